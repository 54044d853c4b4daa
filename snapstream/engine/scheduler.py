"""Decides each step: which prefill units run, which rows decode. It never looks at a token.

Order of prefill. The job with the fewest units left runs first, which minimizes the mean time to first token and lets a
short prompt overtake a long one. A job that was passed over ages, so that short prompts cannot starve a long one:

    rank = remaining x (1 - steps_waited / PATIENCE_STEPS)          the lowest rank runs

``steps_waited`` counts the steps since the job last ran. After PATIENCE_STEPS its rank is <= 0, below every job that is
not overdue; it runs for one step and its wait starts again. So under a full load of short prompts a long job gets every
(PATIENCE_STEPS + 1)-th step, and a short prompt waits for one step of a long one, never for its end. (Aging since
*arrival* would give an old long job every step until it ends.)

While rows decode, a step holds ``prefill_quantum`` units, or as many as fit ``step_work`` (``admission.unit_work``).

Rows with a remote prefill: reserved -> ``_awaiting_kv`` -> received -> ``_kv_received`` -> a plan -> decode.

Invariants: a plan asks no sample for more than max_tokens; rows and staging ranges are freed only once the plan that
used them last is complete, so within one plan nothing has two owners. Plans run in order: a row that is freed while a
plan that holds it is in flight may be reassigned by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from snapstream.config import EngineConfig
from snapstream.engine.admission import Admission, Job, unit_work
from snapstream.engine.prefix_cache import StoredAnswer
from snapstream.engine.request_state import LiveRequest, LiveSample
from snapstream.step import DiskCache, JobSpec, KVReceived, PrefillEntry, ReceivedRow, StepPlan, UnitRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A ``StepPlan`` and the requests it covers. Results are matched to samples, because rows are reassigned."""

    plan: StepPlan
    started: tuple[LiveRequest, ...] = ()  # their first unit is in this plan
    prefilled: tuple[LiveRequest, ...] = ()  # their last unit, or their received row, is in this plan
    reserved: tuple[LiveRequest, ...] = ()  # have rows now, and wait for a remote prefill
    answers: tuple[StoredAnswer, ...] = ()  # whose rows are saved by this plan
    decoding: tuple[LiveSample, ...]  # aligned with plan.decode_rows


PATIENCE_STEPS = 4
# Chunks through the whole model in a step without decode: few enough that arrivals and aborts are still seen.
IDLE_PASSES = 4


class Scheduler:
    """Owns every request from arrival until its last token is planned."""

    def __init__(self, config: EngineConfig, *, num_layers: int, disk_cache: DiskCache | None) -> None:
        self.admission = Admission(config, num_layers=num_layers, disk_cache=disk_cache)
        self._chunking, self._num_layers = config.chunking, num_layers
        self._quantum = config.chunking.prefill_quantum or num_layers
        self._idle_quantum = max(self._quantum, IDLE_PASSES * num_layers)
        self._jobs: dict[int, Job] = {}
        self._decoding: dict[int, LiveSample] = {}  # by row
        self._batch: tuple[tuple[int, ...], tuple[LiveSample, ...]] | None = None  # these in order; None: they changed
        self._ended: list[LiveSample] = []  # decoded, and not yet offered to the prefix store
        self._sending: dict[int, LiveSample] = {}  # by row: prefilled, and not yet sent to the decode engine
        self._awaiting_kv: dict[LiveRequest, PrefillEntry] = {}  # in order of reservation
        self._kv_received: dict[LiveRequest, ReceivedRow] = {}
        self._dropped: list[int] = []
        # On a GPU cached blocks are copied from the host, a layer ahead of the computation.
        self._streams_prefixes = config.prefix_store is not None and config.device.startswith("cuda")
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a plan would hold anything; KV transfers in progress do not count."""
        is_busy = self._jobs or self._decoding or self._dropped or self._kv_received or self._ended
        return bool(is_busy or self.admission.has_room)

    @property
    def ended_requests(self) -> Iterable[LiveRequest]:
        """Requests of samples whose decode has ended and whose rows were not offered to the prefix store yet."""
        return (sample.request for sample in self._ended)

    def holds_id(self, request_id: str) -> bool:
        """Whether an open job still has the id; an aborted prompt stays in a job that others share."""
        return any(live.request_id == request_id for job in self._jobs.values() for live in job.requests)

    def add(self, live: LiveRequest) -> None:
        """Queue a request that ``validate.py`` has passed."""
        self.admission.add(live)

    def release(self, sample: LiveSample) -> None:
        """The sample has ended: free its row, unless it was freed when its last token was planned."""
        for owners in (self._decoding, self._sending):
            if owners.get(sample.row) is sample:
                del owners[sample.row]
                self._batch = None
                if owners is self._decoding and self.admission.prefixes is not None:
                    self._ended.append(sample)
                self.admission.free_row(sample.row)

    def receive_kv(self, live: LiveRequest, row: KVReceived) -> None:
        """The KV of a request is here; ignored if the request does not wait for it."""
        if live in self._awaiting_kv:
            self._kv_received[live] = ReceivedRow(entry=self._awaiting_kv.pop(live), row=row)

    def awaits_kv(self, live: LiveRequest) -> bool:
        """Whether its rows are reserved, and its KV has not been received."""
        return live in self._awaiting_kv

    def abort(self, live: LiveRequest) -> None:
        """Remove a request whose samples are over, whatever its state."""
        if self.admission.remove(live):
            return
        if self._awaiting_kv.pop(live, None) or self._kv_received.pop(live, None):
            for sample in live.samples:
                self.admission.free_row(sample.row)
            return
        for job in self._jobs.values():
            if live in job.requests:
                if all(other.is_over for other in job.requests):
                    self._drop(job)
                return  # else the rows stay with the job until it ends: the device will write them
        for sample in live.samples:
            self.release(sample)

    def plan(self, is_ready: Callable[[int], bool]) -> PlannedStep:
        """The next step. It may be empty; then it must not be submitted. ``is_ready`` is the runner's."""
        if self._batch is None:
            rows = tuple(sorted(self._decoding))
            self._batch = rows, tuple(self._decoding[row] for row in rows)
        decode_rows, decoding = self._batch
        if self.admission.prefixes is not None:
            self.admission.prefixes.poll()
        if not (
            self._jobs or self._dropped or self.admission.num_waiting or self._kv_received or self._ended
        ):  # most steps: decode only
            self._count_decoded(decoding)
            plan = StepPlan(step_id=self._next_step_id, decode_rows=decode_rows)
            self._next_step_id += not plan.is_empty
            return PlannedStep(plan=plan, decoding=decoding)
        dropped, self._dropped = tuple(self._dropped), []
        answers = self._store_answers()
        reserved = self._reserve()
        received, self._kv_received = self._kv_received, {}
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
            saved_rows=tuple(answer.saved for answer in answers),
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
            answers=tuple(answers),
            decoding=decoding,
        )

    def _store_answers(self) -> list[StoredAnswer]:
        """Rows of answers that have ended, for the prefix store: nothing has been written to them since."""
        ended, self._ended = self._ended, []
        if self.admission.prefixes is None:
            return []
        found = [self.admission.prefixes.store_answer(sample) for sample in ended]
        return [answer for answer in found if answer is not None]

    def _reserve(self) -> dict[LiveRequest, PrefillEntry]:
        """Give rows to the requests with a remote prefill at the head of the queue."""
        reserved: dict[LiveRequest, PrefillEntry] = {}
        while (found := self.admission.next_remote()) is not None:
            reserved[found[0]] = found[1]
        self._awaiting_kv |= reserved
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
            runnable = (job for job in self._jobs.values() if job.remaining and self._can_run(job, planned, is_ready))
            job = min(runnable, key=self._rank, default=None)
            if job is None:
                break
            count = min(limit - num_planned, self._units_at_once(job))
            if job.is_idle and not self.admission.num_waiting:  # a request that arrives waits for one unit at most
                units.append(UnitRange(job.job_id, job.next_unit, 1))
                job.next_unit += 1
                break
            if by_work:
                count, work = self._count_by_work(job, count, work, is_decoding=is_decoding)
                if count == 0:
                    break
            units.append(UnitRange(job.job_id, job.next_unit, count))
            job.next_unit += count
            num_planned += count
            if job.remaining == 0 and job.will_decode:
                is_decoding = True
                limit = self._quantum if not by_work else limit
        return opened, units

    def _streams(self, job: Job) -> bool:
        """Whether cached blocks are copied to the device: such a job runs a layer at a time, once it is copied."""
        return self._streams_prefixes and job.spec.num_restored > 0

    def _can_run(self, job: Job, planned: set[int], is_ready: Callable[[int], bool]) -> bool:
        return not self._streams(job) or (job.job_id not in planned and is_ready(job.job_id))

    def _units_at_once(self, job: Job) -> int:
        if not self._streams(job):
            return job.remaining
        num_chunks = job.num_units // self._num_layers
        return num_chunks - job.next_unit % num_chunks

    def _count_by_work(self, job: Job, most: int, work: int, *, is_decoding: bool) -> tuple[int, int]:
        """How many units of a job, at most ``most``, fit a step of ``work`` so far; and the new sum.

        The first unit of a step always fits, or a prompt whose units are too large would never run.
        """
        count = 0
        while count < most:
            more = work + unit_work(self._chunking, job.spec, job.next_unit + count)
            if is_decoding and work > 0 and more > self._chunking.step_work:
                break
            count, work = count + 1, more
        return count, work

    def _open_jobs(self) -> list[JobSpec]:
        """Open all jobs that fit, but no second short one before the first has run: queued prompts are packed."""
        opened: list[JobSpec] = []
        while True:
            wants_short = not any(job.is_short and job.next_unit == 0 for job in self._jobs.values())
            job = self.admission.next_job(wants_short=wants_short)
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
        self.admission.close(job, is_done=True)
        for live in job.requests:
            self._begin(live)

    def _begin(self, live: LiveRequest) -> None:
        """Its rows hold the prompt, and its first tokens are planned."""
        for sample in live.samples:
            sample.num_planned = 1
            if sample.is_over:
                self.admission.free_row(sample.row)
            elif live.request.ticket is not None:
                self._sending[sample.row] = sample
            elif sample.is_fully_planned:
                self.admission.free_row(sample.row)
            else:
                self._decoding[sample.row] = sample
                self._batch = None

    def _drop(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self._dropped.append(job.job_id)
        self.admission.close(job, is_done=False)
        for sample in (sample for live in job.requests for sample in live.samples):
            self.admission.free_row(sample.row)
