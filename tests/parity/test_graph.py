"""Equality 4: the graph executor gives eager's tokens, with plain functions in place of CUDA graphs."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from snapstream.config import KVBudget
from snapstream.config.values import imported
from snapstream.exec.cuda_graph import SAMPLERS, bucket_sizes, covers, make_graph, no_collection
from snapstream.exec.executors import GRAPH, executor_of
from snapstream.exec.row_state import LOGPROB_SIZES, SamplingNeeds
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save

SMALL = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "executor": "eager",
    "budget": SMALL, "selector": SnapKV(observation_len=8), "max_model_len": 160, "progress": False,
}  # fmt: skip
LENGTHS = (70, 5, 120, 33, 18, 1, 90)


def params() -> list[SamplingParams]:
    """Greedy, sampled with and without filters, and what only the plain sampler does, in one batch."""
    return [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=17, temperature=0.9, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=0.8, top_p=0.8, top_k=20, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.7, frequency_penalty=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.8, min_p=0.1, seed=4, ignore_eos=True),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def graph(**parts: Any) -> MakeRunner:
    """A runner whose decode step is made of these parts of ``make_graph``."""
    return partial(build_runner, make_decode=partial(make_graph, **parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


class PlainMaker:
    """A maker whose programs are the functions themselves: buckets and padding without a compiler."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.runs: list[tuple[str, int]] = []  # name of the function and batch size of every program that ran

    def make(self, function, *inputs):  # type: ignore[no-untyped-def]
        self.sizes.append(inputs[0].shape[0])
        function(*inputs)

        def program(*inputs):  # type: ignore[no-untyped-def]
            name = "draw" if isinstance(function, partial) else function.__name__
            self.runs.append((name, inputs[0].shape[0]))
            return function(*inputs)

        return program


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-gqa-tied", "float32"), ("qwen2", "bfloat16"), ("mistral", "float32"), ("gemma3n-panels", "float32")],
)
def test_a_batch_runs_in_the_smallest_bucket_and_padding_harms_nobody(
    name: str, dtype: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    folder = save(make_model(name), tmp_path)
    maker = PlainMaker()
    made = graph(maker=maker, buckets=(2, 5))
    with LLM(folder, dtype=dtype, max_rows=5, **SETTINGS) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params())]
    with LLM(folder, dtype=dtype, make_runner=made, max_rows=5, **SETTINGS) as llm:
        assert maker.sizes == [5] * (1 + len(SAMPLERS)) + [2] * (1 + len(SAMPLERS))  # the largest first
        got = [output.token_ids for output in llm.generate(prompts, params())]
    if dtype == "float32":
        assert got == expected
    else:  # rounds differently with the size of the batch; the answers begin alike
        assert [tokens[0] for tokens in got] == [tokens[0] for tokens in expected]
    assert {size for _, size in maker.runs} == {2, 5}


def test_the_executor_of_that_name_makes_it() -> None:
    assert executor_of("graph") is GRAPH and imported(GRAPH.make) is make_graph


def test_buckets_hold_every_batch() -> None:
    for max_rows in (1, 2, 7, 8, 9, 100, 256, 300):
        sizes = bucket_sizes(max_rows)
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_rows
    assert bucket_sizes(20) == (1, 2, 4, 8, 16, 20)


def test_samplers_cover_every_need() -> None:
    assert covers(SAMPLERS[0], SamplingNeeds()) and not covers(SAMPLERS[0], SamplingNeeds(random=True))
    flags = [field.name for field in fields(SamplingNeeds) if field.name != "num_logprobs"]
    for name in flags:
        needs = SamplingNeeds(**{name: True})  # type: ignore[arg-type]
        assert any(covers(sampler, needs) for sampler in SAMPLERS)
    for num_logprobs in LOGPROB_SIZES:
        needs = SamplingNeeds(num_logprobs=num_logprobs)
        assert covers(SAMPLERS[1], needs) and not covers(SAMPLERS[0], needs)
    most = SamplingNeeds(**dict.fromkeys(flags, True), num_logprobs=LOGPROB_SIZES[-1])  # type: ignore[arg-type]
    assert covers(SAMPLERS[-1], most)


def test_every_need_of_a_request_is_a_program(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Eager's tokens and log-probabilities, and nothing is drawn beside them."""
    maker = PlainMaker()
    made = graph(maker=maker, buckets=(2, 5))
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    kinds = [
        *params(),
        SamplingParams(max_tokens=9, temperature=0.9, seed=6, logit_bias={5: 4.0, 9: -100.0}, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, min_tokens=6, logprobs=0),
        SamplingParams(max_tokens=9, temperature=0.7, repetition_penalty=1.3, logprobs=20, seed=7, ignore_eos=True),
    ]
    many = prompts + prompts[:3]
    with LLM(folder, max_rows=5, **SETTINGS) as llm:
        expected = llm.generate(many, kinds)
    with LLM(folder, make_runner=made, max_rows=5, **SETTINGS) as llm:
        outputs = llm.generate(many, kinds)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        for own, same in zip(output.logprobs or (), other.logprobs or (), strict=True):
            assert [token for token, _ in own.top] == [token for token, _ in same.top]
            values = [own.logprob, *(value for _, value in own.top)]
            assert values == pytest.approx([same.logprob, *(value for _, value in same.top)], abs=1e-4)
    forwards = [size for name, size in maker.runs if name == "_run_forward"]
    assert forwards and forwards == [size for name, size in maker.runs if name == "draw"]  # each step drew by a program


def test_no_garbage_is_collected_during_a_capture(folder: Path) -> None:
    """A collection may destroy an older graph, which makes the capture invalid."""
    seen: list[bool] = []

    class Watching(PlainMaker):
        def make(self, function: Any, *inputs: Any) -> Any:
            seen.append(gc.isenabled())
            return super().make(function, *inputs)

    with LLM(folder, make_runner=graph(maker=Watching(), buckets=(2,)), max_rows=2, **SETTINGS):
        assert seen == [False] * (1 + len(SAMPLERS)) and gc.isenabled()
    with pytest.raises(RuntimeError, match="capture"), no_collection():
        raise RuntimeError("capture")
    assert gc.isenabled()


def test_a_closed_runner_holds_no_program(folder: Path) -> None:
    """NCCL cannot leave a group while a graph holds its collectives."""
    programs: list[weakref.ref[Any]] = []

    class Kept(PlainMaker):
        def make(self, function: Any, *inputs: Any) -> Any:
            program = super().make(function, *inputs)
            programs.append(weakref.ref(program))
            return program

    runners: list[Any] = []

    def keep(*args: Any, **more: Any) -> Any:
        runners.append(graph(maker=Kept(), buckets=(2,))(*args, **more))
        return runners[-1]

    with LLM(folder, make_runner=keep, max_rows=2, **SETTINGS):
        assert programs and all(own() is not None for own in programs)
    gc.collect()
    assert runners and all(own() is None for own in programs)
