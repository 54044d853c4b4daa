"""Bodies: their type and form, and the bounds of one and of all together."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.front_client import CHAT, JSON, TEXT, call, client, error_of
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b"\xff", b"[" * 10000]
)
def test_bodies_that_are_not_json_objects(body: bytes) -> None:
    error_of(call(TEXT, body), 400)


def test_other_content_types_are_refused() -> None:
    """A page may send these to any server without asking it first."""

    async def run() -> None:
        engine = FakeEngine()
        async with client(engine) as http:
            body = b'{"prompt": "a"}'
            for kind in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", None):
                headers = {"Origin": "http://evil.example"} | ({"Content-Type": kind} if kind else {})
                for path in (TEXT, CHAT, "/tokenize"):
                    response = await http.post(path, content=body, headers=headers)
                    assert error_of(response, 400)["code"] == "invalid_content_type"
            assert engine.requests == []
            headers = {"Content-Type": "Application/JSON; charset=utf-8"}
            assert (await http.post(TEXT, content=body, headers=headers)).status_code == 200

    asyncio.run(run())


def test_body_limit_declared_and_chunked() -> None:
    big = {"prompt": "x" * 2000}
    error_of(call(TEXT, big, max_body_bytes=1000), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async def chunked() -> httpx.Response:
        async with client(FakeEngine(), max_body_bytes=1000) as http:
            return await http.post(TEXT, content=pieces(), headers=JSON)

    error_of(asyncio.run(chunked()), 413)


def test_requests_over_the_limit_are_refused_before_their_body_is_read() -> None:
    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_requests=2, retry_after_s=3) as http:
            body = {"prompt": "a", "stream": True}
            taken = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            while engine.num_running < 2:
                await asyncio.sleep(0)

            async def unread() -> Any:
                raise AssertionError("the body was asked for")
                yield b""

            for path in ("/v1/completions", "/tokenize"):
                response = await http.post(path, content=unread(), headers=JSON)
                assert (response.status_code, response.headers["retry-after"]) == (429, "3")
            engine.released.set()
            assert [response.status_code for response in await asyncio.gather(*taken)] == [200, 200]
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_open_bodies_are_bounded_together() -> None:
    body = {"prompt": "a", "user": "u" * 600}

    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_body_bytes=1000, max_open_body_bytes=1000) as http:
            taken = asyncio.create_task(http.post("/v1/completions", json={**body, "stream": True}))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            visits = http.front.visits
            held = visits.num_bytes
            assert 600 < held < 1000
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert response.headers["retry-after"] == "1" and "1000 bytes" in response.json()["error"]["message"]
            assert visits.num_bytes == held, "what was refused holds nothing"
            engine.released.set()
            assert (await taken).status_code == 200 and visits.num_bytes == 0
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_a_body_that_trickles_is_given_up() -> None:
    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(10 * HANG_S)

    async def run() -> None:
        async with client(FakeEngine(), body_timeout_s=0.05) as http:
            response = await asyncio.wait_for(http.post("/v1/completions", content=trickle(), headers=JSON), HANG_S)
            assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
            assert http.front.visits.num_open == 0

    asyncio.run(run())
