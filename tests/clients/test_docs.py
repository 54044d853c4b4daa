"""The examples of docs/serving.md that need clients run as they are printed, against a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import ServerProcess
from tests.clients.test_lm_eval import CHOICE, DOCS
from tests.server.test_docs import PRINTED, blocks
from tests.waiting import HANG_S

LM_EVAL = Path(sys.executable).with_name("lm_eval")


@pytest.mark.parametrize("block", blocks("openai-python", "python"))
def test_openai_python(block: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.replace(PRINTED, server.url), "docs/serving.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", blocks("LangChain", "python"))
def test_langchain(block: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    assert PRINTED in block
    exec(compile(block.replace(PRINTED, server.url), "docs/serving.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("block", blocks("curl", "bash"))
def test_curl(block: str, server: ServerProcess) -> None:
    block = block.replace(PRINTED, server.url)
    result = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert '"error":{' not in result.stdout and ('"choices"' in result.stdout or "output_tokens" in result.stdout)


@pytest.mark.skipif(not LM_EVAL.exists(), reason="the extra `clients` is not installed")
@pytest.mark.parametrize("block", blocks("lm-eval", "bash"))
def test_lm_eval(block: str, server: ServerProcess, tmp_path: Path) -> None:
    """The command as printed, but with a task whose data is here instead of one that would be downloaded."""
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(CHOICE.format(file=tmp_path / "docs.jsonl"))
    assert PRINTED in block and " hellaswag " in block
    command = block.replace(PRINTED, server.url).replace("hellaswag", "local_choice").strip()
    command = f"{LM_EVAL}{command.removeprefix('lm_eval')} --include_path {tmp_path}"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=5 * HANG_S, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "|local_choice|" in result.stdout.replace(" ", "")


NEEDED = {"openai-agents": "agents", "anthropic SDK": "anthropic"}


@pytest.mark.parametrize(
    ("heading", "block"), [(heading, block) for heading in NEEDED for block in blocks(heading, "python")]
)
def test_python(heading: str, block: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(NEEDED[heading], reason="the extra `clients` is not installed")
    assert PRINTED in block
    exec(compile(block.replace(PRINTED, server.url), "docs/serving.md", "exec"), {})
    assert capsys.readouterr().out.strip()
