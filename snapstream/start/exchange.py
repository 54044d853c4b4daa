"""From a checkpoint, its engine's config and the transfer settings to the exchange of rows between engines.

Invariant: two engines whose rows differ in any way have different fingerprints, fact by fact, so that a refusal names
the fact.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.heads import HeadSlots
from snapstream.models.fingerprint import fingerprint as checkpoint_fingerprint
from snapstream.plan.travelling import row_sizes
from snapstream.transfer.exchange import TcpExchange
from snapstream.transfer.settings import TransferSettings
from snapstream.version import __version__


def make_exchange(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    settings: TransferSettings,
    wake: Callable[[], None] = lambda: None,
) -> TcpExchange:
    """ValueError for an engine whose rows cannot travel, or cannot arrive at the address."""
    if config.heads is not None and config.parallel.size > 1:
        raise ValueError(
            f"heads: rows whose kv heads have slots of their own travel between engines of one device; this one has "
            f"{config.parallel.size}"
        )
    return TcpExchange(settings, row_sizes(model, config), fingerprint(folder, config), wake)


def fingerprint(folder: Path, config: EngineConfig) -> dict[str, str]:
    """Facts that rows, and what is computed from them, depend on."""
    return {
        "version": __version__,
        "checkpoint": checkpoint_fingerprint(folder),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "width of the weights": "dtype" if config.weights is None else config.weights.describe(),
        "rescoring": "none" if config.rescoring is None else repr(config.rescoring),
        "heads": "none" if config.heads is None else _digest(config.heads),
    }


def _digest(heads: HeadSlots) -> str:
    """Of the slots of every kv head: profiles of one model that share out a budget alike may speak to each other."""
    return sha256(repr((heads.topk, heads.budget)).encode()).hexdigest()[:16]
