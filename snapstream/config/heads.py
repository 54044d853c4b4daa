"""Slots per kv head: a model's profile, and what it makes of a budget. No torch.

Every head of a row has the same sinks and the same ring; the top-k slots of all heads together are as many as with
equal heads, and a profile says which share of them each head gets. ``snapstream calibrate`` writes profiles.
Invariant: slots are constants of an engine, whatever the prompt; a row takes the bytes that it takes with equal heads.
``cache/head_rows.py`` lays such rows out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from snapstream.config.cache import KVBudget
from snapstream.config.values import as_kind, as_number, as_path, check

FORMAT = 1
LEAST_PART = 16  # no head falls below this part of an equal share: what calibration did not see may need it
_MAX_FILE_BYTES = 16 * 2**20
_ROUNDING = 1e-3  # by which shares may miss 1 in all

Shares = tuple[tuple[float, ...], ...]  # by layer and kv head


@dataclass(frozen=True, kw_only=True)
class HeadSlots:
    """Top-k slots of every kv head, ``[L][G]``, and the budget of a mean head. Offsets are in slots of a row."""

    topk: tuple[tuple[int, ...], ...]
    budget: KVBudget
    model: str = ""  # fingerprint of the only checkpoint that they are for

    @cached_property
    def budgets(self) -> tuple[tuple[KVBudget, ...], ...]:
        """Of every head, by layer."""
        return tuple(tuple(self._with(num) for num in layer) for layer in self.topk)

    @cached_property
    def widest(self) -> KVBudget:
        """Of the head with most slots. A row's counters are those of this head; every other's follow from them."""
        return self._with(max(max(layer) for layer in self.topk))

    @cached_property
    def least(self) -> int:
        """Slots of the smallest head: a longer prompt is compressed somewhere."""
        return self._with(min(min(layer) for layer in self.topk)).capacity

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """First slot of every head in a row: heads in their order, but the widest stands last.

        So a window as long as the widest head, laid at the start of any head, ends within the rows.
        """
        places = [(layer, head) for layer, own in enumerate(self.topk) for head in range(len(own))]
        last = max(places, key=lambda place: self.topk[place[0]][place[1]])
        order = [place for place in places if place != last] + [last]
        sizes = [self.budgets[layer][head].capacity for layer, head in order]
        found = dict(zip(order, accumulate(sizes, initial=0), strict=False))
        return tuple(tuple(found[layer, head] for head in range(len(own))) for layer, own in enumerate(self.topk))

    def first(self, row: int, layer: int, head: int) -> int:
        """Address of a head: its first slot, counted over all rows."""
        return row * self.row_slots + self.starts[layer][head]

    @cached_property
    def row_slots(self) -> int:
        """Slots of a row, all layers and heads."""
        return sum(budget.capacity for layer in self.budgets for budget in layer)

    @staticmethod
    def visible(budgets: Sequence[KVBudget], num_tokens: int) -> list[int]:
        """Slots that attention reads of each head of a layer after ``num_tokens`` tokens."""
        return [min(num_tokens, budget.capacity) for budget in budgets]

    def of_rank(self, rank: int, num_ranks: int) -> HeadSlots:
        """Of the heads that one of several ranks has; heads fewer than ranks are had by several."""
        heads = len(self.topk[0])
        first, own = rank * heads // num_ranks, max(heads // num_ranks, 1)
        return replace(self, topk=tuple(layer[first : first + own] for layer in self.topk))

    def mean_capacity(self, num_ranks: int) -> int:
        """Slots of a mean head, rounded up, on the rank whose heads have most."""
        ranks = [self.of_rank(rank, num_ranks) for rank in range(num_ranks)]
        return max(-(-own.row_slots // sum(map(len, own.topk))) for own in ranks)

    def mean_visible(self, num_tokens: int) -> int:
        """Slots that attention reads of a head after ``num_tokens`` tokens, rounded down over all heads."""
        seen = [num for layer in self.budgets for num in self.visible(layer, num_tokens)]
        return sum(seen) // len(seen)

    def _with(self, num_topk: int) -> KVBudget:
        return KVBudget(num_sink=self.budget.num_sink, num_topk=num_topk, num_recent=self.budget.num_recent)


@dataclass(frozen=True, kw_only=True)
class HeadProfile:
    """Which share of the top-k slots each kv head of a model gets."""

    shares: Shares
    model: str  # fingerprint of the checkpoint that was calibrated (``models/fingerprint.py``)
    made_by: str = ""  # in words: what was read

    def __post_init__(self) -> None:
        check(bool(self.shares) and all(self.shares), "heads: a profile without shares")
        check(
            len({len(layer) for layer in self.shares}) == 1,
            "heads: the layers of the profile have unlike numbers of shares",
        )
        for layer in self.shares:
            for share in layer:
                as_number("heads: a share", share, 0.0, 1.0)
        total = math.fsum(share for layer in self.shares for share in layer)
        check(abs(total - 1) <= _ROUNDING, f"heads: the shares of the profile sum to {total:g}; they must sum to 1")

    def slots(self, budget: KVBudget, max_model_len: int) -> HeadSlots:
        """The budget's top-k slots shared out: no head gets more than it can fill, nor less than the least part.

        ValueError for a budget that cannot be shared out.
        """
        check(budget.num_topk > 0, "heads: a profile shares out top-k slots, and this budget has none (num_topk 0)")
        check(budget.num_window == 0, f"heads: the budget has num_window {budget.num_window}; with heads it must be 0")
        flat = [share for layer in self.shares for share in layer]
        most = max(max_model_len - budget.num_sink - budget.num_recent, budget.num_topk)
        given = iter(_shared_out(flat, budget.num_topk, most))
        return HeadSlots(
            topk=tuple(tuple(next(given) for _ in layer) for layer in self.shares), budget=budget, model=self.model
        )

    def write(self, path: Path) -> None:
        """As JSON, which ``read_profile`` reads."""
        text = {"format": FORMAT, "model": self.model, "made_by": self.made_by, "shares": self.shares}
        path.write_text(json.dumps(text, indent=1) + "\n")


def _shared_out(shares: Sequence[float], num_topk: int, most: int) -> list[int]:
    """``num_topk * len(shares)`` slots in proportion to ``shares``, none above ``most``, none below the least part.

    What a full head leaves goes to the others in proportion; single slots that remain go to the largest shares.
    """
    least = num_topk // LEAST_PART
    slots = [least] * len(shares)
    room = (num_topk - least) * len(shares)
    while room:
        open_heads = [i for i, own in enumerate(slots) if own < most]  # never empty: most >= num_topk
        weight = math.fsum(shares[i] for i in open_heads)
        parts = [shares[i] / weight if weight else 1 / len(open_heads) for i in open_heads]
        extra = [min(int(room * part), most - slots[i]) for i, part in zip(open_heads, parts, strict=True)]
        if not any(extra):
            by_share = sorted(open_heads, key=lambda i: (-shares[i], i))
            for i in by_share[:room]:
                slots[i] += 1
            room -= min(room, len(by_share))
            continue
        for i, more in zip(open_heads, extra, strict=True):
            slots[i] += more
        room -= sum(extra)
    return slots


def as_head_profile(given: Any) -> HeadProfile | None:
    """A profile, or the path of one; None means equal heads. ValueError for a file that holds none."""
    if given is None or isinstance(given, HeadProfile):
        return given
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
