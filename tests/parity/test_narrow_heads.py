"""Narrow rows whose kv heads have slots of their own: FP8 with scales per head, int8 with scales per slot, bf16.

The twin keeps a tensor of numbers per head and rounds what goes there by the forms' own definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from evals.uneven import Rounding, RoundingOf
from snapstream.cache.head_rows import write_heads
from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.kernels import fp8, int8
from snapstream.kernels.bound import HeadNorm, KernelVersion, bind
from snapstream.kernels.cpu.native import find_compiler
from snapstream.llm import LLM
from snapstream.models.heads_view import HeadsView
from snapstream.plan.memory import engine_memory
from snapstream.request import SamplingParams
from snapstream.runner.executors import make_graph
from snapstream.runner.model_runner import ModelRunner
from snapstream.start.build import build_runner
from tests.kernels.triton import interpreter
from tests.parity import tape
from tests.parity.checkpoints import make_model, save
from tests.parity.test_capture import OnTapes
from tests.parity.test_heads import BUDGET, GREEDY, SETTINGS, VOTES, heads_of, profile, prompts, twin_answers

__all__ = ["prompts"]  # a fixture


def of_fp8(prompt: Tensor) -> Rounding:
    scale = fp8.scale_of(prompt[None])  # [1]: of the whole prompt, and of what follows
    return lambda tokens: fp8.dequantise(fp8.quantise(tokens, scale), scale)


def of_int8(prompt: Tensor) -> Rounding:
    def rounded(tokens: Tensor) -> Tensor:
        scale = int8.scale_of(tokens)
        return int8.dequantise(int8.quantise(tokens, scale), scale)

    return rounded


def of_bfloat16(prompt: Tensor) -> Rounding:
    return lambda tokens: tokens.bfloat16().float()


ROUNDING: dict[str, RoundingOf] = {"fp8": of_fp8, "int8": of_int8, "bfloat16": of_bfloat16}


@pytest.mark.parametrize(("name", "executor"), [("qwen3", "eager"), ("llama-mha", "looped")])
@pytest.mark.parametrize("kv_dtype", ROUNDING)
def test_answers_are_those_of_the_twin(
    name: str, executor: str, kv_dtype: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    if executor == "looped" and find_compiler() is None:
        pytest.skip("looped steps need a C++ compiler")
    changes: dict[str, Any] = {"executor": executor, "kv_dtype": kv_dtype}
    folder = save(make_model(name), tmp_path / name)
    with LLM(folder, heads=heads_of(folder), **SETTINGS | changes) as llm:
        got = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        assert got == twin_answers(llm, prompts, rounding_of=ROUNDING[kv_dtype])
        assert got != twin_answers(llm, prompts), "the rounding does something"
        cache = cast(ModelRunner, llm.engine.runner).cache
        planned = engine_memory(llm.model_config, llm.config).row_bytes
        assert cache.num_bytes == (llm.config.max_rows + 1) * planned
        assert planned == engine_memory(llm.model_config, replace(llm.config, heads=None)).row_bytes


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("qwen"))


def answers(folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **more: Any) -> list[list[int]]:
    with LLM(folder, heads=profile(folder), **SETTINGS | {"kv_dtype": "fp8"} | more) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(qwen: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(qwen, prompts)


def by_kernels(version: KernelVersion, **parts: Any) -> Callable[..., Any]:
    return partial(build_runner, kernels=bind("cpu", version), **parts)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_compiled_steps_answer_alike(qwen: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    make_decode = partial(make_graph, buckets=(3,), samplers=())
    assert answers(qwen, prompts, make_runner=partial(build_runner, make_decode=make_decode)) == expected


def test_captured_steps_answer_alike(
    qwen: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tape.install(monkeypatch)
    assert answers(qwen, prompts, make_runner=by_kernels("torch", make_decode=OnTapes)) == expected


def test_later_owners_and_samples_have_the_scales_of_their_prompt(
    qwen: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """One row, so that each prompt follows another; then three rows of one prompt."""
    assert answers(qwen, prompts, max_rows=1) == expected
    three = SamplingParams(n=3, max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(qwen, heads=profile(qwen), kv_dtype="fp8", **SETTINGS) as llm:
        samples = llm.generate([prompts[0]], three)[0].samples
        assert [sample.token_ids for sample in samples] == [expected[0]] * 3


class TestTriton:
    pytestmark = interpreter.interpreted()

    def test_its_kernels_serve_rows_in_fp8(
        self, qwen: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        few = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        got = answers(qwen, [prompts[3], prompts[4]], few, make_runner=by_kernels("triton"))
        assert got == [expected[3][:6], expected[4][:6]]

    def test_in_bfloat16_over_fp8_they_see_the_numbers_of_plain_kernels(self, qwen: Path) -> None:
        """A decode step of a layer: the dtype of a GPU, with magnitudes that FP8 cuts and that it loses."""

        slots = profile(qwen).slots(BUDGET, 160)
        spec = KVSpec(
            num_layers=3, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16", kv_dtype="fp8"
        )
        torch.manual_seed(0)
        keys, values = torch.randn(2, 2, 40, 16, dtype=torch.bfloat16) * 30
        queries, heads = torch.randn(8, 4, 16), torch.randn(2, 8, 16).bfloat16()
        heads[0, 4:] *= 1000
        rows, rope = torch.tensor([0, 2]), (torch.ones(2, 1, 16), torch.zeros(2, 1, 16))
        found = []
        for version in ("torch", "triton"):
            kernels = bind("cpu", version)
            cache = KVCache(spec, 2, BUDGET.capacity, "cpu", kernels, heads=slots)
            assert cache.heads is not None
            write_heads(cache, 1, rows.tolist(), keys, values, queries.bfloat16(), VOTES)
            places = cache.heads.places(rows, torch.tensor([40, 40]), torch.tensor([24, 24]))
            out = HeadsView(cache, rows, places, kernels).attend(1, heads, HeadNorm(None, 1e-6), rope)
            found.append((out, cache.k.float(), cache.v.float(), cache.k_scale))
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)
        assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])
