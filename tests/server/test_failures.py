"""Signals to a server under load: the engine is killed, the server is told to end, the server is killed.

Nothing here depends on how fast the machine is: an engine that must not answer yet is stopped (SIGSTOP) meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.server_process import ServerProcess, is_running, served
from benchmarks.soak import soak
from snapstream.assets import TINY_MODEL
from snapstream.server.anthropic import MessagesBody
from snapstream.server.app import make_app
from snapstream.server.http.lifecycle import JsonFormatter, TextFormatter, fields_of
from snapstream.server.options import ServerSettings
from snapstream.server.responses.protocol import ResponsesBody
from tests.server.app_client import HI, JSON, AppClient, client
from tests.server.fake_engine import ANSWER, METADATA, FakeEngine, template_tokenizer
from tests.server.openai.test_errors import ANYTHING, bodies
from tests.server.templates import TELLING
from tests.waiting import HANG_S, until

ROWS = 3
OPTIONS = ["--max-rows", str(ROWS), "--budget", "128"]
PROMPTS = ["Once upon a time", "The report", "word " * 300, "A key"]
SHORT: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 12_000}


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str
    error: str | None  # its code


class Load:
    """Requests side by side, half of them streams."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, prompt: str, fields: dict[str, Any], *, stream: bool) -> Outcome:
        body = {"prompt": prompt, "stream": stream, **fields}
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            return Outcome(response.status_code, "", response.json()["error"]["code"])
        if not stream:
            return Outcome(200, response.json()["choices"][0]["text"], None)
        *frames, done = [part.removeprefix("data: ") for part in response.text.split("\n\n")[:-1]]
        assert done == "[DONE]", "a stream ends as one, whatever happened"
        chunks = [json.loads(frame) for frame in frames]
        error = chunks.pop()["error"]["code"] if "error" in chunks[-1] else None
        return Outcome(200, "".join(chunk["choices"][0]["text"] for chunk in chunks), error)

    def start(self, fields: dict[str, Any], numbers: Sequence[int]) -> list[asyncio.Task[Outcome]]:
        return [asyncio.create_task(self.ask(PROMPTS[i % len(PROMPTS)], fields, stream=i % 2 == 0)) for i in numbers]

    async def gauges(self) -> dict[str, float]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        ours = [line.removeprefix("snapstream:") for line in lines if line.startswith("snapstream:")]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in ours}

    async def ended(self, reason: str) -> float:
        """Samples that have ended so."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        marks = ("snapstream:request_success_total", f'finished_reason="{reason}"')
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(mark in line for mark in marks))

    async def until_taken(self, count: int) -> None:
        """Until the engine has so many requests, in rows or in its queue."""
        async with asyncio.timeout(HANG_S):
            while (now := await self.gauges())["num_requests_running"] + now["num_requests_waiting"] < count:
                await asyncio.sleep(0.02)

    async def until_at_rest(self) -> None:
        """The gauges are reported ten times a second, so they may lag behind the last answer."""
        async with asyncio.timeout(HANG_S):
            while (now := await self.gauges())["num_requests_running"] + now["num_requests_waiting"] + now["rows_used"]:
                await asyncio.sleep(0.02)

    async def health(self) -> int:
        return (await self.http.get("/health")).status_code

    async def until_health_is(self, status: int) -> None:
        async with asyncio.timeout(HANG_S):
            while await self.health() != status:
                await asyncio.sleep(0.02)


def run(server: ServerProcess, work: Any) -> None:
    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as http:
            await asyncio.wait_for(work(Load(http)), 2 * HANG_S)

    asyncio.run(main())


def test_a_killed_engine_costs_running_requests_and_a_drain_none(tmp_path: Path) -> None:
    model = Path(copytree(TINY_MODEL, tmp_path / "tiny"))
    weights, aside = model / "model.safetensors", tmp_path / "aside"
    with served([str(model), *OPTIONS, "--drain-timeout", str(HANG_S)], tmp_path / "log") as server:

        async def work(load: Load) -> None:
            alone = [await load.ask(prompt, SHORT, stream=False) for prompt in PROMPTS]
            old_pid, before = server.engine_pid, (await load.gauges())["generation_tokens_total"]
            running = load.start(LONG, range(ROWS))  # streams among them
            await load.until_taken(ROWS)
            running += load.start(LONG, range(ROWS, 12))
            await load.until_taken(12)
            while (await load.gauges())["generation_tokens_total"] < before + 20 * ROWS:
                await asyncio.sleep(0.02)
            weights.rename(aside)  # the engine cannot come back before this is undone
            os.kill(old_pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*running)
            assert [outcome.error for outcome in outcomes] == ["engine_unavailable"] * 12
            assert {outcome.status for outcome in outcomes} == {200, 503}, "streams that ran, and the rest"
            assert (await load.ended("error"), await load.ended("abort")) == (12, 0), "the engine's fault, not theirs"
            assert await load.health() == 503
            refused = await load.ask("a", SHORT, stream=False)
            assert (refused.status, refused.error) == (503, "engine_unavailable")
            aside.rename(weights)
            await load.until_health_is(200)
            assert server.engine_pid != old_pid and not is_running(old_pid)
            again = await asyncio.gather(*load.start(SHORT, range(12)))
            assert [outcome.text for outcome in again] == [outcome.text for outcome in alone] * 3
            assert (await load.gauges())["engine_restarts_total"] >= 1
            await load.until_at_rest()

            blockers, running = await fill(load)
            os.kill(server.engine_pid, signal.SIGSTOP)
            os.kill(server.pid, signal.SIGTERM)
            await load.until_health_is(503)
            assert (await load.ask("a", SHORT, stream=True)).status == 503, "new work is refused"
            for blocker in blockers:
                blocker.cancel()
            os.kill(server.engine_pid, signal.SIGCONT)
            outcomes = await asyncio.gather(*running)
            assert all(outcome.error is None for outcome in outcomes), "what was taken is answered, the queue included"
            assert [outcome.text for outcome in outcomes] == [alone[i % len(alone)].text for i in range(9)]

        run(server, work)
        assert server.process.wait(HANG_S) == 0


async def fill(load: Load) -> tuple[list[asyncio.Task[Outcome]], list[asyncio.Task[Outcome]]]:
    """Requests that take all rows, and nine in the queue."""
    blockers = load.start(LONG, range(ROWS))
    await load.until_taken(ROWS)
    waiting = load.start(SHORT, range(9))
    await load.until_taken(ROWS + 9)
    return blockers, waiting


def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error(tmp_path: Path) -> None:
    with served([*OPTIONS, "--drain-timeout", "0.5"], tmp_path / "log") as server:

        async def work(load: Load) -> None:
            blockers, waiting = await fill(load)
            os.kill(server.engine_pid, signal.SIGSTOP)  # nothing ends in time, however fast the machine is
            os.kill(server.pid, signal.SIGTERM)
            outcomes = await asyncio.gather(*blockers, *waiting)
            assert [outcome.error for outcome in outcomes] == ["engine_unavailable"] * (ROWS + 9)
            with suppress(ProcessLookupError):  # the server may have lost its patience with it
                os.kill(server.engine_pid, signal.SIGCONT)

        run(server, work)
        assert server.process.wait(HANG_S) == 0
        assert not is_running(server.engine_pid)


def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    with served(OPTIONS, tmp_path / "log") as server:

        async def work(load: Load) -> None:
            running = load.start(LONG, range(6))
            await load.until_taken(6)
            os.kill(server.pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(outcome, httpx.HTTPError) for outcome in outcomes), outcomes

        run(server, work)
        until(lambda: not is_running(server.engine_pid))  # else the engine outlives its server


# The log as text and as JSON: one line each, fields by their names, nothing of what was asked or answered.

# What docs/serving.md lists.
FIELDS = """
    request answer path status end prompt_tokens dropped_tokens cached_tokens diverged_at kept_tokens
    completion_tokens queue_ms ttft_ms ms
""".split()


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("snapstream.x", logging.INFO, "file", 1, "said %d\nthings", (2,), None)
    made.__dict__.update(extra)
    return made


def test_json_is_one_object_per_line() -> None:
    line = JsonFormatter().format(record(fields={"request": "r", "ttft_ms": None, "ms": 1.25}))
    assert "\n" not in line
    parsed = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", parsed.pop("time"))
    assert parsed == {
        "level": "info", "logger": "snapstream.x", "message": "said 2\nthings", "request": "r", "ttft_ms": None,
        "ms": 1.25,
    }  # fmt: skip


def test_json_keeps_a_traceback_in_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        line = JsonFormatter().format(record(exc_info=(type(error), error, error.__traceback__)))
    assert "\n" not in line and "ValueError: broken" in json.loads(line)["exception"]


def test_text_shows_the_fields() -> None:
    line = TextFormatter().format(record(fields={"request": "r", "ttft_ms": None, "ms": 1.25}))
    assert line.startswith("time=") and " level=INFO said 2" in line and line.endswith(" request=r ttft_ms=- ms=1.2")


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_request(stream: bool) -> None:
    out = StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("snapstream.server.http.requests")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:

        async def run() -> None:
            async with client(FakeEngine()) as http:
                body = {"prompt": "a secret", "max_tokens": 3, "stream": stream}
                await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})

        asyncio.run(run())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (text,) = out.getvalue().splitlines()
    line = json.loads(text)
    assert [name for name in line if name not in ("time", "level", "logger", "message")] == FIELDS
    assert (line["request"], line["status"], line["end"], line["completion_tokens"]) == ("mine", 200, "length", 3)
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert "secret" not in text and ANSWER[:5] not in text


def test_records_without_fields_are_plain() -> None:
    assert fields_of(record()) == {}


# The soak of ``benchmarks/soak.py``, short: right answers beside leavers and nonsense, and nothing left over.


def test_a_short_soak(tmp_path: Path) -> None:
    figures = soak(300, 32, 1, tmp_path / "log", max_waiting=12, num_jobs=24)
    assert figures["failures"] == []
    outcomes = figures["outcomes"]
    assert outcomes["right"] + outcomes["cancelled"] + outcomes["refused"] == 300
    assert min(outcomes["cancelled"], outcomes["refused"], outcomes["tried again"]) > 0, "each must have happened"


# Whatever a client sends to the Responses and the Messages API, it is answered or refused in their form, never 5xx.

TEXTS = st.sampled_from(["", "x", "{}", "get", "c1"])
KINDS = (
    "message reasoning function_call function_call_output custom_tool_call custom_tool_call_output input_text "
    "output_text"
)
BLOCKS = "text thinking redacted_thinking tool_use tool_result image input_text"


def things(kinds: str, roles: str) -> st.SearchStrategy[Any]:
    """Items, messages and blocks in each other, right and wrong."""
    return st.recursive(
        ANYTHING | TEXTS,
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(kinds.split()), "role": st.sampled_from(roles.split()), "text": TEXTS,
                "content": inner | st.lists(inner, max_size=2), "output": inner | st.lists(inner, max_size=2),
                "name": TEXTS, "arguments": TEXTS, "input": st.dictionaries(TEXTS, ANYTHING, max_size=1) | TEXTS,
                "call_id": TEXTS, "id": TEXTS, "tool_use_id": TEXTS, "thinking": TEXTS, "is_error": ANYTHING,
            },
        ),
        max_leaves=8,
    )  # fmt: skip


TOOLS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["function", "custom", "web_search", None]), "name": TEXTS, "parameters": ANYTHING,
            "input_schema": ANYTHING | st.just({"type": "object"}), "format": ANYTHING, "strict": ANYTHING,
        },
    )
    | ANYTHING,
    max_size=2,
)  # fmt: skip
CHOICES = ANYTHING | st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["auto", "tool", "function", "allowed_tools"]), "name": TEXTS, "tools": TOOLS}
)
ITEMS = st.lists(things(KINDS, "user assistant system tool"), max_size=3)
MESSAGES = st.lists(things(BLOCKS, "user assistant system tool"), max_size=3)


@cache
def app() -> FastAPI:
    own = ServerSettings(tool_parser="hermes", responses_store=4)
    return make_app(FakeEngine(), template_tokenizer(TELLING), own, lambda: METADATA)


def answer(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with AppClient(app()) as http:
            response = await http.post(path, content=json.dumps(body).encode(), headers=JSON)
        if response.status_code != 200:
            assert 400 <= response.status_code < 500, (body, response.text)
            error = response.json()["error"]
            assert error["message"] and ("param" in error) == (path == "/v1/responses")

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(
    bodies(ResponsesBody, {"input": "hi", "max_output_tokens": 3})
    | st.fixed_dictionaries(
        {"input": ITEMS}, optional={"tools": TOOLS, "tool_choice": CHOICES, "stream": st.booleans()}
    )
)
def test_responses(body: dict[str, Any]) -> None:
    answer("/v1/responses", body)


@settings(max_examples=100, deadline=None)
@given(
    bodies(MessagesBody, {"messages": HI, "max_tokens": 3})
    | st.fixed_dictionaries(
        {"messages": MESSAGES, "max_tokens": st.just(3)},
        optional={"tools": TOOLS, "tool_choice": CHOICES, "system": MESSAGES, "stream": st.booleans()},
    )
)
def test_messages(body: dict[str, Any]) -> None:
    answer("/v1/messages", body)
    answer("/v1/messages/count_tokens", body)
