"""The waiting queue, the free rows and the staging pool: which requests become the next prefill job.

Rules, in the order in which they bind:

1. A request is admitted when it has a row for each of its samples and its prompt has a staging range.
2. The queue is first come, first served, shifted by priorities (``WaitingQueue``) - except that short prompts pass long
   ones that wait for *staging*. No request passes one that waits for rows, or one of many samples might starve.
3. Short prompts that passed a long one use the reserve only. So the long zone can only get emptier, and as
   every job ends, the long prompt's turn comes.
4. Short prompts in the queue share a job of at most ``chunk_len`` tokens; a long prompt has its own.
5. A request with a remote prefill needs rows only; no request passes it while it waits for them.
6. A prompt whose beginning an open job, or a prompt of the same pack, writes into the prefix store waits for that job;
   requests behind it do not.

Invariant: a row is free, or owned by exactly one sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from snapstream.config import Chunking, EngineConfig, ParallelConfig
from snapstream.engine.prefix_cache import PrefixLookup
from snapstream.engine.request_state import LiveRequest
from snapstream.step import DiskCache, JobSpec, PrefillEntry

LEAST_TOKENS = 128  # a shorter unit takes as long: reading the layer's weights bounds it


def job_chunk_len(chunking: Chunking, num_tokens: int) -> int:
    """Tokens of a unit of a prompt: ``chunk_len``, halved until its last unit fits a step with decode."""
    size = chunking.chunk_len
    while size > chunking.least_chunk_len > 0 and size * (chunking.token_keys + num_tokens) > chunking.step_work > 0:
        size //= 2
    return max(size, chunking.least_chunk_len)


def unit_work(chunking: Chunking, spec: JobSpec, unit: int) -> int:
    """Query-key pairs of a unit: ``T (token_keys + N)`` for T tokens that end at key N, cached keys included."""
    start = unit % spec.num_chunks * spec.chunk_len
    stop = min(start + spec.chunk_len, spec.num_tokens)
    return max(stop - start, LEAST_TOKENS) * (chunking.token_keys + spec.num_restored + stop)


class FreeRows:
    """Low rows first, which keeps rows in use together. With data-parallel attention, a row of the rank with the fewest
    in use: a step lasts as long as that of the busiest rank.
    """

    def __init__(self, num_rows: int, parallel: ParallelConfig) -> None:
        self._free = [list(range(rank, num_rows, parallel.dp_size)) for rank in range(parallel.dp_size)]  # heaps
        self._num_used = [0] * parallel.dp_size

    def __len__(self) -> int:
        return sum(map(len, self._free))

    def take(self) -> int:
        """A row; IndexError where there is none."""
        ranks = [rank for rank, free in enumerate(self._free) if free]
        if not ranks:
            raise IndexError("no row is free")
        rank = min(ranks, key=lambda rank: (self._num_used[rank], rank))
        self._num_used[rank] += 1
        return heappop(self._free[rank])

    def give(self, row: int) -> None:
        rank = row % len(self._free)
        self._num_used[rank] -= 1
        heappush(self._free[rank], row)


class StagingPool:
    """First-fit allocator of contiguous ranges of the staging buffers, counted in tokens, in two zones.

        0                                   pool_tokens - short_reserve        pool_tokens
        |  long prompts; short ones when they find the reserve full  |  short only  |

    Invariant: ranges never overlap, and a long range never enters the reserve, so a short prompt finds room however
    many long ones are in prefill. The caller asks with ``reserve_only`` while a long prompt waits.
    """

    def __init__(self, num_tokens: int, *, short_reserve: int) -> None:
        if not 0 <= short_reserve <= num_tokens:
            raise ValueError(f"short_reserve is {short_reserve}; it must be from 0 to {num_tokens}")
        self.num_tokens = num_tokens
        self._long_end = num_tokens - short_reserve
        self._taken: list[tuple[int, int]] = []  # (start, end), ascending

    @property
    def num_free(self) -> int:
        """Tokens in no range, both zones together."""
        return self.num_tokens - sum(end - start for start, end in self._taken)

    def take(self, num_tokens: int, *, is_short: bool, reserve_only: bool = False) -> int | None:
        """Start of a new range, or None when there is no room now."""
        if num_tokens < 1:
            raise ValueError(f"a staging range of {num_tokens} tokens was asked for; the least is 1")
        start = self._find(num_tokens, is_short=is_short, reserve_only=reserve_only)
        if start is not None:
            insort(self._taken, (start, start + num_tokens))
        return start

    def has_room(self, num_tokens: int, *, is_short: bool) -> bool:
        """Whether ``take`` would succeed now."""
        return self._find(num_tokens, is_short=is_short, reserve_only=False) is not None

    def give(self, start: int) -> None:
        """Return the range that begins at ``start``."""
        for place, (taken_start, _) in enumerate(self._taken):
            if taken_start == start:
                del self._taken[place]
                return
        raise ValueError(f"no staging range begins at {start}; ranges in use: {self._taken}")

    def _find(self, num_tokens: int, *, is_short: bool, reserve_only: bool) -> int | None:
        if not is_short:
            return self._first_fit(num_tokens, 0, self._long_end)
        start = self._first_fit(num_tokens, self._long_end, self.num_tokens)
        if start is None and not reserve_only:
            start = self._first_fit(num_tokens, 0, self.num_tokens)  # may span both zones
        return start

    def _first_fit(self, num_tokens: int, low: int, high: int) -> int | None:
        start = low
        for taken_start, taken_end in self._taken:
            if taken_end <= start:
                continue
            if taken_start - start >= num_tokens:
                break
            start = taken_end
        return start if start + num_tokens <= high else None


AGE = 128  # the default queue length of a server: one level passes all of it

_PLACE = itemgetter(0)


class WaitingQueue:
    """Requests without rows, in order of arrival and priority.

    A request of priority p is queued as if it had arrived ``AGE x p`` requests later. Invariant: no request starves; it
    is overtaken by at most ``AGE`` later arrivals for each level of priority between them.
    """

    def __init__(self) -> None:
        self._order: list[tuple[tuple[int, int], LiveRequest]] = []  # by place, ascending
        self._places: dict[str, tuple[int, int]] = {}  # by id
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[LiveRequest]:
        return (live for _, live in self._order)

    def add(self, live: LiveRequest) -> None:
        number = next(self._arrivals)
        place = (number + AGE * live.request.priority, number)
        self._places[live.request_id] = place
        insort(self._order, (place, live), key=_PLACE)

    def __contains__(self, live: LiveRequest) -> bool:
        place = self._places.get(live.request_id)
        return place is not None and self._order[self._index(place)][1] is live

    def remove(self, live: LiveRequest) -> None:
        del self._order[self._index(self._places.pop(live.request_id))]

    def _index(self, place: tuple[int, int]) -> int:
        return bisect_left(self._order, place, key=_PLACE)


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
    def is_idle(self) -> bool:
        """Whether it fills the prefix store in idle time."""
        return self.requests[0].is_idle

    @property
    def will_decode(self) -> bool:
        """Whether any row decodes after the first token."""
        return any(not live.is_over and live.request.sampling.max_tokens > 1 for live in self.requests)


class Admission:
    """Turns waiting requests into jobs."""

    def __init__(self, config: EngineConfig, *, num_layers: int, disk_cache: DiskCache | None) -> None:
        self._config = config
        self._num_layers = num_layers
        self._job_ids = count()
        self.prefixes = None if config.prefix_store is None else PrefixLookup(config.prefix_store, config, disk_cache)
        self._waiting = WaitingQueue()
        self._num_short = 0  # of those waiting
        self._free_rows = FreeRows(config.max_rows, config.parallel)
        self._pool = StagingPool(config.pool_tokens, short_reserve=config.short_reserve)

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
        """Whether there are rows for the first request of the queue."""
        first = next(iter(self._waiting), None)
        return first is not None and len(first.samples) <= len(self._free_rows)

    def add(self, live: LiveRequest) -> None:
        self._waiting.add(live)
        if self.prefixes is not None and not live.request.is_prefilled_remotely:
            self.prefixes.arrive(live)
        self._num_short += self._is_short(live)

    def remove(self, live: LiveRequest) -> bool:
        """Remove a request from the queue; False if it is not in it."""
        if live not in self._waiting:
            return False
        self._take_out(live)
        if self.prefixes is not None:
            self.prefixes.leave(live)
        return True

    def _take_out(self, live: LiveRequest) -> None:
        self._waiting.remove(live)
        self._num_short -= self._is_short(live)

    def free_row(self, row: int) -> None:
        self._free_rows.give(row)

    def close(self, job: Job, *, is_done: bool) -> None:
        """A job has ended or was dropped: free its staging range and prefix blocks."""
        self._pool.give(job.spec.staging_start)
        if self.prefixes is not None:
            for live in job.requests:
                self.prefixes.close(live, is_done=is_done)

    def next_remote(self) -> tuple[LiveRequest, PrefillEntry] | None:
        """The first request of the queue, if it has a remote prefill and there are rows."""
        first = next(iter(self._waiting), None)
        if first is None or not first.request.is_prefilled_remotely or not self.has_room:
            return None
        self._take_out(first)
        return first, self._entry(first)

    def next_job(self, *, wants_short: bool) -> Job | None:
        """Open one job, if rows and staging allow. Without ``wants_short`` short prompts wait."""
        rows_left = len(self._free_rows)
        pack: list[LiveRequest] = []
        num_in_order = 0  # members of the pack that passed no request
        long_waits = False
        for live in self._waiting:
            if rows_left == 0 or (long_waits and len(pack) == self._num_short):
                break  # no request further back could join: the queue may be long, and this runs every step
            if live.request.is_prefilled_remotely:
                break  # it waits for rows
            if self._is_short(live):
                if not wants_short or len(live.samples) > rows_left or not self._joins(pack, live):
                    break
                if self.prefixes is not None and self.prefixes.must_wait(live, pack):
                    continue
                pack.append(live)
                rows_left -= len(live.samples)
                num_in_order += not long_waits
            elif not long_waits:  # the first long prompt of the queue
                if self.prefixes is not None and self.prefixes.must_wait(live):
                    continue
                if not self._pool.has_room(live.num_tokens, is_short=False):
                    long_waits = True
                elif pack or len(live.samples) > rows_left:
                    break  # its turn comes after the pack, or when there are rows
                else:
                    return self._open([live], reserve_only=False)
        return self._open_pack(pack, num_in_order)

    def _is_short(self, live: LiveRequest) -> bool:
        return live.num_tokens <= self._config.chunking.short_len and not live.request.is_prefilled_remotely

    def _joins(self, pack: list[LiveRequest], live: LiveRequest) -> bool:
        return not pack or sum(other.num_tokens for other in pack) + live.num_tokens <= self._config.chunking.chunk_len

    def _open_pack(self, pack: list[LiveRequest], num_in_order: int) -> Job | None:
        """The longest beginning of the pack that fits the staging pool."""
        for size in range(len(pack), 0, -1):
            job = self._open(pack[:size], reserve_only=size > num_in_order)
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
        spec = JobSpec(
            job_id=next(self._job_ids),
            staging_start=start,
            entries=tuple(self._entry(live) for live in requests),
            chunk_len=job_chunk_len(self._config.chunking, num_tokens),
        )
        return Job(spec, tuple(requests), is_short, spec.num_units(self._num_layers))

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
            prefix=None if self.prefixes is None else self.prefixes.open(live),
            is_sent=live.request.ticket is not None,
            adapter=self._config.adapter(live.request.lora),
        )
