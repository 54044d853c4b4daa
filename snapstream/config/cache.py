"""What a row holds and how it is chosen: budget, selection, rescoring.

Budgets are counted in slots (tokens kept per row, layer and kv head), never in ratios, so that what a row costs can be
read off its config. ``cache/layout.py`` turns a ``KVBudget`` into slot arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapstream.config.values import as_count, as_number, check, set_counts

Selection = Literal["snapkv", "random"]
Pooling = Literal["avg", "max"]
SoftmaxOver = Literal["candidates", "row"]
GroupReduce = Literal["sum", "max"]
DEFAULT_SINK = 4  # StreamingLLM (arXiv 2309.17453): four sinks are enough, fewer are not
DEFAULT_WINDOW = 32  # SnapKV (arXiv 2404.14469) uses 16 to 64


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
        set_counts(
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
        num_sink, window_len = as_count("num_sink", num_sink, 0), as_count("window_len", window_len, 1)
        capacity, least = as_count("budget", capacity, 1), num_sink + window_len
        check(
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
        capacity, num_sink = as_count("budget", capacity, 1), as_count("num_sink", num_sink, 0)
        check(capacity > num_sink, f"a budget of {capacity} slots leaves no ring beside {num_sink} sinks")
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
        set_counts(self, window_len=1, pool_kernel=1, pool_half_life=0, num_hops=0)
        check(
            self.selection in ("snapkv", "random"),
            f"selection is {self.selection!r}; it must be 'snapkv' or 'random'",
        )
        check(self.pool_kernel % 2 == 1, f"pool_kernel is {self.pool_kernel}; it must be odd")
        check(self.pooling in ("avg", "max"), f"pooling is {self.pooling!r}; it must be 'avg' or 'max'")
        check(
            self.softmax_over in ("candidates", "row"),
            f"softmax_over is {self.softmax_over!r}; it must be 'candidates' or 'row'",
        )
        check(
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
        set_counts(self, every=1, num_queries=1)
        object.__setattr__(self, "memory", as_number("memory", self.memory, 0.0, 1.0))

    def check_budget(self, budget: KVBudget) -> None:
        """Refuse a ring that a refresh would empty, or that does not hold the tokens whose queries vote.

        A request may still ask for a smaller row that selects nothing: such a row is never refreshed.
        """
        if not budget.num_topk:
            return
        least = max(self.every + 1, self.num_queries)
        check(
            budget.num_recent >= least,
            f"a ring of {budget.num_recent} slots is too small for rescoring with every={self.every} and "
            f"num_queries={self.num_queries}; it must have at least {least}",
        )
