"""Where prompts lie while they are prefilled: one layer of K and V, and the hidden states, of every token.

A pass owns a range of tokens of the buffers from its first unit to its last; its caller decides which range. Because
prefill is layer-major, one layer's worth serves all layers in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.cache.spec import KVSpec


class StagingBuffers:
    """Buffers of ``num_tokens`` tokens, allocated once."""

    def __init__(
        self, spec: KVSpec, hidden_size: int, num_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.keys = torch.empty((spec.num_kv_heads, num_tokens, spec.key_dim), dtype=dtype, device=device)  # [G, P, E]
        self.values = (  # [G, P, E']
            self.keys[..., : spec.value_dim]
            if spec.values_are_keys
            else torch.empty((spec.num_kv_heads, num_tokens, spec.value_dim), dtype=dtype, device=device)
        )
        self.hidden = torch.empty((num_tokens, hidden_size), dtype=dtype, device=device)  # [P, D]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        own_values = 0 if self.spec.values_are_keys else self.values.nbytes
        return self.keys.nbytes + own_values + self.hidden.nbytes

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[G, n, E]`` of tokens ``start .. stop - 1`` of the buffers."""
        return self.keys[:, start:stop], self.values[:, start:stop]
