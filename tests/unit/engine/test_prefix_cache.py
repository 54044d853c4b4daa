"""The index of the prefix store against a model of it: a dictionary of prefixes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.config import Chunking, EngineConfig, KVBudget, PrefixStoreConfig
from snapstream.engine.core import IDLE_ID, Engine
from snapstream.engine.prefix_cache import Node, PrefixIndex, PrefixStats, Reservation, chain_of
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.step import StoredBlock
from snapstream.types import Request, RequestOutput, SamplingParams
from tests.engine.alone import VOCAB_SIZE, LetterTokenizer, run_alone
from tests.engine.build import abort, config_of, drain, engine_of
from tests.engine.fake_runner import FakeRunner, draw_by_hash

BLOCK = 2


def known(index: PrefixIndex, namespace: str, ids: tuple[int, ...]) -> list[int]:
    """Numbers of the ready beginning."""
    numbers = []
    for node in index.path(namespace, chain_of(ids, BLOCK)):
        if not node.is_ready:
            break
        numbers.append(node.number)
    return numbers


def store(index: PrefixIndex, ids: tuple[int, ...], namespace: str = "") -> list[int]:
    reservation = index.reserve(namespace, chain_of(ids, BLOCK))
    index.commit(reservation)
    return [node.number for node in reservation.nodes]


def ready(index: PrefixIndex, ids: tuple[int, ...], namespace: str = "") -> list[Node]:
    return [node for node in index.path(namespace, chain_of(ids, BLOCK)) if node.is_ready]


def test_a_chain_is_the_full_blocks() -> None:
    assert chain_of((1, 2, 3, 4, 5), 2) == (array("i", [1, 2]).tobytes(), array("i", [3, 4]).tobytes())
    assert chain_of((1,), 2) == ()
    assert len(chain_of((1, 2), 2)) == 1


def test_prompts_meet_up_to_the_first_block_that_differs() -> None:
    index = PrefixIndex(10)
    assert store(index, (1, 2, 3, 4, 5, 6)) == [0, 1, 2]
    assert store(index, (1, 2, 3, 9, 5, 6)) == [3, 4], "the block of 5, 6 stands behind other tokens"
    assert known(index, "", (1, 2, 3, 4, 5, 7)) == [0, 1]
    assert known(index, "", (3, 4)) == []
    assert store(index, (1, 2, 3, 4)) == []


def test_namespaces_never_meet() -> None:
    index = PrefixIndex(10)
    store(index, (1, 2, 3, 4), "a")
    assert known(index, "a", (1, 2, 3, 4)) and not known(index, "b", (1, 2, 3, 4))
    store(index, (1, 2, 3, 4), "b")
    assert not set(known(index, "a", (1, 2, 3, 4))) & set(known(index, "b", (1, 2, 3, 4)))
    assert index.reset("a") == 2
    assert not known(index, "a", (1, 2, 3, 4)) and known(index, "b", (1, 2, 3, 4))
    assert index.reset() == 2 and index.num_used == 0


def test_what_is_written_is_not_read_and_what_is_dropped_is_gone() -> None:
    index = PrefixIndex(4)
    first = index.reserve("", chain_of((1, 2, 3, 4), BLOCK))
    assert index.num_written == 2 and not known(index, "", (1, 2, 3, 4))
    below = index.reserve("", chain_of((1, 2, 3, 4, 5, 6), BLOCK))
    assert (below.first, len(below.nodes)) == (2, 1)
    index.commit(below)
    assert not known(index, "", (1, 2, 3, 4, 5, 6)), "its parents are not there yet"
    index.drop(first)
    assert index.num_used == 0 and index.num_written == 0
    assert len(store(index, (1, 2, 3, 4, 5, 6))) == 3


def test_a_dropped_parent_takes_what_others_still_write() -> None:
    index = PrefixIndex(4)
    first = index.reserve("", chain_of((1, 2), BLOCK))
    below = index.reserve("", chain_of((1, 2, 3, 4), BLOCK))
    index.drop(first)
    assert index.num_used == 1, "its number is in use until its job ends"
    index.commit(below)
    assert index.num_used == 0 and not index.path("", chain_of((1, 2, 3, 4), BLOCK))


def test_leaves_go_first_and_what_was_hit_goes_last() -> None:
    index = PrefixIndex(4)
    store(index, (1, 2, 3, 4))  # hit below
    hit = ready(index, (1, 2, 3, 4))
    index.take(hit)
    index.release(hit)
    store(index, (5, 6, 7, 8))
    store(index, (9, 10))
    assert known(index, "", (5, 6, 7, 8)) == [2], "the leaf went, not its parent"
    store(index, (11, 12, 13, 14, 15, 16, 17, 18))
    assert len(known(index, "", (1, 2, 3, 4))) == 2, "one long document flushes nothing that was hit"
    assert len(known(index, "", (11, 12, 13, 14, 15, 16, 17, 18))) == 2


def test_what_is_restored_is_not_evicted() -> None:
    index = PrefixIndex(2)
    store(index, (1, 2, 3, 4))
    held = ready(index, (1, 2, 3, 4))
    index.take(held)
    assert store(index, (5, 6)) == []
    assert index.reset() == 2 and index.num_used == 2, "forgotten, but still read"
    assert store(index, (5, 6)) == []
    index.release(held)
    assert index.num_used == 0 and len(store(index, (5, 6))) == 1


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, 2, 3, 4), None),  # the beginning of what is stored
        ((1, 2, 3, 4, 5, 6, 7), None),  # it goes on where the stored one ends
        ((1, 2, 3, 9, 5, 6), 3),
        ((1, 2, 9, 9), 2),
        ((1, 9, 3, 4), 1),
        ((9, 9, 9, 9), None),  # another prompt altogether
        ((1, 2, 3), None),  # it ends within a block
        ((1, 2, 9), 2),  # and there it reads otherwise
    ],
)
def test_where_a_prompt_diverges(ids: tuple[int, ...], expected: int | None) -> None:
    index = PrefixIndex(10)
    store(index, (1, 2, 3, 4, 5, 6))
    chain = chain_of(ids, BLOCK)
    rest = array("i", ids[len(chain) * BLOCK :]).tobytes()
    assert index.diverged_at("", chain, rest) == expected
    assert index.diverged_at("other", chain, rest) is None


class Model:
    """What may be ready: every prefix that was committed and not forgotten by a reset or a drop of its parents."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, tuple[int, ...]], None] = {}

    def prefixes(self, namespace: str, ids: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((namespace, ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK))

    def commit(self, namespace: str, ids: tuple[int, ...], reservation: Reservation) -> None:
        end = (reservation.first + len(reservation.nodes)) * BLOCK
        self.stored.update(dict.fromkeys(self.prefixes(namespace, ids[:end])))


PROMPTS = st.lists(st.integers(0, 2), max_size=9).map(tuple)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "commit", "drop", "take", "release", "reset"]),
        st.sampled_from(["a", "b"]),
        PROMPTS,
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(num_blocks=st.integers(1, 7), actions=ACTIONS)
def test_it_is_a_dictionary_of_prefixes_that_forgets(
    num_blocks: int, actions: list[tuple[str, str, tuple[int, ...], int]]
) -> None:
    """Nothing is found that was not stored; no block has two owners; parents outlive children; what is used stays."""
    index, model = PrefixIndex(num_blocks), Model()
    writing: list[tuple[str, tuple[int, ...], Reservation]] = []
    held: list[list[Node]] = []
    for action, namespace, ids, place in actions:
        if action == "reserve":
            writing.append((namespace, ids, index.reserve(namespace, chain_of(ids, BLOCK))))
        elif action == "commit" and writing:
            own_namespace, own, reservation = writing.pop(place % len(writing))
            model.commit(own_namespace, own, reservation)
            index.commit(reservation)
        elif action == "drop" and writing:
            index.drop(writing.pop(place % len(writing))[2])
        elif action == "take":
            nodes = index.path(namespace, chain_of(ids, BLOCK))
            nodes = nodes[: len(known(index, namespace, ids))]
            index.take(nodes)
            held.append(nodes)
        elif action == "release" and held:
            index.release(held.pop(place % len(held)))
        elif action == "reset":
            index.reset(namespace)
            model.stored = {each: None for each in model.stored if each[0] != namespace}
        check(index, model, writing, held)
    for _, _, reservation in writing:
        index.drop(reservation)
    for nodes in held:
        index.release(nodes)
    index.reset()
    assert (index.num_used, index.num_written) == (0, 0), "blocks were lost"


def check(
    index: PrefixIndex,
    model: Model,
    writing: list[tuple[str, tuple[int, ...], Reservation]],
    held: list[list[Node]],
) -> None:
    reached: dict[int, Node] = {}
    used = {id(node): node for nodes in held for node in nodes}
    used |= {id(node): node for _, _, reservation in writing for node in reservation.nodes}
    for namespace, prefix in every_prefix(index):
        path = index.path(namespace, chain_of(prefix, BLOCK))
        node = path[-1]
        assert reached.setdefault(node.number, node) is node, "a block has two owners"
        is_found = len(known(index, namespace, prefix)) * BLOCK == len(prefix)
        assert not is_found or (namespace, prefix) in model.stored, "found, but never stored"
    in_use = {node.number for node in used.values()}
    assert len(in_use) == len(used), "a block in use was given away"
    assert all(reached.get(node.number, node) is node for node in used.values()), "a block in use has a second owner"
    assert index.num_used == len(set(reached) | in_use) <= index.num_blocks
    assert index.num_written == sum(len(reservation.nodes) for _, _, reservation in writing)


def every_prefix(index: PrefixIndex) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All that is in the tree."""
    blocks = [(a, b) for a in range(3) for b in range(3)]

    def below(namespace: str, prefix: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for block in blocks:
            longer = prefix + block
            if len(index.path(namespace, chain_of(longer, BLOCK))) * BLOCK == len(longer):
                yield namespace, longer
                yield from below(namespace, longer)

    for namespace in ("a", "b"):
        yield from below(namespace, ())


# Who waits for whose prefix, and that nobody waits for ever or behind one who waits.

PREFIX_LOOKUP_BLOCK = 4
STORE = PrefixStoreConfig(num_bytes=1, block_len=PREFIX_LOOKUP_BLOCK, min_tokens=PREFIX_LOOKUP_BLOCK, idle_len=0)


def store_config(num_blocks: int = 50, **fields: Any) -> EngineConfig:
    sizes = {"prefix_blocks": num_blocks, "prefill_quantum": 1, "staging_tokens": 400}
    return config_of(prefix_store=STORE, selector=SnapKV(observation_len=4), **(sizes | fields))


def ask(name: str, ids: tuple[int, ...], **fields: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1, seed=0), **fields)


def stats(engine: Engine) -> PrefixStats:
    found = engine.prefix_stats
    assert found is not None
    return found


DOCUMENT = tuple(random.Random(1).randrange(VOCAB_SIZE) for _ in range(60))


def test_it_waits_where_that_spares_half_of_its_work() -> None:
    """A question over the same document waits; one that shares a sixth of it does not; nor does another namespace."""
    engine, _ = engine_of(store_config())
    engine.add_request(ask("writer", DOCUMENT))
    engine.step()
    engine.add_request(ask("waits", (*DOCUMENT, 1, 2)))
    engine.add_request(ask("starts", (*DOCUMENT[:10], *[3] * 50)))
    engine.add_request(ask("stranger", DOCUMENT, namespace="other"))
    engine.step()
    assert (engine.num_waiting, engine.num_running) == (1, 3)
    outputs = drain(engine)
    cached = {name: output.cached_tokens for name, output in outputs.items()}
    assert cached == {"writer": 0, "waits": 56, "starts": 0, "stranger": 0}


def test_a_job_that_is_given_up_lets_the_next_write() -> None:
    engine, runner = engine_of(store_config())
    for name in ("writer", "second", "third"):
        engine.add_request(ask(name, (*DOCUMENT, 5, len(name))))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    abort(engine, runner, "writer")
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1), "the second writes now, the third waits for it"
    outputs = drain(engine)
    assert [outputs[name].cached_tokens for name in ("second", "third")] == [0, 56]
    assert stats(engine).used_blocks * PREFIX_LOOKUP_BLOCK == stats(engine).saved


def test_a_hit_has_fewer_units_and_the_whole_range() -> None:
    engine, runner = engine_of(store_config())
    for name in ("first", "second"):
        engine.add_request(ask(name, DOCUMENT))
        drain(engine)
    first, second = (spec for plan in runner.plans for spec in plan.opened_jobs)
    assert (first.num_tokens, second.num_tokens, second.num_staged) == (60, 4, 60)
    assert second.entries[0].prefix is not None and second.entries[0].prefix.saved == ()
    assert stats(engine).hits == 56 and stats(engine).queries == 120


def test_where_a_prompt_left_the_stored_one_is_told() -> None:
    engine, _ = engine_of(store_config())
    engine.add_request(ask("first", DOCUMENT))
    engine.add_request(ask("edited", (*DOCUMENT[:13], *[(DOCUMENT[13] + 1) % VOCAB_SIZE] * 47)))
    engine.add_request(ask("longer", (*DOCUMENT, 1, 2, 3, 4, 5)))
    outputs = drain(engine)
    edited, longer = outputs["edited"].prefix, outputs["longer"].prefix
    assert edited is not None and longer is not None
    assert (edited.diverged_at, longer.diverged_at) == (13, None)


PREFIX_LOOKUP_PROMPTS = st.tuples(st.integers(0, 1), st.integers(5, 60), st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=60)
@given(
    num_blocks=st.integers(1, 12),
    asked=st.lists(PREFIX_LOOKUP_PROMPTS, min_size=1, max_size=12),
    moves=st.lists(st.tuples(st.sampled_from(["step", "add", "abort"]), st.integers(0, 11)), max_size=60),
    row_len=st.sampled_from([0, 40, 80]),
    max_tokens=st.integers(1, 12),
    idle_len=st.sampled_from([0, 20, 80]),
)
def test_every_request_ends_with_its_own_answer(
    num_blocks: int,
    asked: list[tuple[int, int, int, int]],
    moves: list[tuple[str, int]],
    row_len: int,
    max_tokens: int,
    idle_len: int,
) -> None:
    """Whatever is shared, evicted, waited for and given up: answers are those of a lone request, blocks come back."""
    config = EngineConfig(
        budget=KVBudget.full(80), max_model_len=80, max_rows=3, short_reserve=8, staging_tokens=150,
        chunking=Chunking(chunk_len=4, short_len=4, prefill_quantum=1),
        selector=SnapKV(observation_len=4), prefix_store=replace(STORE, idle_len=idle_len), prefix_blocks=num_blocks,
        prefix_row_len=row_len,
    )  # fmt: skip
    requests: dict[str, Request] = {}

    def length_of(entry: Any, index: int) -> int:
        return 1 if entry.request_id == IDLE_ID else len(run_alone(requests[entry.request_id], index).token_ids)

    runner = FakeRunner(config, 2, draw_by_hash(VOCAB_SIZE), length_of)
    engine = Engine(
        runner, config, vocab_size=VOCAB_SIZE, num_layers=2, eos_token_ids=(0,), tokenizer=LetterTokenizer()
    )
    waiting = [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=(*DOCUMENT[:shared], *[own] * (60 - shared))[: 20 + shared // 2],
            sampling=SamplingParams(max_tokens=max_tokens, seed=own),
            namespace=str(namespace),
        )
        for index, (namespace, shared, own, _) in enumerate(asked)
    ]
    finished: dict[str, RequestOutput] = {}

    def step() -> None:
        if engine.has_work:
            finished.update({output.request_id: output for output in engine.step() if output.is_finished})

    for move, place in moves:
        if move == "add" and waiting:
            request = waiting.pop()
            requests[request.request_id] = request
            engine.add_request(request)
        elif move == "abort" and requests:
            name = list(requests)[place % len(requests)]
            if name not in finished:
                abort(engine, runner, name)
        else:
            step()
    for _ in range(2000):
        step()
    assert not engine.has_work, "a request waits for ever"
    for name, output in finished.items():
        if name not in runner.aborted:
            assert output.samples[0].token_ids == run_alone(requests[name], 0).token_ids
    index = stats(engine)
    assert index.used_blocks <= num_blocks
    engine.reset_prefix_store()
    assert stats(engine).used_blocks == 0, "blocks were lost"


def test_blocks_that_come_over_a_link_are_waited_for_layer_by_layer() -> None:
    """On a GPU a job runs a layer when its blocks are there, and rows decode meanwhile."""
    asked: list[int] = []

    class Linked(FakeRunner):
        def is_ready(self, job_id: int) -> bool:
            asked.append(job_id)
            return job_id in self.jobs and len(asked) % 3 == 0

    config = store_config(device="cuda")
    runner = Linked(config, 2, draw_by_hash(VOCAB_SIZE))
    engine = Engine(runner, config, vocab_size=VOCAB_SIZE, num_layers=2)
    engine.add_request(ask("first", DOCUMENT))
    drain(engine)
    assert not asked, "nothing is restored"
    engine.add_request(ask("second", (*DOCUMENT[:40], *[1] * 20)))
    outputs = drain(engine)
    assert outputs["second"].cached_tokens == 40 and asked
    (job,) = (spec.job_id for plan in runner.plans for spec in plan.opened_jobs if spec.num_restored)
    ranges = [unit for plan in runner.plans for unit in plan.units if unit.job_id == job]
    assert sum(unit.count for unit in ranges) == 10 and len(ranges) >= 2
    assert all(unit.first % 5 + unit.count <= 5 for unit in ranges), "units of two layers in one step"


@dataclass(eq=False)
class FakeDisk:
    """Keeps names, and checks that nothing that was planned before a read was asked for may still fill its blocks."""

    runner: FakeRunner
    kept: set[str] = field(default_factory=set)
    num_read: int = 0
    asked: dict[str, int] = field(default_factory=dict)  # by name: the step that was planned then

    def names(self, namespace: str, chain: Sequence[bytes], *, of_snapshots: bool = False) -> tuple[str, ...]:
        return tuple(repr(tuple(chain[:end])) for end in range(1, len(chain) + 1))

    def has(self, name: str) -> bool:
        self.asked[name] = len(self.runner.plans)
        return name in self.kept

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        for block in wanted:
            assert all(pending.answer.step_id > self.asked[block.name] for pending in self.runner.unread)
        self.num_read += len(wanted)
        return self._done(len(wanted))

    def save(self, block: StoredBlock) -> Future[int]:
        self.kept.add(block.name)
        return self._done(1)

    def forget(self, namespace: str | None) -> None:
        self.kept.clear()

    def close(self) -> None:
        pass

    def _done(self, count: int) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(count)
        return done


@pytest.mark.parametrize("seed", range(4))
def test_a_read_from_the_disk_waits_for_steps_that_may_still_fill_its_blocks(seed: int) -> None:
    """Many prompts, aborts among them, in memory for few of their blocks."""
    draw, disks = random.Random(seed), list[FakeDisk]()

    def with_disk(runner: FakeRunner) -> FakeRunner:
        disks.append(FakeDisk(runner))
        runner.disk_cache = disks[0]
        return runner

    engine, runner = engine_of(store_config(12), around=with_disk)
    prompts = [tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randrange(8, 30))) for _ in range(6)]
    for turn in range(60):
        sampling = SamplingParams(max_tokens=draw.randrange(1, 8), seed=0, ignore_eos=True)
        engine.add_request(Request(request_id=str(turn), prompt_token_ids=draw.choice(prompts), sampling=sampling))
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.2:
            abort(engine, runner, str(draw.randrange(turn + 1)))
    drain(engine)
    assert disks[0].num_read > 5
