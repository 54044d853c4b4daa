"""The package's front: public names, loaded lazily, and a start that imports little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import snapstream
from tests.waiting import HANG_S

SOURCE = Path(snapstream.__file__).parents[1]
TORCH = {"torch", "transformers"}
HEAVY = TORCH | {
    "fastapi", "httpx", "llguidance", "numpy", "prometheus_client", "pydantic", "safetensors", "starlette",
    "tokenizers", "tqdm", "triton", "uvicorn",
}  # fmt: skip
# Of a start that prints the version: a file per command and per model family, and the settings whose flags it reads.
MAX_OWN_MODULES = 57


def loaded(statement: str) -> set[str]:
    """Modules that a statement imports in a Python of its own."""
    code = (
        f"import sys; known = set(sys.modules); {statement}\n"
        "new = sorted(set(sys.modules) - known); import json; print(json.dumps(new))"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_public_names_resolve() -> None:
    for name in snapstream.__all__:
        assert getattr(snapstream, name) is not None
        assert name in dir(snapstream)
    from snapstream.llm import LLM

    assert snapstream.LLM is LLM


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'VLLM'"):
        _ = snapstream.VLLM


@pytest.mark.slow
def test_a_runner_does_not_load_the_compiler() -> None:
    """It would double what the start of an engine, and of each of its ranks, imports."""
    modules = loaded(
        "import snapstream.exec.parallel, snapstream.startup.build, snapstream.models.checkpoint;"
        "from snapstream.assets import TINY_MODEL; from snapstream.models.tokenizer import load_tokenizer;"
        "load_tokenizer(TINY_MODEL)"
    )
    assert "torch" in modules and "torch._dynamo" not in modules


@pytest.mark.parametrize(
    "statement",
    [
        "from snapstream import SamplingParams, KVBudget, SnapKV, RequestOutput, __version__",
        "from snapstream.assets import TINY_MODEL; from snapstream.cli import main; main(['plan', str(TINY_MODEL)])",
        "from snapstream.config import make_selector; make_selector('hops').num_queries(9)",
        "import snapstream.models.registry, snapstream.kv.layout, snapstream.engine.core, snapstream.llm",
    ],
)
def test_import_without_torch(statement: str) -> None:
    assert not packages(loaded(statement)) & TORCH


def test_the_package_alone_imports_its_version_and_nothing_else() -> None:
    modules = loaded("import snapstream")
    assert {module for module in modules if module.startswith("snapstream")} == {"snapstream", "snapstream.version"}
    assert packages(modules) - sys.stdlib_module_names == {"snapstream"}


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_starts_with_little(option: str) -> None:
    """Nobody waits for a start that imports little, on whatever machine: modules are counted, not milliseconds."""
    modules = loaded(f"from snapstream.cli import main; assert main([{option!r}]) == 0")
    assert not packages(modules) & HEAVY
    assert sum(module.startswith("snapstream") for module in modules) <= MAX_OWN_MODULES
