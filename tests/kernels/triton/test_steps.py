"""The Triton kernels are enough to run the engine, and a decode step launches as few as it should. Interpreted, on a
CPU."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVBudget, KVDType
from snapstream.exec.eager import EagerDecode
from snapstream.kernels.interface import bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.kernels.triton import interpreter
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = interpreter.interpreted()


@pytest.mark.parametrize("kv_dtype", ["auto", "int4", "int8/int4"])
def test_the_engine_answers_the_same(kv_dtype: KVDType, tmp_path: Path) -> None:
    """Greedy tokens of prompts above and below the budget, every kernel the Triton one."""
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 7)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    budget = KVBudget(num_sink=2, num_topk=14, num_recent=16)

    def run(make_runner: MakeRunner) -> list[list[int]]:
        with LLM(folder, budget=budget, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48,
                 kv_dtype=kv_dtype, make_runner=make_runner, executor="eager", progress=False) as llm:  # fmt: skip
            return [output.token_ids for output in llm.generate(prompts, params)]

    assert run(partial(build_runner, kernels=bind("cpu", "triton"))) == run(build_runner)


def test_products_of_few_tokens_in_a_step(tmp_path: Path) -> None:
    """Prompts and steps of up to 16 tokens, whose products are added in parts, give the logits of plain PyTorch."""
    from snapstream.kernels.triton import dense

    torch.manual_seed(0)
    folder = save(make_model("qwen3", hidden_size=272, intermediate_size=600), tmp_path)
    prompts = [[*range(3, 3 + count)] for count in (3, 16, 17, 5)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
    found = []
    for kernels in (bind("cpu", "torch"), replace(bind("cpu", "triton"), few_linear=dense.few_linear)):
        with LLM(folder, budget="full", max_rows=4, max_model_len=48, progress=False, executor="eager",
                 dtype="float16", make_runner=partial(build_runner, kernels=kernels)) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
        found.append([(entry.logprob, token) for output in outputs
                      for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)])  # fmt: skip
    for (one, token), (other, same) in zip(*found, strict=True):
        assert token == same and abs(one - other) < 0.02


@pytest.mark.parametrize("num_rows", [1, 2, "few"])
def test_launches_of_a_decode_step(num_rows: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation and slot are one kernel per layer. Sums of the residual stream ride on the norms, two per layer
    and one at the end but for the first; with one row both are part of a layer's four products. So are the products of
    few rows of 16-bit numbers.
    """
    from snapstream.kernels.triton import attention, dense

    calls: Counter[str] = Counter()

    def kind(name: str, arguments: tuple[Any, ...]) -> str:
        is_sum = name == "launch_rms_norm" and arguments[1] is not None  # the residual
        return "add_rms_norm" if is_sum else name.removeprefix("launch_")

    for module, name in (
        (attention, "norm_rope_write"), (dense, "launch_rms_norm"),
        (dense, "swiglu"), (dense, "launch_one_linear"),
        (dense, "few_linear"),
    ):  # fmt: skip
        kernel = getattr(module, name)
        monkeypatch.setattr(
            module, name,
            lambda *args, name=name, kernel=kernel, **named: (calls.update([kind(name, args)]),
                                                              kernel(*args, **named))[1],
        )  # fmt: skip
    steps: list[Counter[str]] = []
    step = EagerDecode.step

    def counted(self: EagerDecode, *args: Any) -> Any:
        calls.clear()
        found = step(self, *args)
        steps.append(calls.copy())
        return found

    monkeypatch.setattr(EagerDecode, "step", counted)
    folder, kernels = save(make_model("qwen3"), tmp_path), bind("cpu", "triton")
    kernels = replace(kernels, few_linear=dense.few_linear) if num_rows == "few" else kernels
    with LLM(folder, budget=32, selector=SnapKV(observation_len=8), max_rows=2, max_model_len=48, progress=False,
             executor="eager", dtype="bfloat16" if num_rows == "few" else "float32",
             make_runner=partial(build_runner, kernels=kernels)) as llm:  # fmt: skip
        layers = llm.model_config.num_layers
        llm.generate(
            [[5, 6, 7]] * (1 if num_rows == 1 else 2), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        )
    expected = {"norm_rope_write": layers, "rms_norm": 1, "one_linear": 4 * layers + 1}
    if num_rows != 1:
        expected = {"norm_rope_write": layers, "rms_norm": 1, "add_rms_norm": 2 * layers, "swiglu": layers}
    if num_rows == "few":
        expected |= {"few_linear": 4 * layers + 1}
    assert expected in steps
