"""Where the deltas of running requests go: one queue per request, on the event loop.

Invariant: a request is held from its submission until the engine has said that it ended (or is dead), also when its
reader has left. So an id is not used twice, a late delta finds nobody else, and idle means that no row is in use.
Used from the loop's thread only. ``process.py`` and ``local.py`` feed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count

from snapstream.engine.messages import Abort, Deltas, Probe, Probed, Refused, Submit, ToEngine
from snapstream.engine.validate import QueueFull
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, RequestDelta

Stream = asyncio.Queue[RequestDelta | Exception]
Send = Callable[[ToEngine], None]


class RequestStreams:
    """Running requests by id; None for one whose reader has left."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream | None] = {}
        self._probes: dict[int, asyncio.Future[int]] = {}
        self._numbers = count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, request: Request, connect: Callable[[], Send]) -> AsyncGenerator[RequestDelta, None]:
        """Submit a request and yield its deltas; leaving early aborts it.

        ``connect`` gives the way to the engine when iteration starts, or raises EngineDead.
        """
        send = connect()
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use; ids of live requests must differ")
        stream = self._streams[request_id] = Stream()
        self._idle.clear()
        send(Submit(replace(request, prompt=None)))  # the engine would only echo the text
        try:
            is_finished = False
            while not is_finished:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                is_finished = item.is_finished
                yield item
        finally:
            if self._streams.get(request_id) is stream:
                self._streams[request_id] = None
                send(Abort(request_id))

    async def probe(self, token_ids: tuple[int, ...], namespace: str, connect: Callable[[], Send]) -> int:
        """Tokens of a prompt that lie in the prefix store. EngineDead if the engine is gone before it has said so."""
        number, found = next(self._numbers), asyncio.get_running_loop().create_future()
        send = connect()
        self._probes[number] = found
        try:
            send(Probe(number, token_ids, namespace))
            return await found
        finally:
            del self._probes[number]

    def deliver(self, message: Deltas | Refused | Probed) -> None:
        match message:
            case Probed(number, num_tokens):
                found = self._probes.get(number)
                if found is not None and not found.done():
                    found.set_result(num_tokens)
            case Deltas(deltas):
                for delta in deltas:
                    self._put(delta.request_id, delta, is_last=delta.is_finished)
            case Refused(request_id, kind, text):
                error = ValueError(text) if kind == "value" else QueueFull(text)
                self._put(request_id, error, is_last=True)

    def fail(self, request_id: str, error: Exception) -> None:
        """End one stream with an error; its reader then aborts the request, which is held until the engine agrees."""
        self._put(request_id, error, is_last=False)

    def fail_all(self, reason: str, *, is_final: bool = False) -> None:
        """End every stream with EngineDead. ``is_final``: the engine will not come back."""
        for found in self._probes.values():
            if not found.done():
                found.set_exception(EngineDead(reason, is_final=is_final))
        for request_id in list(self._streams):
            self._put(request_id, EngineDead(reason, is_final=is_final), is_last=True)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if some still do."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def _put(self, request_id: str, item: RequestDelta | Exception, *, is_last: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put_nowait(item)
        if is_last:
            self._streams.pop(request_id, None)
            if not self._streams:
                self._idle.set()
