"""The documents and every plot show what is stored, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from evals import cells, plots, sections, store, sweep, tables
from evals.arms import Arm, make_arm
from evals.cells import Cell
from evals.comparisons import HYBRID_MODEL, hybrid_table, peer_table, widths_table
from evals.selectors import Variant
from evals.sweep import ARM, points_of
from figures import documents
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

DOCS = documents.DOCS / "research" / "accuracy.md"


def test_every_file_is_what_the_stored_results_give() -> None:
    for path, text in documents.rendered().items():
        assert path.read_text() == text, f"{path.name} is out of date; run python -m figures"


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_sections_are_known_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    names = [match[2] for match in documents.SECTION.finditer(text)]
    assert len(names) == text.count("<!-- figures: ") == text.count("<!-- end -->") > 0
    assert set(names) <= documents.NAMES
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), target


def test_stored_cells_are_few_files_that_name_where_they_were_measured() -> None:
    files = sorted(cells.RESULTS.rglob("*.json*"))
    assert 0 < len(files) <= 36
    for file in files:
        for record in store.read(file).values():
            assert {"settings", "result", "device", "python", "torch", "commit", "command", "date"} <= set(record), file


@pytest.mark.parametrize("model", [TINY_MODEL, TINY_DRAFT_MODEL])
def test_every_stored_point_of_a_sweep_is_in_a_sweep(model: Path) -> None:
    found = [cell["settings"] for cell in tables.cells(model) if cell["settings"]["arm"] == ARM]
    known = {
        json.dumps(cell.settings | {"num_prompts": 0}, sort_keys=True)
        for slots in {settings["slots"] for settings in found}
        for name in sweep.SWEEPS
        for _, cells_of_point in sweep.cells_of(name, model, slots)
        for cell in cells_of_point
    }
    assert {json.dumps(settings | {"num_prompts": 0}, sort_keys=True) for settings in found} <= known


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few cells with known numbers."""
    monkeypatch.setattr(cells, "RESULTS", tmp_path)

    def write(task: str, arm: Arm, accuracy: float, prompts: int = 200) -> None:
        cell = Cell(model=TINY_MODEL, task=task, arm=arm, prompt_len=2048, num_prompts=prompts)
        cell.write(
            {"accuracy": accuracy, "standard_error": 3.0, "accuracy_after_first_token": accuracy - 1,
             "accuracy_by_reference": [90.0, 80.0, 70.0, 60.0], "row_bytes": 2**19}, 1.0,
        )  # fmt: skip

    for task, base in (("kv", 90.0), ("json", 80.0), ("variable", 50.0), ("recite", 40.0)):
        longest = 192 if task == "recite" else 32
        write(task, make_arm("full", 2048, 2048 + longest, longest), base + 9)
        for part in (4, 8):
            write(task, make_arm("snapstream", 2048 // part, 2080, 32), base - part)
    write("kv", make_arm("snapstream", 512, 2080, 32), 1.0, prompts=20)  # fewer prompts: not shown
    for i, point in enumerate(points_of("sinks", 256)):
        write("kv", Arm(name=ARM, slots=256, budget=point.budget, selector=point.selector), 60.0 + i)
    return tmp_path


def test_tables_show_the_stored_cells(stored: Path) -> None:
    text = tables.accuracy()
    assert "| full attention | all | 0.50 MiB | 94.0 | 59.0 |" in text  # exact retrieval: (99 + 89) / 2
    assert "| SnapStream, equal heads | 1/4 | 0.50 MiB | 81.0 | 46.0 |" in text
    detail = tables.tasks_table()
    assert "| SnapStream, equal heads | 1/8 | 82.0 ± 3.0 (81.0) | 72.0 ± 3.0 (71.0) |" in detail
    assert "| SnapStream, equal heads | 1/8 | 64 | 90.0 | 80.0 | 70.0 | 60.0 |" in tables.by_position()
    sinks = sweep.sweep_table("sinks")
    assert (
        "| setting | kv |\n" in sinks and "| **default** | 60.0 ± 3.0 |" in sinks and "| S = 4 | 63.0 ± 3.0 |" in sinks
    )
    with pytest.raises(ValueError, match="not measured; run python -m evals.sweep --sweeps pooling"):
        sweep.sweep_table("pooling")


def test_what_was_wanted_stands_beside_what_came_of_it(stored: Path) -> None:
    for task, base in (("kv", 90.0), ("json", 80.0), ("variable", 50.0)):
        for part in (4, 8):
            arm = make_arm("heads", 2048 // part, 2080, 32)
            default = Cell(model=TINY_MODEL, task=task, arm=arm, prompt_len=2048, num_prompts=200)
            default.write(json.loads(streaming_like(stored)) | {"accuracy": base - part}, 1.0)
    streaming = Cell(
        model=TINY_MODEL, task="variable", arm=make_arm("streaming", 256, 2080, 32), prompt_len=2048, num_prompts=200
    )
    streaming.write(json.loads(streaming_like(stored)) | {"accuracy": 43.0}, 1.0)
    text = tables.goals()
    assert "| exact retrieval | 94.0 | 81.0, missed | 77.0, missed |  | yes, or equal |" in text
    assert "| multi-hop | 59.0 | 46.0, missed | 42.0, missed |  | no: StreamingLLM +1.0 at 1/8 |" in text
    near = Cell(
        model=TINY_MODEL, task="paraphrase", arm=make_arm("full", 2048, 2080, 32), prompt_len=2048, num_prompts=200
    )
    result = json.loads(streaming_like(stored))
    near.write(result | {"accuracy": 90.0}, 1.0)
    for part, accuracy in ((4, 89.0), (8, 86.9)):
        arm = make_arm("heads", 2048 // part, 2080, 32)
        replace(near, arm=arm).write(result | {"accuracy": accuracy}, 1.0)
    assert "| question answering | 90.0 | 89.0, reached | 86.9, missed |  | yes, or equal |" in tables.goals()


def streaming_like(stored: Path) -> str:
    """The result of any stored cell."""
    return json.dumps(next(iter(store.read(next(stored.glob("*/exact_retrieval.jsonl"))).values()))["result"])


def test_tasks_out_of_reach_are_named_and_only_there(stored: Path) -> None:
    arm = make_arm("full", 2048, 2080, 32)
    cell = Cell(model=TINY_MODEL, task="common_words", arm=arm, prompt_len=2048, num_prompts=200)
    cell.write(json.loads(streaming_like(stored)) | {"accuracy": 12.0}, 1.0)
    text = tables.tasks_table()
    assert "full attention being below 80 points: variable 59.0, common_words 12.0, recite 49.0." in text
    assert "| common_words" not in text and "aggregation" not in tables.accuracy()


def test_rows_in_fp8_stand_beside_the_others_and_nowhere_else(stored: Path) -> None:
    before = tables.accuracy(), tables.tasks_table(), plots.bytes_panel(), sections.cells_of("accuracy")
    with pytest.raises(ValueError, match="python -m evals.run --kv-dtype fp8"):
        tables.rows_table({"fp8": "FP8"})
    cell = Cell(
        model=TINY_MODEL, task="kv", arm=make_arm("snapstream", 512, 2080, 32), prompt_len=2048, num_prompts=200,
        kv_dtype="fp8",
    )  # fmt: skip
    scores = {"accuracy": 85.0, "standard_error": 2.0, "accuracy_after_first_token": 85.0, "row_bytes": 2**17}
    cell.write(scores, 1.0)
    lines = tables.rows_table({"fp8": "FP8"}).splitlines()[-2:]
    assert lines == [
        "| SnapStream, equal heads | 1/4 | fp32 | 0.50 MiB | 86.0 ± 3.0 |",
        "| SnapStream, equal heads | 1/4 | FP8 | 0.12 MiB | 85.0 ± 2.0 |",
    ]
    other = replace(cell, task="json", arm=make_arm("full", 2048, 2080, 32))
    other.write(scores, 1.0)
    record = other.read()
    assert record is not None
    store.append(other.path, record | {"device": "another machine"})
    assert (tables.accuracy(), tables.tasks_table(), plots.bytes_panel(), sections.cells_of("accuracy")) == before
    assert sections.section("accuracy_fp8", DOCS, documents.PLOTS).rpartition("<sub>")[2].startswith("another machine")


def test_narrow_weights_stand_beside_the_same_prompts_and_nowhere_else(stored: Path) -> None:
    before = tables.accuracy(), tables.tasks_table(), plots.bytes_panel(), sections.cells_of("accuracy")
    with pytest.raises(ValueError, match="python -m evals.run --width int8"):
        widths_table(TINY_MODEL)
    own = Cell(model=TINY_MODEL, task="kv", arm=make_arm("snapstream", 512, 2080, 32), prompt_len=2048, num_prompts=50)
    scores = {"accuracy": 85.0, "standard_error": 2.0, "accuracy_after_first_token": 85.0, "row_bytes": 2**17}
    own.write(scores, 1.0)
    for width, accuracy in (("int8", 85.5), ("int4-a8", 82.0)):
        replace(own, width=width).write(scores | {"accuracy": accuracy}, 1.0)
    assert widths_table(TINY_MODEL).splitlines()[-3:] == [
        "| fp32 | fp32 | fp32 | SnapStream, equal heads | 1/4 | 85.0 |",
        "| int8 | fp32 | fp32 | SnapStream, equal heads | 1/4 | 85.5 (+0.5) |",
        "| int4 | fp32 | int8 | SnapStream, equal heads | 1/4 | 82.0 (-3.0) |",
    ]
    assert len(sections.cells_of("accuracy_widths")) == 3
    assert (tables.accuracy(), tables.tasks_table(), plots.bytes_panel(), sections.cells_of("accuracy")) == before


def test_a_hybrid_is_compared_with_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="not measured"):
        hybrid_table()
    scores = {"standard_error": 2.0, "accuracy_after_first_token": None, "row_bytes": 2**17}
    for model, tasks, of_full, of_cut in (
        (HYBRID_MODEL, ("kv", "variable"), 80.0, 60.0), (TINY_MODEL, ("kv", "variable", "json"), 100.0, 50.0),
    ):  # fmt: skip
        for task in tasks:
            for name, slots, accuracy in (("full", 2048, of_full), ("snapkv", 512, of_cut)):
                arm = make_arm(name, slots, 2080, 32)
                Cell(model=model, task=task, arm=arm, prompt_len=2048, num_prompts=50).write(
                    scores | {"accuracy": accuracy}, 1.0
                )
    extra = make_arm("streaming", 512, 2080, 32)  # an arm that the hybrid was not measured in
    Cell(model=TINY_MODEL, task="kv", arm=extra, prompt_len=2048, num_prompts=50).write(scores | {"accuracy": 1.0}, 1.0)
    assert hybrid_table().splitlines()[2:] == [
        "| slots | cache | model | kv | variable | kept |",
        "|---|---|---|---|---|---|",
        "| all | full attention | LFM2, 2 of 6 layers cut | 80.0 ± 2.0 | 80.0 ± 2.0 | 100.0 % |",
        "| all | full attention | Llama, 4 of 4 | 100.0 ± 2.0 | 100.0 ± 2.0 | 100.0 % |",
        "| 1/4 | SnapKV as published | LFM2, 2 of 6 layers cut | 60.0 ± 2.0 | 60.0 ± 2.0 | 75.0 % |",
        "| 1/4 | SnapKV as published | Llama, 4 of 4 | 50.0 ± 2.0 | 50.0 ± 2.0 | 50.0 % |",
    ]


def test_a_group_that_is_not_whole_is_left_out(stored: Path) -> None:
    missing = Cell(
        model=TINY_MODEL, task="json", arm=make_arm("snapstream", 512, 2080, 32), prompt_len=2048, num_prompts=200
    )
    lines = missing.path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["settings"] != missing.settings]
    assert len(kept) == len(lines) - 1
    missing.path.write_text("".join(kept))
    assert "| SnapStream, equal heads | 1/4 | 0.50 MiB |  | 46.0 |" in tables.accuracy()


def test_plots_show_the_stored_cells(stored: Path) -> None:
    panels = {panel.title: panel for panel in plots.accuracy_panels()}
    full, own = panels["exact retrieval"].lines
    assert full.is_level and full.points[0][1] == 94.0 and [y for _, y, _ in own.points] == [81.0, 77.0]
    svg = plots.PLOTS["accuracy_plot"].svg()
    assert ">exact retrieval<" in svg and svg == plots.PLOTS["accuracy_plot"].svg()
    full, own = plots.bytes_panel().lines
    assert full.is_level and len(own.points) == 2  # SnapStream at two budgets
    lines = {line.name: line.points for line in plots.budget_panel().lines}
    assert [(x, y) for x, y, _ in lines["exact retrieval"]] == [(0.0, 94.0), (1.0, 81.0), (2.0, 77.0)]
    assert [x for x, _, _ in lines["multi-hop, 4 hops on"]] == [0.0]  # full attention alone


def test_a_peer_stands_beside_what_the_arms_mean_today(stored: Path) -> None:
    with pytest.raises(ValueError, match="not measured; run python -m evals.peers_kvpress"):
        peer_table()

    def write(source: str, arm: Arm, accuracy: float, prompts: int = 200) -> None:
        cell = Cell(model=TINY_MODEL, task="kv", arm=arm, prompt_len=2048, num_prompts=prompts, source=source)
        cell.write({"accuracy": accuracy, "standard_error": 1.0, "accuracy_after_first_token": None,
                    "peer_version": "kvpress 1"}, 1.0)  # fmt: skip

    own = make_arm("as_kvpress", 512, 2080, 32)
    write("kvpress", replace(own, name="snapkv"), 61.0)
    write("kvpress", make_arm("full", 2048, 2080, 32), 98.0, prompts=100)
    write("kvpress", make_arm("full", 2048, 2080, 32), 97.0, prompts=20)
    write("snapstream", make_arm("full", 2048, 2080, 32), 98.0, prompts=100)
    write("snapstream", own, 62.0)
    write("snapstream", own, 64.0, prompts=20)
    now = make_arm("snapstream", 512, 2080, 32)
    write("snapstream", replace(now, selector=Variant(pool_width=9)), 63.0)  # a default of former days
    fp8 = Cell(model=TINY_MODEL, task="kv", arm=now, prompt_len=2048, num_prompts=300, kv_dtype="fp8")
    fp8.write({"accuracy": 50.0, "standard_error": 1.0, "accuracy_after_first_token": None}, 1.0)
    text = peer_table()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert lines == [
        ["this engine", "full attention", "all", "98.0 ± 1.0"],
        ["kvpress", "full attention", "all", "98.0 ± 1.0"],
        ["this engine", "SnapStream", "1/4", "86.0 ± 3.0"],
        ["this engine", "SnapKV, kvpress's settings", "1/4", "62.0 ± 1.0"],
        ["kvpress", "SnapKVPress", "1/4", "61.0 ± 1.0"],
    ]
    assert "kvpress 1." in text


def test_what_was_not_measured_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    text = "<!-- figures: chains -->\n<!-- end -->\n<!-- figures: accuracy_plot -->\n<!-- end -->\n"
    shown = documents.render(text, DOCS)
    assert shown.count("(not measured; run python -m evals.") == 2
    assert documents.render(shown, DOCS) == shown
