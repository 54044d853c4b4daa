"""The equalities on a GPU: the same engine on `cuda` gives the tokens that it gives on `cpu`.

Skipped where torch sees no GPU. Needs torch, transformers, safetensors and pytest, and runs from the source tree:

    python -m pytest tests/gpu
"""

from __future__ import annotations

import random
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVBudget
from snapstream.config.kv import HeadProfile
from snapstream.exec.row_state import SamplingNeeds
from snapstream.kernels.interface import bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.config_json import fingerprint
from snapstream.models.registry import read_model_config
from snapstream.startup.build import build_runner
from snapstream.types import RequestOutput, SamplingParams
from tests.parity.checkpoints import ARCHITECTURES, VOCAB, make_model, save
from tests.parity.test_heads import uneven

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SMALL = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SELECTOR = SnapKV(observation_len=8)
SIZES = {"hidden_size": 128, "intermediate_size": 128}
QUANTIZED: dict[str, dict[str, int]] = {  # rows of whole groups
    "qwen3": SIZES | {"head_dim": 32}, "gemma3": SIZES | {"head_dim": 32},
    "lfm2": SIZES | {"block_auto_adjust_ff_dim": False}, "gpt-oss": SIZES | {"head_dim": 32},
    "qwen3-moe": SIZES | {"head_dim": 32, "moe_intermediate_size": 64},
    "qwen3.5": SIZES | {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "deepseek-v3": SIZES | {"moe_intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32},
}  # fmt: skip
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
    folder: Path, prompts: list[list[int]], device: str, budget: KVBudget | str, heads: HeadProfile | None = None,
    **options: Any,
) -> list[RequestOutput]:  # fmt: skip
    params = [
        SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0) for i in range(9)
    ]
    executor = "eager" if device == "cpu" else None  # looped decode of a CPU would be compiled first
    with LLM(folder, budget=budget, selector=SELECTOR, device=device, executor=executor, max_rows=4, chunk_len=32,
             max_model_len=160, heads=heads, progress=False, **options) as llm:  # fmt: skip
        return llm.generate(prompts, params)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, but for one answer: devices round differently, and a draw between two tokens may fall either way.
    Log-probabilities agree as long as the tokens do.
    """
    num_equal = []
    for got, want in zip(found, expected, strict=True):
        pairs = zip(got.token_ids, want.token_ids, strict=True)
        num_equal.append(len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
        ours, theirs = ([one.logprob for one in (own.logprobs or [])[: num_equal[-1]]] for own in (got, want))
        assert len(ours) == num_equal[-1] and ours == pytest.approx(theirs, rel=0, abs=1e-3)
    assert sum(num < len(want.token_ids) for num, want in zip(num_equal, expected, strict=True)) <= 1, num_equal


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_those_of_the_cpu(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    assert_same(run(folder, prompts, "cuda", SMALL), run(folder, prompts, "cpu", SMALL))


@pytest.mark.parametrize("name", ["llama-gqa-tied", "llama-dynamic", "qwen3", "gemma3", "gpt-oss", "deepseek-v3-dense"])
def test_tokens_over_full_rows_equal_those_of_the_cpu(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    assert_same(run(folder, prompts, "cuda", "full"), run(folder, prompts, "cpu", "full"))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_tokens_with_quantized_weights_equal_those_of_the_cpu(
    weights: str, name: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = save(make_model(name, **QUANTIZED[name]), tmp_path)
    options: dict[str, Any] = {"weights": weights, "activations": "dtype", "kv_dtype": "float32"}
    assert_same(*(run(folder, prompts, device, SMALL, **options) for device in ("cuda", "cpu")))


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3"])
def test_tokens_over_per_head_budgets_equal_those_of_the_cpu(
    name: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = save(make_model(name), tmp_path)
    model = read_model_config(folder)
    profile = HeadProfile(shares=uneven(model.num_layers, model.num_kv_heads), model=fingerprint(folder))
    assert_same(run(folder, prompts, "cuda", SMALL, profile), run(folder, prompts, "cpu", SMALL, profile))


@pytest.mark.parametrize("max_rows", [1, 7, 16, 17])
def test_half_precision_equals_plain_pytorch(max_rows: int, prompts: list[list[int]], tmp_path: Path) -> None:
    """Products of one token, of few and of more, in captured steps; log-probabilities are those of PyTorch."""
    folder = save(make_model("qwen3", hidden_size=272, intermediate_size=600), tmp_path)
    params, found = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0), []
    for executor, version in (("graph", "triton"), ("eager", "torch")):
        made = partial(build_runner, kernels=bind("cuda", version))  # type: ignore[arg-type]
        with LLM(folder, budget=SMALL, selector=SELECTOR, device="cuda", dtype="float16", executor=executor,
                 max_rows=max_rows, max_model_len=160, progress=False, make_runner=made) as llm:  # fmt: skip
            found.append(llm.generate(prompts * 2, params))
    pairs = [
        pair
        for got, want in zip(*found, strict=True)
        for pair in zip(got.token_ids, want.token_ids, got.logprobs or [], want.logprobs or [], strict=True)
    ]
    same = [abs(one.logprob - other.logprob) for token, like, one, other in pairs if token == like]
    assert len(same) > 0.8 * len(pairs) and sorted(same)[int(0.9 * len(same))] < 0.02  # behind a tie all is different


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
