"""Ctrl-C between any two lines of a call that waits for an engine: no row, id, block or answer is left over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from snapstream.config import Chunking, EngineConfig, KVBudget, PrefixStoreConfig
from snapstream.engine import client
from snapstream.engine.client import EngineThread
from snapstream.engine.core import Engine
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.step import JobSpec, KVConnector, PrefillEntry, PrefillResult, StepPlan, StepResult, StoredBlock
from snapstream.types import Compression, Logprob, Request, RequestOutput, SamplingParams
from tests.engine.build import config_of, engine_of, request_of

# The scenario has a prompt whose beginning lies on a disk, one that waits for another's, short ones that share a job,
# and blocks that are written to the disk. The engine works on its own thread while the caller is interrupted.

BLOCK_LEN, NUM_BLOCKS, NUM_ROWS, NUM_LAYERS = 4, 24, 4, 2
CLIENT = str(Path(client.__file__))
STORED, OTHER = tuple(range(1, 33)), tuple(range(40, 72))  # two documents
Place = tuple[int, int]  # line, and how often it was passed


@dataclass(eq=False)
class Disk:
    """A disk cache whose threads come to what they were asked for when the test says so."""

    memory: dict[int, bytes]
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[Callable[[], int], Future[int]]] = field(default_factory=list)

    def names(self, namespace: str, chain: Sequence[bytes], *, of_snapshots: bool = False) -> tuple[str, ...]:
        return tuple(namespace + b"".join(chain[: end + 1]).hex() for end in range(len(chain)))

    def has(self, name: str) -> bool:
        return name in self.files

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        def read() -> int:
            self.memory.update((block.number, self.files[block.name]) for block in wanted)
            return len(wanted)

        return self._ask(read)

    def save(self, block: StoredBlock) -> Future[int]:
        def write() -> int:
            assert self.memory[block.number] == block.tokens, "a block has changed before it was written"
            self.files[block.name] = block.tokens
            return 1

        return self._ask(write)

    def forget(self, namespace: str | None) -> None:
        self.files.clear()

    def close(self) -> None:
        self.work()

    def work(self) -> None:
        while self.asked:
            act, done = self.asked.pop(0)
            done.set_result(act())

    def _ask(self, act: Callable[[], int]) -> Future[int]:
        done: Future[int] = Future()
        self.asked.append((act, done))
        self.work()
        return done


@dataclass(eq=False)
class Pending:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass(eq=False)
class Device:
    """A runner that checks what it restores: every sample is its row's number of tokens, counted from 1."""

    memory: dict[int, bytes] = field(default_factory=dict)
    jobs: dict[int, JobSpec] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.disk_cache = Disk(self.memory)

    def connect(self, connector: KVConnector) -> None:
        raise AssertionError

    def is_ready(self, job_id: int) -> bool:
        return True

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Pending:
        for job_id in plan.dropped_jobs:
            self.jobs.pop(job_id, None)
        for spec in plan.opened_jobs:
            self.jobs[spec.job_id] = spec
            for entry, places in self._moves(spec):
                for number, place in zip(places.restored, _blocks(entry), strict=False):
                    assert self.memory[number] == place, "a block holds another prompt's tokens"
        decoded = tuple(self._draw(row) for row in plan.decode_rows)
        prefilled = {}
        for units in plan.units:
            spec = self.jobs[units.job_id]
            if units.first + units.count < spec.num_units(NUM_LAYERS):
                continue
            for entry, places in self._moves(self.jobs.pop(units.job_id)):
                own = _blocks(entry)[places.first_saved :]
                self.memory.update(zip(places.saved, own, strict=False))
            for entry in spec.entries:
                self.counts.update(dict.fromkeys(entry.rows, 0))
                prefilled[entry.request_id] = self._finish(entry)
        return Pending(StepResult(step_id=plan.step_id, prefilled=prefilled, decoded=decoded))

    def _moves(self, spec: JobSpec) -> Iterator[tuple[PrefillEntry, Any]]:
        return ((entry, entry.prefix) for entry in spec.entries if entry.prefix is not None)

    def _draw(self, row: int) -> Logprob:
        self.counts[row] += 1
        return Logprob(self.counts[row], -1.0)

    def _finish(self, entry: PrefillEntry) -> PrefillResult:
        size = len(entry.token_ids)
        return PrefillResult(
            tokens=tuple(self._draw(row) for row in entry.rows),
            compression=Compression(
                prompt_tokens=size,
                kept_tokens=size,
                evicted_tokens=0,
                row_bytes=1,
                full_bytes=1,
                compress_ms=0.0,
                ring_tokens=0,
            ),
            prompt_logprobs=None,
        )


def _blocks(entry: PrefillEntry) -> list[bytes]:
    ids = entry.token_ids
    raw = b"".join(number.to_bytes(4, sys.byteorder) for number in ids)
    return [raw[at : at + 4 * BLOCK_LEN] for at in range(0, len(raw) - 4 * BLOCK_LEN + 1, 4 * BLOCK_LEN)]


def make() -> tuple[Engine, Device]:
    config = EngineConfig(
        budget=KVBudget.full(80), max_model_len=80, max_rows=NUM_ROWS, short_reserve=8, staging_tokens=150,
        chunking=Chunking(chunk_len=4, short_len=4, prefill_quantum=2), selector=SnapKV(observation_len=4),
        prefix_store=PrefixStoreConfig(num_bytes=2**20, block_len=BLOCK_LEN, min_tokens=8), prefix_blocks=NUM_BLOCKS,
    )  # fmt: skip
    device = Device()
    disk = device.disk_cache
    raw = b"".join(number.to_bytes(4, sys.byteorder) for number in STORED)
    chain = [raw[at : at + 16] for at in range(0, len(raw), 16)]
    disk.files.update(zip(disk.names("", chain), chain, strict=True))
    return Engine(device, config, vocab_size=100, num_layers=NUM_LAYERS), device


def request(name: str, token_ids: tuple[int, ...], size: int = 3, num_samples: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=size, seed=0, n=num_samples, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=token_ids, sampling=sampling)


def requests() -> list[Request]:
    return [
        request("disk", (*STORED, *[90] * 40)), request("writes", (*OTHER, *[91] * 40)),
        request("waits", (*OTHER, *[92] * 40)), request("short", (5, 6, 7)), request("pair", (8, 9), num_samples=2),
        request("leaves", (*STORED[:16], *[93] * 40), size=9),
    ]  # fmt: skip


class Tracer:
    """Notes the lines of the client that this thread passes, and raises KeyboardInterrupt at one of them."""

    def __init__(self, place: Place | None = None) -> None:
        self.place, self.passed = place, dict[int, int]()
        self.is_done = False

    def __enter__(self) -> Tracer:
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename == CLIENT else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.is_done:
            number = frame.f_lineno
            self.passed[number] = self.passed.get(number, 0) + 1
            if self.place == (number, self.passed[number]):
                self.is_done = True
                raise KeyboardInterrupt
        return self.line


def batch(thread: EngineThread) -> None:
    thread.run(requests(), shows_progress=False)


def stream(thread: EngineThread) -> None:
    for _ in thread.stream(requests()[0]):
        pass


def places(call: Callable[[EngineThread], None]) -> list[Place]:
    """The first, and up to two more of the times, that each line is passed."""
    engine, _ = make()
    thread = EngineThread(engine, NUM_ROWS, name="test")
    with Tracer() as tracer:
        call(thread)
    thread.close()
    return sorted({(line, time) for line, count in tracer.passed.items() for time in (1, min(2, count), min(5, count))})


def check(thread: EngineThread, device: Device) -> None:
    """As if nothing had happened."""
    engine = thread.engine  # waits for the step that still runs
    assert not engine.has_work and not device.jobs and thread.client.num_open == 0
    assert (engine.num_running, engine.num_waiting, engine.rows_free) == (0, 0, NUM_ROWS)
    wanted = requests()
    for each, output in zip(wanted, thread.run(wanted, shows_progress=False), strict=True):
        for sample in output.samples:
            assert sample.token_ids == list(range(1, each.sampling.max_tokens + 1)), each.request_id
    assert not thread.engine.has_work and not device.jobs
    assert (engine.rows_free, engine.staging_free) == (NUM_ROWS, 150)
    engine.reset_prefix_store()
    stats = engine.prefix_stats
    assert stats is not None and stats.used_blocks == 0, "blocks were lost"


@pytest.mark.parametrize("call", [batch, stream])
def test_ctrl_c_at_any_line_leaves_nothing_over(call: Callable[[EngineThread], None]) -> None:
    everywhere = places(call)
    assert len({line for line, _ in everywhere}) > 30
    for place in everywhere:
        engine, device = make()
        thread = EngineThread(engine, NUM_ROWS, name="test")
        try:
            try:
                with Tracer(place):
                    call(thread)
            except KeyboardInterrupt:
                pass
            check(thread, device)
        except BaseException as error:
            error.add_note(f"Ctrl-C at line {place[0]}, passed {place[1]} times")
            raise
        finally:
            thread.close()


def test_a_batch_waits_for_places_in_the_queue_and_starts_together() -> None:
    """It is no more than the queue takes, and its requests are in the first plan as far as there are rows."""
    engine, runner = engine_of(config_of(max_rows=2, max_waiting=1))
    thread = EngineThread(engine, 2, name="test")
    outputs = thread.run([request_of(f"r{number}", size=1) for number in range(9)], shows_progress=False)
    assert [len(output.token_ids) for output in outputs] == [3] * 9
    assert sum(len(spec.entries) for spec in runner.plans[0].opened_jobs) == 2
    assert not thread.engine.has_work
    thread.close()


def test_one_that_is_refused_ends_its_batch() -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    thread = EngineThread(engine, 1, name="test")
    wrong = request_of("wrong", size=200)
    with pytest.raises(ValueError, match="the limit is 100"):
        thread.run([request_of("a", max_tokens=90), wrong], shows_progress=False)
    assert thread.client.num_open == 0 and not thread.engine.has_work and thread.engine.rows_free == 1
    runner.aborted.add("a")  # which may have begun
    outputs: list[RequestOutput] = thread.run([request_of("b"), request_of("c")], shows_progress=False)
    assert [len(output.token_ids) for output in outputs] == [3, 3]
    thread.close()
