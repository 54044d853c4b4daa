"""Every setting of the system as a frozen dataclass, validated once. No torch here.

``cache.py``: the slots of a row; ``selector.py``: how its tokens are chosen; ``model.py``: the shape of a decoder;
``options.py``: the settings that a user may give; ``engine.py``, ``chunking.py``: what was decided from them;
``settings.py``: the fields that both share; ``parallel.py``: several devices; ``prefix.py``: the prefix store;
``registry.py``: names to choose from; ``sizes.py``: bytes in words; ``values.py``: dtypes, and how single values are
checked; ``weights.py``: how wide the numbers of a model lie in memory.
"""

from snapstream.config.cache import (
    DEFAULT_SINK,
    KVBudget,
    RescoringConfig,
)
from snapstream.config.chunking import Chunking
from snapstream.config.engine import EXECUTORS, EngineConfig
from snapstream.config.model import ModelConfig, RopeConfig, RopeKind
from snapstream.config.options import AutoCount, Budget, EngineOptions
from snapstream.config.parallel import ParallelConfig, SplitAttention, SplitExperts
from snapstream.config.prefix import PrefixStore, PrefixStoreConfig, as_prefix_store
from snapstream.config.selector import DEFAULT_OBSERVATION, DEFAULT_SELECTOR, SELECTORS, Selector, make_selector
from snapstream.config.settings import PrefillAttentionName, Settings
from snapstream.config.values import (
    DTYPE_BYTES,
    KV_DTYPES,
    DType,
    InvalidValue,
    KVDType,
    as_count,
    as_kind,
    as_number,
    as_path,
    as_token_ids,
    kv_dtype_bytes,
    plain,
)
from snapstream.config.weights import StoredWeights, WeightForm, WeightForms, WidthOption

__all__ = [
    "DEFAULT_OBSERVATION",
    "DEFAULT_SELECTOR",
    "DEFAULT_SINK",
    "DTYPE_BYTES",
    "EXECUTORS",
    "KV_DTYPES",
    "SELECTORS",
    "AutoCount",
    "Budget",
    "Chunking",
    "DType",
    "EngineConfig",
    "EngineOptions",
    "InvalidValue",
    "KVBudget",
    "KVDType",
    "ModelConfig",
    "ParallelConfig",
    "PrefillAttentionName",
    "PrefixStore",
    "PrefixStoreConfig",
    "RescoringConfig",
    "RopeConfig",
    "RopeKind",
    "Selector",
    "Settings",
    "SplitAttention",
    "SplitExperts",
    "StoredWeights",
    "WeightForm",
    "WeightForms",
    "WidthOption",
    "as_count",
    "as_kind",
    "as_number",
    "as_path",
    "as_prefix_store",
    "as_token_ids",
    "kv_dtype_bytes",
    "make_selector",
    "plain",
]
