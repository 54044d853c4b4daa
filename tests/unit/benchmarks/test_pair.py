"""Two checkouts compared: every number by its place, in turn, and a benchmark that fails says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pair

PROGRAM = """
import json, pathlib, sys
log = pathlib.Path(__file__).parents[2] / "log"
log.write_text((log.read_text() if log.exists() else "") + {side!r})
print("a line before")
arms = [{{"ms": {ms}, "name": "x"}}]
print(json.dumps({{"commit": {side!r}, "figures": {{"arms": arms, "same": 5, "size": sys.argv[1]}}}}))
"""


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    for side, ms in (("before", 4.0), ("here", 3.0)):
        folder = tmp_path / side / "benchmarks"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "steps.py").write_text(PROGRAM.format(side=side[0], ms=ms))
    monkeypatch.setattr(pair, "HERE", tmp_path / "here")
    return tmp_path / "before", tmp_path


def test_sides_take_turns_and_numbers_that_differ_are_compared(checkouts: tuple[Path, Path]) -> None:
    before, folder = checkouts
    found = pair.compare(before, ["steps", "--size"], repeats=3)
    assert (folder / "log").read_text() == "bhbhbh"
    assert found["commits"] == {"before": "b", "here": "h"} and found["benchmark"] == "steps --size"
    assert found["figures"] == [{"figure": "arms[0].ms", "before": 4.0, "here": 3.0, "ratio": 0.75}]
    json.dumps(found)


def test_a_benchmark_that_fails_shows_why(checkouts: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="benchmarks.other failed in .*before: .*No module named benchmarks.other"):
        pair.compare(checkouts[0], ["other"], repeats=1)
