"""After the start no kernel is compiled: every launch is of a kind that the warm-up has launched."""

from __future__ import annotations

import inspect
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.kernels.interface import bind
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.startup.build import build_runner
from snapstream.types import SamplingParams
from tests.kernels.triton import interpreter
from tests.parity.checkpoints import VOCAB, make_model, save

pytestmark = interpreter.interpreted()

KERNELS = {"decode_split_kernel", "rope_write_kernel", "rms_norm_kernel", "swiglu_kernel", "window_lse_kernel",
           "votes_kernel", "gather_row_kernel"}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What Triton would compile for the launches so far: kernels with all that their machine code depends on."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[tuple[Any, ...]] = set()
    run = InterpretedFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        settings = (kernel.kwargs.get(key) or () for key in ("do_not_specialize", "do_not_specialize_on_alignment"))
        fixed = {name for names in settings for name in names}
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        kinds = []
        for name, value in sorted(named.items()):
            parameter = inspect.signature(kernel.fn).parameters.get(name)
            is_constant = parameter is None or "constexpr" in str(parameter.annotation)  # an option is one, too
            kinds.append((name, value if is_constant else kind_of(value, name in fixed)))
        found.add((kernel.__name__, tuple(kinds)))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return found


def kind_of(value: Any, is_fixed: bool) -> Any:
    """How an argument enters the choice of machine code (Triton 3.6, ``JITFunction``)."""
    if isinstance(value, torch.Tensor):
        return value.dtype, is_fixed or value.data_ptr() % 16 == 0
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64
        return width if is_fixed else (width, value == 1, value % 16 == 0)
    return type(value)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("qwen3", "auto"), ("qwen3", "fp8"), ("qwen3", "int8/int4"), ("glm4-moe", "auto"), ("qwen3.5", "auto")],
)
def test_no_request_launches_a_kernel_of_a_new_kind(
    tmp_path: Path, launched: set[tuple[Any, ...]], name: str, kv_dtype: Any
) -> None:
    """Of ``glm4-moe`` the first layer has no experts."""
    changes = {"head_dim": 32} if "int" in kv_dtype else {}
    folder = save(make_model(name, **changes), tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (61, 3)]
    sampling = [SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, n=n) for n in (2, 1)]
    expected = KERNELS | ({"grouped_linear_kernel"} if "moe" in name else set())
    if "int" in kv_dtype:
        expected = expected - {"gather_row_kernel"} | {"store_codes_kernel"}
    expected |= {"conv_step_kernel", "memory_step_kernel"} if name == "qwen3.5" else set()
    with LLM(
        folder, budget=40, selector=SnapKV(observation_len=8), max_rows=4, max_model_len=70, chunk_len=32,
        kv_dtype=kv_dtype, executor="eager", progress=False,
        make_runner=partial(build_runner, kernels=bind("cpu", "triton")),
    ) as llm:  # fmt: skip
        at_start = set(launched)
        assert {name for name, _ in at_start} >= expected
        launched.clear()
        llm.generate(prompts, sampling)
    assert {name for name, _ in launched} >= expected
    assert launched <= at_start
