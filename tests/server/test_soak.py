"""The soak of ``benchmarks/soak.py``, short: right answers beside leavers and nonsense, and nothing left over."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import soak


def test_a_short_soak(tmp_path: Path) -> None:
    figures = soak(300, 32, 1, tmp_path / "log", max_waiting=12, num_jobs=24)
    assert figures["failures"] == []
    outcomes = figures["outcomes"]
    assert outcomes["right"] + outcomes["cancelled"] + outcomes["refused"] == 300
    assert min(outcomes["cancelled"], outcomes["refused"], outcomes["tried again"]) > 0, "each must have happened"
