"""Settings of an engine: rows, prefill, numbers, device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from snapstream.config.cache import KVBudget, RescoringConfig, SnapKVConfig
from snapstream.config.values import DTYPE_BYTES, DType, KVDType, as_kind, check, kv_dtype_bytes, set_counts

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
EXECUTORS: tuple[Executor, ...] = ("eager", "graph")


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
        as_kind("budget", self.budget, KVBudget)
        as_kind("snapkv", self.snapkv, SnapKVConfig)
        if self.rescoring is not None:
            as_kind("rescoring", self.rescoring, RescoringConfig)
        set_counts(self, max_model_len=1, max_rows=1, chunk_len=1, short_len=1)
        set_counts(self, staging_tokens=0, short_reserve=0, prefill_quantum=0, max_waiting=0)
        set_counts(self, step_work=0, token_keys=0, least_chunk_len=0)
        check(
            isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES,
            f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}",
        )
        kv_dtype_bytes(self.dtype, self.kv_dtype)
        check(self.executor in EXECUTORS, f"executor is {self.executor!r}; it must be {' or '.join(EXECUTORS)}")
        names = get_args(PrefillAttentionName)
        check(
            self.prefill_attention in names,
            f"prefill_attention is {self.prefill_attention!r}; it must be one of {', '.join(names)}",
        )
        self.check_budget(self.budget)
        check(
            self.rescoring is None or self.snapkv.selection == "snapkv",
            f"rescoring needs selection 'snapkv'; it is {self.snapkv.selection!r}",
        )
        check(
            self.rescoring is None or self.budget.num_topk > 0,
            "rescoring needs a budget with selected slots (num_topk > 0); this one has none",
        )
        check(
            self.rescoring is None or self.kv_dtype == "auto",
            f"rescoring needs kv_dtype 'auto'; it is {self.kv_dtype!r}",
        )
        check(
            self.pool_tokens > self.short_reserve,
            f"staging_tokens is {self.staging_tokens}; it must be larger than short_reserve ({self.short_reserve})",
        )

    def check_budget(self, budget: KVBudget) -> None:
        """Refuse a budget in which selection could not keep the window that votes, or that no row can hold."""
        if budget.num_topk:
            least = budget.num_sink + self.snapkv.window_len
            check(
                budget.capacity >= least,
                f"a budget of {budget.capacity} slots is smaller than sinks + observation window "
                f"({budget.num_sink} + {self.snapkv.window_len} = {least})",
            )
        if self.rescoring is not None:
            self.rescoring.check_budget(budget)
        check(
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
