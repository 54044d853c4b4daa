"""A runner without a model: executes plans to the letter and fails at the first that breaks the contract.

What it knows that the engine does not: ``length_of`` tells how many tokens a sample has when it ends. With it
the runner can demand that each plan decodes exactly the samples that go on - no row too many, none forgotten,
none given to a second owner - allowing for the one step by which the host lags behind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from snapstream.config import EngineConfig
from snapstream.engine.core import IDLE_ID
from snapstream.kv.layout import ring_start
from snapstream.step import DiskCache, JobSpec, KVConnector, PrefillEntry, PrefillResult, StepPlan, StepResult
from snapstream.types import Compression, Logprob

Draw = Callable[[PrefillEntry, int, int], int]  # entry, sample index, number of earlier tokens -> token
LengthOf = Callable[[PrefillEntry, int], int]  # entry, sample index -> tokens of the finished sample


def draw_by_hash(vocab_size: int) -> Draw:
    """A token that depends on prompt, seed and count, and on nothing else."""

    def draw(entry: PrefillEntry, index: int, count: int) -> int:
        return hash((entry.token_ids, entry.seeds[index], count)) % vocab_size

    return draw


@dataclass(eq=False)
class Resident:
    """What the device holds in a row."""

    entry: PrefillEntry
    index: int
    num_drawn: int = 0
    num_reported: int = 0  # tokens whose step result the host has read


@dataclass(eq=False)
class OpenJob:
    spec: JobSpec
    next_unit: int = 0


@dataclass(eq=False)
class FakePending:
    runner: "FakeRunner"
    answer: StepResult
    drawn: list[Resident]

    def result(self) -> StepResult:
        assert self.runner.unread.pop(0) is self, "results must be read once and in order"
        for resident in self.drawn:
            resident.num_reported += 1
        self.runner.events.append(f"read {self.answer.step_id}")
        return self.answer


@dataclass(eq=False)
class FakeRunner:
    config: EngineConfig
    num_layers: int
    draw: Draw
    length_of: LengthOf = lambda entry, index: entry.sampling.max_tokens
    aborted: set[str] = field(default_factory=set)  # to be kept up to date by the test
    plans: list[StepPlan] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    unread: list[FakePending] = field(default_factory=list)
    jobs: dict[int, OpenJob] = field(default_factory=dict)
    rows: dict[int, Resident] = field(default_factory=dict)
    job_ids: set[int] = field(default_factory=set)
    disk_cache: DiskCache | None = None
    sending: dict[str, int] = field(default_factory=dict)  # rows by request; to be kept up to date by the test
    connector: KVConnector | None = None

    def connect(self, connector: KVConnector) -> None:
        self.connector = connector

    def is_ready(self, job_id: int) -> bool:
        return True

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> FakePending:
        assert not plan.is_empty, "an empty plan must not be submitted"
        assert plan.step_id == len(self.plans)
        assert len(self.unread) <= 1, "the host lags more than one step behind"
        self.plans.append(plan)
        self.events.append(f"submit {plan.step_id}")
        to_decode = {row for row, resident in self.rows.items() if not self._is_over(resident)}
        for job_id in plan.dropped_jobs:
            self._drop(job_id)
        for saved in plan.saved_rows:
            resident, moves = self.rows[saved.row], saved.moves
            num_fed = len(resident.entry.token_ids) + resident.num_drawn - 1
            assert (moves.first_saved + len(moves.saved)) * moves.block_len <= num_fed, "tokens that were not fed yet"
            assert num_fed <= resident.entry.budget.capacity, "the row has evicted some"
        for spec in plan.opened_jobs:
            self._open(spec)
        pending = FakePending(self, StepResult(step_id=plan.step_id), [])
        prefilled = {}
        for row in plan.received:
            self._give(row.entry, row.entry.rows)
            prefilled[row.entry.request_id] = self._finish(row.entry, pending)
        prefilled |= self._run_units(plan, pending)
        assert len(plan.decode_rows) == len(set(plan.decode_rows))
        assert set(plan.decode_rows) == to_decode, "exactly the samples that go on are decoded"
        decoded = tuple(self._token(self.rows[row], pending) for row in plan.decode_rows)
        pending.answer = StepResult(step_id=plan.step_id, prefilled=prefilled, decoded=decoded)
        self.unread.append(pending)
        return pending

    def _is_over(self, resident: Resident) -> bool:
        """As far as the host can know when it makes a plan."""
        return (
            resident.entry.request_id in self.aborted
            or resident.num_drawn >= resident.entry.sampling.max_tokens
            or resident.num_reported >= self.length_of(resident.entry, resident.index)
        )

    def _drop(self, job_id: int) -> None:
        job = self.jobs.pop(job_id)
        assert all(entry.request_id in {*self.aborted, IDLE_ID} for entry in job.spec.entries)

    def _open(self, spec: JobSpec) -> None:
        config, size = self.config, spec.num_tokens
        assert spec.job_id not in self.job_ids, "job ids are never used twice"
        is_short = all(len(entry.token_ids) <= config.chunking.short_len for entry in spec.entries)
        if len(spec.entries) > 1:
            assert is_short and size <= config.chunking.chunk_len
        end = config.pool_tokens if is_short else config.pool_tokens - config.short_reserve
        assert spec.staging_start >= 0 and spec.staging_start + size <= end
        for other in (job.spec for job in self.jobs.values()):
            assert (
                spec.staging_start >= other.staging_start + other.num_tokens
                or other.staging_start >= spec.staging_start + size
            ), "staging ranges of open jobs overlap"
        rows = [row for entry in spec.entries for row in entry.rows]
        assert len(rows) == len(set(rows))
        for entry in spec.entries:
            self._give(entry, entry.rows)
        self.job_ids.add(spec.job_id)
        self.jobs[spec.job_id] = OpenJob(spec)

    def _give(self, entry: PrefillEntry, rows: tuple[int, ...]) -> None:
        assert len(entry.rows) == len(entry.seeds) == entry.sampling.n
        assert entry.request_id not in self.aborted
        in_prefill = {row for job in self.jobs.values() for other in job.spec.entries for row in other.rows}
        assert not in_prefill.intersection(rows)
        assert not set(self.sending.values()).intersection(rows), "the row is not sent yet"
        for row in rows:
            assert 0 <= row < self.config.max_rows
            assert row not in self.rows or self._is_over(self.rows[row]), "the row still has an owner"
            self.rows.pop(row, None)

    def _run_units(self, plan: StepPlan, pending: FakePending) -> dict[str, PrefillResult]:
        quantum = self.config.chunking.prefill_quantum or self.num_layers
        is_counted = plan.decode_rows and not self.config.chunking.step_work  # else by work: test_pace.py
        most = quantum if is_counted else max(quantum, 4 * self.num_layers)
        assert sum(unit.count for unit in plan.units) <= most
        prefilled: dict[str, PrefillResult] = {}
        for unit in plan.units:
            job = self.jobs[unit.job_id]
            num_units = job.spec.num_units(self.num_layers)
            assert unit.first == job.next_unit and unit.count >= 1 and unit.first + unit.count <= num_units
            job.next_unit += unit.count
            if job.next_unit == num_units:
                del self.jobs[unit.job_id]
                for entry in job.spec.entries:
                    assert entry.request_id not in prefilled
                    prefilled[entry.request_id] = self._finish(entry, pending)
        return prefilled

    def _finish(self, entry: PrefillEntry, pending: FakePending) -> PrefillResult:
        if entry.is_sent:
            (self.sending[entry.request_id],) = entry.rows
        else:
            self.rows.update({row: Resident(entry, index) for index, row in enumerate(entry.rows)})
        size = len(entry.token_ids)
        kept = min(size, entry.budget.capacity)
        return PrefillResult(
            tokens=() if entry.is_sent else tuple(self._token(self.rows[row], pending) for row in entry.rows),
            compression=Compression(
                prompt_tokens=size,
                kept_tokens=kept,
                evicted_tokens=size - kept,
                row_bytes=entry.budget.capacity,
                full_bytes=size,
                compress_ms=0.0,
                ring_tokens=entry.budget.capacity - ring_start(entry.budget, size),
            ),
            prompt_logprobs=None
            if entry.sampling.prompt_logprobs is None
            else [None, *(Logprob(token, -2.0) for token in entry.token_ids[1:])],
        )

    def _token(self, resident: Resident, pending: FakePending) -> Logprob:
        assert resident.num_drawn < resident.entry.sampling.max_tokens
        token = self.draw(resident.entry, resident.index, resident.num_drawn)
        resident.num_drawn += 1
        pending.drawn.append(resident)
        return Logprob(token, -1.0 - resident.num_drawn)
