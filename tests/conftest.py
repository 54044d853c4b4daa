"""What holds for every test, set before anything imports Triton (``kernels/triton/interpreter.py``) or draws examples.

A test's result depends on nothing outside the tree: not on the number of cores, not on what an earlier run left in the
home folder, not on chance and not on seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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

COMPILED = ("SNAPSTREAM_CACHE", "TRITON_CACHE_DIR")  # folders of compiled code


def pytest_configure() -> None:
    """One thread per process, also without the Makefile: sums are added in the same order on every machine."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
        torch.set_num_threads(1)


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
