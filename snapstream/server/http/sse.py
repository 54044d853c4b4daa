"""Server-sent events, and the watch over a client that may leave at any moment.

Frames are exactly ``data: {json}\\n\\n``, the last is ``data: [DONE]``. Invariant: when the client is gone, whatever is
computed for it is cancelled at once, not when the next byte could not be sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from snapstream.server.http.errors import ApiError, internal

T = TypeVar("T")

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody is there to be answered."""


def frame(data: Any) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ClientGone, and ``work`` cancelled, if the client leaves first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams objects as frames. The first one is already known, so that an early error could have its own status."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        rest: AsyncGenerator[Any, None],
        as_api_error: Callable[[Exception], ApiError],
        on_end: Callable[[int, str], None],
    ) -> None:
        """``on_end`` is called once, with the status and why the stream is not complete, or ""."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._as_api_error = as_api_error
        self._on_end = on_end
        self._how = "left"  # until something else is known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass
        finally:
            try:
                await self._rest.aclose()
            finally:
                self._on_end(200, self._how)

    async def _send_all(self, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await put(frame(self._first))
            async for item in self._rest:
                await put(frame(item))
            self._how = ""
        except OSError:
            raise
        except Exception as error:  # the status line is gone: the stream itself must say it
            fault = self._as_api_error(error)
            self._how = fault.code or "error"
            if fault.status == internal().status:
                log.exception("error in a stream")
            await put(frame(fault.body))
        await put(DONE)
        await put(b"", more=False)
