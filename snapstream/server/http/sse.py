"""Server-sent events, and cancellation of a request's work when its client disconnects: at once, not when the next byte
cannot be sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from snapstream.server.http.errors import ApiError, internal, note_fault

T = TypeVar("T")

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client closed its connection."""


def frame(item: dict[str, Any]) -> bytes:
    """``data: {json}``; the frame of an item with a ``type`` also names its event by it."""
    data = b"data: " + to_json(item) + b"\n\n"
    return b"event: " + str(item["type"]).encode() + b"\n" + data if "type" in item else data


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ClientDisconnected, and ``work`` cancelled, if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams items as frames. The first item is given, so that an error before it could have its own status."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        rest: AsyncGenerator[Any, None],
        as_api_error: Callable[[Exception], ApiError],
        on_end: Callable[[int, str], None],
        fault_item: Callable[[ApiError], dict[str, Any]],
        end: bytes = DONE,
    ) -> None:
        """``on_end`` is called once, with the status and why the stream is incomplete, or "".

        ``fault_item``: the item for an error that ends the stream. ``end`` follows the last item.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._as_api_error = as_api_error
        self._on_end = on_end
        self._fault_item, self._end = fault_item, end
        self._end_reason = "left"  # unless it ends otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(scope, send))
        except (ClientDisconnected, OSError):
            pass
        finally:
            try:
                await self._rest.aclose()
            finally:
                self._on_end(200, self._end_reason)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        # In the task of the first frame, so that both are sent in one write.
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await put(frame(self._first))
            async for item in self._rest:
                await put(frame(item))
            self._end_reason = ""
        except OSError:
            raise
        except Exception as error:  # the status is sent: the stream itself must report it
            fault = self._as_api_error(error)
            self._end_reason = fault.code or "error"
            note_fault(scope, fault.status, fault.reason)
            if fault.status == internal().status:
                log.exception("error in a stream")
            await put(frame(self._fault_item(fault)))
        if self._end:
            await put(self._end)
        await put(b"", more=False)
