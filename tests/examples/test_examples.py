"""Every program of examples/ runs on the models that ship, and shows what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import served
from snapstream.assets import TINY_MODEL
from tests.waiting import HANG_S

EXAMPLES = Path(__file__).parents[2] / "examples"
CODE = "4821907"  # of the vault, in most of them
QUESTION = f"The code of the vault is {CODE}. What is the code of the vault?\nWhat is the code of the vault?\n"
SHOWN = {
    "chat.py": (QUESTION, [CODE]),
    "long_document.py": ("", ["expected: ", "answer: ", "256 slots", "selected by layer 0"]),
    "batch.py": ("", ["request-6", CODE, "(stop"]),
    "compress_with_draft.py": ("", ["expected: ", "answer: ", "reason=''"]),
    "custom_selector.py": ("", ["longest_keys (", "snapkv ("]),
    "transformers_cache.py": ("", ["DynamicCache: ", f"SnapStreamCache: 128 tokens per layer, ' {CODE}"]),
    "disaggregated_prefill.py": ("", [f"answer:  {CODE}", 'rows_received_total{model_name="tiny"} 1.0']),
}


def run(name: str, *words: str, given: str = "") -> str:
    command = [sys.executable, str(EXAMPLES / name), *words]
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=HANG_S, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_tested_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SHOWN, "streaming_client.py"}
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in names)


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs(name: str) -> None:
    given, shown = SHOWN[name]
    out = run(name, given=given)
    assert all(text in out for text in shown), out
    lines = dict(line.split(":", 1) for line in out.splitlines() if line.startswith(("expected:", "answer:")))
    if "expected: " in shown:
        assert lines["answer"].strip() == lines["expected"].strip()


def test_the_client_streams_from_a_server(tmp_path: Path) -> None:
    with served([str(TINY_MODEL), "--budget", "256"], tmp_path / "log") as server:
        out = run(
            "streaming_client.py", f"The code of the vault is {CODE}.\n\nWhat is it?", "--url", f"{server.url}/v1"
        )
    assert "output tokens" in out and "'budget': " in out.split("row:")[1]
