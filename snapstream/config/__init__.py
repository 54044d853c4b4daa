"""Every setting of the system as a frozen dataclass, validated once. No torch here.

``cache.py``: what a row holds; ``selector.py``: how its tokens are chosen; ``model.py``: the shape of a decoder;
``engine.py``: how all are run; ``registry.py``: names to choose from; ``values.py``: dtypes, and how single values are
checked.
"""

from snapstream.config.cache import (
    DEFAULT_SINK,
    KVBudget,
    RescoringConfig,
)
from snapstream.config.engine import EXECUTORS, EngineConfig, Executor, PrefillAttentionName
from snapstream.config.model import ModelConfig, RopeConfig, RopeKind
from snapstream.config.selector import DEFAULT_OBSERVATION, DEFAULT_SELECTOR, SELECTORS, Selector, make_selector
from snapstream.config.values import DTYPE_BYTES, KV_DTYPES, DType, KVDType, as_count, as_number, kv_dtype_bytes

__all__ = [
    "DEFAULT_OBSERVATION",
    "DEFAULT_SELECTOR",
    "DEFAULT_SINK",
    "DTYPE_BYTES",
    "EXECUTORS",
    "KV_DTYPES",
    "SELECTORS",
    "DType",
    "EngineConfig",
    "Executor",
    "KVBudget",
    "KVDType",
    "ModelConfig",
    "PrefillAttentionName",
    "RescoringConfig",
    "RopeConfig",
    "RopeKind",
    "Selector",
    "as_count",
    "as_number",
    "kv_dtype_bytes",
    "make_selector",
]
