"""The curl and openai-python examples of docs/serving.md run as they are printed (against the fake engine)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from snapstream.cli.app import app
from tests.server.fake_engine import ANSWER
from tests.server.front_server import Running, running_server
from tests.waiting import HANG_S

DOC = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
PRINTED = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


def blocks(heading: str, language: str) -> list[str]:
    section = DOC.split(f"\n### {heading}\n")[1].split("\n#")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_every_option_of_the_command_is_described() -> None:
    command: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for param in command.params for name in param.opts if name.startswith("--")}
    table = DOC.split("| option | meaning |")[1].split("\n\n")[0]
    assert options - set(re.findall(r"--[a-z-]+", table)) == set()


@pytest.mark.parametrize("block", blocks("openai-python", "python"))
def test_openai_python(block: str, server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert PRINTED in block
    exec(compile(block.replace(PRINTED, server.url.removesuffix("/v1")), "docs/serving.md", "exec"), {})
    assert ANSWER in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("block", blocks("curl", "bash"))
def test_curl(block: str, server: Running) -> None:
    assert PRINTED in block
    block = block.replace(PRINTED, server.url.removesuffix("/v1"))
    result = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert '"error"' not in result.stdout and '"choices"' in result.stdout
