"""What a draft takes on its device beside the engine, from the integers of its config. No torch.

It is allocated when a prompt is scored, so the start keeps it free: ``startup.py`` counts it, ``plan --draft`` prints
it. The worst text is longer than the draft's window: then as many windows as look ahead together are held at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.cache.layout import row_bytes, token_bytes
from snapstream.config import DEFAULT_WINDOW, ModelConfig
from snapstream.models.shapes import num_parameters
from snapstream.plan.memory import SCORING_KEYS, chunk_bytes
from snapstream.spec_prefill.settings import ROW_SLOTS, ScoringSettings


@dataclass(frozen=True, kw_only=True)
class DraftMemory:
    """Bytes of a draft."""

    weight_bytes: int
    working_bytes: int  # at most, while it scores a text

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.working_bytes


def draft_memory(model: ModelConfig, settings: ScoringSettings, *, dtype_bytes: int, device: str) -> DraftMemory:
    """Bytes of a draft of this shape that reads texts of any length."""
    kind, window = device.split(":")[0], settings.window_len or model.max_position
    chunk = chunk_bytes(model, min(settings.num_prefill_tokens(kind), window), dtype_bytes)
    one_layer = 2 * window * model.num_kv_heads * model.head_dim * dtype_bytes
    if settings.look_ahead == 0:
        held, voters = one_layer, settings.num_own_queries
    elif settings.keys == "one_layer":
        held, voters = one_layer + row_bytes(model, ROW_SLOTS, dtype_bytes), max(settings.look_ahead, DEFAULT_WINDOW)
    else:
        num = 1 if settings.window == "refuse" else settings.num_windows(kind)
        held, voters = num * window * token_bytes(model, dtype_bytes), settings.look_ahead
        held += model.num_layers * num * voters * model.num_heads * model.head_dim * dtype_bytes  # their queries
    hidden = window * model.hidden_size * dtype_bytes
    return DraftMemory(
        weight_bytes=num_parameters(model) * dtype_bytes,
        working_bytes=held + hidden + chunk + _scoring_bytes(model, voters, window),
    )


def _scoring_bytes(model: ModelConfig, num_queries: int, window: int) -> int:
    """Probabilities of a block of keys as they are, padded and pooled, the keys in fp32; the best of every token."""
    keys = min(SCORING_KEYS, window)
    probabilities = 3 * num_queries * model.num_heads * keys
    return 4 * (probabilities + model.num_kv_heads * model.head_dim * keys + num_queries * window)
