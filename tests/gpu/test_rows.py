"""Rows in FP8 and of integers on the device: kernels store the reference's bytes, the engine gives the CPU's tokens.

FP8 is skipped below compute capability 8.9, where start-up refuses it.

    python -m pytest tests/gpu/test_rows.py
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVBudget, KVDType
from snapstream.config.values import FP8_CAPABILITY
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.kernels.triton import checks_rows
from tests.parity.checkpoints import VOCAB, make_model, save

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
    reason="this GPU does not convert FP8",
)
INTEGERS = ("int8", "int4", "int8/int4")
KINDS = (pytest.param("fp8", marks=needs_fp8), *INTEGERS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)
SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8), "max_rows": 4,
    "chunk_len": 32, "max_model_len": 160, "progress": False, "kv_dtype": "fp8",
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 120, 33, 18)]


@needs_triton
@needs_fp8
@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_decode_attention(head_dim: int, dtype: torch.dtype) -> None:
    checks_rows.check_decode_attention(32, 8, head_dim, 4100, [4100, 1, 2049, 129], dtype, "cuda")


@needs_triton
@dtypes
@pytest.mark.parametrize("kv_dtype", INTEGERS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_rows_of_codes(head_dim: int, kv_dtype: KVDType, dtype: torch.dtype) -> None:
    checks_rows.check_rows_of_codes(kv_dtype, 32, 8, head_dim, [4100, 1, 2049, 129], 4100, dtype, "cuda")


@needs_triton
@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_codes_of_no_number(kv_dtype: KVDType) -> None:
    checks_rows.check_codes_of_no_number(kv_dtype, "cuda")


@needs_triton
@needs_fp8
@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_what_is_stored(head_dim: int, dtype: torch.dtype) -> None:
    checks_rows.check_norm_rope_write(32, 8, head_dim, True, dtype, "cuda")
    checks_rows.check_gather_rows(8, head_dim, 5000, dtype, "cuda")


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("executor", ["eager", "graph"])
def test_tokens_equal_those_of_the_cpu(executor: str, kv_dtype: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    found = []
    for device, how in (("cpu", "eager"), ("cuda", executor)):
        with LLM(folder, device=device, executor=how, **SETTINGS | {"kv_dtype": kv_dtype}) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, GREEDY)])
    assert found[0] == found[1]


@needs_triton
@pytest.mark.parametrize("kv_dtype", ["auto", *KINDS])
@pytest.mark.parametrize("executor", ["eager", "graph"])
def test_nothing_is_compiled_after_the_start(
    kv_dtype: str, executor: str, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    from snapstream.kernels.triton import attention, dense, prefill, rows, scores

    for module in (attention, dense, prefill, rows, scores):  # what earlier tests have compiled is no help
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    compiled: list[Any] = []
    with LLM(folder, device="cuda", executor=executor, **SETTINGS | {"kv_dtype": kv_dtype}) as llm:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
        llm.generate(prompts, GREEDY)
    assert not compiled
