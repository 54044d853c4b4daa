"""The weights of a decoder, stored once per role as ``[L, out, in]``.

Invariant: a layer's parameters are views of the stacks, never copies, so that one kernel can walk all layers
with a stride and a loader can fill the stacks in any order. Shapes come from ``shapes.py``; ``decoder.py``
computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.models.shapes import weight_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Views of one layer. Rows of ``qkv`` are q | k | v, rows of ``gate_up`` are gate | up."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H+2G)E, D]
    qkv_bias: Tensor | None  # [(H+2G)E]
    q_norm: Tensor | None  # [E]
    k_norm: Tensor | None  # [E]
    o: Tensor  # [D, HE]
    o_bias: Tensor | None  # [D]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2I, D]
    gate_up_bias: Tensor | None  # [2I]
    down: Tensor  # [D, I]
    down_bias: Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder; ``lm_head`` is the very tensor ``embed`` where the checkpoint ties them."""

    embed: Tensor  # [V, D]
    lm_head: Tensor  # [V, D]
    final_norm: Tensor  # [D]
    input_norm: Tensor  # [L, D]
    qkv: Tensor  # [L, (H+2G)E, D]
    o: Tensor  # [L, D, HE]
    post_norm: Tensor  # [L, D]
    gate_up: Tensor  # [L, 2I, D]
    down: Tensor  # [L, D, I]
    qkv_bias: Tensor | None = None  # [L, (H+2G)E]
    o_bias: Tensor | None = None  # [L, D]
    gate_up_bias: Tensor | None = None  # [L, 2I]
    down_bias: Tensor | None = None  # [L, D]
    q_norm: Tensor | None = None  # [L, E]
    k_norm: Tensor | None = None  # [L, E]

    @classmethod
    def empty(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> DecoderWeights:
        """Uninitialised storage of the right shapes."""
        tensors = {
            role: torch.empty(shape, dtype=dtype, device=device) for role, shape in weight_shapes(config).items()
        }
        tensors.setdefault("lm_head", tensors["embed"])
        return cls(**tensors)

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int) -> DecoderWeights:
        """Random weights at real shapes, for benchmarks: every matrix keeps the size of its input."""
        weights = cls.empty(config, dtype, device)
        generator = torch.Generator(device=device).manual_seed(seed)
        for role, tensor in weights.stored().items():
            if role.endswith("norm"):
                tensor.fill_(1.0)
            elif role.endswith("bias"):
                tensor.zero_()
            else:
                bound = (3.0 / tensor.shape[-1]) ** 0.5  # uniform on [-b, b] has variance b^2 / 3 = 1 / fan-in
                if role in ("o", "down"):
                    bound /= (2 * config.num_layers) ** 0.5  # 2L residual additions sum to order 1
                tensor.uniform_(-bound, bound, generator=generator)
        return weights

    def stored(self) -> dict[str, Tensor]:
        """Distinct tensors by role: without absent ones and without a tied ``lm_head``."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.lm_head is self.embed:
            del found["lm_head"]
        return {role: tensor for role, tensor in found.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored().values())

    def layer(self, index: int) -> LayerWeights:
        """Parameters of one layer, as views."""
        stacks = ((field.name, getattr(self, field.name)) for field in fields(LayerWeights))
        views: dict[str, Any] = {role: None if stack is None else stack[index] for role, stack in stacks}
        return LayerWeights(**views)
