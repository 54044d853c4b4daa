"""A result of the GPU suite becomes entries of the table; what is not in it stays."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill_table
from snapstream.kernels.prefill import table

PLACE = {"capability": "9.0", "dtype": "bfloat16", "head_dim": 128}


def chunk(way: str, keys: int, ms: float, first_ms: float | None = None) -> dict[str, Any]:
    return {"way": way, "kind": "chunk", "chunk": 512, "keys": keys, "ms": ms, "first_ms": first_ms or ms, **PLACE}


def several(way: str, kind: str, ms: float) -> dict[str, Any]:
    return {"way": way, "kind": kind, "ms": ms, "first_ms": ms, **PLACE}


FIGURES = [
    {"way": "flash_attn", "error": "needs the package flash_attn, which is not installed", **PLACE},
    chunk("sdpa_flash", 8192, 1.0), chunk("sdpa_flash", 131_072, 20.0),
    chunk("sdpa_cudnn", 8192, 0.9, first_ms=33.0), chunk("sdpa_cudnn", 131_072, 18.0),
    chunk("sdpa_efficient", 8192, 0.5),  # no figure at the other point
    chunk("reference", 8192, 0.1),
    several("sdpa_flash", "loop", 3.0), several("sdpa_flash", "packed", 1.0), several("sdpa_cudnn", "loop", 2.0),
]  # fmt: skip
RESULT = {"device": "H200", "date": "2026-01-02", "torch": "2.13.0", "sections": {"attention": {"figures": FIGURES}}}


def test_orders() -> None:
    """cuDNN is faster but for its plans: 32 ms more in the first call are 1 ms in each of 32."""
    assert prefill_table.chunk_order(FIGURES) == ("sdpa_flash", "sdpa_cudnn", "reference")
    without_plans = [figure | {"first_ms": figure["ms"]} if "ms" in figure else figure for figure in FIGURES]
    assert prefill_table.chunk_order(without_plans) == ("sdpa_cudnn", "sdpa_flash", "reference")
    assert prefill_table.packed_order(FIGURES) == ("sdpa_flash",)
    assert prefill_table.packed_order([*FIGURES, several("sdpa_cudnn", "loop", 0.9)]) == ()


def test_the_command_fills_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, result = tmp_path / "table.json", tmp_path / "gpu.json"
    shutil.copy(table.FILE, file)
    result.write_text(json.dumps(RESULT))
    monkeypatch.setattr(sys, "argv", ["prefill_table", str(result), "--table", str(file)])
    before = table.read(file)
    for _ in range(2):  # a second time replaces the entry
        prefill_table.main()
        after = table.read(file)
        assert len(after) == len(before) + 1
    entry = table.find(after, "9.0", "bfloat16", 128)
    assert entry.chunk == ("sdpa_flash", "sdpa_cudnn", "reference")
    assert entry.measured == "H200, 2026-01-02, PyTorch 2.13.0 (gpu.json)"
    assert set(before) < set(after)


def test_a_result_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x.json has no figures of the section attention on a GPU"):
        prefill_table.entries_of(
            {"sections": {"attention": {"figures": [FIGURES[1] | {"capability": None}]}}}, "x.json"
        )
