"""The ways to spend the same number of slots. All but truncation are settings of one engine.

- ``full``: every token is kept; the slots are not a limit.
- ``truncation``: the middle of the prompt is cut until it fits, then full attention.
- ``streaming``: StreamingLLM, sinks and a ring (K = 0).
- ``random``: the default split, but the top-k slots hold random tokens: the floor of selection.
- ``snapkv``: SnapKV as published (centred pooling, softmax over the row), and a ring that holds the voting
  tokens and the whole answer, so that it never wraps.
- ``snapstream``: ``KVBudget.of`` and the selection of equal heads.
- ``hops``: the same; the tokens that got most votes vote in turn, four times. Beyond the papers, as is pooling ahead.
- ``largest_head``: the default, but of the heads that share a row the largest vote counts, not their sum: a question of
  models that keep latents, where all heads of a layer share one.
- ``by_head``: the default, but a model of latents keeps keys and values per head (``by_head.py``), and each head its
  own tokens: what agreeing costs.
- ``heads``: the same slots in all, divided among the kv heads by the checkpoint's profile, and the selector ``diverse``
  (the default on a CPU).
- ``as_kvpress``: selection as kvpress's SnapKVPress does it, no sinks: what is left is another implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.selectors import AS_KVPRESS, AS_PUBLISHED, Random, Variant, load_selector, stored_settings
from snapstream.config import DEFAULT_OBSERVATION, DEFAULT_SINK, KVBudget, Selector, make_selector
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops

ARMS = ("full", "truncation", "streaming", "random", "snapkv", "snapstream", "hops")
# Those beyond ARMS run only when they are named.
EVERY_ARM = (*ARMS, "heads", "as_kvpress", "largest_head", "by_head")
NUM_HOPS = 4


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A name, the slots of a row, the budget that spends them and the rule of selection."""

    name: str
    slots: int
    budget: KVBudget
    selector: Selector = field(default_factory=make_selector)
    has_heads: bool = False  # per-head budgets, by the profile beside the weights

    @property
    def selection(self) -> dict[str, Any]:
        """What decides what is kept, as plain data, so that a new default leaves the other cells valid."""
        return stored_settings(self.selector) if self.budget.num_topk else {}

    def prompt(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What the model is given: for ``truncation`` both ends of the prompt, else the prompt."""
        room = self.slots - max_tokens
        if self.name != "truncation" or len(token_ids) <= room:
            return list(token_ids)
        head = room // 2
        return [*token_ids[:head], *token_ids[len(token_ids) - (room - head) :]]


def make_arm(name: str, slots: int, max_model_len: int, max_tokens: int) -> Arm:
    """The arm of that name; ``max_tokens`` is the longest answer. ValueError if the slots cannot hold what it needs."""
    if name == "full":
        return Arm(name=name, slots=max_model_len, budget=KVBudget.full(max_model_len))
    if name == "truncation":
        if slots - max_tokens < 2:
            raise ValueError(f"{slots} slots leave no prompt beside an answer of {max_tokens}")
        return Arm(name=name, slots=slots, budget=KVBudget.full(slots))
    if name == "streaming":
        return Arm(name=name, slots=slots, budget=KVBudget.streaming(slots))
    if name == "random":
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots), selector=Random())
    if name == "snapkv":
        recent = DEFAULT_OBSERVATION + max_tokens
        topk = slots - DEFAULT_SINK - recent
        if topk < 1:
            raise ValueError(
                f"{slots} slots leave nothing to select beside {DEFAULT_SINK} sinks and a ring of {recent}"
            )
        budget = KVBudget(num_topk=topk, num_recent=recent)
        return Arm(name=name, slots=slots, budget=budget, selector=AS_PUBLISHED)
    if name in ("snapstream", "by_head"):
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots))
    if name == "hops":
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots), selector=Hops(num_hops=NUM_HOPS))
    if name == "heads":
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots), selector=Diverse(), has_heads=True)
    if name == "largest_head":
        return Arm(name=name, slots=slots, budget=KVBudget.of(slots), selector=Variant(group_reduce="max"))
    if name == "as_kvpress":
        recent = AS_KVPRESS.observation_len + max_tokens
        if slots <= recent:
            raise ValueError(f"{slots} slots leave nothing to select beside a ring of {recent}")
        budget = KVBudget(num_sink=0, num_topk=slots - recent, num_recent=recent)
        return Arm(name=name, slots=slots, budget=budget, selector=AS_KVPRESS)
    raise ValueError(f"unknown arm {name!r}; known: {', '.join(EVERY_ARM)}")


def selector_arm(text: str, slots: int) -> Arm:
    """The default budget with another selector (``selectors.load_selector``), which names the arm."""
    return Arm(name=text, slots=slots, budget=KVBudget.of(slots), selector=load_selector(text))
