"""Both forms of the looped kernel compile for GPUs that are not here: hardly a spill, loads under way at barriers."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from benchmarks import compile_looped
from benchmarks.machine import RESULTS
from tests.kernels.triton.test_tools import SHARED_LIMIT, pytestmark, run_module

__all__ = ["pytestmark"]
FEW_BYTES = {"sm_80": 64, "sm_90": 0}  # of a thread, that shapes at the limit of 255 registers spill
MORE_BYTES = {"int4 in groups of 32": 48, "int4 in groups of 128": 104}
THREADS_REGISTERS = 65536  # of a multiprocessor: the program must fit, or the cooperative launch fails


def check(kernels: list[dict[str, Any]]) -> None:
    for entry in kernels:
        assert entry["spill_bytes"] <= MORE_BYTES.get(entry["weights"], FEW_BYTES[entry["arch"]]), entry
        assert entry["shared_bytes"] <= SHARED_LIMIT[entry["arch"]], entry
        assert entry["registers"] * 32 * entry["num_warps"] <= THREADS_REGISTERS, entry
        if entry["form"].startswith(("looped", "ring")):  # before O, gate and up, down, the next QKV or the tables
            assert entry["barriers_with_loads"] >= 4, entry
        if entry["form"] == "no loads ahead":
            assert entry["barriers_with_loads"] <= 1, entry  # the output embedding, behind the last layer
        if entry["form"].startswith("ring"):  # 16 bytes at a time; no wait empties the ring but the one at the end
            assert entry["copies"] == ["LDGSTS.E.BYPASS.128"], entry
            assert set(entry["copies_left"]) == {entry["stages"] - 2, 0}, entry
            assert entry["copies_left"].count(0) == 1, entry


def test_one_model_compiles_with_its_loads_ahead() -> None:
    kernels = json.loads(run_module("benchmarks.compile_looped", "--quick", "--arch", "90"))["kernels"]
    assert {(entry["weights"], entry["batch"]) for entry in kernels} == {
        *product((compile_looped.DENSE, "int4 in groups of 32"), (1, 16))
    }
    check(kernels)


def test_the_record_is_of_this_kernel() -> None:
    newest = max((RESULTS / "compile").glob("*_looped.json"))
    record = json.loads(newest.read_text())
    assert record["sources"] == compile_looped.sources(), f"{newest.name} was made from another kernel"
    dense = [entry for entry in record["kernels"] if entry["weights"] == compile_looped.DENSE]
    found = {(entry["form"], entry["batch"], entry["arch"]) for entry in dense}
    arches, others = ("sm_80", "sm_90"), ("a call per layer", "no loads ahead")
    dots = {("ring, swizzled", 16, arch) for arch in arches}
    forms = ("looped", "ring", "ring, inputs in L1")
    assert found == {*product(forms, compile_looped.BATCHES, arches), *product(others, (1,), arches), *dots}
    codes = [entry for entry in record["kernels"] if entry not in dense]
    assert {entry["form"] for entry in codes} == {"looped"}
    assert {(entry["weights"], entry["batch"], entry["arch"]) for entry in codes} == {
        *product(("int8 in groups of 32", "int4 in groups of 32", "int4 in groups of 128"), (1, 16), arches)
    }
    check(record["kernels"])
