"""The memory that a draft takes on its device beside the engine, from the integers of its config. No torch.

It is allocated when a prompt is scored, so the start keeps it free: ``start/resolve.py`` counts it, ``plan --draft``
prints it. The worst text is longer than the draft's context: then as many passages as look ahead together are held at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.cache.spec import KVSpec
from snapstream.config import DEFAULT_OBSERVATION, DTYPE_BYTES, DType, ModelConfig
from snapstream.models.families import kv_spec_of
from snapstream.models.shapes import weight_bytes
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


def draft_memory(model: ModelConfig, settings: ScoringSettings, *, dtype: DType, device: str) -> DraftMemory:
    """Bytes of a draft of this shape that reads texts of any length."""
    kind, context_len = device.split(":")[0], settings.context_len or model.max_position
    spec, chunk_len = kv_spec_of(model, dtype), min(settings.num_prefill_tokens(kind), context_len)
    one_layer = spec.staging_bytes(context_len)
    if settings.look_ahead == 0:
        held, voters = one_layer, settings.num_own_queries
    elif settings.keys == "one_layer":
        held, voters = one_layer + spec.row_bytes(ROW_SLOTS), max(settings.look_ahead, DEFAULT_OBSERVATION)
    else:
        num = 1 if settings.long_texts == "refuse" else settings.num_passages(kind)
        voters = settings.look_ahead
        held = one_layer + num * context_len * spec.token_bytes() + model.num_layers * spec.query_bytes(num * voters)
    hidden = context_len * model.hidden_size * DTYPE_BYTES[dtype]
    return DraftMemory(
        weight_bytes=weight_bytes(model, dtype),
        working_bytes=held + hidden + chunk_bytes(model, chunk_len, dtype) + _scoring_bytes(spec, voters, context_len),
    )


def _scoring_bytes(spec: KVSpec, num_queries: int, context_len: int) -> int:
    """Probabilities of a block of keys as they are, padded and pooled, the keys in fp32; the best of every token."""
    keys = min(SCORING_KEYS, context_len)
    probabilities = 3 * num_queries * spec.num_heads * keys
    return 4 * (probabilities + spec.key_size * keys + num_queries * context_len)
