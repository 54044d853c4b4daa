"""What the README says is run: its Python block, its commands' options, and the figures it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import README, SECTION, TABLES, render
from evals import plots, sections
from snapstream.assets import TINY_MODEL

TEXT = README.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    assert "path/to/Llama-3.2-1B-Instruct" in block and "report.txt" in block
    (tmp_path / "report.txt").write_text("The report was signed by Marta Quill. " * 20)
    monkeypatch.chdir(tmp_path)
    exec(block.replace("path/to/Llama-3.2-1B-Instruct", str(TINY_MODEL)), {})
    assert "Compression(prompt_tokens=" in capsys.readouterr().out


def test_named_files_and_folders_exist() -> None:
    root = README.parent
    for name in re.findall(r"`((?:cache|runner|engine)/\w+\.py)`", TEXT):
        assert (root / "snapstream" / name).is_file(), name
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (root / link).exists(), link


def test_figures_are_those_of_the_stored_results() -> None:
    names = [match[2] for match in SECTION.finditer(TEXT)]
    assert len(names) == TEXT.count("<!-- figures: ") == TEXT.count("<!-- end -->") > 0
    assert set(names) <= set(TABLES) | set(plots.PLOTS) | set(sections.SECTIONS)
    assert render(TEXT) == TEXT, "run python -m benchmarks.figures"


def test_a_changed_figure_is_noticed() -> None:
    (match, *_) = (match for match in SECTION.finditer(TEXT) if match[2] == "decode")
    digit = next(i for i in range(match.start(3), match.end(3)) if TEXT[i].isdigit())
    forged = TEXT[:digit] + str((int(TEXT[digit]) + 1) % 10) + TEXT[digit + 1 :]
    assert render(forged) == TEXT != forged
