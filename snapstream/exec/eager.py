"""Eager decode, the reference for the other executors, and their interface (``StepParts -> DecodeStep``).

One token for each row of a batch: embed, layers against the rows view, logits, sample, advance. Everything between the
row indices and the sampled ids stays on the device. ``cuda_graph.py`` captures the same two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from snapstream.config import EngineConfig
from snapstream.exec.executors import max_batch
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.rows import RecentQueries, Rows
from snapstream.exec.sampling import Sampled, sample
from snapstream.exec.sampling_state import SamplingState
from snapstream.kernels.memory import upload
from snapstream.kv.cache import KVCache
from snapstream.models.decoder import Decoder
from snapstream.models.latent import DataParallelRowsView
from snapstream.models.layers import KVView
from snapstream.models.views import DraftsView, RowsView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """State of a decode step; its tensors keep their addresses for the life of the engine."""

    decoder: Decoder
    cache: KVCache
    rows: Rows
    sampling: SamplingState
    config: EngineConfig
    queries: RecentQueries | None = None  # of every row, which a draft scores with
    is_greedy: bool = False  # no token is ever sampled another way

    @property
    def padding_row(self) -> int:
        return self.config.max_rows


class DecodeStep(Protocol):
    """One token for each row of a batch."""

    def warm_up(self, progress: bool) -> None:
        """Called once before the first step; feeds only the padding row. ``progress`` is shown on stderr."""
        ...

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each of ``rows [B]`` int64 its last token and sample the next one."""
        ...


@runtime_checkable
class OwnSampler(Protocol):
    """A decode step with its own sampler, which first tokens use too."""

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``sampling.sample``: ``logits [B, V]`` fp32, ``rows [B]`` int64, distinct."""
        ...


@runtime_checkable
class HoldsPrograms(Protocol):
    """A decode step that holds captured programs."""

    def release(self) -> None:
        """Free them; no step runs afterwards."""
        ...


class DraftBatch(NamedTuple):
    """Entries of a step, on the host: of each row its last token, then drafted ones; B entries in all."""

    rows: Tensor  # [B] int64
    ahead: Tensor  # [B] int64: index of an entry among those of its row
    inputs: Tensor  # [B] int64: the tokens
    starts: tuple[int, ...]  # first entry of each row

    @property
    def ends(self) -> Tensor:
        """The last entry of each row ``[rows]`` int64."""
        return torch.tensor((*self.starts[1:], len(self.rows))) - 1


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


# Between two turns of a step: of rows that have drawn these drafted tokens, whether each may draw the next.
GoOn = Callable[[Sequence[int], Sequence[int]], Sequence[bool]]


@runtime_checkable
class Verifier(DecodeStep, Protocol):
    """A decode step that takes drafts (``speculation.py``)."""

    most_draft_rows: int | None  # a larger batch takes none; None: no limit
    keeps_latents: bool  # whether latents that drafted tokens overwrite are seen by the tokens before these

    def verify(self, batch: DraftBatch, needs: SamplingNeeds, go_on: GoOn | None = None) -> tuple[Sampled, list[int]]:
        """Feed the entries and sample after each. Returns the samples of accepted entries, row after row, and how many
        each row has: at least 1. Rows are advanced by them. ``go_on`` waits for the device in every turn.
        """
        ...

    def feed(self, batch: DraftBatch) -> Tensor:
        """Feed the entries; logits after the last of each row ``[rows, V]``, overwritten by the next step. Rows are not
        advanced. Not for models with recurrent states.
        """
        ...


@runtime_checkable
class ShowsHidden(Protocol):
    """A decode step that says what the last layer gave."""

    def hidden(self, count: int) -> Tensor:
        """Of the first entries of the last step, before the final norm: a copy ``[count, D]``."""
        ...


MakeDecode = Callable[[StepParts], DecodeStep]


class RowsForward:
    """The forward pass of decode, from row indices to logits; a draft uses it too."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows, queries: RecentQueries | None) -> None:
        self._decoder, self._cache, self._rows, self._queries = decoder, cache, rows, queries

    def logits(self, rows: Tensor) -> Tensor:
        """Feed each of ``rows [B]`` int64 its last token; logits of the next ``[B, V]`` fp32."""
        cache, kernels = self._cache, self._decoder.kernels
        self._adapt(rows)
        positions = self._rows.num_tokens[rows]  # [B]
        places = self._rows.places(rows, cache.spec, heads=cache.heads)
        view: KVView
        if cache.partition is None:
            keep = None if self._queries is None else self._queries.of_step(rows, positions)
            view = RowsView(cache, rows, places, kernels, keep)
        else:  # rows of latents, alike in all layers
            shard = cache.partition.shard(places[0])
            positions = positions[shard.entries]
            view = DataParallelRowsView(cache, shard, kernels)
        angles = self._decoder.rope(positions, positions + 1)
        return self._decoder.run(self._rows.last_token[rows], angles, view)

    def _adapt(self, rows: Tensor) -> None:
        """The next products are of tokens of ``rows``. With adapters this waits for the device."""
        if self._decoder.adapters is not None:
            self._decoder.adapters.select((adapter, 1) for adapter in self._rows.adapter[rows].tolist())

    def draft_logits(self, turns: Sequence[Tensor], inputs: Tensor) -> tuple[Tensor, DraftsView]:
        """Feed ``inputs [N]`` turn by turn: ``turns[t] [n]`` int64 are the rows of those t tokens ahead of their rows'
        last, the first rows of the turn before. Logits after each ``[N, V]`` fp32; rows are not advanced.
        """
        self._adapt(torch.cat(list(turns)))
        turns = [rows.clone() for rows in turns]  # aligned in memory, or Triton would compile more kernels
        positions = torch.cat([self._rows.num_tokens[rows] + ahead for ahead, rows in enumerate(turns)])
        kernels, places = self._decoder.kernels, self._rows.places
        view = DraftsView(self._cache, kernels, [
            (rows, places(rows, self._cache.spec, ahead, self._cache.heads)) for ahead, rows in enumerate(turns)
        ])  # fmt: skip
        return self._decoder.run(inputs, self._decoder.rope(positions, positions + 1), view), view


class DraftTurns(NamedTuple):
    """A ``DraftBatch`` turn by turn: the last tokens of all rows, then the first drafted ones of rows that have some,
    and so on; rows with longer drafts first. On the host.
    """

    rows: Sequence[Tensor]  # [n] int64 each
    inputs: Sequence[Tensor]
    entries: Sequence[Tensor]  # [n] int64 each: their indices in the batch
    order: tuple[int, ...]  # by place in a turn, the row's index in the batch

    @classmethod
    def of(cls, batch: DraftBatch) -> DraftTurns:
        ends = (*batch.starts[1:], len(batch.rows))
        sizes = [end - start for start, end in zip(batch.starts, ends, strict=True)]
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        turns = [
            torch.tensor([batch.starts[index] + ahead for index in order if sizes[index] > ahead])
            for ahead in range(max(sizes))
        ]
        return cls([batch.rows[own] for own in turns], [batch.inputs[own] for own in turns], turns, tuple(order))

    def by_row(self, logits: Tensor, sizes: Sequence[int], batch: DraftBatch) -> Tensor:
        """Those after the last entry of each row of the batch, of ``logits [N, V]`` turn by turn, of which turn t has
        the first of ``sizes[t]``.
        """
        starts = accumulate(sizes, initial=0)
        places = torch.cat([start + torch.arange(len(own)) for start, own in zip(starts, self.entries, strict=False)])
        by_entry = places[torch.cat(list(self.entries)).argsort()]
        return logits[upload(by_entry[batch.ends], torch.int64, logits.device)]


class DrawnTurns:
    """Samples of a ``DraftBatch``, turn by turn: what a token changes (counts of penalties, the random stream) is seen
    by the next of its row. A row goes on while its drafted tokens are those that it draws; its place is then taken by
    the padding row, so that nothing waits for the host.
    """

    def __init__(self, padding_row: int) -> None:
        self._padding_row = padding_row
        self.rows: list[Tensor] = []  # of a turn, those that have gone on
        self._drawn: list[Sampled] = []

    def draw(
        self,
        turns: Sequence[Tensor],
        inputs: Sequence[Tensor],
        logits: Tensor,
        draw: Callable[[Tensor, Tensor], Sampled],
        go_on: GoOn | None = None,
    ) -> None:
        """All turns: their rows and tokens, ``logits [N, V]`` after each of these, and what samples after some."""
        sizes = [len(rows) for rows in turns]
        for rows, fed, own in zip(turns, inputs, logits.split(sizes), strict=True):
            if self._drawn:
                goes_on = self._drawn[-1].token_ids[: len(rows)] == fed
                goes_on &= self.rows[-1][: len(rows)] != self._padding_row
                if go_on is not None:
                    allowed = go_on(rows[goes_on].tolist(), fed[goes_on].tolist())
                    goes_on[goes_on.clone()] = torch.tensor(allowed, dtype=torch.bool, device=rows.device)
                rows = torch.where(goes_on, rows, self._padding_row)
            self.rows.append(rows)
            self._drawn.append(draw(own, rows))

    def accepted(self, order: Sequence[int]) -> tuple[Sampled, list[int]]:
        """See ``Verifier.verify``; ``order``: see ``DraftTurns``. Waits for the device."""
        sizes = [len(rows) for rows in self.rows]
        has_drawn = [own.tolist() for own in (torch.cat(self.rows) != self._padding_row).cpu().split(sizes)]
        found: list[list[int]] = [[] for _ in order]  # entries, by index in the batch
        for start, turn in zip(accumulate(sizes, initial=0), has_drawn, strict=False):
            for place, (index, is_drawn) in enumerate(zip(order, turn, strict=False)):
                if is_drawn:
                    found[index].append(start + place)
        entries = upload([entry for own in found for entry in own], torch.int64, self.rows[0].device)
        return Sampled.joined(self._drawn, entries), list(map(len, found))


class EagerDecode(RowsForward):
    """A ``DecodeStep`` and a ``Verifier``; ``logits`` is the first half of a step, ``draw`` the second."""

    most_draft_rows: int | None = None
    keeps_latents = True

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts.decoder, parts.cache, parts.rows, parts.queries)
        self._parts = parts

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Compile Triton kernels: a forward pass of the padding row for each batch tile."""
        kernels = self._parts.decoder.kernels
        if kernels.version == "triton":
            for size in kernels.batch_tiles:
                if size <= max_batch(self._parts.config):
                    self.logits(torch.full((size,), self._parts.padding_row, device=self._parts.decoder.device))

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        return self.draw(self.logits(rows), rows, needs)

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Sample a token per row from ``logits [B, V]`` and advance the rows."""
        sampled = sample(logits, self._parts.sampling, rows, needs)
        self._parts.rows.advance(rows, sampled.token_ids)
        return sampled

    def verify(self, batch: DraftBatch, needs: SamplingNeeds, go_on: GoOn | None = None) -> tuple[Sampled, list[int]]:
        """See ``Verifier``; the caller restores slots that rejected tokens are written to."""
        host = DraftTurns.of(batch)
        turns, inputs, logits, view = self._feed_turns(host)
        drawn = DrawnTurns(self._parts.padding_row)
        drawn.draw(turns, inputs, logits, partial(self.draw, needs=needs), go_on)
        if self._parts.cache.spec.has_states:
            view.accept(drawn.rows[1:])
        return drawn.accepted(host.order)

    def feed(self, batch: DraftBatch) -> Tensor:
        """See ``Verifier``."""
        host = DraftTurns.of(batch)
        return host.by_row(self._feed_turns(host)[2], list(map(len, host.rows)), batch)

    def _feed_turns(self, host: DraftTurns) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor, DraftsView]:
        """Rows and tokens of all turns on the device, and see ``draft_logits``."""
        columns = torch.stack([torch.cat(list(column)) for column in (host.rows, host.inputs)])
        entries, sizes = upload(columns, torch.int64, self._parts.decoder.device), list(map(len, host.rows))
        turns, inputs = (column.split(sizes) for column in entries)
        return turns, inputs, *self.draft_logits(turns, entries[1])
