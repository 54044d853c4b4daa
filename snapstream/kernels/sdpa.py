"""Prefill attention through PyTorch's fused kernels: flash or cuDNN on a GPU, no matrix of scores.

The T queries of a chunk are the last of N tokens. A GPU's flash kernel aligns its causal mask with the last key. It is
called by its own name: PyTorch's choice among its kernels may prefer cuDNN, which plans every new pair of lengths on
the host. Elsewhere a chunk that is the whole prompt is plainly causal, one query sees every key, and between a mask of
bits is aligned with the last key; ``torch.nn.attention.bias`` would make the same one, and import the compiler for it.
``split`` is the other way: keys before the chunk unmasked, the chunk as one causal square, merged by their log-sum-exp;
it works with kernels that know only the plain causal mask, cuDNN's among them. Extra memory is ``O(T)`` and the
mask, where the reference holds ``[H, T, N]`` fp32 scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# q, k, v [1, heads, tokens, E] and whether causal -> output and log-sum-exp [1, H, T]
Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]

efficient_operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention
cudnn_operator: Any = torch.ops.aten._scaled_dot_product_cudnn_attention


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = num_heads != num_kv_heads
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)  # [1, H, T, E], [1, G, N, E]
    if q.is_cuda:
        out = flash(queries, keys, values, True)[0]
    elif num_queries == num_keys:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    elif num_queries == 1:
        out = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=grouped)
    else:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - num_queries)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def one_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query over all N tokens: ``q [1, H, E]``, ``k [G, N, E], v [G, N, E']`` -> ``[1, H, E']``.

    Any sizes of heads and values, on any device: for latents, whose keys are wider than flash kernels take. The heads
    of a group stand as queries of one head, so that keys are neither repeated nor copied.
    """
    grouped = q.reshape(1, k.shape[0], -1, q.shape[-1])  # [1, G, r, E]
    return F.scaled_dot_product_attention(grouped, k[None], v[None]).flatten(1, 2)


def split(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """The same through two calls of ``kernel``; one query sees every key and takes one call."""
    prefix = k.shape[1] - q.shape[0]
    queries = q.transpose(0, 1)[None]
    if q.shape[0] == 1:
        return kernel(queries, k[None], v[None], False)[0][0].transpose(0, 1)
    own, own_lse = kernel(queries, k[None, :, prefix:], v[None, :, prefix:], True)
    if prefix == 0:
        return own[0].transpose(0, 1)
    before, before_lse = kernel(queries, k[None, :, :prefix], v[None, :, :prefix], False)
    share = torch.sigmoid(before_lse.float() - own_lse.float())[..., None].to(own.dtype)
    return torch.lerp(own, before, share)[0].transpose(0, 1)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``; through cuDNN. Every new pair of lengths costs it a plan on the host."""
    return split(q, k, v, cudnn)


def by_efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``; through the memory-efficient kernel, which also takes fp32."""
    return split(q, k, v, efficient)


def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's kernel for ``split``; half precision on an NVIDIA GPU. It takes no single key, so that is done here."""
    if k.shape[2] == 1:
        group = q.shape[1] // k.shape[1]
        key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [1, H, 1, E]
        lse = (q.float() * key.float()).sum(-1) * q.shape[-1] ** -0.5  # [1, H, T]
        return value.expand(q.shape), lse
    found: Any = cudnn_operator(q, k, v, None, True, 0.0, is_causal)
    return found[0], found[1].reshape(q.shape[:3])


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The flash kernel; half precision on an NVIDIA GPU. Causal means aligned with the last key."""
    found: Any = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return found[0], found[1]


def efficient(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel for ``split``; fp32 too, on an NVIDIA GPU.

    It wants as many kv heads as query heads. The causal square repeats them, a chunk's worth; over the keys before it
    there is no mask, so the query heads of a group stand one after the other as queries of one head.
    """
    _, num_heads, num_queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    if is_causal:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    else:
        q = q.reshape(1, num_kv_heads, group * num_queries, head_dim)
    found: Any = efficient_operator(q, k, v, None, True, 0.0, is_causal)
    lse = found[1][:, :, : q.shape[2]]  # padded to whole tiles
    return found[0].reshape(1, num_heads, num_queries, head_dim), lse.reshape(1, num_heads, num_queries)
