"""Admission, body and end of each request, in the server and in the proxy, and server-sent events.

    admit -> read the body -> work, cancelled if the client disconnects -> answer or error -> count and log

Invariants: a request over a limit is refused before a byte of its body is read. An admitted request ends exactly once
and logs one line. A disconnect cancels the work at once, not when the next byte cannot be sent. A drain waits for all
open requests, also those whose prompts have not been submitted yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self, TypeVar

from fastapi import Request, Response
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from snapstream.server.http.errors import (
    CLIENT_CLOSED,
    Api,
    ApiError,
    api_of,
    bad_value,
    internal,
    note_fault,
    queue_full,
    unavailable,
)
from snapstream.server.options import RequestLimits

T = TypeVar("T")

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


class StreamedResponse(Response):
    """Sent piece by piece from a source that ``close`` closes: at the end, at the latest when the client disconnects.

    ``on_end`` is called once, with the status and why the answer is incomplete, or "".
    """

    def __init__(
        self,
        close: Callable[[], Awaitable[None]],
        on_end: Callable[[int, str], None],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        self._close, self._on_end = close, on_end
        self.end_reason = "left"  # unless it ends otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self.send_all(scope, send))
        except (ClientDisconnected, OSError):
            pass
        finally:
            try:
                await self._close()
            finally:
                self._on_end(self.status_code, self.end_reason)

    async def send_all(self, scope: Scope, send: Send) -> None:
        """Send head and body, and set ``end_reason``."""
        raise NotImplementedError


class EventStream(StreamedResponse):
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
        """``fault_item``: the item for an error that ends the stream. ``end`` follows the last item."""
        super().__init__(rest.aclose, on_end, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._end = first, rest, end
        self._as_api_error, self._fault_item = as_api_error, fault_item

    async def send_all(self, scope: Scope, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        # In the task of the first frame, so that both are sent in one write.
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await put(frame(self._first))
            async for item in self._rest:
                await put(frame(item))
            self.end_reason = ""
        except OSError:
            raise
        except Exception as error:  # the status is sent: the stream itself must report it
            fault = self._as_api_error(error)
            self.end_reason = fault.code or "error"
            note_fault(scope, fault.status, fault.reason)
            if fault.status == internal().status:
                log.exception("error in a stream")
            await put(frame(self._fault_item(fault)))
        if self._end:
            await put(self._end)
        await put(b"", more=False)


log = logging.getLogger(__name__)

JSON_TYPE = "application/json"


class OpenRequests:
    """Number and body bytes of the requests being answered by one application."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_bytes = 0  # of the bodies of open requests
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if some still are."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()


@dataclass
class RequestContext:
    """One HTTP request. ``answer_id`` is unique; ``request_id`` may be the client's."""

    open_requests: OpenRequests
    answer_id: str
    request_id: str
    path: str
    api: Api | None = None
    arrived_at: float = field(default_factory=monotonic)
    is_open: bool = False
    num_bytes: int = 0

    @classmethod
    def of(cls, open_requests: OpenRequests, request: Request, **own: Any) -> Self:
        """Of a request that ``RequestId`` and ``SelectApi`` have seen; ``own``: fields of a subclass."""
        state = request.state
        return cls(open_requests, state.own_id, state.request_id, request.url.path, api_of(request.scope), **own)

    def enter(self) -> None:
        self.is_open = True
        self.open_requests.enter()

    def take(self, num_bytes: int) -> None:
        """Count so many bytes of body until the end: what was parsed from them lives as long as the answer."""
        self.num_bytes += num_bytes
        self.open_requests.num_bytes += num_bytes

    def end(self, status: int, reason: str = "") -> None:
        """``reason``: why a stream ended early, or "". Also called for requests that were not admitted."""
        if self.is_open:
            self.is_open = False
            self.open_requests.leave()
            self.open_requests.num_bytes -= self.num_bytes
        log.info("answered", extra={"fields": self.fields(status, reason)})

    def fields(self, status: int, reason: str) -> dict[str, Any]:
        """Fields of the log line; no text of a prompt or an answer."""
        return {
            "request": self.request_id,
            "path": self.path,
            "status": status,
            "end": reason or None,
            "ms": 1e3 * (monotonic() - self.arrived_at),
        }


class Admission:
    """Admits, bounds and ends the requests of one application."""

    def __init__(self, limits: RequestLimits, name: str) -> None:
        """``name`` is for messages."""
        self._limits, self._name = limits, name
        self.open_requests = OpenRequests()
        self.is_draining = False

    def require_open(self) -> None:
        """503 while the application drains."""
        if self.is_draining:
            raise unavailable(f"the {self._name} is shutting down; try again later", self._limits.retry_after_s)

    def error(self, error: Exception) -> ApiError:
        """Any error as an ``ApiError``; subclasses handle more kinds first."""
        if isinstance(error, ApiError):
            return error
        return bad_value(str(error), None) if isinstance(error, ValueError) else internal()

    async def handle(self, context: RequestContext, work: Callable[[], Awaitable[Response]]) -> Response:
        """The response of ``work``, or to its error."""
        limit, retry_after_s = self._limits.max_requests, self._limits.retry_after_s
        response: Response | None = None
        try:
            # Before the body is read, so that refused requests take no memory for bodies and tokens.
            self.require_open()
            if self.open_requests.num_open >= limit:
                raise queue_full(f"{limit} requests are being answered, which is the limit", retry_after_s)
            context.enter()
            response = await work()
        except (ClientDisconnected, ClientDisconnect):
            response = Response(status_code=CLIENT_CLOSED)
        except Exception as error:
            fault = self.error(error)
            if fault.status == internal().status and fault is not error:  # a bug
                log.exception("request=%s failed", context.request_id)
            response = fault.response(context.api)
        finally:
            if not isinstance(response, StreamedResponse):  # which ends its context once sent
                context.end(CLIENT_CLOSED if response is None else response.status_code)
        return response

    async def read_object(self, request: Request, context: RequestContext) -> dict[str, Any]:
        """The body, a JSON object, within the limits.

        Only the content type of JSON is accepted: browsers send other types across origins without a preflight, so any
        web page could use a server on its reader's machine.
        """
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != JSON_TYPE:
            raise bad_value(f"the content type is {given!r}; it must be {JSON_TYPE}", None, "invalid_content_type")
        body = await self.read_bytes(request, context)
        try:
            data = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise bad_value(f"the body is not valid JSON: {error}", None, "invalid_json") from None
        if not isinstance(data, dict):
            raise bad_value("the body must be a JSON object", None, "invalid_json")
        return data

    async def read_bytes(self, request: Request, context: RequestContext) -> bytes:
        """The body as it is, within the limits."""
        limits, opened = self._limits, self.open_requests
        most = limits.max_open_body_bytes
        too_large = ApiError(
            413, f"the body is larger than the limit of {limits.max_body_bytes} bytes", code="request_too_large"
        )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limits.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for piece in request.stream():
                    if len(body) + len(piece) > limits.max_body_bytes:
                        raise too_large
                    if opened.num_bytes + len(piece) > most:
                        message = f"the bodies of open requests reach the limit of {most} bytes"
                        raise queue_full(message, limits.retry_after_s)
                    context.take(len(piece))
                    body += piece
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_timeout_s:g} s"
            raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
        return bytes(body)
