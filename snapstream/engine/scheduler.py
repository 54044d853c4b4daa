"""Decides each step: which prefill units run, which rows decode. It never looks at a token.

Order of prefill. The job with the fewest units left runs first, which gives the least mean time to first
token and lets a short prompt overtake a long one. Left at that, a stream of short prompts would starve the
long one, so a job that was passed over ages:

    rank = remaining x (1 - steps_waited / PATIENCE_STEPS)          the lowest rank runs

``steps_waited`` counts the steps since the job last ran. After PATIENCE_STEPS of them its rank is <= 0, below
every job that is not overdue; then it runs for one step and its wait starts again. So a long job under a full
load of short ones gets every (PATIENCE_STEPS + 1)-th step and ends after a number of steps linear in its
length, and a short prompt waits for one step of a long one, never for its end. (Ageing since *arrival* would
hand an old long job every step until it ends: exactly the stall that layer-major prefill is there to avoid.)

While rows decode, a step holds ``prefill_quantum`` units, or with ``step_work`` units of so much work together
(``pace.py``): units of long prompts are few, those of short ones many.

Invariants: a plan asks no sample for more than max_tokens; rows and staging ranges come back only after the
plan that used them last is complete, so within one plan nothing has two owners. Plans run in order: a row
freed while a plan that holds it is in flight may be given away by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snapstream.config import EngineConfig
from snapstream.engine.admission import Admission, Job, unit_work
from snapstream.engine.prefix_cache import PrefixLookup
from snapstream.engine.request_state import LiveRequest, LiveSample
from snapstream.step import JobSpec, KVReceived, PrefillEntry, PrefixTier, ReceivedRow, StepPlan, UnitRange

# A plan with whom it concerns, from the scheduler that made it to the engine that reads its result a step later.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan and whom it concerns. Results are matched to these samples, never to rows: rows change hands."""

    plan: StepPlan
    started: tuple[LiveRequest, ...] = ()  # their first unit is in this plan
    prefilled: tuple[LiveRequest, ...] = ()  # their last unit is in this plan, or their row came with it
    reserved: tuple[LiveRequest, ...] = ()  # have rows now, and wait for what these hold
    decoding: tuple[LiveSample, ...]  # aligned with plan.decode_rows


# Requests whose prompts other engines read: they own rows, and wait for what these hold.
#
#             rows reserved            the row is whole             a plan takes it
#     (queue) -------------> waiting -----------------> whole ---------------------> decode
#
# Invariant: a request is in one of the two, and its rows are its own. ``scheduler.py`` decides when.


class ArrivingRows:
    """In the order in which rows were reserved, and came."""

    def __init__(self) -> None:
        self._waiting: dict[LiveRequest, PrefillEntry] = {}
        self._whole: dict[LiveRequest, ReceivedRow] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose rows are not whole."""
        return len(self._waiting)

    @property
    def has_whole(self) -> bool:
        """Whether ``take`` would return anything."""
        return bool(self._whole)

    def reserve(self, live: LiveRequest, entry: PrefillEntry) -> None:
        self._waiting[live] = entry

    def is_waiting(self, live: LiveRequest) -> bool:
        return live in self._waiting

    def arrive(self, live: LiveRequest, row: KVReceived) -> None:
        """What a waiting request's rows will hold is here."""
        self._whole[live] = ReceivedRow(entry=self._waiting.pop(live), row=row)

    def take(self) -> dict[LiveRequest, ReceivedRow]:
        """All that are whole; they are gone from here."""
        whole, self._whole = self._whole, {}
        return whole

    def remove(self, live: LiveRequest) -> bool:
        """Forget a request, whose rows are free then; False if it is not here."""
        was_here = live in self._waiting or live in self._whole
        self._waiting.pop(live, None)
        self._whole.pop(live, None)
        return was_here


PATIENCE_STEPS = 4
# Chunks through the whole model in a step without decode: few enough that arrivals and aborts are still seen.
IDLE_PASSES = 4


class Scheduler:
    """Owns every request from arrival until its last token is planned."""

    def __init__(self, config: EngineConfig, *, num_layers: int, tier: PrefixTier | None = None) -> None:
        self._admission = Admission(config, num_layers=num_layers, tier=tier)
        self._chunking, self._num_layers = config.chunking, num_layers
        self._quantum = config.chunking.prefill_quantum or num_layers
        self._idle_quantum = max(self._quantum, IDLE_PASSES * num_layers)
        self._jobs: dict[int, Job] = {}
        self._decoding: dict[int, LiveSample] = {}  # by row
        self._batch: tuple[tuple[int, ...], tuple[LiveSample, ...]] | None = None  # these in order; None: they changed
        self._sending: dict[int, LiveSample] = {}  # by row: read, and not yet with the engine that answers
        self._arriving = ArrivingRows()
        self._dropped: list[int] = []
        # On a GPU restored blocks come over a link, a layer ahead of the computation.
        self._streams_prefixes = config.prefix_store is not None and config.device.startswith("cuda")
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self._admission.num_waiting

    @property
    def rows_free(self) -> int:
        return self._admission.rows_free

    @property
    def staging_free(self) -> int:
        """Tokens of the staging pool that no job uses."""
        return self._admission.staging_free

    @property
    def prefixes(self) -> PrefixLookup | None:
        """The prefix store's index; None where there is no store."""
        return self._admission.prefixes

    @property
    def has_work(self) -> bool:
        """Whether a plan would hold anything; rows on their way to or from other engines are no work."""
        is_busy = self._jobs or self._decoding or self._dropped or self._arriving.has_whole
        return bool(is_busy or self._admission.has_room)

    def holds_id(self, request_id: str) -> bool:
        """Whether an open job still carries the id; an aborted prompt stays in a job that others need."""
        return any(live.request_id == request_id for job in self._jobs.values() for live in job.requests)

    def add(self, live: LiveRequest) -> None:
        """Queue a request that ``validate.py`` has passed."""
        self._admission.add(live)

    def release(self, sample: LiveSample) -> None:
        """The sample has ended: free its row, unless that happened when its last token was planned."""
        for owners in (self._decoding, self._sending):
            if owners.get(sample.row) is sample:
                del owners[sample.row]
                self._batch = None
                self._admission.free_row(sample.row)

    def arrive(self, live: LiveRequest, row: KVReceived) -> bool:
        """The row of a request that waits for it is here; False if the request does not wait."""
        if not self._arriving.is_waiting(live):
            return False
        self._arriving.arrive(live, row)
        return True

    def awaits_row(self, live: LiveRequest) -> bool:
        """Whether its rows are reserved, and nothing has come for them."""
        return self._arriving.is_waiting(live)

    def abort(self, live: LiveRequest) -> None:
        """Forget a request whose samples are over, wherever it is."""
        if self._admission.remove(live):
            return
        if self._arriving.remove(live):
            for sample in live.samples:
                self._admission.free_row(sample.row)
            return
        for job in self._jobs.values():
            if live in job.requests:
                if all(other.is_over for other in job.requests):
                    self._drop(job)
                return  # else the rows stay with the job until it ends: the device will write them
        for sample in live.samples:
            self.release(sample)

    def plan(self, is_ready: Callable[[int], bool] = lambda job_id: True) -> PlannedStep:
        """The next step. It may be empty; then it must not be submitted. ``is_ready`` is the runner's."""
        if self._batch is None:
            rows = tuple(sorted(self._decoding))
            self._batch = rows, tuple(self._decoding[row] for row in rows)
        decode_rows, decoding = self._batch
        if self.prefixes is not None:
            self.prefixes.poll()
        if not (self._jobs or self._dropped or self.num_waiting or self._arriving.has_whole):  # most steps: rows go on
            self._count_decoded(decoding)
            plan = StepPlan(step_id=self._next_step_id, decode_rows=decode_rows)
            self._next_step_id += not plan.is_empty
            return PlannedStep(plan=plan, decoding=decoding)
        dropped, self._dropped = tuple(self._dropped), []
        reserved = self._reserve()
        received = self._arriving.take()
        opened, units = self._plan_units(is_ready, is_decoding=bool(decoding))
        jobs = [self._jobs[unit.job_id] for unit in units]
        ended = [job for job in jobs if job.remaining == 0]
        self._age({unit.job_id for unit in units})
        self._count_decoded(decoding)
        for job in ended:
            self._end(job)
        for live in received:
            self._begin(live)
        plan = StepPlan(
            step_id=self._next_step_id,
            dropped_jobs=dropped,
            opened_jobs=tuple(opened),
            prepared=tuple(entry for entry in reserved.values() if entry.sampling.grammar is not None),
            received=tuple(received.values()),
            units=tuple(units),
            decode_rows=decode_rows,
        )
        self._next_step_id += not plan.is_empty
        begun = [job for job, unit in zip(jobs, units, strict=True) if unit.first == 0]
        return PlannedStep(
            plan=plan,
            started=tuple(live for job in begun for live in job.requests),
            prefilled=(*received, *(live for job in ended for live in job.requests)),
            reserved=tuple(reserved),
            decoding=decoding,
        )

    def _reserve(self) -> dict[LiveRequest, PrefillEntry]:
        """Give rows to requests whose prompts other engines read, as far as their turn has come."""
        reserved: dict[LiveRequest, PrefillEntry] = {}
        while (found := self._admission.next_arriving()) is not None:
            self._arriving.reserve(*found)
            reserved[found[0]] = found[1]
        return reserved

    def _plan_units(
        self, is_ready: Callable[[int], bool], *, is_decoding: bool
    ) -> tuple[list[JobSpec], list[UnitRange]]:
        opened: list[JobSpec] = []
        units: list[UnitRange] = []
        by_work = self._chunking.step_work > 0
        limit = self._quantum if is_decoding and not by_work else self._idle_quantum
        work = 0
        num_planned = 0
        while num_planned < limit:
            opened += self._open_jobs()
            planned = {unit.job_id for unit in units}
            able = (job for job in self._jobs.values() if job.remaining and self._can_run(job, planned, is_ready))
            job = min(able, key=self._rank, default=None)
            if job is None:
                break
            count = min(limit - num_planned, self._rest_of(job))
            if by_work:
                count, work = self._count_by_work(job, count, work, is_waited_for=is_decoding)
                if count == 0:
                    break
            units.append(UnitRange(job.job_id, job.next_unit, count))
            job.next_unit += count
            num_planned += count
            if job.remaining == 0 and job.will_decode:  # from here on somebody waits for the next decode
                is_decoding = True
                limit = self._quantum if not by_work else limit
        return opened, units

    def _streams(self, job: Job) -> bool:
        return self._streams_prefixes and job.spec.num_restored > 0

    def _can_run(self, job: Job, planned: set[int], is_ready: Callable[[int], bool]) -> bool:
        """A job whose blocks come over a link runs a layer at a time, when it is there: others do not wait with it."""
        return not self._streams(job) or (job.job_id not in planned and is_ready(job.job_id))

    def _rest_of(self, job: Job) -> int:
        """Units that a job may run before it is looked at again."""
        if not self._streams(job):
            return job.remaining
        num_chunks = job.num_units // self._num_layers
        return num_chunks - job.next_unit % num_chunks

    def _count_by_work(self, job: Job, most: int, work: int, *, is_waited_for: bool) -> tuple[int, int]:
        """How many units of a job, ``most`` at most, still fit a step that has so much work already; and its new sum.

        The first unit of a step always fits, or a prompt whose units are too large would never be read.
        """
        count = 0
        while count < most:
            more = work + unit_work(self._chunking, job.spec, job.next_unit + count)
            if is_waited_for and work > 0 and more > self._chunking.step_work:
                break
            count, work = count + 1, more
        return count, work

    def _open_jobs(self) -> list[JobSpec]:
        """Open all jobs that fit, but no second short one before the first has run: prompts that wait are packed."""
        opened: list[JobSpec] = []
        while True:
            wants_short = not any(job.is_short and job.next_unit == 0 for job in self._jobs.values())
            job = self._admission.next_job(wants_short=wants_short)
            if job is None:
                return opened
            self._jobs[job.job_id] = job
            opened.append(job.spec)

    @staticmethod
    def _rank(job: Job) -> tuple[float, int]:
        return job.remaining * (1 - job.steps_waited / PATIENCE_STEPS), job.job_id

    def _age(self, served: set[int]) -> None:
        for job in self._jobs.values():
            job.steps_waited = 0 if job.job_id in served else job.steps_waited + 1

    def _count_decoded(self, decoding: tuple[LiveSample, ...]) -> None:
        for sample in decoding:
            sample.num_planned += 1
            if sample.is_fully_planned:
                self.release(sample)

    def _end(self, job: Job) -> None:
        """The last unit is planned: its samples decode from the next plan on."""
        del self._jobs[job.job_id]
        self._admission.close(job, is_done=True)
        for live in job.requests:
            self._begin(live)

    def _begin(self, live: LiveRequest) -> None:
        """Its rows hold the prompt, and its first tokens are planned."""
        for sample in live.samples:
            sample.num_planned = 1
            if sample.is_over:
                self._admission.free_row(sample.row)
            elif live.request.ticket is not None:
                self._sending[sample.row] = sample
            elif sample.is_fully_planned:
                self._admission.free_row(sample.row)
            else:
                self._decoding[sample.row] = sample
                self._batch = None

    def _drop(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self._dropped.append(job.job_id)
        self._admission.close(job, is_done=False)
        for sample in (sample for live in job.requests for sample in live.samples):
            self._admission.free_row(sample.row)
