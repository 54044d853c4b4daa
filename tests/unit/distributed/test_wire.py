"""What leader and followers say to each other survives the way as bytes, and bytes that are no message are refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from snapstream.cache.selectors.diverse import Diverse
from snapstream.cache.selectors.hops import Hops
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import (
    EngineConfig,
    KVBudget,
    ParallelConfig,
    PrefixStoreConfig,
    RescoringConfig,
    WeightForms,
)
from snapstream.distributed.messages import (
    TO_FOLLOWER,
    TO_LEADER,
    BlocksDone,
    Failed,
    ForgetBlocks,
    Hello,
    Joined,
    ReadBlocks,
    Ready,
    Task,
    WriteBlock,
)
from snapstream.distributed.wire import pack, unpack
from snapstream.request import Grammar, SamplingParams
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves, StepPlan, StoredBlock, UnitRange

CONFIG = EngineConfig(
    budget=KVBudget.of(64),
    max_model_len=4096,
    selector=Hops(num_hops=2),
    parallel=ParallelConfig(size=4, experts="ep"),
    weights=WeightForms.of("int4"),
    kv_dtype="auto",
)
STORING = EngineConfig(
    budget=KVBudget.of(64), max_model_len=64, prefix_store=PrefixStoreConfig(num_bytes=2**20), prefix_blocks=3,
    rescoring=RescoringConfig(every=4, num_queries=4, memory=1),
)  # fmt: skip
SAMPLING = SamplingParams(
    n=2, temperature=1, logit_bias={3: -1.5, 7: 100}, stop=["a", "\ud800é"], stop_token_ids=[5], seed=-(2**63),
    logprobs=2, grammar=Grammar.json_object(), return_kept="bitmap",
)  # fmt: skip


def entry(count: int, **more: object) -> PrefillEntry:
    return PrefillEntry(
        request_id="r-1", token_ids=tuple(range(count)), rows=(0, 3), seeds=(2**63 - 1, 0), sampling=SAMPLING,
        budget=KVBudget.of(40), selector=Diverse(share=0.25), **more,
    )  # fmt: skip


def plan(count: int) -> StepPlan:
    long = entry(count, positions=tuple(range(0, 2 * count, 2)), prefix=PrefixMoves(block_len=8, saved=(1, 2)))
    return StepPlan(
        step_id=7,
        dropped_jobs=(1,),
        opened_jobs=(JobSpec(job_id=2, staging_start=0, entries=(long, entry(1))),),
        units=(UnitRange(2, 0, 3),),
        decode_rows=tuple(range(count)),
    )


MESSAGES = [
    Hello(version="1", torch="2", host="h", pid=3),
    Task(rank=1, model="/m", fingerprint="f", config=CONFIG, meeting="file:///x", num_threads=2),
    Task(rank=3, model="", fingerprint="", config=STORING, meeting="", num_threads=0, checks_ranks=True),
    Joined(),
    Ready(),
    Failed("value", "why\nnot"),
    ReadBlocks(3, (StoredBlock(5, "a/b", bytes(range(256))), StoredBlock(6, "c", b""))),
    WriteBlock(4, StoredBlock(1, "a", b"\xff\x00")),
    ForgetBlocks(5, ""),
    BlocksDone(3, 2),
    StepPlan(step_id=0),
    plan(3),
    plan(5000),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_out_as_they_went_in(message: object) -> None:
    found = unpack(pack(message), {**TO_FOLLOWER, **TO_LEADER})
    assert found == message and type(found) is type(message)


def test_token_ids_take_eight_bytes_each() -> None:
    assert len(pack(plan(5000))) < 3 * 8 * 5000 + 3000


def test_only_messages_of_that_direction_are_read() -> None:
    with pytest.raises(ValueError, match="KeyError: 'Joined'"):
        unpack(pack(Joined()), TO_FOLLOWER)


def test_what_is_not_plain_is_not_sent() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(SnapKV):
        """A selector that other processes do not know."""

    for value in (Own(), object(), bytearray(b"x")):
        with pytest.raises(TypeError, match="has no plain form"):
            pack(Failed("error", value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", "1"), ("rank", None), ("rank", 1.0), ("rank", True), ("config", None), ("config", [1]), ("model", 3)],
)
def test_values_of_a_wrong_type_are_refused(field: str, value: object) -> None:
    task = Task(rank=1, model="", fingerprint="", config=CONFIG, meeting="", num_threads=0)
    object.__setattr__(task, field, value)
    with pytest.raises(ValueError, match="no message"):
        unpack(pack(task), TO_FOLLOWER)


def test_a_number_that_no_float_holds_is_refused() -> None:
    selector = Diverse(share=0.25)
    object.__setattr__(selector, "share", 10**400)
    task = Task(rank=1, model="", fingerprint="", config=replace(CONFIG, selector=selector), meeting="", num_threads=0)
    with pytest.raises(ValueError, match="no message: OverflowError"):
        unpack(pack(task), TO_FOLLOWER)


def test_values_that_no_engine_could_have_are_refused() -> None:
    task = Task(rank=1, model="", fingerprint="", config=CONFIG, meeting="", num_threads=0)
    object.__setattr__(task.config, "dtype", "int3")
    try:
        with pytest.raises(ValueError, match="int3"):
            unpack(pack(task), TO_FOLLOWER)
    finally:
        object.__setattr__(task.config, "dtype", "float32")


def test_bytes_that_are_cut_doubled_or_changed_are_refused_or_read_and_never_more() -> None:
    """No other error, whatever comes; nothing is executed, because nothing but JSON and numbers is ever read."""
    rng, whole = random.Random(5), pack(plan(40))
    kinds = {**TO_FOLLOWER, **TO_LEADER}
    for bad in (b"", b"\0", whole[:-1], whole + b"\0", whole + whole, whole[:40]):
        with pytest.raises(ValueError, match="no message"):
            unpack(bad, kinds)
    for _ in range(3000):
        bytes_ = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            bytes_[rng.randrange(len(bytes_))] = rng.randrange(256)
        try:
            found = unpack(bytes(bytes_), kinds)
        except ValueError:
            continue
        assert isinstance(found, StepPlan)
