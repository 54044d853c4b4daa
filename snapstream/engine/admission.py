"""The waiting queue, the free rows and the staging pool: which requests become the next prefill job.

Rules, in the order in which they bind:

1. A request is admitted when it has a row for each of its samples and its prompt has a staging range.
2. The queue is first come, first served, shifted by priorities (``waiting.py``) - except that short prompts pass long
   ones that wait for *staging*. Nobody passes a request that waits for rows: one of many samples would wait for ever.
3. Short prompts that passed a long one use the reserve only. So the long zone can only get emptier, and as
   every job ends, the long prompt's turn comes.
4. Short prompts that wait together share a job of at most ``chunk_len`` tokens; a long prompt has its own.
5. A request whose row arrives from another engine needs rows only; nobody passes it while it waits for them.
6. A prompt whose beginning an open job writes into the prefix store waits for that job, and nobody waits with it.

Invariant: a row is free, or owned by exactly one sample. ``scheduler.py`` decides when jobs run and rows come
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from snapstream.config import EngineConfig
from snapstream.engine.free_rows import FreeRows
from snapstream.engine.live import LiveRequest
from snapstream.engine.pace import job_chunk_len
from snapstream.engine.prefix_lookup import PrefixLookup
from snapstream.engine.staging_pool import StagingPool
from snapstream.engine.waiting import WaitingQueue
from snapstream.step import JobSpec, PrefillEntry, PrefixTier


@dataclass(slots=True, eq=False)
class Job:
    """An open prefill job, as the host sees it."""

    spec: JobSpec
    requests: tuple[LiveRequest, ...]  # aligned with spec.entries
    is_short: bool
    num_units: int
    next_unit: int = 0
    steps_waited: int = 0  # steps since it last ran a unit

    @property
    def job_id(self) -> int:
        return self.spec.job_id

    @property
    def remaining(self) -> int:
        return self.num_units - self.next_unit

    @property
    def will_decode(self) -> bool:
        """Whether any row goes on after the first token."""
        return any(not live.is_over and live.request.sampling.max_tokens > 1 for live in self.requests)


class Admission:
    """Turns waiting requests into jobs."""

    def __init__(self, config: EngineConfig, *, num_layers: int, tier: PrefixTier | None = None) -> None:
        self._config = config
        self._num_layers = num_layers
        self._job_ids = count()
        self.prefixes = None if config.prefix_store is None else PrefixLookup(config.prefix_store, config, tier)
        self._empty()

    def _empty(self) -> None:
        self._waiting = WaitingQueue()
        self._num_short = 0  # of those waiting
        self._free_rows = FreeRows(self._config.max_rows, self._config.parallel)
        self._pool = StagingPool(self._config.pool_tokens, short_reserve=self._config.short_reserve)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows_free(self) -> int:
        return len(self._free_rows)

    @property
    def staging_free(self) -> int:
        return self._pool.num_free

    @property
    def has_room(self) -> bool:
        """Whether there are rows for the first that waits."""
        first = next(iter(self._waiting), None)
        return first is not None and len(first.samples) <= len(self._free_rows)

    def add(self, live: LiveRequest) -> None:
        self._waiting.add(live)
        if self.prefixes is not None and not live.request.arrives:
            self.prefixes.arrive(live)
        self._num_short += self._is_short(live)

    def remove(self, live: LiveRequest) -> bool:
        """Take a request out of the queue; False if it is not in it."""
        if live not in self._waiting:
            return False
        self._take_out(live)
        if self.prefixes is not None:
            self.prefixes.leave(live)
        return True

    def _take_out(self, live: LiveRequest) -> None:
        self._waiting.remove(live)
        self._num_short -= self._is_short(live)

    def start_over(self) -> None:
        """Nobody waits, and all rows and all staging are free; see ``interrupts.py``."""
        self._empty()
        if self.prefixes is not None:
            self.prefixes.start_over()

    def free_row(self, row: int) -> None:
        self._free_rows.give(row)

    def close(self, job: Job, *, is_done: bool) -> None:
        """A job has ended, or was given up: what it held but its rows comes back."""
        self._pool.give(job.spec.staging_start)
        if self.prefixes is not None:
            for live in job.requests:
                self.prefixes.close(live, is_done=is_done)

    def next_arriving(self) -> tuple[LiveRequest, PrefillEntry] | None:
        """The first of the queue, with rows of its own, if another engine reads its prompt and there are rows."""
        first = next(iter(self._waiting), None)
        if first is None or not first.request.arrives or not self.has_room:
            return None
        self._take_out(first)
        return first, self._entry(first)

    def next_job(self, *, wants_short: bool) -> Job | None:
        """Open one job, if rows and staging allow. Without ``wants_short`` short prompts wait."""
        rows_left = len(self._free_rows)
        pack: list[LiveRequest] = []
        num_unpassing = 0  # members of the pack that passed nobody
        long_waits = False
        for live in self._waiting:
            if rows_left == 0 or (long_waits and len(pack) == self._num_short):
                break  # nobody further back could join: the queue may be long, and this runs every step
            if live.request.arrives:
                break  # it waits for rows
            if self._is_short(live):
                if not wants_short or len(live.samples) > rows_left or not self._joins(pack, live):
                    break
                pack.append(live)
                rows_left -= len(live.samples)
                num_unpassing += not long_waits
            elif not long_waits:  # the first long prompt of the queue; others wait behind it
                if self.prefixes is not None and self.prefixes.must_wait(live):
                    continue
                if not self._pool.has_room(live.num_tokens, is_short=False):
                    long_waits = True
                elif pack or len(live.samples) > rows_left:
                    break  # its turn comes after the pack, or when there are rows
                else:
                    return self._open([live], reserve_only=False)
        return self._open_pack(pack, num_unpassing)

    def _is_short(self, live: LiveRequest) -> bool:
        return live.num_tokens <= self._config.chunking.short_len and not live.request.arrives

    def _joins(self, pack: list[LiveRequest], live: LiveRequest) -> bool:
        return not pack or sum(other.num_tokens for other in pack) + live.num_tokens <= self._config.chunking.chunk_len

    def _open_pack(self, pack: list[LiveRequest], num_unpassing: int) -> Job | None:
        """The largest head of the pack for which there is staging."""
        for size in range(len(pack), 0, -1):
            job = self._open(pack[:size], reserve_only=size > num_unpassing)
            if job is not None:
                return job
        return None

    def _open(self, requests: list[LiveRequest], *, reserve_only: bool) -> Job | None:
        is_short = self._is_short(requests[0])
        num_tokens = sum(live.num_tokens for live in requests)
        start = self._pool.take(num_tokens, is_short=is_short, reserve_only=reserve_only)
        if start is None:
            return None
        for live in requests:
            self._take_out(live)
        entries = tuple(self._entry(live) for live in requests)  # cut as without the prefix store
        own = job_chunk_len(self._config.chunking, num_tokens)
        spec = JobSpec(
            job_id=next(self._job_ids),
            staging_start=start,
            entries=entries,
            chunk_len=own if own != self._config.chunking.chunk_len else 0,
        )
        num_units = spec.num_units(self._config.chunking.chunk_len, self._num_layers)
        return Job(spec, tuple(requests), is_short, num_units)

    def _entry(self, live: LiveRequest) -> PrefillEntry:
        for sample in live.samples:
            sample.row = self._free_rows.take()
        return PrefillEntry(
            request_id=live.request_id,
            token_ids=live.request.prompt_token_ids,
            rows=tuple(sample.row for sample in live.samples),
            seeds=tuple(sample.seed for sample in live.samples),
            sampling=live.request.sampling,
            budget=live.budget,
            selector=live.selector,
            positions=live.request.positions,
            prefix=None if self.prefixes is None else self.prefixes.open(live),
            is_sent=live.request.ticket is not None,
        )
