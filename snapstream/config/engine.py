"""The settings decided for an engine: rows, prefill, numbers, device. ``options.py`` has those that a user gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snapstream.config.cache import KVBudget
from snapstream.config.chunking import Chunking
from snapstream.config.heads import HeadSlots
from snapstream.config.parallel import ParallelConfig
from snapstream.config.prefix import PrefixStoreConfig
from snapstream.config.registry import Registry
from snapstream.config.selector import Selector, make_selector
from snapstream.config.settings import Settings
from snapstream.config.values import as_kind, check, set_counts
from snapstream.config.weights import WeightForms

SHORT_RESERVE = 4096  # tokens of the staging pool that only short prompts may use
# Functions from runner.decode_step.StepParts to a DecodeStep, by name.
EXECUTORS: Registry[Any] = Registry(
    "executor",
    {
        "eager": "snapstream.runner.executors:make_eager",
        "graph": "snapstream.runner.executors:make_graph",
        "looped": "snapstream.runner.executors:make_looped",
    },
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """What the scheduler and the runner agree on. All lengths in tokens."""

    budget: KVBudget  # the largest row; a request may ask for a smaller one
    max_model_len: int  # prompt + output of one request
    selector: Selector = field(default_factory=make_selector)  # of requests that name none
    heads: HeadSlots | None = None  # slots of every kv head; None: all have the budget's
    max_rows: int = 8  # resident requests
    chunking: Chunking = field(default_factory=Chunking)
    staging_tokens: int = 0  # pool for prompts in prefill; 0 means one longest prompt + reserve
    short_reserve: int = SHORT_RESERVE
    device: str = "cpu"
    executor: str = "eager"  # of EXECUTORS
    weights: WeightForms | None = None  # how matrices lie in memory; None: in dtype
    reserved_bytes: int = 0  # of the device's memory that a draft will take
    prefix_store: PrefixStoreConfig | None = None
    prefix_blocks: int = 0  # that the store holds
    prefix_dir: str = ""  # folder of the store's disk tier; none by default
    prefix_disk: int = 0  # bytes that it may hold
    prefix_max_len: int = 0  # longer prompts are neither stored nor looked up; 0: max_model_len
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        as_kind("budget", self.budget, KVBudget)
        if not isinstance(self.selector, Selector):
            raise TypeError(f"selector is {self.selector!r}; it must be a Selector")
        set_counts(self, max_model_len=1, max_rows=1, staging_tokens=0, short_reserve=0, reserved_bytes=0)
        if self.prefix_store is not None:
            as_kind("prefix_store", self.prefix_store, PrefixStoreConfig)
            set_counts(self, prefix_blocks=1, prefix_max_len=0, prefix_disk=0)
            check(
                not self.selector.needs_all_queries,
                f"selector {self.selector.name!r} needs the queries of a whole prompt, and a prefix store keeps keys "
                "and values only; use selector 'snapkv', or no prefix store",
            )
        as_kind("parallel", self.parallel, ParallelConfig)
        EXECUTORS.check(self.executor)
        if self.weights is not None:
            as_kind("weights", self.weights, WeightForms)
        self.check_budget(self.budget)
        check(
            self.rescoring is None or self.selector.can_rescore,
            f"rescoring needs a selector that can rescore; {self.selector.name!r} cannot",
        )
        check(
            self.rescoring is None or self.budget.num_topk > 0,
            "rescoring needs a budget with selected slots (num_topk > 0); this one has none",
        )
        check(
            self.rescoring is None or self.kv_dtype == "auto",
            f"rescoring needs kv_dtype 'auto'; it is {self.kv_dtype!r}",
        )
        if self.heads is not None:
            as_kind("heads", self.heads, HeadSlots)
            check(
                self.rescoring is None or self.parallel.size == 1,
                "heads: rows whose heads have unlike slots rescore on one device; tensor_parallel is "
                f"{self.parallel.size}",
            )
            check(self.heads.budget == self.budget, "heads: their slots are of another budget than the rows'")
        check(
            self.pool_tokens > self.short_reserve,
            f"staging_tokens is {self.staging_tokens}; it must be larger than short_reserve ({self.short_reserve})",
        )

    def check_budget(self, budget: KVBudget, selector: Selector | None = None) -> None:
        """Refuse a budget in which the tokens that vote could not be kept, or that no row can hold.

        ``selector`` is a request's own; None means the engine's.
        """
        if budget.num_topk:
            observation_len = (selector or self.selector).observation_len
            least = budget.num_sink + observation_len
            check(
                budget.capacity >= least,
                f"a budget of {budget.capacity} slots is smaller than sinks + observation_len "
                f"({budget.num_sink} + {observation_len} = {least})",
            )
        if self.rescoring is not None:
            self.rescoring.check_budget(budget)
        check(
            self.heads is None or budget == self.budget,
            f"a budget of {budget.capacity} slots; the heads of this engine's rows have slots of their own (heads), "
            f"so every request has its {self.budget.capacity}",
        )
        check(
            budget.capacity <= self.budget.capacity,
            f"a budget of {budget.capacity} slots is larger than a row of this engine ({self.budget.capacity})",
        )

    @property
    def row_budget(self) -> KVBudget:
        """The budget by which a row's counters go."""
        return self.budget if self.heads is None else self.heads.widest

    @property
    def pool_tokens(self) -> int:
        """Staging pool in tokens."""
        return self.staging_tokens or self.max_model_len + self.short_reserve
