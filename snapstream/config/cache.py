"""The slots of a row, and when it chooses again: budget and rescoring. ``selector.py`` says how tokens are chosen.

Budgets are counted in slots (tokens kept per row, layer and kv head), never in ratios, so that a row's cost can be read
off its config. ``cache/layout.py`` turns a ``KVBudget`` into slot arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config.selector import DEFAULT_OBSERVATION
from snapstream.config.values import as_count, as_number, check, set_counts

DEFAULT_SINK = 4  # StreamingLLM (arXiv 2309.17453): four sinks are enough, fewer are not


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
        cls,
        capacity: int,
        *,
        num_sink: int = DEFAULT_SINK,
        observation_len: int = DEFAULT_OBSERVATION,
        num_window: int = 0,
    ) -> KVBudget:
        """Split ``capacity`` slots by default: a quarter recent (never less than ``observation_len``), the rest top-k.

        ``num_window`` slots, for prompt tokens that stay, come out of the recent ones.
        """
        num_sink = as_count("num_sink", num_sink, 0)
        observation_len = as_count("observation_len", observation_len, 1)
        capacity, least = as_count("budget", capacity, 1), num_sink + observation_len
        check(
            capacity >= least,
            f"a budget of {capacity} slots is smaller than sinks + observation_len "
            f"({num_sink} + {observation_len} = {least})",
        )
        num_recent = min(max(observation_len, capacity // 4), capacity - num_sink)
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
class RescoringConfig:
    """Beyond the paper: the last decode queries choose again what a full row keeps (``cache/rescoring.py``).

    A refresh frees ``every`` slots of the ring, so it comes at most once in as many tokens. A selected token keeps the
    best vote that it ever got, times ``memory`` at every refresh: with 0 only the last queries count, and tokens that
    nobody asked for lately are forgotten.
    """

    every: int = 32  # tokens between two refreshes of a row; less than the ring
    num_queries: int = 32  # the last decode queries, which vote; at most the ring
    memory: float = 0.98  # share of a vote that counts one refresh later, 0 to 1

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
