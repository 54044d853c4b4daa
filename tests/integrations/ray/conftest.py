"""A Ray cluster of one node with two replicas of the tiny model, and views of it, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.ray_process import Deployed, ReplicaWatch, deployed
from benchmarks.server_process import is_running
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from tests.waiting import HANG_S, until

BUDGET, MAX_ROWS = 512, 4
CONFIG: dict[str, Any] = {
    "served_model_name": ["tiny"],
    "drain_timeout": HANG_S,
    "engine": {"budget": BUDGET, "max_rows": MAX_ROWS, "prefix_store": "64MiB"},
    "decode": {"replicas": 2, "cpus": 0, "stall_timeout": 0},  # tests stop engines
}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return CONFIG


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(CONFIG, tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture(scope="module")
def watch(cluster: Deployed) -> Iterator[ReplicaWatch]:
    """Afterwards the whole deployment is ended, and no replica or engine is left."""
    watching = ReplicaWatch(cluster.address)
    yield watching
    pids = [pid for report in watching.reports() for pid in (report.pid, report.metadata.pid)]
    watching.close()
    assert len(pids) == 4
    cluster.process.terminate()
    assert cluster.process.wait(HANG_S) == 0, cluster.log
    until(lambda: not any(map(is_running, pids)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The reference: what the replicas have to answer."""
    with LLM(TINY_MODEL, budget=BUDGET, max_rows=1, progress=False) as reference:
        yield reference


@pytest.fixture
def http(cluster: Deployed) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=HANG_S) as client:
        yield client
