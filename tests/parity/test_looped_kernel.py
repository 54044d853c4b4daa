"""Executor ``looped`` of a GPU gives eager's tokens: its kernel under Triton's interpreter, one program alone.

What stands in for captures makes programs of nothing but the function. On a GPU: ``tests/gpu/test_looped.py``.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from snapstream.config import KVBudget
from snapstream.exec.eager import DecodeStep, StepParts
from snapstream.exec.looped_gpu import make_looped
from snapstream.exec.sampling_state import SamplingNeeds
from snapstream.kernels.interface import bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.kernels.triton.interpreter import interpreted
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = interpreted()
pytest.importorskip("triton")


class _AsItIs:
    """Counts what a capture would hold."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    def make(self, function: Any, *inputs: Any) -> Any:
        self.sizes.add(len(inputs[0]))
        function(*inputs)
        return function


def looped(maker: _AsItIs, parts: StepParts) -> DecodeStep:
    return make_looped(parts, maker, (SamplingNeeds(),))


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_answers_are_those_of_eager(weights: Any, tmp_path: Path) -> None:
    """Prompts above and below the budget, three rows in buckets of 1, 2 and 3, one of which draws with a seed.

    Weights of int4 are three forms: int4 in MLPs, int8 around attention and in the tables.
    """
    sizes = {} if weights == "auto" else {"hidden_size": 64, "intermediate_size": 96}  # groups of 32
    folder = save(make_model("qwen3", head_dim=16, **sizes), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7, 20)]
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=2, temperature=0.8, seed=4, ignore_eos=True)
    budget, maker = KVBudget(num_sink=2, num_topk=14, num_recent=16), _AsItIs()

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=budget, selector=SnapKV(observation_len=8), max_rows=3, max_model_len=64,
                 weights=weights, activations="dtype", make_runner=make_runner, executor="eager",
                 progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, [greedy, drawn, greedy])]

    kernels = bind("cpu", "triton")
    got = run(partial(build_runner, kernels=kernels, make_decode=partial(looped, maker)))
    assert got == run(build_runner)
    assert maker.sizes == {1, 2, 3}


def test_what_the_kernel_cannot_run_is_refused(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", head_dim=16), tmp_path)
    with pytest.raises(ValueError, match="executor 'looped': max_rows is 17; the GPU kernel takes up to 16"):
        LLM(folder, budget=64, max_rows=17, executor="eager", progress=False,
            make_runner=partial(build_runner, make_decode=partial(looped, _AsItIs())))  # fmt: skip
