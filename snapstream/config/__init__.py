"""Every setting of the system as a frozen dataclass, validated once. No torch here.

``cache.py``: what a row holds and how it is chosen; ``model.py``: the shape of a decoder; ``engine.py``: how both are
run; ``values.py``: dtypes, and how single values are checked.
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
from snapstream.config.engine import EXECUTORS, EngineConfig, Executor, PrefillAttentionName
from snapstream.config.model import ModelConfig, RopeConfig, RopeKind
from snapstream.config.values import (
    DTYPE_BYTES,
    KV_DTYPES,
    DType,
    KVDType,
    as_count,
    as_kind,
    as_number,
    as_path,
    as_token_ids,
    kv_dtype_bytes,
    plain,
)

__all__ = [
    "DEFAULT_SINK",
    "DEFAULT_WINDOW",
    "DTYPE_BYTES",
    "EXECUTORS",
    "KV_DTYPES",
    "DType",
    "EngineConfig",
    "Executor",
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
    "SnapKVConfig",
    "SoftmaxOver",
    "as_count",
    "as_kind",
    "as_number",
    "as_path",
    "as_token_ids",
    "kv_dtype_bytes",
    "plain",
]
