"""A fake OpenAI-compatible server, a fake draft, and a proxy between them, all on real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from snapstream.proxy import make_proxy, proxy_config
from snapstream.server.options import ProxyOptions
from snapstream.spec_prefill.settings import Protection
from snapstream.types import CompressionSummary
from tests.server.app_server import on_socket
from tests.waiting import HANG_S

CUT = "[...]"


@dataclass
class FakeResult:
    report: CompressionSummary
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def _report(before: int, after: int) -> CompressionSummary:
    return CompressionSummary(
        tokens_before=before, tokens_after=after, draft_ms=1.5, reason="" if before != after else "short"
    )


class FakeDraft:
    """Keeps the first words of long texts; counts words. ``gate`` holds it up, ``error`` makes it fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.num_calls = 0
        self.protection = Protection(threshold=0)

    def compress(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        target_tokenizer: object,
        keep: float | None,
        max_tokens: int | None,
        threshold: int | None = None,
        tools: object = None,
    ) -> FakeResult:
        self.num_calls += 1
        self.gate.wait(HANG_S)
        if self.error is not None:
            raise self.error
        if isinstance(prompt, str):
            text, before, after = self._cut(prompt, keep, max_tokens)
            return FakeResult(_report(before, after), text=text)
        messages, total, left = [], 0, 0
        for message in prompt:
            text, before, after = self._cut(message["content"], keep, max_tokens)
            total, left = total + before, left + after
            messages.append({**message, "content": text})
        return FakeResult(_report(total, left), messages=messages)

    @staticmethod
    def _cut(text: str, keep: float | None, max_tokens: int | None) -> tuple[str, int, int]:
        words = text.split()
        room = max_tokens if max_tokens is not None else int(len(words) * (keep or 1.0))
        if len(words) <= 8 or room >= len(words):
            return text, len(words), len(words)
        return " ".join([*words[:room], CUT]), len(words), room


@dataclass
class Seen:
    """What reached the upstream server."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    num_left: int = 0  # streams whose reader went away


def make_upstream(seen: Seen) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/{path:path}")
    async def answer(request: Request, path: str) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw.startswith(b"{") else {"raw": raw.decode()}
        seen.bodies.append(body)
        seen.headers.append(dict(request.headers))
        seen.targets.append(str(request.url).split("/", 3)[3])
        if body.get("model") == "missing":
            error = {"message": "no such model", "type": "x", "param": None, "code": "model_not_found"}
            return JSONResponse({"error": error}, 404, {"retry-after": "7"})
        if body.get("stream"):
            return StreamingResponse(_frames(seen, body), media_type="text/event-stream")
        message = {"role": "assistant", "content": "fine"}
        choice = {"index": 0, "message": message, "text": "fine", "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        return JSONResponse(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        seen.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    return app


async def _frames(seen: Seen, body: dict[str, Any]) -> AsyncIterator[bytes]:
    done = False
    try:
        for index in range(body.get("max_tokens") or 3):
            delta = {"role": "assistant", "content": f"t{index} "}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m",
                     "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}  # fmt: skip
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            if index == 1 and body.get("user") == "breaks":
                raise RuntimeError("the upstream broke")
            await asyncio.sleep(0.02)
        yield b"data: [DONE]\n\n"
        done = True
    finally:
        seen.num_left += not done


@dataclass
class Chain:
    """Proxy and upstream."""

    url: str
    seen: Seen
    draft: FakeDraft
    app: FastAPI


@contextmanager
def chain(*, upstream_app: ASGIApp | None = None, **settings: Any) -> Iterator[Chain]:
    seen, draft = Seen(), FakeDraft()
    with on_socket(upstream_app or make_upstream(seen)) as upstream:
        upstream += settings.pop("prefix", "")
        options: dict[str, Any] = {"upstream": upstream, "keep": 0.5, **settings}
        app = make_proxy(draft, None, ProxyOptions(**options))  # type: ignore[arg-type]
        own = proxy_config(app)
        with on_socket(app, date_header=own.date_header, http=own.http) as url:
            yield Chain(url, seen, draft, app)
            draft.gate.set()
