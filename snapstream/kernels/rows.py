"""Compound arguments of kernels: one layer of all rows, places in it, norms, tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config.model import Activation, SwiGLUClamp

CosSin = tuple[Tensor, Tensor]  # [T, 1, E] fp32 each, the minus of the rotation in the sine
Keep = Callable[[Tensor], object]  # takes the rotated queries [B, H, E] of a decode step


class HeadNorm(NamedTuple):
    """What differs in a layer's attention: the norm of the heads of q and k before the rotation, sinks, a cap."""

    weight: Tensor | None  # [H+G, E]; None: no norm
    eps: float
    # Learned attention sinks (gpt-oss): a logit per query head that adds to the denominator of its softmax alone.
    sinks: Tensor | None = None  # [H] or [B, H] fp32
    cap: float | None = None  # of scores: c tanh(score / c), see reference.capped


class SumNorm(NamedTuple):
    """An RMSNorm of a sum, evaluated lazily: the consumer does ``residual += x`` once."""

    residual: Tensor  # [T, D]
    x: Tensor | None  # [T, D], or fp32 parts of it [S, T, D]; None: nothing is added
    weight: Tensor  # [D]
    eps: float


class Pairs(NamedTuple):
    """Tokens and their experts; a pair is a token and one of its experts."""

    order: Tensor  # [T k] int64: token * k + which of its experts, sorted by expert; behind all, those not stored here
    ends: Tensor  # [X'] int32: of the experts stored here, the pair before which those of each end
    weights: Tensor  # [T, k] fp32: what an expert's output is multiplied with
    are_elsewhere: Tensor | None  # [T k]: of those not stored here, by token; None where all are


class Xielu(NamedTuple):
    """The activation of a layer of Apertus, see ``pytorch.xielu``."""

    numbers: Tensor  # [4] fp32: what squares, curves and inputs are multiplied by, and the least distance from 0

    @classmethod
    def of(cls, stored: Tensor) -> Xielu:
        """From ``alpha_p, alpha_n, beta, eps`` as a checkpoint has them ``[4]``."""
        positive, negative, beta, eps = stored.unbind()
        return cls(torch.stack((F.softplus(positive), beta + F.softplus(negative), beta, eps)))


LayerActivation = Activation | SwiGLUClamp | Xielu


def activation_numbers(activation: LayerActivation) -> Tensor | None:
    """``[4]`` fp32; None of an activation that has none."""
    if isinstance(activation, Xielu):
        return activation.numbers
    return torch.tensor(activation) if isinstance(activation, SwiGLUClamp) else None


class ExpertParts(NamedTuple):
    """What the experts of a layer have besides their matrices."""

    gate_up_bias: Tensor | None = None  # [X', 2M]
    down_bias: Tensor | None = None  # [X', D]; None also where another rank adds it
    activation: LayerActivation = "silu"
    scales_inputs: bool = False  # see ``MoEConfig``


class RowPlaces(NamedTuple):
    """Where the tokens of a decode step are written, and what they attend to."""

    rows: Tensor  # [B] int64
    slots: Tensor  # [B] int64: where each row's new token is written
    lengths: Tensor  # [B] int64: visible slots once it is


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of the tensors of all rows.

    The handle has the tensors of all layers because an operator of torch must write to a whole tensor, not to a view.
    FP8 rows without scales hold their numbers as they are (``models/views.py`` scales them before and after). Where
    values are the first numbers of the keys (latents), ``values`` is a view of ``keys`` and nothing is written to it.
    """

    keys: Tensor  # [L, rows+1, G, C, E], all layers
    values: Tensor  # [L, rows+1, G, C, E']
    layer: int
    key_scales: Tensor | None = None  # [L, rows+1, G] fp32, of int8 [L, rows+1, G, C]
    value_scales: Tensor | None = None
    values_are_keys: bool = False

    @property
    def k(self) -> Tensor:
        """Keys of this layer ``[rows+1, G, C, E]``."""
        return self.keys[self.layer]

    @property
    def v(self) -> Tensor:
        """Values of this layer ``[rows+1, G, C, E']``."""
        return self.values[self.layer]

    @property
    def num_kv_heads(self) -> int:
        """Kv heads of a row."""
        return self.keys.shape[2]

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Scales of K and of V ``[rows+1, G]``, of int8 ``[rows+1, G, C]``; None for those that need none."""
        keys, values = self.key_scales, self.value_scales
        return None if keys is None else keys[self.layer], None if values is None else values[self.layer]

    def refuse_latents(self, kernel: str) -> None:
        """ValueError for rows without a value tensor, for a kernel that needs one."""
        if self.values_are_keys:
            raise ValueError(f"{kernel} reads keys and values from two tensors; in these rows the values are the keys")


@dataclass(frozen=True, slots=True)
class PackedLens:
    """Where prompts begin and end in packed tensors; the last entry is the total."""

    queries: Tensor  # [prompts + 1] int32: cumulative query tokens
    keys: Tensor  # [prompts + 1] int32: cumulative keys
    max_queries: int
    max_keys: int
