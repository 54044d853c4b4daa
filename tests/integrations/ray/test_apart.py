"""Two replicas that answer and one of two ranks that reads for them: answers as of one engine, nothing is left behind.

What must not have happened yet is held up by a signal: nothing here depends on how fast anything is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from benchmarks.ray_process import Deployed, ReplicaWatch, deployed
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

MAX_ROWS = 2
ENGINE: dict[str, Any] = {"budget": 128, "max_rows": MAX_ROWS, "max_model_len": 2048, "executor": "eager"}
CONFIG: dict[str, Any] = {
    "served_model_name": ["tiny"],
    "drain_timeout": HANG_S,
    "engine": {**ENGINE, "prefix_store": "16MiB"},
    "decode": {"replicas": 2, "cpus": 0, "stall_timeout": 0},  # the test stops engines
    "prefill": {"replicas": 1, "cpus": 0, "stall_timeout": 0, "tensor_parallel": 2},
}
PROMPTS = ("Once upon a time", "The harbour of the town has a lamp. " * 40)  # the second is above the budget
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(CONFIG, tmp_path_factory.mktemp("apart")) as running:
        yield running


def at_rest(watch: ReplicaWatch) -> bool:
    """Every replica is there and has all of its rows."""
    answering, reading = watch.reports(), watch.reports("prefill")
    return (
        (len(answering), len(reading)) == (2, 1)
        and not any(each.load.unavailable or each.load.open_rows for each in (*answering, *reading))
        and all(each.stats.rows_free == MAX_ROWS for each in (*answering, *reading))
    )


def test_prompts_are_read_by_another_replica(cluster: Deployed) -> None:
    with (
        closing(ReplicaWatch(cluster.address)) as watch,
        LLM(TINY_MODEL, progress=False, **ENGINE) as llm,
        httpx.Client(base_url=cluster.url, timeout=HANG_S) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(prompt: str, fields: dict[str, Any]) -> list[str]:
            response = http.post("/v1/completions", json={"prompt": prompt, **fields})
            assert response.status_code == 200, response.text
            return [choice["text"] for choice in response.json()["choices"]]

        jobs = [(prompt, fields) for prompt in PROMPTS for fields in (GREEDY, SEEDED)]
        wanted = [[one.text for one in llm.generate([p], SamplingParams(**f))[0].samples] for p, f in jobs]
        knows_both = f'snapstream:rows_free{{model_name="tiny"}} {2 * MAX_ROWS}.0'
        until(lambda: knows_both in http.get("/metrics").text)
        assert list(pool.map(lambda job: ask(*job), jobs)) == wanted
        until(lambda: at_rest(watch))
        [reader] = watch.reports("prefill")
        assert sum(each.stats.rows_received_total for each in watch.reports()) == len(jobs)
        # Who sent a row counts it when the other side has it, so an answer may be whole before.
        until(lambda: watch.reports("prefill")[0].stats.rows_sent_total == len(jobs))
        assert reader.stats.generation_tokens_total == 0

        os.kill(reader.metadata.pid, signal.SIGSTOP)  # so that no row has come when its replica dies
        pending = []
        for number in (1, 2):  # one on each replica that answers
            pending.append(pool.submit(ask, *jobs[0]))
            until(lambda number=number: sum(each.load.open_rows for each in watch.reports("prefill")) == number)
        assert [each.load.open_rows for each in watch.reports()] == [1, 1]
        # The next replica must get the keys of those that wait, though who kept them has died as well.
        watch.kill_key_keeper()
        os.kill(reader.pid, signal.SIGKILL)
        os.kill(reader.metadata.pid, signal.SIGKILL)
        assert [each.result(HANG_S) for each in pending] == [wanted[0]] * 2  # the next one has read both
        until(lambda: at_rest(watch))

        [reader] = watch.reports("prefill")
        os.kill(reader.metadata.pid, signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):  # a client that leaves while its prompt is to be read
            http.post("/v1/completions", json={"prompt": PROMPTS[1], **GREEDY}, timeout=2.0)
        until(lambda: not any(each.load.open_rows for each in (*watch.reports(), *watch.reports("prefill"))))
        os.kill(reader.metadata.pid, signal.SIGCONT)
        until(lambda: at_rest(watch))
        assert ask(*jobs[0]) == wanted[0]
    cluster.process.terminate()
    assert cluster.process.wait(HANG_S) == 0, cluster.log  # nothing hangs in its drain
