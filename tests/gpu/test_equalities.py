"""The equalities on a GPU: the same engine on `cuda` gives the tokens that it gives on `cpu`.

Skipped where torch sees no GPU. Needs torch, transformers, safetensors and pytest, and runs from the source tree:

    python -m pytest tests/gpu
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVBudget
from snapstream.config.kv import HeadProfile
from snapstream.exec.sampling_state import SamplingNeeds
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.config_json import fingerprint
from snapstream.models.registry import read_model_config
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_heads import uneven

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SMALL = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SELECTOR = SnapKV(observation_len=8)
LENGTHS = (70, 5, 120, 33, 18, 64, 1, 90, 40)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """tf32 would round products to 10 bits; equal tokens need fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def run(
    folder: Path, prompts: list[list[int]], device: str, budget: KVBudget | str, heads: HeadProfile | None = None
) -> list[list[int]]:
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(9)]
    executor = "eager" if device == "cpu" else None  # looped decode of a CPU would be compiled first
    with LLM(folder, budget=budget, selector=SELECTOR, device=device, executor=executor, max_rows=4, chunk_len=32,
             max_model_len=160, heads=heads, progress=False) as llm:  # fmt: skip
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "name", ["llama-mha", "llama-gqa-tied", "llama-llama3", "llama-dynamic", "qwen2", "qwen3", "deepseek-v3-dense"]
)
@pytest.mark.parametrize("budget", ["full", SMALL])
def test_tokens_equal_those_of_the_cpu(
    name: str, budget: KVBudget | str, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = save(make_model(name), tmp_path)
    assert run(folder, prompts, "cuda", budget) == run(folder, prompts, "cpu", budget)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3"])
def test_tokens_over_per_head_budgets_equal_those_of_the_cpu(
    name: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = save(make_model(name), tmp_path)
    model = read_model_config(folder)
    profile = HeadProfile(shares=uneven(model.num_layers, model.num_kv_heads), model=fingerprint(folder))
    assert run(folder, prompts, "cuda", SMALL, profile) == run(folder, prompts, "cpu", SMALL, profile)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)
    with LLM(folder, budget=SMALL, selector=SELECTOR, device="cuda", dtype=dtype, max_model_len=160,
             progress=False) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params)
    assert all(len(output.token_ids) == 24 for output in outputs)
    assert all(entry.logprob <= 0.0 for output in outputs for entry in output.logprobs or [])


def test_a_decode_step_never_waits_for_the_host(prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    with LLM(
        folder, budget=SMALL, selector=SELECTOR, device="cuda", max_rows=4, max_model_len=160, progress=False
    ) as llm:
        llm.generate(prompts[:4], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        runner: Any = llm.engine.runner
        rows = torch.arange(4, device="cuda")
        needs = SamplingNeeds.of([SamplingParams(temperature=0.7, top_p=0.9, logprobs=2)])
        with torch.inference_mode():
            runner.decode.step(rows, needs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                runner.decode.step(rows, needs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
