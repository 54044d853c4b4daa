"""The curl and openai-python examples of docs/serving.md run as they are printed (against the fake engine)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import served
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from tests.server.app_server import Running, running_server
from tests.server.fake_engine import ANSWER
from tests.waiting import HANG_S

DOC = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
PRINTED = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


def blocks(heading: str, language: str) -> list[str]:
    """The snippets of one language in a subsection."""
    section = DOC.split(f"\n### {heading}\n")[1].split("\n#")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_every_client_has_its_snippets() -> None:
    assert [len(blocks(heading, "bash")) for heading in ("curl", "lm-eval", "guidellm")] == [4, 1, 1]
    counts = {heading: len(blocks(heading, "python")) for heading in ("openai-python", "LangChain", "openai-agents")}
    assert counts == {"openai-python": 4, "LangChain": 2, "openai-agents": 1}
    assert len(blocks("anthropic SDK", "python")) == 2


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
    assert '"error":{' not in result.stdout
    if "/chat/completions" in block or "/completions" in block:
        assert '"choices"' in result.stdout
    else:
        assert ANSWER in result.stdout or "event: message_stop" in result.stdout


@pytest.mark.slow
def test_prompt_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a server with a draft; the prompt is short, so the report says why it stayed whole."""
    (block,) = blocks("prompt_compression", "python")
    assert PRINTED in block
    with served([str(TINY_MODEL), "--draft", str(TINY_DRAFT_MODEL), "--budget", "256"], tmp_path / "log") as one:
        exec(compile(block.replace(PRINTED, one.url), "docs/serving.md", "exec"), {})
    assert "'applied': False" in capsys.readouterr().out
