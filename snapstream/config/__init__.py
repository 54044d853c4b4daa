"""Every setting of the system as a frozen dataclass, validated once. No torch here.

``cache.py``: what a row holds and how it is chosen; ``model.py``: the shape of a decoder; ``options.py``: what a user
may say about an engine; ``engine.py``, ``chunking.py``: what it was decided to be; ``settings.py``: what both have;
``registry.py``: things that are chosen by name; ``selector.py``: what a selection method is; ``values.py``: dtypes, and
how single values are checked.
"""

from snapstream.config.cache import (
    DEFAULT_SINK,
    DEFAULT_WINDOW,
    GroupReduce,
    KVBudget,
    Pooling,
    RescoringConfig,
    Selection,
    SnapKVConfig,
    SoftmaxOver,
)
from snapstream.config.chunking import Chunking
from snapstream.config.engine import EXECUTORS, EngineConfig
from snapstream.config.model import ModelConfig, RopeConfig, RopeKind
from snapstream.config.options import AutoCount, Budget, EngineOptions
from snapstream.config.settings import PrefillAttentionName, Settings
from snapstream.config.values import DTYPE_BYTES, KV_DTYPES, DType, KVDType, as_count, as_number, kv_dtype_bytes

__all__ = [
    "DEFAULT_SINK",
    "DEFAULT_WINDOW",
    "DTYPE_BYTES",
    "EXECUTORS",
    "KV_DTYPES",
    "AutoCount",
    "Budget",
    "Chunking",
    "DType",
    "EngineConfig",
    "EngineOptions",
    "GroupReduce",
    "KVBudget",
    "KVDType",
    "ModelConfig",
    "Pooling",
    "PrefillAttentionName",
    "RescoringConfig",
    "RopeConfig",
    "RopeKind",
    "Selection",
    "Settings",
    "SnapKVConfig",
    "SoftmaxOver",
    "as_count",
    "as_number",
    "kv_dtype_bytes",
]
