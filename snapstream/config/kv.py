"""Selectors, KV budgets and per-head budgets. No torch.

Budgets are counted in slots (tokens kept per row, layer and kv head), never in ratios, so that a row's cost can be read
off its config; ``kv/layout.py`` turns them into slot arithmetic. With per-head budgets a profile says which share of
the top-k slots each head gets; all have the same sinks, and large ones a longer ring. A row takes the bytes that it
takes with equal heads, which rows of prompts that fit have. Several ranks divide it as one device does.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from snapstream.config.values import Registry, as_count, as_kind, as_number, as_path, check, set_counts

if TYPE_CHECKING:
    from torch import Tensor


DEFAULT_SELECTOR = "snapkv"
HEADS_SELECTOR = "diverse"  # the default with per-head budgets, which leave room for what no question pointed at
DEFAULT_OBSERVATION = 32  # observation window; SnapKV (arXiv 2404.14469) uses 16 to 64


class Selector(ABC):
    """Chooses which prompt tokens a row keeps in its top-k slots, per layer and kv head, when a layer is staged.

    Selectors are frozen dataclasses whose fields are their settings, a file each in ``kv/selectors/``: requests hold
    them and processes exchange them. Their modules import torch only to select, so that plans and settings need none.
    """

    name: ClassVar[str]  # as in SELECTORS, on the command line and in requests
    observation_len: int = DEFAULT_OBSERVATION  # last prompt queries, which score the candidates

    def num_queries(self, prompt_len: int) -> int:
        """How many of the last queries of a prompt ``select`` needs; a layer keeps them until it is staged."""
        return prompt_len if self.needs_all_queries else min(self.observation_len, prompt_len)

    @property
    def needs_all_queries(self) -> bool:
        """Whether ``select`` needs the queries of the whole prompt, which ``plan`` then counts."""
        return False

    @abstractmethod
    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Any
    ) -> Tensor:
        """Prompt positions ``[G, K]`` int64 to keep, ascending; ``K = num_topk``.

        ``queries [w, H, E]`` are the last ``num_queries`` of the prompt after RoPE, ``keys [G, N, E]`` all its keys
        after RoPE; ``candidates`` are the positions that compete; ``kernels`` are the functions of the device
        (``kernels/interface.py``). The host must not wait for the device.
        """


SELECTORS: Registry[type[Selector]] = Registry(
    "selector",
    {
        "snapkv": "snapstream.kv.selectors.snapkv:SnapKV",
        "hops": "snapstream.kv.selectors.hops:Hops",
        "diverse": "snapstream.kv.selectors.diverse:Diverse",
    },
)


def is_shipped(selector: Selector) -> bool:
    """Whether a selector's class is the package's own, so that other processes can make an equal one by its name."""
    return SELECTORS.is_shipped(selector.name) and SELECTORS.get(selector.name) is type(selector)


def make_selector(selector: str | Selector | None = None) -> Selector:
    """A selector itself, or the one of that name (None: the default) with its default settings. ValueError or TypeError
    for others.
    """
    selector = DEFAULT_SELECTOR if selector is None else selector
    if isinstance(selector, Selector):
        return selector
    if not isinstance(selector, str):
        raise TypeError(f"selector is {selector!r}; it must be a Selector or one of {', '.join(SELECTORS.names)}")
    return SELECTORS.get(selector)()


DEFAULT_SINK = 4  # StreamingLLM (arXiv 2309.17453): four sinks are enough, fewer are not


@dataclass(frozen=True, kw_only=True)
class KVBudget:
    """How many slots a row has, by region: ``sink | top-k | window | recent ring``.

    The paper's row (SnapStream, arXiv 2511.03092, section 3) has no window region: with ``num_window`` the last prompt
    tokens, usually the question, stay when the ring wraps.

    Other policies are budgets of the same code: full attention (capacity >= all tokens),
    StreamingLLM (``num_topk=0``), SnapKV only (``num_recent`` large enough never to wrap).
    """

    num_sink: int = DEFAULT_SINK  # first tokens of the prompt, always kept
    num_topk: int  # prompt tokens chosen once, at the end of prefill
    num_window: int = 0  # last tokens of the prompt that stay when the ring wraps
    num_recent: int  # ring of the newest tokens

    def __post_init__(self) -> None:
        # A ring without a slot cannot take the next token.
        set_counts(self, num_sink=0, num_topk=0, num_window=0, num_recent=1)

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
        check(capacity > num_sink, f"a budget of {capacity} slots leaves no ring with {num_sink} sinks")
        return cls(num_sink=num_sink, num_topk=0, num_recent=capacity - num_sink)


FORMAT = 1
LEAST_PART = 16  # no head falls below this part of an equal share: what calibration did not see may need it
_MAX_FILE_BYTES = 16 * 2**20
_ROUNDING = 1e-3  # by which shares may miss 1 in all

Shares = tuple[tuple[float, ...], ...]  # by layer and kv head


@dataclass(frozen=True, kw_only=True)
class HeadSlots:
    """Top-k slots of every kv head of a model, ``[L][G]``, and a mean head's budget. Offsets are in slots of a row.

    Layers to which no budget applies (sliding windows, recurrent states) have none. On one of several ranks
    ``budgets``, ``starts`` and ``row_slots`` are of its heads; rows are divided among the heads of all ranks, so that
    every head keeps what it keeps on one device.
    """

    topk: tuple[tuple[int, ...], ...]  # of large heads the ring takes some
    budget: KVBudget
    model: str = ""  # fingerprint of the only checkpoint that they are for
    shares: Shares  # by which rows are divided prompt by prompt, of the layers that have slots
    rank: int = 0
    num_ranks: int = 1

    @cached_property
    def own_heads(self) -> slice:
        """The heads of this rank in a layer; heads fewer than ranks are on several."""
        heads = max(map(len, self.topk))  # G
        first = self.rank * heads // self.num_ranks
        return slice(first, first + max(heads // self.num_ranks, 1))

    def spread(self, layers: Sequence[int], num_layers: int) -> HeadSlots:
        """The same in a model of ``num_layers``, whose ``layers`` these are."""
        found = dict(zip(layers, self.topk, strict=True))
        return replace(self, topk=tuple(found.get(layer, ()) for layer in range(num_layers)))

    @cached_property
    def budgets(self) -> tuple[tuple[KVBudget, ...], ...]:
        """Of every head of this rank, by layer."""
        return tuple(tuple(self._with(num) for num in layer[self.own_heads]) for layer in self.topk)

    @cached_property
    def widest(self) -> KVBudget:
        """Of the head with most slots. A row's counters are those of this head; every other's follow from them."""
        return self._with(max(num for layer in self.topk for num in layer))

    @cached_property
    def longest(self) -> int:
        """The most slots that a head has in any row, on any rank."""
        return max(self.widest.capacity, self.budget.capacity)

    @cached_property
    def distinct(self) -> tuple[KVBudget, ...]:
        """Of the heads of all ranks, each once, in the order of layers and heads."""
        return tuple(dict.fromkeys(self._with(num) for layer in self.topk for num in layer))

    def of(self, budget: KVBudget, prompt_len: int) -> HeadSlots:
        """Slots of the heads in the row of a request; never more in all than a row has.

        No head gets more slots than the prompt has tokens. So a row that holds the whole prompt has equal heads, and
        nothing is lost there.
        """
        return _row_slots(self, budget, min(max(prompt_len, budget.capacity), self.longest))

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """First slot of every head in a row, in the order of layers and heads."""
        found = accumulate((own.capacity for layer in self.budgets for own in layer), initial=0)
        return tuple(tuple(next(found) for _ in layer) for layer in self.budgets)

    @cached_property
    def row_slots(self) -> int:
        """Slots of a row, of all layers and heads: enough for any prompt and any budget of a request.

        Between the lengths of prompts at which one more head is not full, a rank's number of slots is linear in the
        length: it is largest at one of those. Rounding adds at most one slot for each head.
        """
        num_heads, num_own = (sum(len(layer[own]) for layer in self.topk) for own in (slice(None), self.own_heads))
        if num_own == num_heads:
            return num_heads * self.budget.capacity
        part = _largest_part(self.shares, self.own_heads.start, self.own_heads.stop)
        more = math.floor((self.budget.num_topk - self.budget.num_topk // LEAST_PART) * (num_heads * part - num_own))
        return max(num_own * (self.budget.capacity + 1) + more, self.longest)

    @staticmethod
    def visible(budgets: Sequence[KVBudget], num_tokens: int) -> list[int]:
        """Slots that attention reads of each head of a layer after ``num_tokens`` tokens."""
        return [min(num_tokens, budget.capacity) for budget in budgets]

    def of_rank(self, rank: int, num_ranks: int) -> HeadSlots:
        """On one of several ranks."""
        return replace(self, rank=rank, num_ranks=num_ranks)

    def mean_capacity(self, num_ranks: int) -> int:
        """Slots of a mean head, rounded up, on the rank whose heads have most."""
        ranks = [self.of_rank(rank, num_ranks) for rank in range(num_ranks)]
        return max(-(-own.row_slots // sum(map(len, own.budgets))) for own in ranks)

    def mean_visible(self, num_tokens: int) -> int:
        """Slots that attention reads of a head after ``num_tokens`` tokens, rounded down over all heads."""
        seen = [num for layer in self.budgets for num in self.visible(layer, num_tokens)]
        return sum(seen) // len(seen)

    def _with(self, num_topk: int) -> KVBudget:
        """Of a head with so many slots besides sinks and ring. The ring of a large head takes its part of them.

        Else facts at the end of the prompt, which are no candidates, would be lost with the first tokens of the answer
        in heads that keep all other facts (docs/research/log.md, 2026-11-26).
        """
        sinks, ring = self.budget.num_sink, self.budget.num_recent
        room = num_topk + ring
        if num_topk > self.budget.num_topk:
            ring = ring * (sinks + room) // self.budget.capacity
        return KVBudget(num_sink=sinks, num_topk=room - ring, num_recent=ring)


@lru_cache(maxsize=256)
def _row_slots(slots: HeadSlots, budget: KVBudget, longest: int) -> HeadSlots:
    """``HeadSlots.of``, with heads of at most ``longest`` slots."""
    given = iter(_divided(slots.shares, budget.num_topk, longest - budget.num_sink - budget.num_recent))
    return replace(slots, topk=tuple(next(given) if layer else () for layer in slots.topk), budget=budget)


@dataclass(frozen=True, kw_only=True)
class HeadProfile:
    """Which share of the top-k slots each kv head of a model gets, in the layers to which a budget applies."""

    shares: Shares
    model: str  # fingerprint of the checkpoint that was calibrated (``models/checkpoint.py``)
    made_by: str = ""  # in words: what was read

    def __post_init__(self) -> None:
        check(bool(self.shares) and all(self.shares), "heads: a profile without shares")
        check(
            len({len(layer) for layer in self.shares}) == 1,
            "heads: the layers of the profile have different numbers of shares",
        )
        for layer in self.shares:
            for share in layer:
                as_number("heads: a share", share, 0.0, 1.0)
        total = math.fsum(share for layer in self.shares for share in layer)
        check(abs(total - 1) <= _ROUNDING, f"heads: the shares of the profile sum to {total:g}; they must sum to 1")

    def slots(self, budget: KVBudget, max_model_len: int) -> HeadSlots:
        """The budget's top-k slots divided: no head gets more than it can fill, nor less than the least part.

        ValueError for a budget that cannot be divided.
        """
        check(budget.num_topk > 0, "heads: a profile divides top-k slots, and this budget has none (num_topk 0)")
        check(budget.num_window == 0, f"heads: the budget has num_window {budget.num_window}; with heads it must be 0")
        most = max(max_model_len - budget.num_sink - budget.num_recent, budget.num_topk)
        topk = _divided(self.shares, budget.num_topk, most)
        return HeadSlots(topk=topk, budget=budget, model=self.model, shares=self.shares)

    def write(self, path: Path) -> None:
        """As JSON, which ``read_profile`` reads."""
        text = {"format": FORMAT, "model": self.model, "made_by": self.made_by, "shares": self.shares}
        path.write_text(json.dumps(text, indent=1) + "\n")


def _weights(shares: Shares) -> list[int]:
    """Of all heads, in proportion to their shares. Integers, since all machines must divide alike; none is 0."""
    return [max(1, round(share * 2**40)) for layer in shares for share in layer]


def _divided(by_layer: Shares, num_topk: int, most: int) -> tuple[tuple[int, ...], ...]:
    """``num_topk`` slots for a mean head in proportion to the shares, none above ``most``, none below the least part.

    What a full head leaves is divided among the others in proportion; remaining slots go to the largest shares.
    """
    weights, least = _weights(by_layer), num_topk // LEAST_PART
    slots, room, total = [most] * len(weights), (num_topk - least) * len(weights), sum(weights)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    while order and room * weights[order[0]] >= (most - least) * total:
        room, total = room - (most - least), total - weights[order.pop(0)]
    more = [room * weights[i] // total for i in order]
    left = room - sum(more)
    for place, (i, own) in enumerate(zip(order, more, strict=True)):
        slots[i] = least + own + (place < left)
    given = iter(slots)
    return tuple(tuple(next(given) for _ in layer) for layer in by_layer)


@lru_cache(maxsize=64)
def _largest_part(shares: Shares, start: int, stop: int) -> Fraction:
    """The largest part of the slots above the least ones that heads ``start .. stop - 1`` get in any prompt's row."""
    is_own = [start <= head < stop for layer in shares for head in range(len(layer))]
    part, below, own_below, num_above, own_above = Fraction(0), 0, 0, len(is_own), sum(is_own)
    for weight, own in sorted(zip(_weights(shares), is_own, strict=True)):  # full heads count with the least of them
        part = max(part, Fraction(own_below + own_above * weight, below + num_above * weight))
        below, own_below = below + weight, own_below + own * weight
        num_above, own_above = num_above - 1, own_above - own
    return part


def as_heads(given: Any) -> HeadProfile | Literal["auto", "none"] | None:
    """A profile or the path of one, ``"auto"``, ``"none"`` (equal heads) or None (not set).

    ValueError for a file that holds no profile.
    """
    if given in (None, "auto", "none") or isinstance(given, HeadProfile):
        return cast('HeadProfile | Literal["auto", "none"] | None', given)
    return read_profile(as_path("heads", given))


def read_profile(path: Path) -> HeadProfile:
    """A profile from its file; ValueError, naming the file, for one that is missing or damaged."""
    try:
        check(path.stat().st_size <= _MAX_FILE_BYTES, f"it has more than {_MAX_FILE_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        as_kind("the profile", found, dict)
        check(found.get("format") == FORMAT, f"its format is {found.get('format')!r}; this version reads {FORMAT}")
        texts = found.get("model"), found.get("made_by")
        check(all(isinstance(text, str) for text in texts), "it does not say which model it is of")
        shares = found.get("shares")
        check(
            isinstance(shares, list) and all(isinstance(layer, list) for layer in shares),
            "its shares are no lists by layer and head",
        )
        return HeadProfile(shares=tuple(map(tuple, shares)), model=str(texts[0]), made_by=str(texts[1]))
    except (OSError, ValueError, TypeError, RecursionError) as error:  # damaged JSON and UTF-8 are ValueErrors
        raise ValueError(f"heads: {path} holds no profile of a model's heads: {error}") from None
