"""What the looped kernel knows of a model: sizes, and stacks of weights, dense or in codes.

``launch.py`` cuts and launches the kernel for it, ``twin.py`` runs it in plain PyTorch, ``runner/looped_kernel.py``
makes one of a decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.kernels import groups

ROLES = ("embed", "qkv", "o", "gate_up", "down", "head")  # in the order of the kernel's arguments


class Form(NamedTuple):
    """How a matrix is stored: bits of a code and numbers that share a scale, or 0 and 0 where it is dense."""

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix, or a stack of them, of int8 or int4 (``kernels/groups.py``)."""

    codes: Tensor  # [..., out, in * bits / 8] uint8
    scales: Tensor  # [..., out, in / group] fp16
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, ``[..., out, in]``."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    def __getitem__(self, index: int | Tensor) -> Codes:
        return Codes(self.codes[index], self.scales[index], self.bits)

    @property
    def words(self) -> Tensor:
        """The same bytes in words of 32 bits, as the kernel reads them."""
        return self.codes.view(torch.int32)

    def wide(self) -> Tensor:
        """The numbers, fp32."""
        return groups.widen(self.codes, self.scales, self.bits)


Stored = Tensor | Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedModel:
    """Sizes and stacked tensors of a decoder of grouped-query attention and one MLP, weights ``[L, out, in]``.

    ValueError where the two matrices of attention, of the MLP, or the two tables are not stored alike.
    """

    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embed: Stored  # [V, D]
    head: Stored  # [V, D]; may be ``embed``
    qkv: Stored  # [L, (H+2G)E, D]
    o: Stored  # [L, D, HE]
    gate_up: Stored  # [L, 2I, D]
    down: Stored  # [L, D, I]
    input_norm: Tensor  # [L, D]
    post_norm: Tensor  # [L, D]
    final_norm: Tensor  # [D]
    q_norm: Tensor | None = None  # [L, E]
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None  # [L, (H+2G)E]
    o_bias: Tensor | None = None  # [L, D]
    gate_up_bias: Tensor | None = None  # [L, 2I]
    down_bias: Tensor | None = None  # [L, D]

    def __post_init__(self) -> None:
        for one, other in (("qkv", "o"), ("gate_up", "down"), ("embed", "head")):
            forms = form_of(getattr(self, one)), form_of(getattr(self, other))
            if forms[0] != forms[1]:
                raise ValueError(f"{one} and {other} are stored as {forms}; the looped kernel wants both alike")

    @property
    def dtype(self) -> torch.dtype:
        """That norms, biases, rows and what goes from stage to stage have; also dense weights."""
        return self.input_norm.dtype

    @property
    def weights(self) -> tuple[Stored, ...]:
        """In the order of ``ROLES``."""
        return self.embed, self.qkv, self.o, self.gate_up, self.down, self.head

    @property
    def forms(self) -> tuple[Form, Form, Form]:
        """Of the matrices of attention, of those of the MLP, and of the tables."""
        return form_of(self.qkv), form_of(self.gate_up), form_of(self.embed)

    @property
    def has_codes(self) -> bool:
        return any(form.bits for form in self.forms)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the weights lie in."""
        stored = [(weight.codes, weight.scales) if isinstance(weight, Codes) else (weight,) for weight in self.weights]
        return [tensor for tensors in stored for tensor in tensors]


def form_of(weight: Stored) -> Form:
    """How a matrix is stored."""
    return Form(weight.bits, weight.shape[-1] // weight.scales.shape[-1]) if isinstance(weight, Codes) else Form(0, 0)
