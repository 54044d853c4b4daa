"""Bytes of a row on its way from one engine to another, as both ends hold them on the host. No torch."""

from __future__ import annotations

from snapstream.config import DTYPE_BYTES, EngineConfig, ModelConfig
from snapstream.models.families import kv_spec_of
from snapstream.transfer.wire import RowSizes


def row_sizes(model: ModelConfig, config: EngineConfig) -> RowSizes:
    """Bytes of the pieces of a row, as ``runner/row_parts.py`` lays them; ranks send and receive whole ones."""
    spec = kv_spec_of(model, config.dtype, config.kv_dtype)
    return RowSizes(
        num_layers=spec.num_layers,
        slot_bytes=spec.token_bytes() // spec.num_layers,
        scale_bytes=spec.scale_bytes() // spec.num_layers,
        vote_bytes=0 if config.rescoring is None else 4 * spec.num_kv_heads,
        hidden_bytes=model.hidden_size * DTYPE_BYTES[config.dtype],
        num_kv_heads=spec.num_kv_heads,
        heads=config.heads,
    )
