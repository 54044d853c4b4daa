"""What holds for every test, set before anything imports Triton (``kernels/triton/interpreter.py``) or draws examples.

A test's result depends on nothing outside the tree: not on the number of cores, not on what an earlier run left in the
home folder, not on chance and not on seconds.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch

from snapstream.kernels.cpu.looped import build
from tests.kernels.triton import interpreter

interpreter.switch_on()

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass  # tests/gpu does without
else:
    # The same examples every time and no limits in seconds: a failure is a fault of the code, not of the machine or of
    # chance. `pytest --hypothesis-profile=search` looks for new ones.
    settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fixed", settings.get_profile("search"), derandomize=True)
    settings.load_profile("fixed")

# Compilers, Triton's interpreter, processes, servers. ``make test`` leaves them out, ``make test-all`` and CI run them.
SLOW = (
    "disaggregation/test_roles.py", "distributed", "examples", "integrations/test_transformers.py",
    "integrations/test_wheel.py", "kernels/triton", "llm/test_code_in_checkpoints.py",
    "proxy/test_cli.py", "server/engine/test_process.py", "server/openai/test_errors.py", "server/page/test_browser.py",
    "server/test_failures.py", "server/test_serve.py", "unit/benchmarks/test_gpu_suite.py", "unit/exec/test_memory.py",
    "unit/test_accuracy_docs.py",
)  # fmt: skip
SLOW_PATHS = {Path(__file__).parent / name for name in SLOW}
# Of the architectures, those with which tests are quick ones: each kind of layer, and the common ones.
QUICK = {
    "llama-gqa-tied", "qwen3", "qwen3-moe", "mistral-window", "gemma3", "gemma4-shared", "gpt-oss", "lfm2", "qwen3.5",
    "granite-hybrid", "deepseek-v3", "kimi-linear",
}  # fmt: skip
COMPILED = ("SNAPSTREAM_CACHE", "TRITON_CACHE_DIR")  # folders of compiled code


def is_quick(config: pytest.Config) -> bool:
    """Whether no slow test is asked for, as by ``make test``."""
    return bool(config.option.markexpr == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process, also without the Makefile: sums are added in the same order on every machine.

    Of the libraries of looped steps the portable one is compiled in half the time; the best one as it ships, and in two
    thirds of the time without the slow tests.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
        torch.set_num_threads(1)
    if build.instruction_sets()[0] != "portable":
        build.FLAGS_OF_SET["portable"] += ("-O1",)
    if is_quick(config):
        os.environ.setdefault("SNAPSTREAM_CXXFLAGS", "-O1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the slow tests, their files are not imported."""
    return True if is_quick(config) and collection_path in SLOW_PATHS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is in ``SLOW``, and tests with an architecture that is not in ``QUICK`` or with other instructions
    than this processor's best.

    ``SNAPSTREAM_SLOW=I/N`` leaves of the slow tests the I-th of N parts, which their names decide (``.ci/run``).
    """
    files = {path for path in {item.path for item in items} if not {path, *path.parents}.isdisjoint(SLOW_PATHS)}
    others: set[str] = {*build.instruction_sets()[1:]}
    if checkpoints := sys.modules.get("tests.parity.checkpoints"):  # where a test that was collected has loaded it
        assert checkpoints.ARCHITECTURES.keys() >= QUICK
        others |= checkpoints.ARCHITECTURES.keys() - QUICK
    for item in items:
        spec = getattr(item, "callspec", None)
        params = spec.params.values() if spec else ()
        if item.path in files or any(isinstance(param, str) and param in others for param in params):
            item.add_marker(pytest.mark.slow)
    if part := os.environ.get("SNAPSTREAM_SLOW"):
        index, count = map(int, part.split("/"))
        others_turn = {item for item in items if item.get_closest_marker("slow")}
        others_turn = {item for item in others_turn if crc32(item.nodeid.encode()) % count != index}
        config.hook.pytest_deselected(items=[*others_turn])
        items[:] = [item for item in items if item not in others_turn]


def pytest_collection_finish() -> None:
    """What has been imported by now is never garbage: collections, a fifth of a second each, need not walk it."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled code lies: compiled once in this run, for all its workers, and never found from an earlier one.

    Who wants to keep it sets the variables himself.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    for name in COMPILED:
        os.environ.setdefault(name, str(folder / name.lower()))
    return folder
