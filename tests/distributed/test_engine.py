"""A whole engine over two ranks answers as one device does: every feature that a request or an engine may have.

Processes over gloo; the ranks compare their drawn tokens after every step, so a difference between them fails at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.server_process import is_running
from benchmarks.stand_ins import Pretend
from snapstream import LLM, Grammar, KVBudget, SamplingParams
from snapstream.config import PrefixStoreConfig
from snapstream.exec.parallel import ParallelRunner, RanksDiffer, check_ranks
from snapstream.exec.results import SubmittedStep
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.step import StepPlan
from tests.distributed.pairs import Pair, ids
from tests.llm.conftest import write_checkpoint

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
ENGINE_SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8), "max_rows": 6, "max_model_len": 512, "chunk_len": 32,
    "executor": "eager", "progress": False,
    "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=8, min_tokens=16),
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
        with LLM(folder, **ENGINE_SETTINGS) as one, LLM(folder, **ENGINE_SETTINGS, tensor_parallel=2) as two:
            runner = two.engine.runner
            assert isinstance(runner, ParallelRunner) and len(runner.workers.pids) == 1
            assert all(is_running(pid) for pid in runner.workers.pids)
            yield Pair(one, two)
    assert not any(is_running(pid) for pid in runner.workers.pids), "a closed engine leaves no process"
    assert torch.get_num_threads() == threads


def test_the_start_says_how_many_ranks_there_are(pair: Pair) -> None:
    assert pair.two.notes[0] == "ranks: 2 (cpu, 1 thread each)"
    assert pair.two.config.parallel.size == 2 and pair.one.config.parallel.size == 1


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=24, temperature=0.8, seed=5, top_p=0.9),
        SamplingParams(max_tokens=16, temperature=1.0, seed=6, n=3, top_k=20, min_p=0.01, logprobs=3),
        SamplingParams(max_tokens=16, temperature=0.7, seed=7, presence_penalty=0.5, frequency_penalty=0.5,
                       repetition_penalty=1.2, logit_bias={65: 3.0, 66: -100.0}),
        SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=2, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.0, return_kept=True),
        SamplingParams(max_tokens=12, temperature=0.0, return_kept="bitmap"),
        SamplingParams(max_tokens=40, temperature=0.9, seed=8, stop=["e"], stop_token_ids=[100, 120], min_tokens=3),
    ],
    ids=["greedy", "seeded", "n", "penalties", "prompt_logprobs", "kept", "bitmap", "stop"],
)  # fmt: skip
def test_requests_of_every_kind_are_answered_alike(pair: Pair, params: SamplingParams) -> None:
    """Prompts below and above the budget; rows that fill and wrap."""
    outputs = pair.same([ids(5), ids(31, 2), ids(90, 3), ids(150, 4)], params)
    assert any(output.compression and output.compression.evicted_tokens for output in outputs)


def test_other_rows_and_selectors(pair: Pair) -> None:
    smaller = KVBudget(num_sink=1, num_topk=6, num_recent=10)
    pair.same([ids(90, 5), ids(40, 6)], GREEDY, budget=smaller)


def test_grammars_are_followed_on_every_rank(pair: Pair) -> None:
    for grammar in (Grammar.regex("[a-f]{2,6}(-[0-9]{3}){1,2}"), Grammar.json_object()):
        params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, grammar=grammar, n=2)
        [output] = pair.same(["The quick brown fox jumps over the lazy dog."], params)
        assert output.text


def test_beginnings_that_are_stored_are_restored_on_every_rank(pair: Pair) -> None:
    common = ids(120, 7)
    pair.same([common + ids(9, 8)], GREEDY)
    before = pair.stored_tokens()
    pair.same([common + ids(11, 9)], GREEDY)
    assert pair.stored_tokens() == (before[0] + 120, before[1] + 120)
    said = pair.same([ids(6, 21)], GREEDY)[0].samples[0].token_ids
    pair.same([ids(6, 21) + said + ids(5, 22)], GREEDY)
    assert pair.stored_tokens() == (before[0] + 144, before[1] + 144), "24 tokens of the prompt and its answer"


def test_streams_and_aborted_requests(pair: Pair) -> None:
    """A stream that is closed early gives its row back on every rank; what runs beside it is not touched."""
    [wanted] = pair.one.generate([ids(60, 11)], GREEDY)
    stream = pair.two.stream(ids(90, 12), SamplingParams(max_tokens=300, ignore_eos=True))
    for _ in range(3):
        next(stream)
    beside = pair.two.stream(ids(60, 11), GREEDY)
    next(beside)
    stream.close()
    for output in beside:
        last = output
    assert last.token_ids == wanted.token_ids
    assert pair.two.engine.rows_free == 6


def test_a_second_engine_over_ranks_does_not_fit_into_a_process(pair: Pair, folder: Path) -> None:
    with pytest.raises(ValueError, match="this process has an engine over several ranks already; close it first"):
        LLM(folder, **ENGINE_SETTINGS, tensor_parallel=2)
    pair.same([ids(20, 13)], GREEDY)


def test_a_selector_from_outside_is_refused(pair: Pair) -> None:
    class Mine(SnapKV):
        """Not known to other processes."""

    with pytest.raises(ValueError, match="'snapkv' is not shipped with the package"):
        pair.two.generate([ids(50)], GREEDY, selector=Mine(observation_len=8))


def test_ctrl_c_ends_the_requests_and_not_the_engine(pair: Pair) -> None:
    """It comes amid a submit, at the end of which it is let through: no rank has run a part of a plan."""
    runner = pair.two.engine.runner
    assert isinstance(runner, ParallelRunner)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with pytest.MonkeyPatch.context() as patch:
        plain, count = runner.rank_0.submit, iter(range(100))

        def submit(plan: StepPlan) -> SubmittedStep:
            if next(count) == 4:
                signal.raise_signal(signal.SIGINT)
            return plain(plan)

        patch.setattr(runner.rank_0, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            pair.two.generate([ids(60, 14)], GREEDY)
    signal.signal(signal.SIGINT, before)
    pair.same([ids(60, 14), ids(33, 15)], GREEDY)


def test_ranks_that_draw_different_tokens_are_noticed() -> None:
    """The check itself: a group whose other rank has drawn something else."""

    class Other(Pretend):
        def all_gather(self, x: Tensor, dim: int) -> Tensor:
            return torch.cat([x, x + torch.tensor([[0] * (x.shape[1] - 1) + [1]])], dim)

    check_ranks([5, 6], Pretend(0, 2), torch.device("cpu"))
    with pytest.raises(RanksDiffer, match=r"\[\[5, 6\], \[5, 7\]\]"):
        check_ranks([5, 6], Other(0, 2), torch.device("cpu"))
