"""Every stage of the looped kernel in plain PyTorch, buffer by buffer: what ``kernel.py`` is tested against.

The same roundings at the same places: norms, heads, attention and the inner activations in the dtype of the norms, the
residual stream, sums and logits in fp32; codes are widened to fp32. Only the order of sums differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import reference
from snapstream.kernels.rows import CosSin, HeadNorm, LayerRows, RowPlaces
from snapstream.kernels.triton.looped.launch import Codes, LoopedModel, Stored


@dataclass
class Buffers:
    """What a step leaves behind, named as in the kernel."""

    residual: Tensor  # [B, D] fp32
    heads: Tensor | None = None  # [B, (H+2G)E]
    attended: Tensor | None = None  # [B, HE]
    inner: Tensor | None = None  # [B, I]
    logits: Tensor | None = None  # [B, V] fp32


def step(
    model: LoopedModel, keys: Tensor, values: Tensor, token_ids: Tensor, places: RowPlaces, rope: CosSin,
    num_layers: int | None = None,
) -> Buffers:  # fmt: skip
    """The buffers after ``num_layers`` layers, by default all and the logits; writes slots of ``keys, values``."""
    found = Buffers(residual=_wide(model.embed[token_ids]).to(model.dtype).float())
    for layer in range(model.num_layers if num_layers is None else num_layers):
        normed = _norm(found.residual, model.input_norm[layer], model.eps)
        found.heads = _product(model.qkv[layer], normed, model.qkv_bias, layer).to(normed.dtype)
        found.attended = _attend(model, layer, found.heads, LayerRows(keys, values, layer), places, rope)
        found.residual = found.residual + _product(model.o[layer], found.attended, model.o_bias, layer)
        normed = _norm(found.residual, model.post_norm[layer], model.eps)
        gate, up = _product(model.gate_up[layer], normed, model.gate_up_bias, layer).chunk(2, dim=-1)
        found.inner = (F.silu(gate) * up).to(normed.dtype)
        found.residual = found.residual + _product(model.down[layer], found.inner, model.down_bias, layer)
    if num_layers is None:
        normed = _norm(found.residual, model.final_norm, model.eps)
        found.logits = normed.float() @ _wide(model.head).T
    return found


def _norm(residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    inverse = torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps)
    return (residual * inverse * weight.float()).to(weight.dtype)


def _wide(weight: Stored) -> Tensor:
    return weight.wide() if isinstance(weight, Codes) else weight.float()


def _product(matrix: Stored, x: Tensor, bias: Tensor | None, layer: int) -> Tensor:
    out = x.float() @ _wide(matrix).T
    return out if bias is None else out + bias[layer].float()


def _attend(model: LoopedModel, layer: int, heads: Tensor, rows: LayerRows, places: RowPlaces, rope: CosSin) -> Tensor:
    """``heads [B, (H+2G)E]`` -> ``[B, HE]``, and a slot written per entry."""
    norm = None
    if model.q_norm is not None and model.k_norm is not None:
        per_head = (model.q_norm[layer].expand(model.num_heads, -1), model.k_norm[layer].expand(model.num_kv_heads, -1))
        norm = torch.cat(per_head)
    split = heads.view(len(heads), -1, model.head_dim)
    return reference.attend_rows(split, HeadNorm(norm, model.eps), rope, rows, places, None).flatten(1)
