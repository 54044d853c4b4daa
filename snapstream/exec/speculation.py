"""Speculative decoding: tokens that repeat earlier text, or that a small model expects, are verified in one wider step.

A draft continues the last earlier occurrence of a row's last tokens, in its prompt or its answer (prompt lookup,
Saxena 2023); where there is none, a draft model may give one (``draft_model.py``). The step feeds the row's last token
and the drafted ones as entries of one batch; entry i sees exactly the slots that it would see alone, so its logits are
the same (of ``looped`` to the bit: its products are batch-invariant). A drafted token is accepted if the sampler draws
it, which is a function of logits, seed and count alone: answers are the same with and without drafts, greedy or
sampled.

Tokens that a row's grammar forces are drafted before others, which are cut at the first that it does not allow.

Slots of rejected tokens beyond a row's length are never read. Those that overwrote a slot of a full ring are restored.
Recurrent states go on by a row's last token alone, and then by the drafted ones that were accepted, from their inputs
(``models/views.py:DraftsView``, ``kernels/cpu/looped/recurrent.h``).

On a GPU only steps that look for a draft wait for the tokens of the one before; times are those of events.

Of several ranks rank 0 alone proposes, as a draft depends on measured times: ``StepPlan.drafts``. All ranks verify, and
accept the same tokens, because they draw the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.exec.eager import DraftBatch, ShowsHidden, StepParts, Verifier, draft_batch
from snapstream.exec.executors import MAX_DRAFTED
from snapstream.exec.results import HostCopy, RowGrammars, Stopwatch, Verified
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.sampling import Sampled
from snapstream.kernels.memory import upload
from snapstream.kv.spec import Window
from snapstream.step import PrefillEntry

MIN_MATCH, MAX_MATCH = 2, 8  # last tokens that an earlier occurrence shares
MAX_PAUSE = 64  # steps in which a row without accepted drafts is not looked up
MANY_EMPTY, EMPTY_PAUSE = 16, 3  # lookups in a row that find nothing; then so many steps between two
_DECAY = 0.9  # of what is known of acceptance and of times, per token and per step
_PRIOR_SLOPE = 0.1  # a drafted token's share of the time of a step, before it is measured
_PRIOR_RATE = 0.7  # share of drafted tokens that are accepted, before any was verified
_READ_SHARE = 0.03  # of the time that is left of an answer, for reading its last tokens into the draft model
LEAST_WAIT, MOST_WAIT = 32, 512  # steps in which a draft model that does not pay is not asked


class Drafter(Protocol):
    """Drafts tokens for rows by what they hold so far."""

    seconds: float  # of a draft of one token for every row; 0: not measured
    read_seconds: float  # of what a row costs before its first draft; 0: not measured

    def forget(self, row: int) -> None:
        """The row has a new owner."""
        ...

    def holds(self, row: int) -> bool:
        """Whether the row has had a draft."""
        ...

    def draft(self, wanted: Sequence[tuple[int, History, int]]) -> list[list[int]]:
        """For each row, its tokens and a count >= 1: that many drafted tokens, or fewer."""
        ...


@runtime_checkable
class Follower(Protocol):
    """A drafter that reads the hidden states of its target."""

    num_hidden: int  # of the last tokens of a prompt

    def begin(self, rows: Sequence[int], first: int, hidden: Tensor) -> None:
        """Rows have a prompt; ``hidden [n, D]``: what the last layer gave its tokens from index ``first`` on, of a row
        that came from another engine none.
        """
        ...

    def follow(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        """A step has fed each row ``counts`` tokens; the same of these begins at ``starts`` of ``hidden [B, D]``."""
        ...


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
    def last(self) -> int:
        """The last token."""
        return int(self._ids[self._end - 1])

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for token in self._ids[self._start : self._end]]

    def since(self, start: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token ids from index ``start`` on, a view."""
        return self._ids[self._start + start : self._end]

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
        ends = np.flatnonzero(ids[MIN_MATCH - 1 : last] == ids[last])
        if not len(ends):
            return []
        ends, matched = ends + MIN_MATCH - 1, 1
        while matched < min(MAX_MATCH, last):
            longer = ends[ends >= matched]
            longer = longer[ids[longer - matched] == ids[last - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if matched < MIN_MATCH:
            return []
        first, period = int(ends[-1]) + 1, last - int(ends[-1])  # text that repeats goes on repeating
        return [int(ids[first + i % period]) for i in range(most)]


@dataclass(slots=True)
class _Row:
    history: History
    num_left: int  # tokens that max_tokens allows
    num_safe: int  # tokens that fit every layer's slots without overwriting one
    most: int  # drafted tokens per step
    rate: float = _PRIOR_RATE  # share of drafted tokens that were accepted, of those that could be
    num_missed: int = 0  # drafts in a row of which nothing was accepted
    num_empty: int = 0  # lookups in a row that found nothing
    pause: int = 0  # steps until the next lookup
    num_forced: int = 0  # tokens of the last draft that a grammar forces
    model_rate: float = _PRIOR_RATE  # as ``rate``, of the draft model's tokens
    model_pause: int = 0  # steps until the draft model is asked again
    model_wait: int = LEAST_WAIT  # the next such pause
    num_asked: int = 0  # steps in a row in which it was asked
    num_verified: int = 0  # steps with its tokens, since the last pause

    def learn_model(self, accepted: int, drafted: int) -> None:
        """So many of the draft model's tokens are right. The first ones say more than the prior."""
        share = max(1.0 - _DECAY, 1.0 / (self.num_verified + 2))
        self.num_verified += 1
        for is_right in _outcomes(accepted, drafted):
            self.model_rate += share * (is_right - self.model_rate)

    def rest(self) -> None:
        """A step of the draft model's pause passes; behind it the row is as if it were new."""
        if self.model_pause > 0:
            self.model_pause -= 1
            if not self.model_pause:
                self.model_rate, self.num_verified = _PRIOR_RATE, 0


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

    def steps(self, seconds: float, entries: int) -> float:
        """So much time in steps of so many entries; 0 where either was not measured."""
        return seconds / step if (step := self._line(entries)[0]) > 0.0 else 0.0

    def cost(self, entries: int) -> float:
        """Of one more entry, in steps of so many."""
        seconds, slope = self._line(entries)
        return _PRIOR_SLOPE if seconds == 0.0 else float(max(slope, 0.0) / max(seconds, 1e-9))

    def _line(self, entries: int) -> tuple[float, float]:
        """Seconds of a step of so many entries, and of one more; zeros before one was measured."""
        weight, n, t, nn, nt = self._sums
        if weight == 0.0:
            return 0.0, 0.0
        mean, spread = n / weight, nn - n * n / weight
        mean_time = t / weight
        prior = _PRIOR_SLOPE * mean_time
        slope = (nt - n * t / weight + prior) / (spread + 1.0)  # the prior counts as one step
        return float(mean_time + slope * (entries - mean)), float(slope)


@dataclass
class Speculation:
    """Drafts for the rows of one engine, as many as their acceptance and the time of wider steps let pay."""

    parts: StepParts
    decode: Verifier
    most: int  # drafted tokens per row and step
    grammars: RowGrammars
    drafter: Drafter | None = None  # asked where prompt lookup finds nothing

    def __post_init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._times = StepTimes()
        self._num_steps = 0
        self.is_lazy = self.parts.decoder.device.type == "cuda"  # reads tokens only for lookups: reading waits
        # The token that each row is fed next, as a NumPy view: indexing the tensor costs as much as all else here.
        is_host = self.parts.decoder.device.type == "cpu"
        self._last = self.parts.rows.last_token.numpy() if is_host else None
        # Of steps that nothing has been read of: their rows with the tokens fed; entries and times, lacking the last.
        self._fed: list[tuple[Sequence[_Row], HostCopy]] = []
        self._timed: list[tuple[int, Stopwatch]] = []
        # Of the rows last proposed for, those with drafts of the draft model, and how many tokens it gave.
        self._asked: dict[int, int] = {}
        self._windows = [own.num_tokens for own in self.parts.cache.spec.layers if isinstance(own, Window)]

    @property
    def follower(self) -> Follower | None:
        """The drafter, if it follows its target."""
        return self.drafter if isinstance(self.drafter, Follower) else None

    def admit(self, entry: PrefillEntry) -> None:
        """The entry's rows hold its prompt, and their first tokens are drawn."""
        cache = self.parts.cache
        budgets: Collection[KVBudget] = (entry.budget,)
        if cache.heads is not None:
            budgets = cache.heads.slots.of(entry.budget, entry.prompt_len).distinct
        least_ring = min([entry.budget.num_recent, *self._windows])  # of any layer
        for row in entry.rows:
            if self.drafter is not None:
                self.drafter.forget(row)
            self._rows[row] = _Row(
                History(entry.token_ids, entry.sampling.prediction),
                num_left=entry.sampling.max_tokens,
                num_safe=min([*filter(None, cache.layer_slots), *(budget.capacity for budget in budgets)]),
                # No two entries share a slot of a ring. A GPU would wait for a grammar's mask in every turn.
                most=0 if entry.sampling.grammar and self.is_lazy else min(self.most, least_ring - 1),
            )

    def propose(self, rows: tuple[int, ...], batch_rows: Tensor) -> tuple[tuple[int, ...], ...]:
        """Drafts of each row for the next step, where they pay; nothing if no row has any."""
        own = self._feed(rows, batch_rows)
        self._asked = {}
        if not self._may_draft(own):
            return ()
        self._catch_up()
        drafts = self._drafts(rows, own)
        if self.drafter is not None:
            self._asked = self._ask(self.drafter, rows, own, drafts)
        return tuple(map(tuple, drafts)) if any(drafts) else ()

    def _feed(self, rows: tuple[int, ...], batch_rows: Tensor) -> list[_Row]:
        """A step will feed the rows their last tokens."""
        own = [self._rows[row] for row in rows]
        for row in own:
            row.num_left -= 1
        self._num_steps += 1
        if self._last is None:
            self._fed.append((own, HostCopy(self.parts.rows.last_token[batch_rows])))
            return own
        for number, row in zip(rows, own, strict=True):
            row.history.append(int(self._last[number]))
        return own

    def step(
        self,
        rows: tuple[int, ...],
        batch_rows: Tensor,
        needs: SamplingNeeds,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Sampled, list[Verified] | None]:
        """A decode step with drafts: samples, and what each row has of them; None: one each. ``drafts``: those that
        rank 0 has proposed for all ranks; None: there are no others.
        """
        if drafts is None:
            drafts = self.propose(rows, batch_rows)
        elif self.parts.decoder.group.rank:
            self._feed(rows, batch_rows)
            self._catch_up()
        own = [self._rows[row] for row in rows]
        watch = Stopwatch(self.parts.decoder.device)
        watch.start()
        starts: Sequence[int] = range(len(rows))
        if not any(drafts):
            sampled, counts = self.decode.step(batch_rows, needs), None
        else:
            batch = draft_batch(rows, [row.history.last for row in own], drafts)
            starts = batch.starts
            backup = self._backup(batch, own)
            follows = any(draft and self.grammars.holds(row) for row, draft in zip(rows, drafts, strict=True))
            sampled, counts = self.decode.verify(batch, needs, self.grammars.go_on if follows else None)
            if backup is not None:
                backup.restore(batch, counts)
        watch.stop()
        num_entries = len(rows) + sum(map(len, drafts))
        self._timed.append((num_entries, watch))
        if (follower := self.follower) is not None:
            assert isinstance(self.decode, ShowsHidden)  # others are refused
            follower.follow(rows, starts, counts or [1] * len(rows), self.decode.hidden(num_entries))
        if counts is None:
            return sampled, None
        for index, (row, draft, count) in enumerate(zip(own, drafts, counts, strict=True)):
            _learn(row, draft, count, num_asked=self._asked.get(index, 0))
        return sampled, [Verified(count, len(draft)) for count, draft in zip(counts, drafts, strict=True)]

    def _may_draft(self, rows: Sequence[_Row]) -> bool:
        """Whether any row is due for a lookup or the draft model, or reading tokens costs nothing."""
        limit = self.decode.most_draft_rows
        if limit is not None and len(rows) > limit:
            self._catch_up(leave=1)
            return False
        if not self.is_lazy:
            return True
        for row in rows:
            if row.most > 0 and (row.pause == 0 or (self.drafter is not None and row.model_pause == 0)):
                return True
        for row in rows:
            row.pause = max(row.pause - 1, 0)
            row.rest()
        if len(self._fed) > MAX_PAUSE:
            self._catch_up(leave=1)
        return False

    def _catch_up(self, leave: int = 0) -> None:
        """Add the tokens and times of steps, but for the last ``leave``, whose tokens may not have arrived."""
        num_fed, num_timed = len(self._fed) - leave, max(len(self._timed) - leave, 0)
        for rows, tokens in self._fed[:num_fed]:
            for row, token in zip(rows, tokens.read()[0].tolist(), strict=True):
                row.history.append(token)
        for entries, watch in self._timed[:num_timed]:
            self._times.add(entries, watch.milliseconds() / 1e3)
        del self._fed[:num_fed], self._timed[:num_timed]

    def _drafts(self, numbers: Sequence[int], rows: Sequence[_Row]) -> list[list[int]]:
        """Drafts of each row; tokens are added while the expected tokens per second rise."""
        found: list[list[int]] = []
        values: list[tuple[float, int]] = []  # expected tokens of a further draft, its row
        for index, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            draft: list[int] = []
            forced = self.grammars.forced(number, self._most(row))
            if row.pause > 0:
                row.pause -= 1
            elif row.most > 0:
                draft = self.grammars.possible(number, row.history.draft(self._most(row)))
                if draft[: len(forced)] != forced:
                    draft = []
                row.num_empty = 0 if draft else row.num_empty + 1
                if row.num_empty >= MANY_EMPTY:  # rows in the same steps, so that a GPU is waited for in few
                    row.pause = EMPTY_PAUSE - self._num_steps % (EMPTY_PAUSE + 1)
            found.append(draft or forced)
            row.num_forced = len(forced)
            values += [(row.rate ** max(i + 1 - len(forced), 0), index) for i in range(len(found[-1]))]
        if not values:
            return found
        counts, expected = [0] * len(rows), float(len(rows))
        cost = self._times.cost(len(rows))  # of one more entry, in steps
        for entries, (value, index) in enumerate(sorted(values, key=lambda own: -own[0])[:MAX_DRAFTED]):
            own = rows[index]
            probes = own.num_missed > 0 and counts[index] == own.num_forced  # seldom: a row pauses longer each time
            if not probes and value * (1.0 + cost * entries) <= cost * expected:
                continue
            counts[index] += 1
            expected += value
        return [draft[:count] for draft, count in zip(found, counts, strict=True)]

    def _most(self, row: _Row) -> int:
        """Tokens that may be drafted for a row now."""
        most = min(row.most, row.num_left - 1)
        if self.parts.cache.spec.values_are_keys and not self.decode.keeps_latents:
            most = min(most, row.num_safe - row.history.num_tokens)
        return max(most, 0)

    def _ask(
        self, drafter: Drafter, numbers: Sequence[int], rows: Sequence[_Row], drafts: list[list[int]]
    ) -> dict[int, int]:
        """Let the draft model fill in ``drafts`` that lookup left empty; the indices of those rows, and how many tokens
        it gave, before a grammar cut them.

        All of them together get the depth that gives the most expected tokens per second, the time of drafting
        included; rows for which that is 0 are left out for a while, and then tried as if they were new.
        """
        limits = {}
        for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if row.model_pause > 0:
                row.rest()
            elif not draft and (limit := self._most(row)):
                first = 0.0 if drafter.holds(numbers[index]) else self._times.steps(drafter.read_seconds, len(rows))
                if first <= _READ_SHARE * row.num_left:  # of the steps that are left
                    limits[index] = limit
                else:
                    _wait(row, 0)
        if not limits:
            return {}
        cost = self._times.cost(len(rows))  # in steps, as the time of a draft
        step = self._times.steps(drafter.seconds, len(rows)) or _PRIOR_SLOPE
        room = MAX_DRAFTED - sum(len(draft) for draft in drafts)
        best, fastest = {index: 0 for index in limits}, float(len(rows))
        counts, expected = dict(best), float(len(rows))
        for depth in range(1, self.most + 1):
            deeper = [index for index, limit in limits.items() if limit >= depth][: max(room - sum(counts.values()), 0)]
            if not deeper:
                break
            for index in deeper:
                counts[index] = depth
                expected += rows[index].model_rate ** depth
            speed = expected / (1.0 + cost * sum(counts.values()) + step * depth)
            if speed > fastest:
                best, fastest = dict(counts), speed
        for index, count in best.items():
            _wait(rows[index], count)
        asked = {index: count for index, count in best.items() if count}
        if asked:
            found = drafter.draft([(numbers[index], rows[index].history, count) for index, count in asked.items()])
            vocab = self.parts.decoder.config.vocab_size
            for index, draft in zip(asked, found, strict=True):
                whole = list(takewhile(lambda token: 0 <= token < vocab, draft))
                drafts[index] = self.grammars.possible(numbers[index], whole)
                if whole and not drafts[index]:  # none to verify
                    rows[index].learn_model(0, 1)
                asked[index] = len(whole)
        return asked

    def _backup(self, batch: DraftBatch, rows: Sequence[_Row]) -> SlotBackup | None:
        """Contents of the slots that drafted tokens are written to, if any of these slots is in use."""
        ends = (*batch.starts[1:], len(batch.rows))
        nums = (end - start for start, end in zip(batch.starts, ends, strict=True))
        if all(row.history.num_tokens + num - 1 <= row.num_safe for row, num in zip(rows, nums, strict=True)):
            return None
        return SlotBackup(self.parts, batch)


def _outcomes(accepted: int, drafted: int) -> list[float]:
    """Of the drafted tokens that were compared: 1 for each accepted one, 0 for the first that was not."""
    return [1.0] * accepted + [0.0] * (accepted < drafted)


def _wait(row: _Row, count: int) -> None:
    """The draft model is asked for ``count`` tokens of a row; after none it is not asked for ever longer."""
    row.num_asked = row.num_asked + 1 if count else 0
    if row.num_asked >= LEAST_WAIT:
        row.model_wait = LEAST_WAIT
    if not count:
        row.model_pause, row.model_wait = min(row.model_wait, MOST_WAIT), 2 * row.model_wait


def _learn(row: _Row, draft: Sequence[int], count: int, *, num_asked: int) -> None:
    """The step has accepted ``count - 1`` of a row's drafted tokens, which are from the ``num_asked >= 1`` tokens of
    the draft model, or else begin with those that are forced.
    """
    accepted = count - 1
    for token in draft[:accepted]:
        row.history.append(token)
    row.num_left -= accepted
    if not draft:
        return
    if num_asked:
        row.learn_model(accepted, num_asked)
        return
    accepted, num_found = accepted - row.num_forced, len(draft) - row.num_forced
    if accepted < 0 or num_found <= 0:
        return  # nothing that was looked up was verified
    for is_right in _outcomes(accepted, num_found):
        row.rate = _DECAY * row.rate + (1.0 - _DECAY) * is_right
    if accepted:
        row.num_missed = 0
        row.rate = max(row.rate, 0.3)
    else:
        row.num_missed += 1
        row.pause = min(2**row.num_missed, MAX_PAUSE)


class SlotBackup:
    """Copies of the slots, in all layers that have some, that the drafted entries of a batch are written to."""

    def __init__(self, parts: StepParts, batch: DraftBatch) -> None:
        cache, self._device = parts.cache, parts.decoder.device
        self._drafted = batch.ahead.nonzero().squeeze(1)  # entries
        rows, ahead = (upload(own[self._drafted], torch.int64, self._device) for own in (batch.rows, batch.ahead))
        self._slots = cache.slots_at(parts.rows.places(rows, cache.spec, ahead, cache.heads))
        self._kept = [stored[slots] for stored, slots in self._slots]

    def restore(self, batch: DraftBatch, counts: Sequence[int]) -> None:
        """Put back what rejected entries overwrote; each row has accepted so many entries."""
        ends = torch.tensor([start + count for start, count in zip(batch.starts, counts, strict=True)])
        sizes = torch.diff(torch.tensor((*batch.starts, len(batch.rows))))
        is_rejected = (torch.arange(len(batch.rows)) >= ends.repeat_interleave(sizes))[self._drafted]
        rejected = upload(is_rejected.nonzero().squeeze(1), torch.int64, self._device)
        for (stored, slots), kept in zip(self._slots, self._kept, strict=True):
            stored[slots[:, rejected]] = kept[:, rejected]
