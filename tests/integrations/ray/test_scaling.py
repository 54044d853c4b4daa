"""Load brings a second replica of each kind, and an update of the four of them keeps answering.

Clients go on asking until what they are for has come: nothing here depends on how fast anything is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.util import find_spec
from threading import Event
from typing import Any

import httpx
import pytest

from benchmarks.ray_process import Deployed, ReplicaWatch, deployed
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

CONFIG: dict[str, Any] = {
    "served_model_name": ["tiny"],
    "drain_timeout": HANG_S,
    "engine": {"budget": 128, "max_rows": 2, "max_model_len": 4096, "executor": "eager", "prefix_store": None},
    "decode": {"replicas": 1, "max_replicas": 2, "cpus": 0, "stall_timeout": 0},
    "prefill": {"replicas": 1, "max_replicas": 2, "cpus": 0, "stall_timeout": 0, "queued_tokens": 1},
}
NUM_CLIENTS = 6  # more than a replica has rows, so that they wait
SHORT: dict[str, Any] = {"prompt": [5 + i % 200 for i in range(900)], "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 2000, "stream": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(CONFIG, tmp_path_factory.mktemp("scaling")) as running:
        yield running


@contextmanager
def asking(http: httpx.Client) -> Iterator[Counter[int]]:
    """Clients that ask again and again, and what they were answered, by status."""
    over, seen = Event(), Counter[int]()

    def ask() -> None:
        while not over.is_set():
            response = http.post("/v1/completions", json=SHORT)
            seen[response.status_code] += 1
            if response.status_code == 200:
                assert response.json()["usage"]["completion_tokens"] == SHORT["max_tokens"]
            else:
                over.wait(0.2)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients: list[Future[None]] = [pool.submit(ask) for _ in range(NUM_CLIENTS)]
        try:
            yield seen
        finally:
            over.set()
        for client in clients:
            client.result(HANG_S)


def test_replicas_follow_the_load_and_an_update_keeps_answering(cluster: Deployed) -> None:
    """Rows in use bring a replica that answers; prompt tokens that wait, one that reads."""
    with (
        closing(ReplicaWatch(cluster.address)) as watch,
        httpx.Client(base_url=cluster.url, timeout=HANG_S) as http,
    ):
        assert [len(watch.reports(kind)) for kind in ("decode", "prefill")] == [1, 1]
        with asking(http) as seen:
            until(lambda: [len(watch.reports(kind)) for kind in ("decode", "prefill")] == [2, 2], 2 * HANG_S)
        assert seen[200] > 0 and set(seen) <= {200, 429, 503}

        before = {report.replica for kind in ("decode", "prefill") for report in watch.reports(kind)}
        changed = {**CONFIG, "engine": {**CONFIG["engine"], "max_rows": 3}}
        with http.stream("POST", "/v1/completions", json=LONG) as response, asking(http) as seen:
            lines = (line for line in response.iter_lines() if line)
            assert "text" in next(lines)
            cluster.again(changed)
            until(lambda: [len(_new(watch, kind, 3)) for kind in ("decode", "prefill")] == [2, 2], 2 * HANG_S)
            rest = list(lines)
        last = json.loads(rest[-2].removeprefix("data: "))
        assert rest[-1] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "length"
        assert seen[200] > 0 and set(seen) <= {200, 429, 503}  # answered, or told to come again
        assert not before & {report.replica for kind in ("decode", "prefill") for report in _new(watch, kind, 3)}
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def _new(watch: ReplicaWatch, kind: str, max_rows: int) -> list[Any]:
    return [report for report in watch.reports(kind) if report.stats.rows_total == max_rows]
