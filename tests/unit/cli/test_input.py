"""What a terminal gives and gets: numbers without units, binary input, and narrow windows."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.cli import main
from snapstream.startup.measure import HostMemory
from tests.waiting import HANG_S

NARROW = 60
BINARY = b"\x89PNG\r\n\x1a\n\x00\xff"


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("--memory", "80", "'80' is not a size; write a number > 0 and a unit, such as 80GiB or 24GB"),
        ("--memory", "1e9", "'1e9' is not a size"),
        ("--bandwidth", "3.35", "'3.35' is not a bandwidth; write a number > 0 and a unit, such as 3.35TB/s"),
        ("--bandwidth", "3.35/s", "is not a bandwidth"),
    ],
)
def test_numbers_without_a_unit(option: str, value: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TINY_MODEL), option, value]) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and captured.err.startswith("error: ") and not captured.out


def test_plan_is_readable_in_60_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, no cell is cut or wrapped, and every number of the wide table is there."""
    arguments = [
        "plan",
        str(TINY_MODEL),
        "--draft",
        str(TINY_DRAFT_MODEL),
        "--selector",
        "hops",
    ]
    monkeypatch.setattr("snapstream.startup.measure.host_memory", lambda: HostMemory(2**30, 64 * 2**20))
    texts = {}
    for columns in (NARROW, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(arguments) == 0
        texts[columns] = capsys.readouterr().out
    narrow = texts[NARROW]
    assert max(map(len, narrow.splitlines())) <= NARROW
    assert "…" not in narrow and narrow.split() == texts[120].split()
    table = narrow.split("─\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == ["full", "8,192", "4,096", "2,048", "1,024"]
    below = [line for line in narrow.splitlines() if line.startswith(" " * 9 + "prompts: of 4,096)")]
    assert below, narrow  # the text goes on below itself


def test_plan_in_a_pipe_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))
    done = subprocess.run(
        [sys.executable, "-m", "snapstream.cli", "plan", str(TINY_MODEL)],
        capture_output=True, text=True, check=True, timeout=HANG_S,
    )  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= NARROW and "\x1b" not in done.stdout


def test_binary_input_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(BINARY)
    config = tmp_path / "config.json"
    config.write_bytes(BINARY)
    for arguments, name in (
        (["generate", str(TINY_MODEL), "--file", str(file)], str(file)),
        (["generate", str(TINY_MODEL), "--file", "-"], "stdin"),
        (["compress", str(file)], str(file)),
        (["compress"], "stdin"),
        (["plan", str(config)], str(config)),
        (["plan", str(TINY_MODEL), "--draft", str(config)], str(config)),
        (["generate", str(tmp_path), "x"], str(config)),
        (["serve", str(tmp_path), "--port", "0"], str(config)),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BINARY)))
        assert main(arguments) == (1 if arguments[0] == "serve" else 2)  # a server tells what it cannot load apart
        assert f"error: {name} is not text" in capsys.readouterr().err, arguments


def test_messages_nested_without_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("[" * 100_000))
    assert main(["compress", "--messages"]) == 2
    assert "--messages needs JSON that is not nested so deeply" in capsys.readouterr().err
