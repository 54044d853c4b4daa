"""The staging pool: room for the prompts in prefill, one layer of K and V and the hidden states of each.

A job owns a range of tokens of the pool from its first unit to its last; which range, the scheduler decides. Because
prefill is layer-major, one layer's worth serves all layers in turn.
"""

from __future__ import annotations

import torch

from snapstream.config import ModelConfig


class StagingPool:
    """Buffers of ``num_tokens`` tokens, allocated once."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (config.num_kv_heads, num_tokens, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)  # [G, P, E]
        self.v = torch.empty(shape, dtype=dtype, device=device)  # [G, P, E]
        self.hidden = torch.empty((num_tokens, config.hidden_size), dtype=dtype, device=device)  # [P, D]

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.hidden.nbytes
