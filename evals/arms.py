"""The ways to spend the same number of slots. All but truncation are budgets of one engine.

- ``full``: every token is kept; the slots are not a limit.
- ``truncation``: the middle of the prompt is cut until it fits, then full attention.
- ``streaming``: StreamingLLM, sinks and a ring (K = 0).
- ``snapkv``: selection, and a ring that holds the window and the whole answer, so that it never wraps.
- ``snapstream``: ``KVBudget.of``, the project's default split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.config import DEFAULT_SINK, DEFAULT_WINDOW, KVBudget

ARMS = ("full", "truncation", "streaming", "snapkv", "snapstream")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A name, the slots of a row, and the budget that spends them."""

    name: str
    slots: int
    budget: KVBudget

    def prompt(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What the model is given: for ``truncation`` both ends of the prompt, else the prompt."""
        room = self.slots - max_tokens
        if self.name != "truncation" or len(token_ids) <= room:
            return list(token_ids)
        head = room // 2
        return [*token_ids[:head], *token_ids[len(token_ids) - (room - head) :]]


def make_arm(name: str, slots: int, max_model_len: int, max_tokens: int) -> Arm:
    """The arm of that name; ``max_tokens`` is the longest answer."""
    if name == "full" or name == "truncation":
        return Arm(name=name, slots=slots, budget=KVBudget.full(max_model_len if name == "full" else slots))
    if name == "streaming":
        return Arm(name=name, slots=slots, budget=KVBudget.streaming(slots))
    if name == "snapkv":
        recent = DEFAULT_WINDOW + max_tokens
        topk = slots - DEFAULT_SINK - recent
        if topk < 0:
            raise ValueError(f"{slots} slots leave no room beside {DEFAULT_SINK} sinks and a ring of {recent}")
        return Arm(name=name, slots=slots, budget=KVBudget(num_topk=topk, num_recent=recent))
    if name == "snapstream":
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots))
    raise ValueError(f"unknown arm {name!r}; known: {', '.join(ARMS)}")
