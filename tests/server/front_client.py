"""The app on a fake engine, called in-process through httpx."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from snapstream.server.app import make_app
from snapstream.server.settings import ServerSettings
from tests.server.fake_engine import FACTS, FakeEngine, tokenizer

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client(engine: FakeEngine, draft: Any = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(engine, tokenizer(), ServerSettings(**settings), lambda: FACTS, draft)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http
    app.state.front.close()


def app_of(http: httpx.AsyncClient) -> Any:
    """The application behind a client."""
    transport: Any = http._transport
    return transport.app


def frames(text: str) -> list[dict[str, Any]]:
    """Frames of a whole stream; the form is checked to the byte, and the last must be [DONE]."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)
