"""Signals to a server under load: the engine is killed, the server is told to end, the server is killed.

Limits are wide, because the machine that runs the tests may be busy; what they bound takes tenths of a second. What
must still run when a signal comes runs for seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import ServerProcess, is_running, served
from tests.waiting import HANG_S, Lateness, until

ROWS = 3
OPTIONS = ["--max-rows", str(ROWS), "--budget", "128"]
ANSWER_S = 5.0  # for every client to hear of the engine's death; 2 s are promised
PROMPTS = ["Once upon a time", "The report", "word " * 300, "A key"]
SHORT: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
BLOCKING: dict[str, Any] = {**SHORT, "max_tokens": 2000}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 12_000}
DRAIN_S = 3  # time enough to be told that the server drains


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str
    error: str | None  # its code
    seconds: float  # from the beginning of the test's last signal, see ``Load``


class Load:
    """Requests side by side, half of them streams."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.signalled_at = time.monotonic()

    async def ask(self, prompt: str, fields: dict[str, Any], *, stream: bool) -> Outcome:
        body = {"prompt": prompt, "stream": stream, **fields}
        response = await self.http.post("/v1/completions", json=body)
        seconds = time.monotonic() - self.signalled_at
        if response.status_code != 200:
            return Outcome(response.status_code, "", response.json()["error"]["code"], seconds)
        if not stream:
            return Outcome(200, response.json()["choices"][0]["text"], None, seconds)
        *frames, done = [part.removeprefix("data: ") for part in response.text.split("\n\n")[:-1]]
        assert done == "[DONE]", "a stream ends as one, whatever happened"
        chunks = [json.loads(frame) for frame in frames]
        error = chunks.pop()["error"]["code"] if "error" in chunks[-1] else None
        return Outcome(200, "".join(chunk["choices"][0]["text"] for chunk in chunks), error, seconds)

    def start(self, fields: dict[str, Any], numbers: Sequence[int]) -> list[asyncio.Task[Outcome]]:
        return [asyncio.create_task(self.ask(PROMPTS[i % len(PROMPTS)], fields, stream=i % 2 == 0)) for i in numbers]

    async def gauges(self) -> dict[str, float]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        ours = [line.removeprefix("snapstream:") for line in lines if line.startswith("snapstream:")]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in ours}

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

    def signal(self, pid: int, number: signal.Signals) -> None:
        self.signalled_at = time.monotonic()
        os.kill(pid, number)


def run(server: ServerProcess, work: Any) -> None:
    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as http:
            await asyncio.wait_for(work(Load(http)), 2 * HANG_S)

    asyncio.run(main())


def test_a_killed_engine_costs_running_requests_and_a_drain_none(tmp_path: Path) -> None:
    with served([*OPTIONS, "--drain-timeout", str(HANG_S)], tmp_path / "log") as server:

        async def work(load: Load) -> None:
            alone = [await load.ask(prompt, SHORT, stream=False) for prompt in PROMPTS]
            old_pid, before = server.engine_pid, (await load.gauges())["generation_tokens_total"]
            running = load.start(LONG, range(ROWS))  # streams among them
            await load.until_taken(ROWS)
            running += load.start(LONG, range(ROWS, 12))
            await load.until_taken(12)
            while (await load.gauges())["generation_tokens_total"] < before + 20 * ROWS:
                await asyncio.sleep(0.02)
            with Lateness() as late:
                load.signal(old_pid, signal.SIGKILL)
                outcomes = await asyncio.gather(*running)
            assert [outcome.error for outcome in outcomes] == ["engine_unavailable"] * 12
            assert {outcome.status for outcome in outcomes} == {200, 503}, "streams that ran, and the rest"
            assert max(outcome.seconds for outcome in outcomes) < late.allowed(ANSWER_S)
            assert await load.health() == 503
            refused = await load.ask("a", SHORT, stream=False)
            assert (refused.status, refused.error) == (503, "engine_unavailable")
            while await load.health() != 200:
                assert time.monotonic() - load.signalled_at < HANG_S
                await asyncio.sleep(0.05)
            assert server.engine_pid != old_pid and not is_running(old_pid)
            again = await asyncio.gather(*load.start(SHORT, range(12)))
            assert [outcome.text for outcome in again] == [outcome.text for outcome in alone] * 3
            assert (await load.gauges())["engine_restarts_total"] == 1
            await load.until_at_rest()

            outcomes = await drain(load, server, BLOCKING)
            assert all(outcome.error is None for outcome in outcomes), "what was taken is answered, the queue included"
            assert [outcome.text for outcome in outcomes[ROWS:]] == [alone[i % len(alone)].text for i in range(9)]

        run(server, work)
        assert server.process.wait(HANG_S) == 0


async def drain(load: Load, server: ServerProcess, blockers_ask: dict[str, Any]) -> list[Outcome]:
    """SIGTERM while all rows are taken and the queue holds nine requests."""
    blockers = load.start(blockers_ask, range(ROWS))
    await load.until_taken(ROWS)
    running = load.start(SHORT, range(9))
    await load.until_taken(ROWS + 9)
    load.signal(server.pid, signal.SIGTERM)
    while await load.health() == 200:
        assert time.monotonic() - load.signalled_at < HANG_S
    assert (await load.ask("a", SHORT, stream=True)).status == 503, "new work is refused"
    return await asyncio.gather(*blockers, *running)


def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error(tmp_path: Path) -> None:
    with served([*OPTIONS, "--drain-timeout", str(DRAIN_S)], tmp_path / "log") as server:

        async def work(load: Load) -> None:
            with Lateness() as late:
                outcomes = await drain(load, server, LONG)
            assert [outcome.error for outcome in outcomes] == ["engine_unavailable"] * (ROWS + 9)
            assert max(outcome.seconds for outcome in outcomes) < late.allowed(DRAIN_S + ANSWER_S)

        run(server, work)
        assert server.process.wait(HANG_S) == 0
        assert not is_running(server.engine_pid)


def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    with served(OPTIONS, tmp_path / "log") as server:

        async def work(load: Load) -> None:
            running = load.start(LONG, range(6))
            await load.until_taken(6)
            load.signal(server.pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(outcome, httpx.HTTPError) for outcome in outcomes), outcomes

        run(server, work)
        until(lambda: not is_running(server.engine_pid))  # else the engine outlives its server
