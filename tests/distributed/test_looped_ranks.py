"""Ranks of one machine decode by looped steps, with the answers of one device that does, and leave nothing behind.

Processes over gloo that meet within the native step; all ranks must hold the same bits.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.server_process import is_running
from benchmarks.stand_ins import Pretend
from snapstream import LLM, Grammar, KVBudget, SamplingParams
from snapstream.config import ParallelConfig, SplitExperts, WeightFormats
from snapstream.distributed.control import RankLost
from snapstream.distributed.group import Alone, create, reach
from snapstream.exec import speculation
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.parallel import ParallelRunner
from snapstream.exec.speculation import History, StepTimes
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kv.selectors.snapkv import SnapKV
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pairs import Pair, ids
from tests.distributed.pool import Pool
from tests.distributed.test_tensor_parallel import DENSE, HYBRIDS, STATES_TOLERANCE, Checkpoint, check, checkpoint
from tests.llm.conftest import write_checkpoint
from tests.waiting import HANG_S, until

__all__ = ["checkpoint"]  # a fixture
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
NAME = "memfd:snapstream-ranks"  # as the system shows the memory that ranks share


def looped(folder: Path, **changes: Any) -> Asked:
    return Asked(folder, budget=40, executor="looped", **changes)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    """A kv head on each rank; one on both (qwen2); 199 token ids; tied tables; biases that one rank adds."""
    asked = looped(checkpoint(name))
    check(two, asked)
    eager = two.run(cases.answered, replace(asked, executor="eager"))[0]
    own = two.run(cases.answered, asked)[0]
    assert own.tokens == eager.tokens
    torch.testing.assert_close(own.logits, eager.logits, rtol=0.0, atol=5e-5)  # sums in another order


@pytest.mark.parametrize("name", [name for name in HYBRIDS if "falcon" not in name])  # which is refused
def test_recurrent_layers(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    check(two, looped(checkpoint(name)), STATES_TOLERANCE)


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "glm4-moe", "minimax-m3-panels", "laguna", "mimo-halves"])
def test_experts_and_latents(two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts) -> None:
    check(two, looped(checkpoint(name), experts=experts))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("name", ["hy-v4", "step3.7"])
def test_experts_of_one_tensor(two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts) -> None:
    check(two, looped(checkpoint(name), experts=experts))


@pytest.mark.parametrize("width", ["bfloat16", "int8", "int4", "uint4"])
def test_widths(two: Pool, checkpoint: Checkpoint, width: str) -> None:
    check(two, looped(checkpoint("qwen3-groups"), formats=WeightFormats.of(width)))


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_products_of_codes(two: Pool, checkpoint: Checkpoint, width: str) -> None:
    """Inputs are rounded per group, and no group lies on two ranks; what rounds to the next code moves a logit."""
    asked = looped(checkpoint("qwen3-groups"), formats=WeightFormats.of(width).rounding_inputs())
    [one, other] = two.run(cases.answered, asked)
    assert torch.equal(one.logits, other.logits) and one.tokens == other.tokens
    alone = cases.answered(Alone(), asked)
    torch.testing.assert_close(one.logits, alone.logits, rtol=0.0, atol=2e-2 * float(alone.logits.abs().max()))


def test_a_row_does_not_depend_on_its_neighbours(two: Pool, checkpoint: Checkpoint) -> None:
    """The same bits alone and in a batch, and on one thread as on two."""
    for name in ("qwen3", "deepseek-v3"):
        one, other = two.run(cases.in_batches, checkpoint(name))
        assert one == other == {1: [True, True], 2: [True, True]}


def test_four_ranks(four: Pool, checkpoint: Checkpoint) -> None:
    """Two ranks share a kv head; the last has 49 of 199 token ids, and a line that stands for none."""
    check(four, looped(checkpoint("llama-gqa-tied")))
    check(four, looped(checkpoint("deepseek-v3"), experts="ep"))


def test_a_share_alone(checkpoint: Checkpoint) -> None:
    """One rank of two without the other steps through its share, and waits for nobody."""
    asked = looped(checkpoint("llama-gqa-tied"))
    pretended = cases.answered(Pretend(1, 2), asked)
    assert pretended.logits.shape == (2, 199) and all(token >= 100 for row in pretended.tokens for token in row[1:])


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        (ParallelConfig(size=2, attention="dp"), "attention is 'dp'"),
        (ParallelConfig(size=2, num_local=1, address="h:1"), "these are on several machines"),
    ],
)
def test_ranks_that_cannot_meet_within_a_step_are_refused(
    parallel: ParallelConfig, why: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ValueError, match=f"executor 'looped': .*{why}"):
        cases.looped_under(checkpoint("llama-gqa-tied"), parallel)


def test_memory_that_another_process_has_made() -> None:
    made = create(10_000)
    one, other = (reach(os.getpid(), made, 10_000) for _ in range(2))
    os.close(made)
    one[9_999] = 7
    assert other[9_999] == 7 and other[0] == 0
    with pytest.raises(OSError, match="No such file"):
        reach(os.getpid(), made, 10_000)


# -- whole engines

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8), "max_rows": 4, "max_model_len": 512, "chunk_len": 32,
    "progress": False,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("looped"))


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], LLM]]:
    """Starts the engine over two ranks, of which nothing may be left."""
    engines: list[LLM] = []
    pids: list[int] = []

    def started() -> LLM:
        engines.append(LLM(folder, **SETTINGS, tensor_parallel=2))
        pids.extend(runner_of(engines[-1]).workers.pids)
        return engines[-1]

    yield started
    while engines:
        engines.pop().close()
    assert pids and not any(is_running(pid) for pid in pids)
    assert not shared_here(), "a closed engine leaves no memory"


def runner_of(llm: LLM) -> ParallelRunner:
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    return runner


def shared_here() -> list[str]:
    """What this process has mapped of memory that ranks share, or still has open."""
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]
    numbers = [number for number in Path("/proc/self/fd").iterdir() if number.is_symlink()]
    return mapped + [str(number) for number in numbers if NAME in os.path.realpath(number)]


@pytest.fixture
def costless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft pays, however long steps take on this machine."""
    monkeypatch.setattr(StepTimes, "cost", lambda self, entries: 0.0)


@pytest.mark.usefixtures("costless")
def test_whole_engines(folder: Path, start: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Looped is the default over ranks too, and drafts. Drawn tokens of all ranks are compared after every step."""
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    two = start()
    assert two.config.executor == "looped" and not any("plain calls" in note for note in two.notes)
    assert shared_here()
    with LLM(folder, **SETTINGS) as one:
        assert one.config.executor == "looped"
        pair = Pair(one, two)
        prompts = [ids(5), ids(31, 2), ids(90, 3), ids(150, 4)]
        pair.same(prompts, GREEDY)
        pair.same(prompts, SamplingParams(max_tokens=24, temperature=0.8, seed=5, top_p=0.9))
        pair.same(prompts[:2], SamplingParams(max_tokens=16, temperature=1.0, seed=6, n=2, top_k=20, logprobs=3))
        pair.same(prompts[1:], SamplingParams(max_tokens=16, temperature=0.7, seed=7, repetition_penalty=1.2))
        grammar = Grammar.regex("[a-f]{2,6}(-[0-9]{3}){1,2}")
        pair.same(prompts[:2], SamplingParams(max_tokens=40, temperature=0.9, seed=3, grammar=grammar))
        names = {"the_first_long_name": {"enum": ["ab", "ac"]}, "the_second_long_name": {"type": "boolean"}}
        grammar = Grammar.json_schema({"type": "object", "properties": names, "required": list(names)})
        for sampling in (GREEDY, SamplingParams(max_tokens=90, temperature=0.9, seed=4, n=2, logprobs=1)):
            [bound, *_] = pair.same(prompts[:2], replace(sampling, max_tokens=90, ignore_eos=False, grammar=grammar))
            assert bound.finish_reason == "stop" and bound.timings.accepted_tokens > 20
        [said] = pair.same(prompts[:1], params := SamplingParams(max_tokens=60, seed=8, ignore_eos=True))
        edited = [7 if place % 9 == 8 else token for place, token in enumerate(said.token_ids)]
        [again] = pair.same(prompts[:1], replace(params, prediction=edited, stop=(said.text[-9:-6],)))
        assert again.timings.drafted_tokens > again.timings.accepted_tokens > 20


@pytest.mark.usefixtures("costless")
def test_a_rank_that_is_killed_amid_a_step_ends_the_engine(
    start: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops first, so that rank 0 waits for it within a step that verifies a draft; its death wakes rank 0."""
    monkeypatch.setattr(History, "draft", lambda history, most: [7] * min(most, 2))
    monkeypatch.setattr(speculation, "MAX_PAUSE", 0)
    llm = start()
    runner = runner_of(llm)
    [pid], decode = runner.workers.pids, runner.rank_0.runner.decode
    assert isinstance(decode, LoopedDecode)
    assert decode.shared is not None
    memory, verify, verifying = decode.shared, LoopedDecode.verify, threading.Event()

    def noted(*given: Any) -> Any:
        verifying.set()
        drawn = verify(*given)
        verifying.clear()
        return drawn

    monkeypatch.setattr(LoopedDecode, "verify", noted)
    raised: list[BaseException] = []

    def arrivals() -> tuple[int, int]:  # at meetings, of both ranks
        counts = memory[:192].view(torch.int64)
        return int(counts[8]), int(counts[16])

    def ask() -> None:
        try:
            llm.generate([ids(40)], replace(GREEDY, max_tokens=400))
        except BaseException as error:
            raised.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    until(lambda: arrivals()[1] > 10)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: arrivals()[0] == arrivals()[1] + 1)  # it has come where the other will not
    assert asking.is_alive() and verifying.is_set()
    os.kill(pid, signal.SIGKILL)
    asking.join(HANG_S)
    [error] = raised
    assert isinstance(error, RankLost) and "rank 1 was killed by SIGKILL" in str(error)
