"""The GPU suite runs from end to end on tiny shapes, and a failing or slow section costs only itself."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_tables
from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite import speed, suite
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.peers_kvpress import kvpress
from benchmarks.gpu_suite.suite import Bench, Figures, Section, run
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]

# transformers' parts take long to import and to generate; they are run by hand with --smoke.
QUICK = [
    "decode_8b",
    "decode_kernel",
    "prefill_8b",
    "largest_batch",
    "streams",
    "prefixes",
    "spec_prefill",
    "requests",
    "decode_8b_fp8",
    "narrow_linear",
    "decode_8b_narrow",
    "decode_small",
    "attention",
    "latent_kernel",
    "decode_lite",
    "prefill_lite",
    "experts_kernel",
]


def test_smoke_run_fills_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sub" / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(out), "--smoke", "--only", *QUICK])
    assert command.main() == 0
    result = json.loads(out.read_text())
    assert list(result["sections"]) == ["ceilings", *QUICK]
    assert all(entry["figures"] and entry["error"] is None for entry in result["sections"].values())
    assert result["ceilings"]["read_gb_per_s"] > 0 and result["torch"]
    kinds = {
        name: {f["kv_dtype"] for f in result["sections"][name]["figures"]} for name in ("decode_8b", "decode_8b_fp8")
    }
    assert kinds == {"decode_8b": {"auto"}, "decode_8b_fp8": {"fp8"}}
    (prefill,) = result["sections"]["prefill_8b"]["figures"]
    assert 0 < prefill["compress_share"] < 1
    assert all(entry["about"] and not entry["is_running"] for entry in result["sections"].values())
    page = gpu_tables.document(result, out.name)
    assert all(f"## {name}" in page for name in QUICK)
    (answers,) = result["sections"]["requests"]["figures"]
    assert answers["batch"] * answers["output_len"] / answers["seconds"] == pytest.approx(answers["tokens_per_s"])
    assert {figure["executor"] for figure in result["sections"]["decode_8b"]["figures"]} == {"graph", "eager"}


def test_kvpress_joins_in_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that prunes nothing; the section asks for a quarter of the prompt."""
    ratios: list[float] = []

    class Press:
        def __init__(self, compression_ratio: float) -> None:
            ratios.append(compression_ratio)

        def __call__(self, model: Any) -> Any:
            return nullcontext()

    bench = Bench(Device("cpu"), True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [figure["skipped"] for figure in kvpress(bench)] == ["kvpress is not installed"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(SnapKVPress=Press, __spec__=object()))
    with torch.inference_mode():
        ours, theirs = kvpress(bench)
    assert ours["slots"] == 64 and ours["prefill_s"] > 0 and theirs["step_ms"] > 0
    assert all(int(256 * (1 - ratio)) == 64 for ratio in ratios)
    assert theirs["slots"] == 256  # what its cache holds, not what was asked for


def test_a_failing_section_keeps_its_figures_and_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: Bench) -> Figures:
        yield {"a": 1}
        raise RuntimeError("no such kernel")

    def endless(bench: Bench) -> Figures:
        while True:
            yield {"b": 2}

    ticks = count()
    monkeypatch.setattr(suite, "perf_counter", lambda: float(next(ticks)))  # a second passes whenever it is read
    sections = [Section("fails", fails, 9), Section("endless", endless, 3), Section("late", fails, 9)]
    out = tmp_path / "gpu.json"
    run(sections[:2], Bench(Device("cpu"), True), 60, out, {"name": "x"})
    found = json.loads(out.read_text())["sections"]
    assert found["fails"]["figures"] == [{"a": 1}] and "no such kernel" in found["fails"]["error"]
    assert found["endless"]["is_cut"] and found["endless"]["error"] is None
    assert found["endless"]["figures"] == [{"b": 2}] * 4  # the fourth came after more than 3 s
    run(sections, Bench(Device("cpu"), True), 1, out, {"name": "x"})  # no time: nothing starts
    found = json.loads(out.read_text())["sections"]
    assert all(entry["is_cut"] and not entry["figures"] for entry in found.values())


STUCK = """
import sys, threading
from pathlib import Path
from benchmarks.gpu_suite import suite
from benchmarks.gpu_suite.device import Device

is_stuck = threading.Event()

class Timer(threading.Thread):  # goes off when the section is stuck, however fast it came there
    def __init__(self, seconds, end):
        super().__init__(target=lambda: (is_stuck.wait(), print("at", seconds), end()), daemon=True)

def stuck(bench):
    yield {"a": 1}
    is_stuck.set()
    threading.Event().wait()

suite.threading.Timer = Timer
bench = suite.Bench(Device("cpu"), True)
suite.run([suite.Section("stuck", stuck, 9)], bench, 600, Path(sys.argv[1]), {"name": "x"}, 15)
"""


def test_a_figure_that_does_not_come_back_ends_the_run(tmp_path: Path) -> None:
    """In a process of its own, which ends itself: with the figures so far, when its time and grace are over."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", STUCK, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1 and "at 615\ntime is over" in done.stdout
    result = json.loads(out.read_text())
    assert result["sections"]["stuck"]["figures"] == [{"a": 1}]
    assert result["sections"]["stuck"]["is_cut"] and result["seconds"] > 0


def test_all_sections_fit_their_names() -> None:
    sections = command.sections()
    assert len({section.name for section in sections}) == len(sections)
    assert all(section.about for section in sections)


def test_a_section_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(tmp_path / "o"), "--smoke", "--only", "nonsense"])
    with pytest.raises(SystemExit, match="no section nonsense"):
        command.main()


def test_a_section_starts_only_with_half_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that has begun cannot be cut, and the whole command has a limit of its own."""
    monkeypatch.setattr(suite, "perf_counter", lambda: 0.0)  # no time passes

    def one(bench: Bench) -> Figures:
        yield {"a": 1}

    out = tmp_path / "gpu.json"
    run([Section("long", one, 100), Section("short", one, 50)], Bench(Device("cpu"), True), 40, out, {"name": "x"})
    found = json.loads(out.read_text())["sections"]
    assert found["long"]["is_cut"] and not found["long"]["figures"]
    assert found["short"]["figures"] == [{"a": 1}]


def test_the_largest_batch_steps_down_where_the_plan_was_too_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    make = speed.make_runner

    def runner(bench: Bench, decoder: Any, slots: int, batch: int, *rest: Any, **more: Any) -> Any:
        tried.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("too much")
        return make(bench, decoder, slots, batch, *rest, **more)

    monkeypatch.setattr(speed, "make_runner", runner)
    with torch.inference_mode():
        figures = list(speed.largest_batch(Bench(Device("cpu"), True)))
    assert tried[:2] == [4, 3] and {(figure["planned_rows"], figure["batch"]) for figure in figures} == {(4, 3)}
