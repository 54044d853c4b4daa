"""One ``snapstream serve`` with the shipped model, and the same model in-process, for all client tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.server_process import ServerProcess, served
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM

MAX_ROWS = 4
BUDGET = 512


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--max-rows", str(MAX_ROWS), "--budget", str(BUDGET), "--served-model-name", "tiny"]
    with served(options, log) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The reference: what the server has to answer."""
    with LLM(TINY_MODEL, budget=BUDGET, max_rows=MAX_ROWS, progress=False) as reference:
        yield reference
