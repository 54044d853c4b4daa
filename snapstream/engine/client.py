"""The caller's side of an engine that runs on another thread or in another process.

    callers --Submit, SubmitBatch, Abort ...--> send      engine loop (worker.py)      deliver --news--> readers

``EngineClient`` keeps the open requests and routes what the engine sends to their readers. ``LLM`` and ``AsyncLLM`` use
it through ``EngineThread``, the server through a pipe to the engine process. Callers only wait for results, so Ctrl-C
interrupts that wait and never a step.

Invariants: a reader gets every delta up to ``is_finished``, or an exception. A request is open, and its id in use, from
submission until the engine has reported its end, even if its reader has left. Readers may leave on any thread at any
moment (the garbage collector closes generators), so leaving only sets a flag and queues a message.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from snapstream.engine.core import Engine
from snapstream.engine.request_state import RequestDelta, grow
from snapstream.engine.worker import (
    Abort,
    Deltas,
    EngineStats,
    EngineWorker,
    FromEngine,
    Probe,
    Refused,
    Reply,
    ResetPrefixes,
    Stop,
    Submit,
    SubmitBatch,
    ToEngine,
    WhenIdle,
)
from snapstream.types import QueueFull, Request, RequestOutput

EXIT_S = 10.0  # how long an exiting interpreter waits for the current step

Item = RequestDelta | Exception
News = Sequence[tuple["Reader", Item]]


class Channel(Protocol):
    """Passes news from the delivering thread to that of its readers. Readers of equal channels share a call per
    step."""

    def put(self, news: News, /) -> object:
        """Must not block. RuntimeError if its readers are gone."""
        ...


class Reader:
    """The reader of one request. ``take`` is called on the reader's own thread."""

    def __init__(self, request_id: str, channel: Channel) -> None:
        self.request_id, self.channel = request_id, channel
        self.is_sent = False  # the engine has the request
        self.has_left = False

    def take(self, item: Item) -> None:
        raise NotImplementedError


class OutputReader(Reader):
    """Grows a ``RequestOutput``; ``notify`` is called after each item."""

    def __init__(self, request: Request, channel: Channel, notify: Callable[[], object] = lambda: None) -> None:
        super().__init__(request.request_id, channel)
        self.output = request.new_output()
        self._error: Exception | None = None
        self.notify = notify

    def take(self, item: Item) -> None:
        if isinstance(item, Exception):
            self._error = item
        else:
            grow(self.output, item)
        self.notify()

    def result(self) -> RequestOutput:
        """The output so far; raises the error that ended it."""
        if self._error is not None:
            raise self._error
        return self.output


class EngineClient:
    """Open requests of one engine. Methods may be called from any thread, but not from within a step."""

    def __init__(self, send: Callable[[ToEngine], None], on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle`` is called, by ``deliver``, when the last open request has ended."""
        self._send, self._on_idle = send, on_idle
        # No lock: single operations of a dict with str or int keys are atomic, and a lock could be held by the thread
        # in which the garbage collector closes a generator.
        self._open: dict[str, Reader] = {}
        self._replies: dict[int, Future[int]] = {}
        self._numbers = count(1)
        self._fault: Callable[[], Exception] | None = None
        self.stats = EngineStats()  # as last reported

    @property
    def num_open(self) -> int:
        """Requests whose end the engine has not reported."""
        return len(self._open)

    @property
    def has_readers(self) -> bool:
        return any(not reader.has_left for reader in list(self._open.values()))

    def check(self) -> None:
        """Raise the error for which the engine takes no more requests."""
        if self._fault is not None:
            raise self._fault()

    def submit(self, request: Request, reader: Reader) -> None:
        """Send a request. ValueError if its id is in use; if the engine refuses it, the reader gets the error."""
        self._admit([reader])
        self._send(Submit(request))
        reader.is_sent = True

    def submit_batch(self, requests: Sequence[Request], readers: Sequence[Reader]) -> None:
        """Send requests that start together and wait while the queue is full; each gets one delta, at its end."""
        self._admit(readers)
        self._send(SubmitBatch(tuple(requests)))
        for reader in readers:
            reader.is_sent = True

    def leave(self, readers: Iterable[Reader]) -> None:
        """Abort the open ones of these requests; their readers get no more news."""
        self._abort([reader for reader in readers if self._holds(reader)], is_read=False)

    def abort(self, readers: Iterable[Reader]) -> set[Reader]:
        """Abort the open ones of these requests; returns the readers that will get their last delta."""
        still_open = [reader for reader in readers if self._holds(reader)]
        self._abort(still_open, is_read=True)
        return {reader for reader in still_open if reader.is_sent}

    def num_stored(self, token_ids: tuple[int, ...], namespace: str = "") -> Future[int]:
        """Tokens at the beginning of a prompt that are in the prefix store."""
        return self._ask(lambda number: Probe(number, token_ids, namespace))

    def reset_prefixes(self, namespace: str | None) -> Future[int]:
        """Clear a namespace of the prefix store and those below it, or all; the number of blocks."""
        return self._ask(lambda number: ResetPrefixes(number, namespace))

    def when_idle(self) -> Future[int]:
        """Done once the engine has no work."""
        return self._ask(WhenIdle)

    def deliver(self, message: FromEngine) -> None:
        """Route a message of the engine. Does not raise errors of readers."""
        match message:
            case Deltas(deltas):
                self._post([(delta.request_id, delta, delta.is_finished) for delta in deltas])
            case Refused(request_id, kind, text):
                error = ValueError(text) if kind == "value" else QueueFull(text)
                self._post([(request_id, error, True)])
            case Reply(number, value):
                reply = self._replies.pop(number, None)
                if reply is not None:
                    with suppress(InvalidStateError):  # cancelled
                        reply.set_result(value)
            case EngineStats():
                self.stats = message

    def fail(self, request_id: str, error: Exception) -> None:
        """Give ``error`` to the reader of a request; its id stays in use until the engine reports the end."""
        self._post([(request_id, error, False)])

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End all open requests, without the engine."""
        for number in list(self._replies):
            reply = self._replies.pop(number, None)
            if reply is not None:
                with suppress(InvalidStateError):
                    reply.set_exception(make_error())
        self._post([(request_id, make_error(), True) for request_id in list(self._open)])

    def close(self, make_error: Callable[[], Exception], first: Exception | None = None) -> None:
        """End all open requests, with ``first`` if given, and refuse those to come."""
        self._fault = make_error
        self.fail_all(make_error if first is None else lambda: first)

    def _admit(self, readers: Sequence[Reader]) -> None:
        added: list[Reader] = []
        try:
            for reader in readers:
                if self._open.setdefault(reader.request_id, reader) is not reader:
                    raise ValueError(f"request id {reader.request_id!r} is in use; ids of live requests must differ")
                added.append(reader)
            self.check()  # after they were added, so that a later fault reaches them
        except BaseException:
            for reader in added:
                self._open.pop(reader.request_id, None)
            raise

    def _holds(self, reader: Reader) -> bool:
        return self._open.get(reader.request_id) is reader and not reader.has_left

    def _abort(self, readers: Sequence[Reader], *, is_read: bool) -> None:
        for reader in readers:
            reader.has_left = not is_read
            if not reader.is_sent:  # interrupted while sending: the engine may not have it
                self._open.pop(reader.request_id, None)
        if readers:
            self._send(Abort(tuple(reader.request_id for reader in readers)))

    def _ask(self, make: Callable[[int], ToEngine]) -> Future[int]:
        number, reply = next(self._numbers), Future[int]()
        self._replies[number] = reply
        try:
            self.check()
        except BaseException:
            self._replies.pop(number, None)
            raise
        self._send(make(number))
        return reply

    def _post(self, items: Iterable[tuple[str, Item, bool]]) -> None:
        """Deliver items (id, item, whether it is the last), one call per channel."""
        by_channel: dict[Channel, list[tuple[Reader, Item]]] = {}
        has_ended = False
        for request_id, item, is_last in items:
            reader = self._open.pop(request_id, None) if is_last else self._open.get(request_id)
            has_ended = has_ended or is_last
            if reader is not None and not reader.has_left:
                by_channel.setdefault(reader.channel, []).append((reader, item))
        for channel, news in by_channel.items():
            try:
                channel.put(news)
            except RuntimeError:  # an event loop that was closed
                self.leave([reader for reader, _ in news])
        if has_ended and not self._open:
            self._on_idle()


class _QueuePort:
    """A ``Port`` between threads: a queue to the engine, a call from it."""

    def __init__(self, inbox: SimpleQueue[ToEngine | None], deliver: Callable[[FromEngine], None]) -> None:
        self._inbox = inbox
        self.send = deliver

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            return self._inbox.get(block=block)
        except Empty:
            return None


class EngineThread:
    """An engine and its thread, from the first use of ``client`` until ``close``.

    The thread has no reference to this object or to ``LLM``, so dropping these stops it.
    """

    def __init__(
        self, engine: Engine, rows_total: int, *, name: str, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """``name`` of the owner is for error messages; the thread first calls ``prepare``."""
        self._engine: Engine | None = engine
        self._name = name
        self._inbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._client = EngineClient(self._inbox.put)
        self._client.stats = EngineStats(rows_free=rows_total, rows_total=rows_total)
        worker = EngineWorker(engine, rows_total, _QueuePort(self._inbox, self._client.deliver))
        self._thread = threading.Thread(
            target=_run, args=(worker, self._client, prepare, name), name=f"engine of {name}", daemon=True
        )
        self._starting = threading.RLock()
        self._closing = threading.RLock()
        weakref.finalize(self, self._inbox.put, Stop()).atexit = False

    @property
    def client(self) -> EngineClient:
        """RuntimeError if the engine was closed or has failed, in a forked process, and inside a step."""
        self._client.check()
        if self._thread is threading.current_thread():
            raise RuntimeError(f"this {self._name} is in the middle of a step; what a step calls must not use it")
        with self._starting:
            if self._thread.ident is None:
                atexit.unregister(_stop_threads)  # handlers run last in, first out: before those of torch
                atexit.register(_stop_threads)
                self._thread.start()
                _running[self._thread] = self._inbox
        if not self._thread.is_alive():
            self._client.check()
            raise RuntimeError(f"this {self._name} belongs to the process that made it; a forked process cannot use it")
        return self._client

    @property
    def engine(self) -> Engine:
        """For callers that use the engine directly while no request is open; waits for the current step."""
        self._client.check()
        assert self._engine is not None
        if self._thread.is_alive() and self._thread is not threading.current_thread() and not self._client.has_readers:
            self._client.when_idle().result()
        return self._engine

    @property
    def stats(self) -> EngineStats:
        """As last reported."""
        return self._client.stats

    def check(self) -> None:
        """RuntimeError if the engine was closed or has failed."""
        self._client.check()

    def end_requests(self) -> None:
        """End open requests, and those to come, with a RuntimeError."""
        self._client.close(lambda: RuntimeError(f"this {self._name} is closed"))

    def validate(self, request: Request) -> None:
        """ValueError if the request could never be served; RuntimeError if the engine was closed or has failed."""
        self._client.check()
        assert self._engine is not None
        self._engine.validate(request)

    def run(self, requests: Sequence[Request], *, shows_progress: bool) -> list[RequestOutput]:
        """Answer checked requests, in their order. ValueError for an id in use.

        If it raises, including KeyboardInterrupt, its requests have been removed from the engine.
        """
        from tqdm import tqdm

        client, news = self.client, SimpleQueue[News]()
        readers = [OutputReader(request, news) for request in requests]
        num_left = len(readers)
        bar = tqdm(total=num_left, desc="prompts", unit="prompt", disable=not shows_progress or num_left < 2)
        try:
            if readers:
                client.submit_batch(requests, readers)
            while num_left:
                ended = news.get()
                for reader, item in ended:
                    reader.take(item)
                for reader, _ in ended:
                    assert isinstance(reader, OutputReader)
                    reader.result()
                num_left -= len(ended)
                bar.update(len(ended))
        finally:
            bar.close()
            ending = client.abort(readers)
            while ending:
                ending.difference_update([reader for reader, _ in news.get()])
        return [reader.output for reader in readers]

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Yield the request's output each time it has grown; closing the iterator aborts the request."""
        client, news = self.client, SimpleQueue[News]()
        reader = OutputReader(request, news)
        try:
            client.submit(request, reader)
            while not reader.output.is_finished:
                for _, item in news.get():
                    reader.take(item)
                    yield reader.result()
        finally:
            client.leave([reader])

    def close(self) -> None:
        """End open requests with a RuntimeError, wait for the current step, drop the engine. May be repeated."""
        self.end_requests()
        with self._closing:
            self._inbox.put(Stop())
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join()
            if self._engine is not None:
                self._engine.close()
            self._engine = None


def _run(worker: EngineWorker, client: EngineClient, prepare: Callable[[], None], name: str) -> None:
    """Main function of the thread. After a failed step the state of the device is unknown, so nothing more runs."""
    try:
        prepare()
        worker.run()
    except BaseException as error:
        failed = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        what = f"an earlier step of this {name} failed, and nothing more is run: {type(error).__name__}: {error}"

        def later() -> Exception:
            new = RuntimeError(what)
            new.__cause__ = failed
            return new

        client.close(later, failed)


_running: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[ToEngine | None]] = weakref.WeakKeyDictionary()


def _stop_threads() -> None:
    """End threads first, also those whose owner is gone: native code may crash while the interpreter or torch shuts
    down."""
    for thread, inbox in list(_running.items()):
        inbox.put(Stop())
        if thread is not threading.current_thread():
            thread.join(EXIT_S)
