"""guidellm against a running server, by the command of docs/serving.md: what it measures is what was served.

Its pins exclude those of ``constraints.txt``, so it lives in an environment of its own: `make test-load` makes one. It
is found on the path, or beside the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.server.test_docs import PRINTED, blocks
from tests.waiting import HANG_S, until

SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
GUIDELLM = shutil.which("guidellm", path=SEARCHED)
pytestmark = pytest.mark.skipif(
    GUIDELLM is None, reason="guidellm is not installed; its pins exclude ours: make test-load"
)

NUM_REQUESTS, NUM_STREAMS, NUM_OUTPUT, SLOTS = 24, 8, 32, 64  # of the printed command
LINE = re.compile(r" answer=(\w+) path=/v1/chat/completions status=200 (.*)\n")
NUMBER = re.compile(r"(\w+)=([\d.]+)(?=\s|$)")


@pytest.fixture(scope="module")
def report(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON that the printed command leaves, against our server and with no way to a model hub."""
    folder = tmp_path_factory.mktemp("load")
    [block] = blocks("guidellm", "bash")
    assert GUIDELLM is not None and PRINTED in block
    command = block.replace(PRINTED, server.url).replace("snapstream/assets/tiny", str(TINY_MODEL))
    command = command.replace("guidellm run", f"'{GUIDELLM}' run --disable-console", 1)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    result = subprocess.run(
        ["bash", "-euc", command], capture_output=True, text=True, timeout=HANG_S, cwd=folder, env=env
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    [benchmark] = json.loads((folder / "load.json").read_text())["benchmarks"]
    return dict(benchmark)


def test_every_request_succeeds(report: dict[str, Any]) -> None:
    assert report["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    assert report["scheduler_metrics"]["requests_made"]["successful"] == NUM_REQUESTS
    assert 1 < report["metrics"]["request_concurrency"]["successful"]["max"] <= NUM_STREAMS


def test_tokens_and_answers_are_those_of_the_engine(report: dict[str, Any], server: ServerProcess, llm: LLM) -> None:
    done = report["requests"]["successful"]
    conversations = [json.loads(one["request_args"])["body"]["messages"] for one in done]
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    want = llm.chat(conversations, params, budget=SLOTS)
    lines = log_lines(server, done)
    for one, output in zip(done, want, strict=True):
        assert one["output"] == output.text
        counts = (len(output.prompt_token_ids), len(output.token_ids))
        assert counts[0] > SLOTS and counts[1] == NUM_OUTPUT
        assert (one["input_metrics"]["text_tokens"], one["output_metrics"]["text_tokens"]) == counts
        assert (lines[own_id(one)]["prompt_tokens"], lines[own_id(one)]["completion_tokens"]) == counts


def test_times_of_tokens_are_seen(report: dict[str, Any]) -> None:
    """They came one by one: time went by between the first and the last."""
    for one in report["requests"]["successful"]:
        first, between = one["time_to_first_token_ms"], one["inter_token_latency_ms"]
        assert first > 0 and between > 0
        assert first + between * (NUM_OUTPUT - 1) <= 1e3 * one["request_latency"] + 1
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        assert report["metrics"][name]["successful"]["count"] >= NUM_REQUESTS


def own_id(one: dict[str, Any]) -> str:
    return str(one["response_id"]).removeprefix("chatcmpl-")


def log_lines(server: ServerProcess, done: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The numbers in the server's log about each of these answers, by its id. A line is written after its answer."""
    lines: dict[str, dict[str, float]] = {}

    def are_there() -> bool:
        for found in LINE.finditer(server.log.read_text()):
            lines[found[1]] = {name: float(value) for name, value in NUMBER.findall(found[2])}
        return lines.keys() >= {own_id(one) for one in done}

    until(are_there)
    return lines
