"""The app on a fake engine, called in-process through httpx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from snapstream.server.app import make_app
from snapstream.server.openai.state import ServerState
from snapstream.server.options import ServerSettings
from tests.server.fake_engine import METADATA, FakeEngine, template_tokenizer, tokenizer

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


class AppClient(httpx.AsyncClient):
    """A client of an application in this process, whose shared state is ``server``."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")
        self.app = app
        self.server: ServerState = app.state.server


@asynccontextmanager
async def client(
    engine: FakeEngine, draft: Any = None, *, template: str = "", **settings: Any
) -> AsyncIterator[AppClient]:
    """``template``: the tokenizer's, instead of its own."""
    own = template_tokenizer(template) if template else tokenizer()
    async with AppClient(make_app(engine, own, ServerSettings(**settings), lambda: METADATA, draft)) as http:
        try:
            yield http
        finally:
            http.server.close()  # or the processes that it started keep a failed test waiting


def frames(text: str) -> list[dict[str, Any]]:
    """Frames of a whole stream; the form is checked to the byte, and the last must be [DONE]."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def call(
    path: str, body: Any = None, *, engine: FakeEngine | None = None, method: str = "POST", **settings: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(engine or FakeEngine(), **settings) as http:
            given = (
                {"content": body, "headers": JSON}
                if isinstance(body, bytes)
                else {"json": body}
                if body is not None
                else {}
            )
            return await http.request(method, path, **given)

    return asyncio.run(run())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}
