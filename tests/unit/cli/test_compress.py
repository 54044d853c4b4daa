"""``snapstream compress``: text in, shorter text and a report out."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.cli import main
from tests.unit.cli.test_cli import assert_refused

DOCUMENT = make_document(
    family="single_number", seed=1, count_tokens=lambda text: len(text.split()), target_tokens=500, num_questions=1
)
(START, END), QUESTION = DOCUMENT.questions[0].spans[0], DOCUMENT.questions[0].text
NEEDLE = DOCUMENT.text[START:END]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(DOCUMENT.text)
    return file


def test_file_in_text_out(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(text_file), "--query", QUESTION, "--keep", "0.2"]) == 0
    captured = capsys.readouterr()
    assert NEEDLE in captured.out and len(captured.out) < len(DOCUMENT.text) / 2
    assert re.match(r"[\d,]+ to [\d,]+ draft tokens \(\d+\.\d%\) \| \d+ pieces \| draft \d", captured.err)
    assert captured.err.count("\n") == 1


def test_stdin_unchanged_when_nothing_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO(b"short\r\n\tText \n")

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["compress", "--max-tokens", "50"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "short\r\n\tText \n"
    assert captured.err.startswith("left as it is: ") and "fit the ceiling of 50" in captured.err


def test_ceiling_in_target_tokens_and_report(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--target", str(TINY_MODEL), "--max-tokens", "200", "--look-ahead", "0", "--report", str(report)]
    assert main(["compress", str(text_file), *options]) == 0
    out = capsys.readouterr().out
    stored = json.loads(report.read_text())
    assert stored["is_applied"] and stored["counted_with"] == "target" and stored["tokens_after"] <= 200
    (text,) = stored["texts"]
    assert out == "\n[...]\n".join(DOCUMENT.text[a:b] for a, b in text["spans"])
    assert {"start", "end", "score", "is_kept"} == set(text["chunks"][0])
    assert main(["compress", str(text_file), *options[:-1], "-"]) == 0
    assert json.loads(capsys.readouterr().err)["tokens_after"] == stored["tokens_after"]


def test_smaller_chunks_make_more_pieces(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = []
    for chunk_len in ("64", "8"):
        assert main(["compress", str(text_file), "--look-ahead", "0", "--keep", "0.2", "--chunk-len", chunk_len]) == 0
        pieces.append(capsys.readouterr().out.count("[...]"))
    assert pieces[0] < pieces[1]


def test_a_long_text_is_read_in_passages(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(text_file), "--query", QUESTION, "--keep", "0.2", "--context-len", "400"]) == 0
    captured = capsys.readouterr()
    assert NEEDLE in captured.out and re.search(r" in [2-9] passages$", captured.err.strip())


def test_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    messages = [
        {"role": "system", "content": "Über."},
        {"role": "user", "content": DOCUMENT.text * 2 + "\n\n" + QUESTION},
    ]
    file.write_text(json.dumps({"model": "m", "messages": messages}))
    assert main(["compress", str(file), "--messages", "--max-tokens", "300"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed[0] == messages[0] and printed[1]["content"].endswith(QUESTION)
    assert len(printed[1]["content"]) < len(DOCUMENT.text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--keep", "2"], ["keep is 2"]),
        (["--keep", "0"], ["keep is 0"]),
        (["--keep", "0.5", "--max-tokens", "9"], ["exactly one"]),
        (["--max-tokens", "0"], ["max_tokens is 0"]),
        (["--mode", "poem"], ["poem"]),
        (["--look-ahead", "-1"], ["look_ahead is -1"]),
        (["--draft", "/nowhere"], ["/nowhere"]),
        (["--target", "/nowhere"], ["/nowhere", "not a folder"]),
        (["--delimiter", ""], ["delimiter is empty"]),
        (["--chunk-len", "0"], ["chunk_len is 0"]),
        (["--context-len", "0"], ["context_len", "0"]),
        (["--context-len", "9"], ["context_len is 9", "needs 10"]),
        (["--context-len", "999999"], ["context_len is 999999", "the draft reads at most"]),
        (["--messages"], ["--messages needs"]),
        (["--report", "/nowhere/report.json"], ["--report is /nowhere/report.json", "a folder that exists"]),
    ],
)
def test_refusals_in_one_line(
    text_file: Path, options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(["compress", str(text_file), *options], words, capsys)
