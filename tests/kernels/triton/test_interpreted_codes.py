"""The Triton product with int8 and int4 weights equals its reference, under Triton's interpreter."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import WeightForm
from snapstream.kernels.bound import Kernels, bind
from snapstream.llm import LLM
from snapstream.models.narrow import Grouped, make_weight
from snapstream.models.row_major import FEW
from snapstream.request import SamplingParams
from snapstream.start.build import MakeRunner, build_runner
from tests.kernels.triton import checks_codes, interpreter
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = interpreter.interpreted()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_tokens", "group", "dtype"),
    [(1, 32, torch.float32), (16, 128, torch.bfloat16), (33, 32, torch.bfloat16), (17, 64, torch.float16)],
)
def test_tokens_and_groups(num_tokens: int, group: int, dtype: torch.dtype, bits: int) -> None:
    checks_codes.check_code_linear(num_tokens, 45, 9 * group, bits, group, dtype, "cpu")


def test_more_tokens_than_a_tile() -> None:
    checks_codes.check_code_linear(70, 33, 64, 4, 32, torch.bfloat16, "cpu")


def test_refusals() -> None:
    checks_codes.check_refusals("cpu")


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_a_weight_chooses_by_the_number_of_tokens(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to ``FEW`` tokens meet the codes, more of them widened rows; both are the same product."""
    from snapstream.kernels.triton import codes

    calls: list[int] = []
    launch = codes.launch_code_linear
    monkeypatch.setattr(codes, "launch_code_linear", lambda x, *rest: (calls.append(len(x)), launch(x, *rest))[1])
    weight = make_weight(WeightForm(width=width, group=32), (3, 40, 64), torch.float32, "cpu")  # type: ignore[arg-type]
    weight.fill(torch.randn(3, 40, 64))
    own = weight[1]
    assert isinstance(own, Grouped)
    kernels: Kernels = bind("cpu", "triton")
    for count in (FEW, FEW + 1):
        x, bias = torch.randn(count, 64), torch.randn(40)
        torch.testing.assert_close(own.multiply(x, bias, kernels), x @ own.dense().T + bias, rtol=1e-4, atol=1e-4)
    assert calls == [FEW]


def test_the_engine_answers_the_same(tmp_path: Path) -> None:
    """Greedy tokens over int4 and int8 weights: plain PyTorch widens, the kernels read codes."""
    folder = save(make_model("qwen3", hidden_size=64, head_dim=16, intermediate_size=96), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=32, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48, weights="int4",
                 activations="dtype", make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    assert run(partial(build_runner, kernels=bind("cpu", "triton"))) == run(build_runner)
