"""Two replicas on a cluster of one node: every API streams, conversations stay, deaths are told, updates drop nothing.

Nothing here depends on how fast anything is: an engine that must not have answered yet is stopped by a signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest

from benchmarks.ray_process import Deployed, ReplicaWatch
from snapstream.integrations.ray.replicas import Report
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.waiting import until

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

PROMPT = "The river"
SHORT = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 4000, "stream": True}


def until_whole(http: httpx.Client, watch: ReplicaWatch) -> list[Report]:
    """Two replicas that take requests and have none, and an ingress that knows it."""
    found: list[Report] = []

    def is_whole() -> bool:
        found[:] = watch.reports()
        return len(found) == 2 and not any(each.load.unavailable or each.load.open_rows for each in found)

    until(is_whole)
    until(lambda: 'snapstream:rows_free{model_name="tiny"} 8.0' in http.get("/metrics").text)
    return found


def serving(watch: ReplicaWatch) -> Report:
    """The replica that has the only open request."""
    [found] = [report for report in watch.reports() if report.load.open_rows]
    return found


@contextmanager
def begun(http: httpx.Client, body: dict[str, Any] | None = None) -> Iterator[Iterator[str]]:
    """The lines of a long stream, of which some have come."""
    with http.stream("POST", "/v1/completions", json=body or LONG) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(3):
            assert "text" in next(lines)
        yield lines


@contextmanager
def posted(http: httpx.Client, body: dict[str, Any]) -> Iterator[Future[httpx.Response]]:
    """An answer that comes when it comes; leaving waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(http.post, "/v1/completions", json=body)


def answer(llm: LLM, num_tokens: int) -> str:
    return llm.generate([PROMPT], SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))[0].text


def test_clients_of_every_api_are_answered(cluster: Deployed, watch: ReplicaWatch, llm: LLM) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    want = answer(llm, 24)
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True, extra_body=extra,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == want
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, temperature=0, stream=True, extra_body=extra
    )
    assert [chunk.choices[0].finish_reason for chunk in chat][-1] == "length"
    events = client.responses.create(model="tiny", input="hello", max_output_tokens=16, stream=True)
    assert {event.type for event in events} >= {"response.created", "response.output_text.delta"}
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    body = {"model": "tiny", "max_tokens": 4, "messages": messages, "stream": True}
    lines = httpx.post(f"{cluster.url}/v1/messages", json=body, timeout=60).text
    assert "event: message_start" in lines and "event: message_stop" in lines
    stopped = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=[want[4:8]])
    assert stopped.choices[0].finish_reason == "stop"


def test_an_answer_has_one_id_and_metrics_count_all_replicas(http: httpx.Client, watch: ReplicaWatch) -> None:
    response = http.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    until_whole(http, watch)
    assert http.get("/health").status_code == 200


def test_a_client_that_leaves_frees_its_row(http: httpx.Client, watch: ReplicaWatch) -> None:
    with begun(http):
        assert serving(watch).load.open_rows == 1
    until(lambda: sum(report.load.open_rows for report in watch.reports()) == 0)
    until(lambda: all(report.stats.rows_free == report.stats.rows_total for report in watch.reports()))


def test_a_conversation_stays_where_its_beginning_is_stored(http: httpx.Client, watch: ReplicaWatch) -> None:
    """Four of them, three turns each: all that a turn before stored is found, which is so on one replica only."""
    until_whole(http, watch)
    for number in range(4):
        prompt = [3 + (number * 7 + i * i) % 250 for i in range(1100)]
        for turn in range(3):
            body = {**SHORT, "prompt": prompt, "max_tokens": 2}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == (0 if turn == 0 else 1024)
            prompt = [*prompt, *range(10, 20)]


def test_a_request_without_a_token_is_repeated_elsewhere(http: httpx.Client, watch: ReplicaWatch, llm: LLM) -> None:
    """Both engines stand still, so that no token can have come; the one that has the request is then killed."""
    reports = until_whole(http, watch)
    for report in reports:
        os.kill(report.metadata.pid, signal.SIGSTOP)
    with posted(http, SHORT) as response:
        until(lambda: any(report.load.open_rows for report in watch.reports()))
        having = serving(watch)
        os.kill(having.pid, signal.SIGKILL)
        for report in reports:
            if report.replica != having.replica:
                os.kill(report.metadata.pid, signal.SIGCONT)
    assert response.result().status_code == 200
    assert response.result().json()["choices"][0]["text"] == answer(llm, 24)
    until_whole(http, watch)


@pytest.mark.parametrize("part", ["engine", "replica"])
def test_a_death_amid_a_stream_ends_it_with_an_error(http: httpx.Client, watch: ReplicaWatch, part: str) -> None:
    until_whole(http, watch)
    with begun(http) as lines:
        having = serving(watch)
        os.kill(having.metadata.pid if part == "engine" else having.pid, signal.SIGKILL)
        rest = list(lines)
        assert http.post("/v1/completions", json=SHORT).status_code == 200  # the other one is there
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    after = until_whole(http, watch)
    is_same_replica = having.replica in [report.replica for report in after]
    assert is_same_replica == (part == "engine")  # an engine is restarted in its replica


def test_rows_of_a_dead_ingress_are_given_back(cluster: Deployed, http: httpx.Client, watch: ReplicaWatch) -> None:
    """The engine stands still meanwhile: the request cannot have ended by itself."""
    until_whole(http, watch)
    pids = [int(found) for found in re.findall(r"ServeReplica:snapstream:ingress pid=(\d+)", cluster.log)]
    with begun(http) as lines:
        having = serving(watch)
        os.kill(having.metadata.pid, signal.SIGSTOP)
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    until(lambda: not any(report.load.open_rows for report in watch.reports()))
    os.kill(having.metadata.pid, signal.SIGCONT)
    until(lambda: http.get("/health").status_code == 200)


def test_an_update_drops_no_stream(
    cluster: Deployed, http: httpx.Client, watch: ReplicaWatch, config: dict[str, Any]
) -> None:
    """The engine that writes the stream stands still until Ray has begun to end its replica."""
    before = {report.replica for report in until_whole(http, watch)}
    changed = {**config, "engine": {**config["engine"], "budget": 256}}
    with begun(http) as lines, ThreadPoolExecutor(1) as pool:
        having = serving(watch)
        os.kill(having.metadata.pid, signal.SIGSTOP)
        updated = pool.submit(cluster.again, changed)
        until(lambda: having.replica not in [report.replica for report in watch.reports()])
        os.kill(having.metadata.pid, signal.SIGCONT)
        rest = list(lines)
        updated.result()
    last = json.loads(rest[-2].removeprefix("data: "))
    assert rest[-1] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "length"

    def is_new() -> bool:
        reports = watch.reports()
        return len(reports) == 2 and all(report.metadata.engine.budget.capacity == 256 for report in reports)

    until(is_new)
    assert not before & {report.replica for report in until_whole(http, watch)}
    assert http.post("/v1/completions", json=SHORT).status_code == 200
