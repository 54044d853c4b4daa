"""Clients that leave, and servers that drain while requests are on their way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineDead
from snapstream.server.http.lifecycle import TextFormatter
from snapstream.server.options import ServerSettings
from snapstream.types import QueueFull
from tests.server.app_client import HI, client, samples
from tests.server.fake_engine import METADATA, FakeEngine, tokenizer
from tests.waiting import HANG_S


class Visitor:
    """A client at the ASGI level, which can leave."""

    def __init__(self, engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
        self.app = make_app(engine, tokenizer(), ServerSettings(), lambda: METADATA)
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._body: bytes | None = json.dumps(body).encode()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "server": ("t", 80), "client": ("c", 1),
        }  # fmt: skip

    async def run(self) -> None:
        async def receive() -> dict[str, Any]:
            if self._body is not None:
                body, self._body = self._body, None
                return {"type": "http.request", "body": body, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(self._scope, receive, send)


@pytest.mark.parametrize("hang_after", [0, 4], ids=["in prefill", "in decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [("/v1/chat/completions", {"messages": HI}, 1), ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3)],
)
def test_a_client_that_leaves_frees_its_rows(
    path: str, fields: dict[str, Any], count: int, stream: bool, hang_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def run() -> None:
        engine = FakeEngine(hang_after=hang_after)
        visitor = Visitor(engine, path, {**fields, "stream": stream})
        task = asyncio.create_task(visitor.run())
        await asyncio.wait_for(engine.hanging.wait(), HANG_S)
        while engine.num_running < count:
            await asyncio.sleep(0)
        visitor.gone.set()  # the engine itself stays silent: only the watch can notice
        await asyncio.wait_for(task, HANG_S)
        assert engine.num_running == 0 and len(engine.aborted) == count
        text = visitor.app.state.server.metrics.render().decode()
        assert samples(text)['vllm:request_success_total{finished_reason="abort",model_name="tiny"}'] == count
        assert visitor.app.state.server.open_requests.num_open == 0
        visitor.app.state.server.close()

    asyncio.run(run())
    (line,) = [line for line in map(TextFormatter().format, caplog.records) if " end=" in line]
    assert ("status=200 end=left" if stream and hang_after else "status=499 end=-") in line


def test_a_drain_waits_for_prompts_that_wait_in_the_front() -> None:
    """A batch larger than the queue was accepted as a whole: the engine may not close before its last prompt."""

    class OneAtATime(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if not self.is_ready:
                raise EngineDead("the engine is shutting down")
            if self.num_running:
                raise QueueFull("full")
            async for delta in super().generate(request):
                yield delta

    async def run() -> None:
        engine = OneAtATime(hang_after=1)
        async with client(engine) as http:
            body = {"prompt": ["a", "b", "c"], "max_tokens": 3}
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            server = http.server
            drain = asyncio.create_task(server.drain(10 * HANG_S))
            await asyncio.sleep(0)
            assert (await http.post("/v1/completions", json=body)).status_code == 503  # new work
            refused = await http.get("/health")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down; try again later"
            engine.released.set()
            response = await answer
            assert response.status_code == 200, response.text
            assert len(response.json()["choices"]) == 3
            await asyncio.wait_for(drain, HANG_S)
            assert engine.is_shut and server.open_requests.num_open == 0

    asyncio.run(run())


def test_a_request_that_is_being_tokenized_survives_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if not self.is_ready:
                raise EngineDead("the engine is shutting down")
            async for delta in super().generate(request):
                yield delta

    async def run() -> None:
        engine = Strict()
        async with client(engine) as http:
            server = http.server
            encode, may_go, is_there = server.prompts.encode, asyncio.Event(), asyncio.Event()

            async def slowly(*args: Any, **options: Any) -> Any:
                is_there.set()
                await may_go.wait()
                return await encode(*args, **options)

            monkeypatch.setattr(server.prompts, "encode", slowly)
            answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
            await asyncio.wait_for(is_there.wait(), HANG_S)
            drain = asyncio.create_task(server.drain(10 * HANG_S))
            for _ in range(10):  # turns of the loop, in which the drain could go too far
                await asyncio.sleep(0)
            assert server.is_draining and not drain.done() and not engine.is_shut
            may_go.set()
            assert (await answer).status_code == 200
            await asyncio.wait_for(drain, HANG_S)

    asyncio.run(run())


def test_a_drain_ends_in_time_whatever_is_open() -> None:
    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine) as http:
            answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            await asyncio.wait_for(http.server.drain(0.1), HANG_S)
            assert (await answer).status_code == 503

    asyncio.run(run())
