"""Kernels compile for GPUs that are not here, without spilling, within the memory a multiprocessor has."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from benchmarks import compile_kernels
from benchmarks.machine import RESULTS
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FEW_BYTES = 48  # of a thread, that products with codes in groups of 64 and 128 may spill
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}


def run_module(*args: str) -> str:
    """A benchmark in a process of its own: kernels are either interpreted or compiled from the first import on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *args], capture_output=True, text=True, env=environment, timeout=5 * HANG_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_main_shapes_compile_without_spills() -> None:
    kernels = json.loads(run_module("benchmarks.compile_kernels", "--quick"))["kernels"]
    assert {entry["kernel"] for entry in kernels} == {
        "decode_split_kernel", "decode_merge_kernel", "rope_write_kernel", "rms_norm_kernel", "swiglu_kernel",
        "window_lse_kernel", "votes_kernel", "gather_row_kernel", "grouped_linear_kernel",
        "code_linear_kernel", "conv_step_kernel", "memory_step_kernel", "one_linear_kernel", "few_linear_kernel",
        "prefill_attention_kernel", "store_codes_kernel",
    }  # fmt: skip
    integers = {(entry["kernel"], entry["rows"]) for entry in kernels if entry["rows"] in ("int8", "int4", "int8/int4")}
    assert integers >= set(product(("decode_split_kernel", "store_codes_kernel"), ("int8", "int4", "int8/int4")))
    reads_fp8 = {entry["kernel"] for entry in kernels if entry["rows"] == "fp8"}
    assert reads_fp8 >= {"decode_split_kernel", "rope_write_kernel", "gather_row_kernel", "grouped_linear_kernel"}
    assert {entry["arch"] for entry in kernels if entry["rows"] == "fp8"} == {"sm_90"}
    assert {entry["head_dim"] for entry in kernels} == {0, *compile_kernels.COMMON_DIMS}  # 0: has no heads
    check_limits(kernels)
    for entry in kernels:  # two programs of decode attention share a multiprocessor: configs.py counts on it
        if entry["kernel"] == "decode_split_kernel":
            assert 2 * entry["shared_bytes"] <= SHARED_LIMIT[entry["arch"]], entry
            assert 2 * entry["registers"] * 32 * entry["num_warps"] <= 65536, entry


def check_limits(kernels: list[dict[str, Any]]) -> None:
    for entry in kernels:
        assert entry["shared_bytes"] <= SHARED_LIMIT[entry["arch"]], entry
        is_rare = entry["op"] == "code_linear" and "groups of 32" not in entry["rows"]
        assert entry["spill_bytes"] <= (FEW_BYTES if is_rare else 0), entry
        takes_all = entry["kernel"] in (
            "one_linear_kernel",
            "prefill_attention_kernel",
        )  # of the registers that there are
        if entry["head_dim"] in compile_kernels.COMMON_DIMS and not takes_all:
            assert entry["registers"] <= compile_kernels.MOST_REGISTERS, entry


def test_the_record_has_every_shape_without_spills() -> None:
    """All head dimensions and dtypes, too slow to compile here; ``python -m benchmarks.compile_kernels --save``.

    That the record was made from the kernels as they are now is a test of ``make test``:
    ``tests/unit/benchmarks/test_benchmarks.py``.
    """
    record = json.loads(max((RESULTS / "compile").glob("*_triton.json")).read_text())
    found = {(entry["head_dim"], entry["dtype"], entry["arch"]) for entry in record["kernels"]}
    assert found == set(product((0, 64, 80, 96, 128, 192, 256, 576), ("bf16", "fp16", "fp32"), ("sm_80", "sm_90")))
    check_limits(record["kernels"])
    of_latents = [entry for entry in record["kernels"] if entry["op"] == "latent_attention"]
    assert of_latents and not any(entry["spill_bytes"] for entry in of_latents)


def test_the_benchmark_runs() -> None:
    result = json.loads(run_module("benchmarks.kernels", "--smoke"))
    assert {case["op"] for case in result["figures"]["cases"]} >= {"decode_attention", "snapkv_scores", "gather_rows"}
