"""Settings as frozen dataclasses, validated once. No torch.

``engine.py``: what a user gives and what is decided; ``kv.py``: budgets, per-head budgets, selectors; ``model.py``: the
shape of a decoder; ``weights.py``: formats of its weights; ``values.py``: dtypes, registries, checks of single values.
"""

from snapstream.config.engine import (
    EXECUTORS,
    AutoCount,
    Budget,
    Chunking,
    EngineConfig,
    EngineOptions,
    ParallelConfig,
    PrefillAttentionName,
    PrefixStoreConfig,
    Settings,
    SplitAttention,
    SplitExperts,
    as_prefix_store,
)
from snapstream.config.kv import (
    DEFAULT_OBSERVATION,
    DEFAULT_SINK,
    SELECTORS,
    KVBudget,
    Selector,
    make_selector,
)
from snapstream.config.model import ModelConfig, RopeConfig, RopeKind
from snapstream.config.values import (
    DTYPE_BYTES,
    KV_DTYPES,
    ROW_FORMATS,
    DType,
    InvalidValue,
    KVDType,
    RowFormat,
    as_count,
    as_kind,
    as_number,
    as_path,
    as_token_ids,
    plain,
    row_formats,
)
from snapstream.config.weights import StoredWeights, WeightFormat, WeightFormats, WeightsOption

__all__ = [
    "DEFAULT_OBSERVATION", "DEFAULT_SINK", "DTYPE_BYTES", "EXECUTORS", "KV_DTYPES", "ROW_FORMATS",
    "SELECTORS", "AutoCount", "Budget", "Chunking", "DType", "EngineConfig", "EngineOptions", "InvalidValue",
    "KVBudget", "KVDType", "ModelConfig", "ParallelConfig", "PrefillAttentionName", "PrefixStoreConfig",
    "RopeConfig", "RopeKind", "RowFormat", "Selector", "Settings", "SplitAttention",
    "SplitExperts", "StoredWeights", "WeightFormat", "WeightFormats", "WeightsOption", "as_count", "as_kind",
    "as_number", "as_path", "as_prefix_store", "as_token_ids", "make_selector", "plain", "row_formats",
]  # fmt: skip
