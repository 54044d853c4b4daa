"""Every setting of the system as a frozen dataclass, validated once. No torch here.

Budgets are counted in slots (tokens kept per row, layer and kv head), never in ratios, so that what a row costs can be
read off its config. ``cache/layout.py`` turns a ``KVBudget`` into slot arithmetic; ``models/registry.py`` turns a
checkpoint's ``config.json`` into a ``ModelConfig``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Selection = Literal["snapkv", "random"]
Pooling = Literal["avg", "max"]
SoftmaxOver = Literal["candidates", "row"]
GroupReduce = Literal["sum", "max"]
Executor = Literal["eager", "graph"]
PrefillAttentionName = Literal[
    "auto",
    "reference",
    "cpu",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
]
DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["auto", "fp8"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES: tuple[KVDType, ...] = ("auto", "fp8")
EXECUTORS: tuple[Executor, ...] = ("eager", "graph")
DEFAULT_SINK = 4  # StreamingLLM (arXiv 2309.17453): four sinks are enough, fewer are not
DEFAULT_WINDOW = 32  # SnapKV (arXiv 2404.14469) uses 16 to 64


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def as_count(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int, numpy's included; ValueError unless it is a whole number from ``low`` to ``high``."""
    limit = f"from {low} to {high}" if high is not None else f">= {low}"
    try:
        count = index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < low or (high is not None and count > high):
        raise ValueError(f"{name} is {value!r}; it must be a whole number {limit}")
    return count


def as_number(name: str, value: Any, low: float, high: float) -> float:
    """``value`` as a float; ValueError unless it is a finite number from ``low`` to ``high``."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
    return number


def kv_dtype_bytes(dtype: str, kv_dtype: KVDType) -> int:
    """Bytes of a number in a row: 1 in FP8, else those of the weights; ValueError for an unknown ``kv_dtype``."""
    _check(kv_dtype in KV_DTYPES, f"kv_dtype is {kv_dtype!r}; it must be {' or '.join(KV_DTYPES)}")
    return 1 if kv_dtype == "fp8" else DTYPE_BYTES[dtype]


def _set_counts(config: Any, **lows: int) -> None:
    """Check and normalise the whole-number fields of a frozen dataclass; values are the least allowed."""
    for name, low in lows.items():
        object.__setattr__(config, name, as_count(name, getattr(config, name), low))


@dataclass(frozen=True, kw_only=True)
class KVBudget:
    """How many slots a row has, by region: ``sink | top-k | window | recent ring``.

    The paper's row (SnapStream, arXiv 2511.03092, section 3) has no window region: with ``num_window`` the last prompt
    tokens, usually the question, stay when the ring wraps.

    The policies that users compare are budgets of the same code: full attention (capacity >= all tokens),
    StreamingLLM (``num_topk=0``), SnapKV only (``num_recent`` large enough never to wrap).
    """

    num_sink: int = DEFAULT_SINK  # first tokens of the prompt, kept for ever
    num_topk: int  # prompt tokens chosen once, at the end of prefill
    num_window: int = 0  # last tokens of the prompt that stay when the ring wraps
    num_recent: int  # ring of the newest tokens

    def __post_init__(self) -> None:
        _set_counts(
            self, num_sink=0, num_topk=0, num_window=0, num_recent=1
        )  # a ring without a slot cannot take the next token

    @property
    def capacity(self) -> int:
        """Slots of a row: sink + top-k + window + recent."""
        return self.num_sink + self.num_topk + self.num_window + self.num_recent

    @classmethod
    def full(cls, max_model_len: int) -> KVBudget:
        """A ring that never wraps: full attention over at most ``max_model_len`` tokens."""
        return cls(num_sink=0, num_topk=0, num_recent=as_count("max_model_len", max_model_len, 1))

    @classmethod
    def of(
        cls, capacity: int, *, num_sink: int = DEFAULT_SINK, window_len: int = DEFAULT_WINDOW, num_window: int = 0
    ) -> KVBudget:
        """Split ``capacity`` slots by default: a quarter recent (never less than the window), the rest top-k.

        ``num_window`` slots, for prompt tokens that stay, come out of the recent ones.
        """
        capacity, least = as_count("budget", capacity, 1), num_sink + window_len
        _check(
            capacity >= least,
            f"a budget of {capacity} slots is smaller than sinks + observation window "
            f"({num_sink} + {window_len} = {least})",
        )
        num_recent = min(max(window_len, capacity // 4), capacity - num_sink)
        as_count("num_window", num_window, 0, num_recent - 1)
        return cls(
            num_sink=num_sink,
            num_topk=capacity - num_sink - num_recent,
            num_window=num_window,
            num_recent=num_recent - num_window,
        )

    @classmethod
    def streaming(cls, capacity: int, *, num_sink: int = DEFAULT_SINK) -> KVBudget:
        """StreamingLLM at ``capacity`` slots: sinks and a ring, nothing selected."""
        capacity = as_count("budget", capacity, 1)
        _check(capacity > num_sink, f"a budget of {capacity} slots leaves no ring beside {num_sink} sinks")
        return cls(num_sink=num_sink, num_topk=0, num_recent=capacity - num_sink)


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig:
    """How the end of a prompt votes for the tokens to keep (SnapKV, arXiv 2404.14469; SnapStream, section 3)."""

    selection: Selection = "snapkv"  # "random" ignores the votes: the floor that a selection must beat
    window_len: int = DEFAULT_WINDOW  # observation window: the last prompt queries that vote
    pool_kernel: int = 7  # odd width of the centred pooling along the keys, stride 1, zero padding
    pooling: Pooling = "max"  # SnapKV's code has both; why the maximum: docs/accuracy.md
    pool_half_life: int = 8  # tokens ahead over which a pooled score halves; 0 carries none ahead, as SnapKV has it
    softmax_over: SoftmaxOver = "candidates"  # normalise over the eviction candidates, or over the whole visible row
    group_reduce: GroupReduce = "sum"  # how query heads that share a kv head merge, after the softmax
    num_hops: int = (
        0  # rounds in which the tokens that got most votes vote in turn; keeps a layer's queries till its end
    )

    def __post_init__(self) -> None:
        _set_counts(self, window_len=1, pool_kernel=1, pool_half_life=0, num_hops=0)
        _check(
            self.selection in ("snapkv", "random"),
            f"selection is {self.selection!r}; it must be 'snapkv' or 'random'",
        )
        _check(self.pool_kernel % 2 == 1, f"pool_kernel is {self.pool_kernel}; it must be odd")
        _check(self.pooling in ("avg", "max"), f"pooling is {self.pooling!r}; it must be 'avg' or 'max'")
        _check(
            self.softmax_over in ("candidates", "row"),
            f"softmax_over is {self.softmax_over!r}; it must be 'candidates' or 'row'",
        )
        _check(
            self.group_reduce in ("sum", "max"),
            f"group_reduce is {self.group_reduce!r}; it must be 'sum' or 'max'",
        )

    def num_queries(self, prompt_len: int) -> int:
        """How many of the last queries of a prompt selection needs."""
        return min(self.window_len, prompt_len) if self.num_hops == 0 else prompt_len


@dataclass(frozen=True, kw_only=True)
class RescoringConfig:
    """Beyond the paper: the last decode queries choose again what a full row keeps (``cache/rescoring.py``).

    A refresh frees ``every`` slots of the ring, so it comes at most once in as many tokens. A selected token keeps the
    best vote that it ever got, times ``memory`` at every refresh: with 0 only the last queries count, and what nobody
    asked for lately is forgotten.
    """

    every: int = 32  # tokens between two refreshes of a row; less than the ring
    num_queries: int = 32  # the last decode queries, which vote; at most the ring
    memory: float = 0.98  # what a vote still counts one refresh later, 0 to 1

    def __post_init__(self) -> None:
        _set_counts(self, every=1, num_queries=1)
        object.__setattr__(self, "memory", as_number("memory", self.memory, 0.0, 1.0))

    def check_budget(self, budget: KVBudget) -> None:
        """Refuse a ring that a refresh would empty, or that does not hold the tokens whose queries vote.

        A request may still ask for a smaller row that selects nothing: such a row is never refreshed.
        """
        if not budget.num_topk:
            return
        least = max(self.every + 1, self.num_queries)
        _check(
            budget.num_recent >= least,
            f"a ring of {budget.num_recent} slots is too small for rescoring with every={self.every} and "
            f"num_queries={self.num_queries}; it must have at least {least}",
        )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched. Field names follow ``transformers``."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # window before stretching; 0 where the kind does not use it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin; None means the formula of the paper
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn (DeepSeek variant)
    mscale_all_dim: float | None = None  # yarn (DeepSeek variant)
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder: all that the engine needs to know of a checkpoint without its weights."""

    architecture: str  # as in config.json, e.g. "LlamaForCausalLM"
    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G
    head_dim: int  # E
    intermediate_size: int  # I
    max_position: int  # window in tokens, after rope stretching
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotation (Qwen3)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position"):  # fmt: skip
            _check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be >= 1")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        _check(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary embedding needs an even size")

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the scheduler and the runner agree on. All lengths in tokens."""

    budget: KVBudget  # the largest row; a request may ask for a smaller one
    max_model_len: int  # prompt + output of one request
    snapkv: SnapKVConfig = field(default_factory=SnapKVConfig)
    rescoring: RescoringConfig | None = None  # None: what the prompt chose stays for ever, as in the paper
    max_rows: int = 8  # resident requests
    chunk_len: int = 512  # T: tokens of one prefill unit
    short_len: int = 512  # prompts up to this length are packed together and may overtake longer ones
    staging_tokens: int = 0  # pool for prompts in prefill; 0 means one longest prompt + reserve
    short_reserve: int = 4096  # part of the pool that only short prompts may use
    prefill_quantum: int = 0  # units per step while rows decode; 0 means num_layers (one chunk through the model)
    # With step_work the units of such a step are counted by their work, in query-key pairs (chunking.py); a token's
    # matrix products weigh as token_keys keys, and long prompts are cut into units of down to least_chunk_len tokens.
    step_work: int = 0
    token_keys: int = 0
    least_chunk_len: int = 0  # 0: all units have chunk_len tokens
    max_waiting: int = 0  # bound of the queue; 0 means none
    dtype: DType = "float32"  # weights, staging and, unless kv_dtype says otherwise, rows
    kv_dtype: KVDType = "auto"  # rows: as dtype, or FP8 (e4m3) with a scale per layer, row and kv head
    device: str = "cpu"
    executor: Executor = "eager"
    prefill_attention: PrefillAttentionName = "auto"  # kernels/prefill/ decides, and refuses what cannot serve

    def __post_init__(self) -> None:
        _set_counts(self, max_model_len=1, max_rows=1, chunk_len=1, short_len=1)
        _set_counts(self, staging_tokens=0, short_reserve=0, prefill_quantum=0, max_waiting=0)
        _set_counts(self, step_work=0, token_keys=0, least_chunk_len=0)
        _check(
            isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES,
            f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}",
        )
        kv_dtype_bytes(self.dtype, self.kv_dtype)
        _check(self.executor in EXECUTORS, f"executor is {self.executor!r}; it must be {' or '.join(EXECUTORS)}")
        names = get_args(PrefillAttentionName)
        _check(
            self.prefill_attention in names,
            f"prefill_attention is {self.prefill_attention!r}; it must be one of {', '.join(names)}",
        )
        self.check_budget(self.budget)
        _check(
            self.rescoring is None or self.snapkv.selection == "snapkv",
            f"rescoring needs selection 'snapkv'; it is {self.snapkv.selection!r}",
        )
        _check(
            self.rescoring is None or self.budget.num_topk > 0,
            "rescoring needs a budget with selected slots (num_topk > 0); this one has none",
        )
        _check(
            self.rescoring is None or self.kv_dtype == "auto",
            f"rescoring needs kv_dtype 'auto'; it is {self.kv_dtype!r}",
        )
        _check(
            self.pool_tokens > self.short_reserve,
            f"staging_tokens is {self.staging_tokens}; it must be larger than short_reserve ({self.short_reserve})",
        )

    def check_budget(self, budget: KVBudget) -> None:
        """Refuse a budget in which selection could not keep the window that votes, or that no row can hold."""
        if budget.num_topk:
            least = budget.num_sink + self.snapkv.window_len
            _check(
                budget.capacity >= least,
                f"a budget of {budget.capacity} slots is smaller than sinks + observation window "
                f"({budget.num_sink} + {self.snapkv.window_len} = {least})",
            )
        if self.rescoring is not None:
            self.rescoring.check_budget(budget)
        _check(
            budget.capacity <= self.budget.capacity,
            f"a budget of {budget.capacity} slots is larger than a row of this engine ({self.budget.capacity})",
        )

    @property
    def pool_tokens(self) -> int:
        """Staging pool in tokens."""
        return self.staging_tokens or self.max_model_len + self.short_reserve

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in a row."""
        return kv_dtype_bytes(self.dtype, self.kv_dtype)
