"""The package's front: public names, loaded lazily, and a start that no one waits for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import snapstream
from tests.waiting import HANG_S

SOURCE = Path(snapstream.__file__).parents[1]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=HANG_S)


def test_public_names_resolve() -> None:
    for name in snapstream.__all__:
        assert getattr(snapstream, name) is not None
        assert name in dir(snapstream)
    from snapstream.llm import LLM

    assert snapstream.LLM is LLM


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'VLLM'"):
        _ = snapstream.VLLM


@pytest.mark.parametrize(
    "statement",
    [
        "import snapstream",
        "from snapstream import SamplingParams, KVBudget, SnapKVConfig, RequestOutput, __version__",
        "import snapstream.cli, snapstream.plan.plan, snapstream.plan.report, snapstream.cli.generate",
        "import snapstream.models.registry, snapstream.cache.layout, snapstream.engine.core, snapstream.llm",
    ],
)
def test_import_without_torch(statement: str) -> None:
    check = "import sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    done = run_python("-c", f"{statement}; {check}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("-c", "import snapstream"), ("-m", "snapstream.cli", "--version")])
def test_start_takes_less_than_300_ms(arguments: tuple[str, ...]) -> None:
    """Processor time, the best of five: what one waits for on an idle machine, and steady on a busy one."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, seconds
