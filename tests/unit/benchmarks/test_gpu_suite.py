"""The GPU suite runs from end to end on tiny shapes, and a failing or slow section costs only itself."""

from __future__ import annotations

import json
import re
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
from benchmarks.gpu_suite import apart, speed, suite
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.peers_kvpress import kvpress
from benchmarks.gpu_suite.suite import Bench, Figures, Section, run
from benchmarks.gpu_tables import WANTED
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
    "drafts",
    "decode_8b_fp8",
    "decode_8b_heads",
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
    assert {f["heads"] for f in result["sections"]["decode_8b_heads"]["figures"]} == {"uneven"}
    (prefill,) = result["sections"]["prefill_8b"]["figures"]
    assert 0 < prefill["compress_share"] < 1
    assert all(entry["about"] and not entry["is_running"] for entry in result["sections"].values())
    page = gpu_tables.document({out.name: result})
    assert all(f"### {name}" in page for name in QUICK)
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


def test_a_rehearsal_loses_only_what_hangs_and_what_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r" / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(out), "--rehearse"])
    assert command.main() == 0
    found = json.loads(out.read_text())["sections"]
    names = [section.name for section in command.sections()]
    assert [name for name in found if name not in ("hangs", "dies")] == names
    assert all(found[name]["figures"] == [{"value": len(name)}] for name in found)
    assert {name for name in found if found[name]["error"]} == {"hangs", "dies"}
    assert found["hangs"]["is_cut"] and [path.name for path in out.parent.iterdir()] == ["gpu.json"]


def test_the_next_run_begins_with_what_is_left(tmp_path: Path) -> None:
    out, started = tmp_path / "gpu.json", []

    def command_of(name: str, seconds: float, part: Path) -> list[str]:
        started.append(name)
        return [sys.executable, "-m", "benchmarks.gpu_suite.apart", name, str(part)]

    sections = [apart.Apart("short", 60, ""), apart.Apart("long", 1000, "")]
    found = apart.run_apart(sections, command_of, out, 100)["sections"]
    assert found["short"]["figures"] and apart.is_waiting(found["long"])
    found = apart.run_apart(sections, command_of, out, 2000)["sections"]
    assert started == ["short", "long"] and all(entry["figures"] for entry in found.values())


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


# A result of the GPU suite becomes a page: every wanted figure has its line, reached or not, measured or not.

HEAD = {"name": "gpu_suite", "device": "NVIDIA H200", "multiprocessors": 132, "torch": "2.13.0", "date": "2026-01-02",
        "commit": "abc", "command": "python -m benchmarks.gpu_suite --out gpu.json", "seconds": 499.0}  # fmt: skip


def section(*figures: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"about": "what it is", "figures": list(figures), "error": None, "is_cut": False, "seconds": 3.0} | changes


def peer(engine: str, batch: int, rate: float) -> dict[str, Any]:
    return {"engine": engine, "batch": batch, "tokens_per_s": rate}


def result() -> dict[str, Any]:
    """All that is wanted, just reached."""
    long, middle = {"prompt_len": 131_064}, {"prompt_len": 32_768}
    return {**HEAD, "sections": {
        "decode_8b": section({"executor": "eager", "batch": 64, "share_of_read": 0.1},
                             {"executor": "graph", "batch": 64, "share_of_read": 0.8},
                             {"executor": "graph", "batch": 1, "share_of_read": 0.7}),
        "decode_kernel": section({"model": "Llama-3.1-8B", "batch": 64, "share_of_read": 0.85}),
        "prefill_8b": section({**middle, "mfu": 0.55, "compress_share": 0.5, "extra_gib": 9.0},
                              {**long, "mfu": 0.1, "compress_share": 0.01, "extra_gib": 2.0}),
        "largest_batch": section({"slots": 131_072, "speedup_over_full": 1.0, "peak_gib": 97.5, "planned_gib": 100.0},
                                 {"slots": 32_768, "speedup_over_full": 4.3, "peak_gib": 100.0, "planned_gib": 100.0}),
        "prefixes": section({"speedup": 12.0, "slowdown": 1.02}, {"p99_ratio": 1.5}),
        "streams": section({"is_default": False, "p99_ratio": 9.0}, {"is_default": True, "p99_ratio": 2.0}),
        "peers": section(peer("snapstream graph", 1, 11.0), peer("snapstream graph", 16, 30.0),
                         peer("transformers static cache", 1, 10.0), peer("transformers static cache", 16, 20.0)),
        "requests": section(peer("snapstream engine", 64, 120.0)),
        "peers_continuous": section(peer("transformers continuous", 64, 100.0)),
        "spec_prefill": section({"seconds": 1.0}, {"speedup": 8.0}, {"speedup": 6.0}),
    }}  # fmt: skip


def rows(found: dict[str, Any]) -> list[list[str]]:
    lines = gpu_tables.wanted_table(found).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_all_reached_at_the_limits() -> None:
    table = rows(result())
    assert [row[3] for row in table] == ["yes"] * len(WANTED)
    assert [row[2] for row in table] == ["80 %", "70 %", "85 %", "4.3x", "1 %", "2 GiB", "55 %", "2x", "1.1x", "1.2x",
                                         "8x", "2.5 %", "12x", "1.02x", "1.5x"]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "where", "name", "value"),
    [
        (0, ("decode_8b", 1), "share_of_read", 0.79),
        (1, ("decode_8b", 2), "share_of_read", 0.69),
        (2, ("decode_kernel", 0), "share_of_read", 0.84),
        (3, ("largest_batch", 1), "speedup_over_full", 4.2),
        (4, ("prefill_8b", 1), "compress_share", 0.011),
        (5, ("prefill_8b", 1), "extra_gib", 2.1),
        (6, ("prefill_8b", 0), "mfu", 0.54),
        (7, ("streams", 1), "p99_ratio", 2.1),
        (8, ("peers", 3), "tokens_per_s", 30.0),
        (9, ("requests", 0), "tokens_per_s", 100.0),
        (10, ("spec_prefill", 1), "speedup", 7.9),
        (11, ("largest_batch", 0), "peak_gib", 104.0),
        (12, ("prefixes", 0), "speedup", 11.9),
        (13, ("prefixes", 0), "slowdown", 1.03),
        (14, ("prefixes", 1), "p99_ratio", 1.6),
    ],
)
def test_each_line_looks_at_its_own_figure(line: int, where: tuple[str, int], name: str, value: float) -> None:
    found = result()
    found["sections"][where[0]]["figures"][where[1]][name] = value
    assert [i for i, row in enumerate(rows(found)) if row[3] != "yes"] == [line]
    assert rows(found)[line][3] == "**no**"


def test_what_is_missing_is_named() -> None:
    nothing = {**HEAD, "sections": {}}
    assert {row[3] for row in rows(nothing)} == {"not measured"}
    found = result()
    found["sections"]["peers"]["figures"].pop()  # a batch of ours without its peer
    assert rows(found)[8][3] == "not measured"


def test_a_page_shows_every_line_and_what_went_wrong() -> None:
    found = result()
    found["sections"]["streams"] = section(error="Traceback\n  x\nRuntimeError: no memory\n")
    found["sections"]["requests"] |= {"is_cut": True}
    found["sections"]["late"] = section(is_cut=True, seconds=0.0)
    page = gpu_tables.document({"results/x.json": found})
    assert "`results/x.json`" in page and "| device | NVIDIA H200 |" in page
    assert "Failed: `RuntimeError: no memory`" in page and "Cut by time after 3 s." in page
    assert "### late\n\nWhat it is.\n\nNot started: no time was left." in page
    assert "| executor | batch | share_of_read |\n|---|---|---|\n| eager | 64 | 0.1 |" in page
    assert page.count("| seconds |\n|---|\n| 1 |") == 1  # lines of another kind have a table of their own


def test_the_command_keeps_the_json_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, page = tmp_path / "gpu.json", tmp_path / "docs.md"
    source.write_text(json.dumps(result()))
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(gpu_tables, "RESULTS", results)
    monkeypatch.setattr(gpu_tables, "DOCUMENT", page)
    monkeypatch.setattr(sys, "argv", ["gpu_tables", str(source)])
    gpu_tables.main()
    kept = results / "h200" / "2026-01-02_gpu_suite.json"
    assert json.loads(kept.read_text()) == result()
    assert page.read_text() == gpu_tables.document({"benchmarks/results/h200/2026-01-02_gpu_suite.json": result()})
    for wrong, words in (({"name": "decode"}, "no result"), ({"name": "gpu_suite"}, "not measured on a GPU")):
        source.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit, match=words):
            gpu_tables.main()


def test_the_page_in_the_tree_is_of_the_results_that_are_kept() -> None:
    assert gpu_tables.DOCUMENT.read_text() == gpu_tables.document(gpu_tables.kept())


def test_the_calls_name_tests_and_sections_that_exist() -> None:
    """The script that a GPU runs first: a wrong file, -k expression or section would cost its time."""
    script = (ROOT / "benchmarks/gpu_suite/calls.sh").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests/gpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    words = {word for found in re.findall(r'-k "?([^"\n]+)', script) for word in re.findall(r"[\w-]+", found)}
    words -= {"and", "or", "not", "expression"}
    assert len(words) > 1 and [word for word in words if word not in done.stdout] == []
    assert [file for file in re.findall(r"tests/gpu/\w+\.py", script) if not (ROOT / file).exists()] == []
    sections = [name for found in re.findall(r"^  suite \d+ (.+)$", script, re.MULTILINE) for name in found.split()]
    assert len(sections) == len(set(sections)) > 10
    assert set(sections) <= {section.name for section in command.sections()}
