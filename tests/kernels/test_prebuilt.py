"""Libraries that came with the package: used where they are what today's sources would give, and no others."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from snapstream.kernels.compile_cache import VARIABLE
from snapstream.kernels.cpu.looped import build, prebuilt
from snapstream.kernels.cpu.looped.build import find_compiler, instruction_sets, library_name
from snapstream.kernels.cpu.looped.prebuilt import open_library, write_libraries

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BEST = instruction_sets()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (written,) = write_libraries(tmp_path / "prebuilt", [BEST])
    assert written.name == library_name(BEST)
    return written.parent


@pytest.fixture
def bare(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on a machine that has no compiler and has compiled nothing yet."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return folder


def test_no_compiler_is_needed(bare: Path, tmp_path: Path) -> None:
    assert open_library(BEST, bare).looped_team is not None
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        open_library(BEST, tmp_path / "absent")


@pytest.mark.parametrize("changed", ["source", "flag"])
def test_a_library_of_other_sources_or_flags_is_not_opened(
    changed: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is another one, so nobody opens it."""
    if changed == "flag":
        monkeypatch.setitem(build.FLAGS_OF_SET, BEST, ("-DISA=0", "-O1"))
    else:
        sources = tmp_path / "sources"
        sources.mkdir()
        for source in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
            (sources / source.name).write_bytes(source.read_bytes() + b" " * (source.name == "abi.h"))
        monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        open_library(BEST, bare)


def test_what_the_system_refuses_is_told_and_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / library_name(BEST)).write_bytes(b"made for another system")
    with caplog.at_level(logging.WARNING):
        assert open_library(BEST, folder).looped_team is not None
    assert "came with the package cannot be loaded" in caplog.text and "it is compiled instead" in caplog.text
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="came with the package cannot be loaded .*; no C\\+\\+ compiler"):
        open_library(BEST, folder)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prebuilt, "sets_of_machine", lambda: (BEST,))
    monkeypatch.setattr("sys.argv", ["prebuilt", str(tmp_path / "out")])
    assert prebuilt.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / library_name(BEST)}\n"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prebuilt.main() == 1
    assert "error: no C++ compiler" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["prebuilt"])
    assert prebuilt.main() == 2
