"""The caller's side of an engine that runs on another thread or in another process.

    callers --Submit, SubmitBatch, Abort ...--> send      engine loop (worker.py)      deliver --news--> readers

``EngineClient`` knows every open request and routes what the engine sends to its reader. ``LLM`` and ``AsyncLLM`` use
it through ``EngineThread``, the server through a pipe to the engine process. A caller only ever waits for news, so
Ctrl-C interrupts that wait and never a step.

Invariants: a reader gets every delta up to ``is_finished``, or an exception. A request is open, and its id in use, from
its submission until the engine has reported its end, also when its reader has left. Readers may leave on any thread and
at any moment (the garbage collector closes generators), so leaving only sets a flag and queues a message.
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
from typing import Any, Protocol

from snapstream.engine.core import Engine
from snapstream.engine.request_state import RequestDelta, grow
from snapstream.engine.stats import EngineStats
from snapstream.engine.validate import QueueFull
from snapstream.engine.worker import (
    Abort,
    Deltas,
    EngineWorker,
    FromEngine,
    Probe,
    Refused,
    Reply,
    ResetPrefixes,
    Stats,
    Stop,
    Submit,
    SubmitBatch,
    ToEngine,
    WhenIdle,
)
from snapstream.types import Request, RequestOutput, SampleOutput

EXIT_S = 10.0  # how long an exiting interpreter waits for the step that runs

Item = RequestDelta | Exception
News = Sequence[tuple["Reader", Item]]


class Channel(Protocol):
    """Brings news from the thread that delivers to the thread of its readers. Readers of equal channels share a call
    per step."""

    def put(self, news: News, /) -> object:
        """Must not block. RuntimeError if its readers cannot be reached any more."""
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
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            samples=[
                SampleOutput(index=index, logprobs=None if request.sampling.logprobs is None else [])
                for index in range(request.sampling.n)
            ],
            prompt=request.prompt,
            prompt_compression=request.prompt_compression,
        )
        self._error: Exception | None = None
        self.notify = notify

    def take(self, item: Item) -> None:
        if isinstance(item, Exception):
            self._error = item
        else:
            grow(self.output, item)
        self.notify()

    def result(self) -> RequestOutput:
        """The output so far, or raises what ended it."""
        if self._error is not None:
            raise self._error
        return self.output


class EngineClient:
    """Open requests of one engine. Methods may be called from any thread, except from within the engine's own step."""

    def __init__(self, send: Callable[[ToEngine], None], on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle`` is called, by ``deliver``, when the last open request has ended."""
        self._send, self._on_idle = send, on_idle
        # Threads share these without a lock: single operations of a dict with str or int keys are atomic, and a lock
        # could be held by the very thread in which the garbage collector closes a generator.
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
        """Whether anyone reads an open request."""
        return any(not reader.has_left for reader in list(self._open.values()))

    def check(self) -> None:
        """Raises the reason for which the engine takes no requests for good."""
        if self._fault is not None:
            raise self._fault()

    def submit(self, request: Request, reader: Reader) -> None:
        """Send a request whose deltas are read step by step. ValueError if its id is in use.

        If the engine refuses it, the reader gets a ValueError or QueueFull.
        """
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
        """Abort those of the requests that are still open; their readers get no more news."""
        self._abort([reader for reader in readers if self._holds(reader)], is_read=False)

    def abort(self, readers: Iterable[Reader]) -> set[Reader]:
        """Abort those of the requests that are still open; returns the readers that will get the news of their end."""
        still_open = [reader for reader in readers if self._holds(reader)]
        self._abort(still_open, is_read=True)
        return {reader for reader in still_open if reader.is_sent}

    def num_stored(self, token_ids: tuple[int, ...], namespace: str = "") -> Future[int]:
        """Tokens at the beginning of a prompt that lie in the prefix store when the engine reads this."""
        return self._ask(lambda number: Probe(number, token_ids, namespace))

    def reset_prefixes(self, namespace: str | None) -> Future[int]:
        """Forget the stored prefixes of a namespace and those below it, or all; the number of blocks."""
        return self._ask(lambda number: ResetPrefixes(number, namespace))

    def when_idle(self) -> Future[int]:
        """Done once the engine has no work."""
        return self._ask(WhenIdle)

    def deliver(self, message: FromEngine) -> None:
        """Route a message of the engine. Never raises because of a reader."""
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
            case Stats(stats):
                self.stats = stats

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
            self.check()  # after they were added: a fault that comes later finds them
        except BaseException:
            for reader in added:
                self._open.pop(reader.request_id, None)
            raise

    def _holds(self, reader: Reader) -> bool:
        return self._open.get(reader.request_id) is reader and not reader.has_left

    def _abort(self, readers: Sequence[Reader], *, is_read: bool) -> None:
        for reader in readers:
            reader.has_left = not is_read
            if not reader.is_sent:  # interrupted while it was sent: the engine may not know it, and will not report
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
        """Hand items over, one call per channel; the flag says whether it is the last of its request."""
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
    """An engine and the thread that runs it, from the first use of ``client`` until ``close``.

    The thread refers to neither this object nor ``LLM``: dropping these stops it.
    """

    def __init__(
        self, engine: Engine, rows_total: int, *, name: str, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """``name`` is that of the owner, for error messages; ``prepare`` is called on the thread before all else."""
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
        _threads.add(self)

    @property
    def client(self) -> EngineClient:
        """RuntimeError if the engine was closed or has failed, in a forked process, and inside the engine's step."""
        self._client.check()
        if self._thread is threading.current_thread():
            raise RuntimeError(f"this {self._name} is in the middle of a step; what a step calls must not use it")
        with self._starting:
            if self._thread.ident is None:
                atexit.unregister(_stop_threads)  # handlers run last in, first out: this one before those of torch
                atexit.register(_stop_threads)
                self._thread.start()
        if not self._thread.is_alive():
            self._client.check()
            raise RuntimeError(f"this {self._name} belongs to the process that made it; a forked process cannot use it")
        return self._client

    @property
    def engine(self) -> Engine:
        """For callers that use the engine themselves while no request is open; waits for the step that still runs."""
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
        """Raise ValueError if the request could never be served; RuntimeError if the engine takes none any more."""
        self._client.check()
        assert self._engine is not None
        self._engine.validate(request)

    def run(self, requests: Sequence[Request], *, shows_progress: bool) -> list[RequestOutput]:
        """Answer checked requests, in their order. ValueError for an id in use.

        When it raises, also because of Ctrl-C, its requests are gone from the engine.
        """
        client, news = self.client, SimpleQueue[News]()
        readers = [OutputReader(request, news) for request in requests]
        num_left, bar = len(readers), _progress_bar(len(readers), shows_progress)
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
        """End open requests with a RuntimeError, wait for the step that runs, drop the engine. May be repeated."""
        self.end_requests()
        with self._closing:
            self.stop()
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread after the step that runs, and wait for that."""
        self._inbox.put(Stop())
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _run(worker: EngineWorker, client: EngineClient, prepare: Callable[[], None], name: str) -> None:
    """The life of an engine thread. After a step that failed the state of the device is unknown: nothing more runs."""
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


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _stop_threads() -> None:
    """Native code that runs while the interpreter or torch shuts down may crash: end the threads first."""
    for thread in list(_threads):
        thread.stop(EXIT_S)


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", disable=not wanted or total < 2)
