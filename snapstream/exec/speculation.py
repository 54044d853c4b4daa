"""Speculative decoding by prompt lookup: tokens that repeat earlier text are drafted, and verified in one wider step.

A draft continues the last earlier occurrence of a row's last tokens, in its prompt or its answer (prompt lookup,
Saxena 2023). The step feeds the row's last token and the drafted ones as entries of one batch; entry i sees exactly the
slots that it would see alone, so its logits are the same bits (products are batch-invariant). A drafted token is
accepted if the sampler draws it, which is a function of logits, seed and count alone: answers are the same with and
without drafts, greedy or sampled.

Slots of rejected tokens beyond a row's length are never read. Those that overwrote a slot of a full ring are restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from snapstream.exec.eager import DecodeStep, StepParts
from snapstream.exec.looped import MAX_DRAFTED
from snapstream.exec.results import Verified
from snapstream.exec.sampling import Sampled
from snapstream.exec.sampling_state import SamplingNeeds
from snapstream.kv.spec import Window
from snapstream.step import PrefillEntry

MIN_MATCH, MAX_MATCH = 2, 8  # last tokens that an earlier occurrence shares
MAX_PAUSE = 64  # steps in which a row without accepted drafts is not looked up
MANY_EMPTY, EMPTY_PAUSE = 16, 3  # lookups in a row that find nothing; then so many steps between two
_DECAY = 0.9  # of what is known of acceptance and of times, per token and per step
_PRIOR_SLOPE = 0.1  # a drafted token's share of the time of a step, before it is measured


class DraftBatch(NamedTuple):
    """Entries of a step: of each row its last token, then drafted ones; B entries in all."""

    rows: Tensor  # [B] int64
    ahead: Tensor  # [B] int64: index of an entry among those of its row
    inputs: Tensor  # [B] int64: the tokens
    starts: tuple[int, ...]  # first entry of each row


@runtime_checkable
class Verifier(Protocol):
    """A decode step that takes drafts."""

    def verify(self, batch: DraftBatch, needs: SamplingNeeds) -> tuple[Sampled, list[int]]:
        """Feed the entries and sample after each. Returns the samples of accepted entries, row after row, and how many
        each row has: at least 1. Rows are advanced by them.
        """
        ...


class VerifyingStep(DecodeStep, Verifier, Protocol):
    """A ``DecodeStep`` that is a ``Verifier``."""


class History:
    """Token ids of one row, and its lookups: there, and in a text that its answer may repeat (``prediction``)."""

    def __init__(self, token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        ids = (*prediction, *token_ids)
        self._ids = np.empty(len(ids) + 256, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._start, self._end = len(prediction), len(ids)

    @property
    def num_tokens(self) -> int:
        return self._end - self._start

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for token in self._ids[self._start : self._end]]

    def append(self, token: int) -> None:
        if self._end == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[self._end] = token
        self._end += 1

    def draft(self, most: int) -> list[int]:
        """Up to ``most`` tokens that followed the longest, then latest, earlier occurrence of the last tokens; none
        where fewer than ``MIN_MATCH`` of them occur.
        """
        ids, last = self._ids, self._end - 1
        if most < 1 or last < MIN_MATCH:
            return []
        ends = np.flatnonzero(ids[MIN_MATCH - 1 : last] == ids[last]) + MIN_MATCH - 1
        matched = 1
        while matched < min(MAX_MATCH, last):
            longer = ends[ends >= matched]
            longer = longer[ids[longer - matched] == ids[last - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if not len(ends) or matched < MIN_MATCH:
            return []
        first, period = int(ends[-1]) + 1, last - int(ends[-1])  # text that repeats goes on repeating
        return [int(ids[first + i % period]) for i in range(most)]


@dataclass(slots=True)
class _Row:
    history: History
    num_left: int  # tokens that max_tokens allows
    num_safe: int  # tokens that fit every layer's slots without overwriting one
    most: int  # drafted tokens per step
    rate: float = 0.7  # share of drafted tokens that were accepted, of those that could be
    num_missed: int = 0  # drafts in a row of which nothing was accepted
    num_empty: int = 0  # lookups in a row that found nothing
    pause: int = 0  # steps until the next lookup


class StepTimes:
    """Time of a step as a line over its entries: a decaying least-squares fit."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # of weights, n, t, n n, n t

    def add(self, entries: int, seconds: float) -> None:
        weight, n, t, nn, nt = self._sums
        self._sums = (
            weight * _DECAY + 1.0, n * _DECAY + entries, t * _DECAY + seconds, nn * _DECAY + entries * entries,
            nt * _DECAY + entries * seconds,
        )  # fmt: skip

    def cost(self, entries: int) -> float:
        """Of one more entry, in steps of so many."""
        weight, n, t, nn, nt = self._sums
        if weight == 0.0:
            return _PRIOR_SLOPE
        mean, spread = n / weight, nn - n * n / weight
        mean_time = t / weight
        prior = _PRIOR_SLOPE * mean_time
        slope = (nt - n * t / weight + prior) / (spread + 1.0)  # the prior counts as one step
        seconds = mean_time + slope * (entries - mean)
        return float(max(slope, 0.0) / max(seconds, 1e-9))


@dataclass
class Speculation:
    """Drafts for the rows of one engine, as many as their acceptance and the time of wider steps let pay."""

    parts: StepParts
    decode: VerifyingStep
    most: int  # drafted tokens per row and step

    def __post_init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._times = StepTimes()
        cache = self.parts.cache
        self._least_slots = min(cache.layer_slots)
        self._windows = [own.num_tokens for own in cache.spec.layers if isinstance(own, Window)]
        if cache.heads is not None:
            self._least_slots = min(budget.capacity for layer in cache.heads.slots.budgets for budget in layer)

    def _least_ring(self, entry: PrefillEntry) -> int:
        """Slots of the smallest ring of any layer."""
        return min([entry.budget.num_recent, *self._windows])

    def admit(self, entry: PrefillEntry) -> None:
        """The entry's rows hold its prompt, and their first tokens are drawn."""
        for row in entry.rows:
            self._rows[row] = _Row(
                History(entry.token_ids, entry.sampling.prediction),
                num_left=entry.sampling.max_tokens,
                num_safe=min(self._least_slots, entry.budget.capacity),
                # No two entries share a slot of a ring. A grammar's mask is made between two tokens.
                most=min(self.most, self._least_ring(entry) - 1) if entry.sampling.grammar is None else 0,
            )

    def step(
        self, rows: tuple[int, ...], batch_rows: Tensor, needs: SamplingNeeds
    ) -> tuple[Sampled, list[Verified] | None]:
        """A decode step with drafts where they pay: samples, and what each row has of them; None: one each."""
        own = [self._rows[row] for row in rows]
        last = self.parts.rows.last_token[batch_rows].tolist()
        for row, token in zip(own, last, strict=True):
            row.history.append(token)
            row.num_left -= 1
        drafts = self._drafts(own)
        began = perf_counter()
        if not any(drafts):
            sampled = self.decode.step(batch_rows, needs)
            self._times.add(len(rows), perf_counter() - began)
            return sampled, None
        batch = draft_batch(rows, last, drafts)
        backup = self._backup(batch, own)
        sampled, counts = self.decode.verify(batch, needs)
        if backup is not None:
            backup.restore(batch, counts)
        self._times.add(len(batch.rows), perf_counter() - began)
        for row, draft, count in zip(own, drafts, counts, strict=True):
            _learn(row, draft, count)
        return sampled, [Verified(count, len(draft)) for count, draft in zip(counts, drafts, strict=True)]

    def _drafts(self, rows: Sequence[_Row]) -> list[list[int]]:
        """Drafts of each row; tokens are added while the expected tokens per second rise."""
        found: list[list[int]] = []
        values: list[tuple[float, int]] = []  # expected tokens of a further draft, its row
        for index, row in enumerate(rows):
            draft: list[int] = []
            if row.pause > 0:
                row.pause -= 1
            elif row.most > 0:
                most = min(row.most, row.num_left - 1)
                if self.parts.cache.spec.values_are_keys:  # latents are written before any entry attends
                    most = min(most, row.num_safe - row.history.num_tokens)
                draft = row.history.draft(most)
                row.num_empty = 0 if draft else row.num_empty + 1
                row.pause = EMPTY_PAUSE if row.num_empty >= MANY_EMPTY else 0
            found.append(draft)
            values += [(row.rate ** (i + 1), index) for i in range(len(draft))]
        if not values:
            return found
        counts, expected = [0] * len(rows), float(len(rows))
        cost = self._times.cost(len(rows))  # of one more entry, in steps
        for entries, (value, index) in enumerate(sorted(values, key=lambda own: -own[0])[:MAX_DRAFTED]):
            probes = rows[index].num_missed > 0 and counts[index] == 0  # seldom: a row pauses longer each time
            if not probes and value * (1.0 + cost * entries) <= cost * expected:
                continue
            counts[index] += 1
            expected += value
        return [draft[:count] for draft, count in zip(found, counts, strict=True)]

    def _backup(self, batch: DraftBatch, rows: Sequence[_Row]) -> SlotBackup | None:
        """Contents of the slots that drafted tokens are written to, if any of these slots is in use."""
        ends = (*batch.starts[1:], len(batch.rows))
        nums = (end - start for start, end in zip(batch.starts, ends, strict=True))
        if all(row.history.num_tokens + num - 1 <= row.num_safe for row, num in zip(rows, nums, strict=True)):
            return None
        return SlotBackup(self.parts, batch)


def _learn(row: _Row, draft: list[int], count: int) -> None:
    """The step has accepted ``count - 1`` of a row's drafted tokens."""
    accepted = count - 1
    for token in draft[:accepted]:
        row.history.append(token)
    row.num_left -= accepted
    if not draft:
        return
    for is_right in (*[1.0] * accepted, *[0.0] * (accepted < len(draft))):
        row.rate = _DECAY * row.rate + (1.0 - _DECAY) * is_right
    if accepted:
        row.num_missed = 0
        row.rate = max(row.rate, 0.3)
    else:
        row.num_missed += 1
        row.pause = min(2**row.num_missed, MAX_PAUSE)


def draft_batch(rows: Sequence[int], last: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftBatch:
    """The entries of ``rows``: of each its ``last`` token, then its draft."""
    entries = [
        (row, ahead, token)
        for row, first, draft in zip(rows, last, drafts, strict=True)
        for ahead, token in enumerate((first, *draft))
    ]
    columns = torch.tensor(entries).t().contiguous()  # [3, B]
    starts = tuple(index for index, (_, ahead, _) in enumerate(entries) if ahead == 0)
    return DraftBatch(columns[0], columns[1], columns[2], starts)


class SlotBackup:
    """Copies of the slots, in all layers, that the drafted entries of a batch are written to."""

    def __init__(self, parts: StepParts, batch: DraftBatch) -> None:
        self._cache = cache = parts.cache
        self._drafted = batch.ahead.nonzero().squeeze(1)  # entries
        rows, ahead = batch.rows[self._drafted], batch.ahead[self._drafted]
        state = parts.rows
        if cache.heads is not None:
            places = cache.heads.places(rows, state.num_tokens[rows] + ahead, state.ring_start[rows])
        else:
            places = state.places(rows, cache.spec, ahead)
        self._slots = cache.slot_indices(places)  # [L, drafted, G]
        self._kept = [stored[self._slots] for stored in cache.flat()]

    def restore(self, batch: DraftBatch, counts: Sequence[int]) -> None:
        """Put back what rejected entries overwrote; each row has accepted so many entries."""
        ends = torch.tensor([start + count for start, count in zip(batch.starts, counts, strict=True)])
        sizes = torch.diff(torch.tensor((*batch.starts, len(batch.rows))))
        rejected = (torch.arange(len(batch.rows)) >= ends.repeat_interleave(sizes))[self._drafted]
        slots = self._slots[:, rejected]
        for stored, kept in zip(self._cache.flat(), self._kept, strict=True):
            stored[slots] = kept[:, rejected]
