"""The engine process: loads the model, reports it, and serves until it is stopped or the server has gone.

``worker.py`` of ``snapstream/engine`` is the loop; ``child.py`` is the other end of the pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from snapstream.disaggregation.connector import TcpConnector
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.engine.worker import Beat, EngineWorker, ToEngine
from snapstream.server.engine.api import EngineFacts, EngineSpec, Failed, FromProcess, Loading, Ready
from snapstream.startup.build import make_connector

if TYPE_CHECKING:
    from snapstream.llm import LLM
    from snapstream.step import Runner

BEAT_S = 0.1


class FrontGone(Exception):
    """The other end of the pipe is closed: the server has gone."""


class Pulse:
    """Shows a front, at most every ``BEAT_S``, that a long step still gets on."""

    def __init__(self, send: Callable[[Beat], None], *, clock: Callable[[], float] = monotonic) -> None:
        self._send, self._clock = send, clock
        self._at = clock()

    def note(self) -> None:
        now = self._clock()
        if now - self._at >= BEAT_S:
            self._at = now
            self._send(Beat())


class PipePort:
    """A port at the end of a pipe, which other threads may wake."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # the news that a rank has gone come on a thread
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)

    def wake(self) -> None:
        """From any thread: there is news that came beside the messages."""
        with suppress(BlockingIOError):  # it rings already
            self._bell.send(b"\0")

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            if block and self._connection not in wait([self._connection, self._ear]):
                self._ear.recv(4096)
                return None
            if not block and not self._connection.poll():
                return None
            message: ToEngine = self._connection.recv()
        except (EOFError, OSError) as error:
            raise FrontGone from error
        return message

    def send(self, message: FromProcess) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise FrontGone from error


def build(
    spec: EngineSpec,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> LLM:
    """Load the model and build everything around it; ``on_unit`` and ``on_lost`` as in ``build_ranks``. ``on_stage``
    receives the current stage."""
    from snapstream.llm import LLM
    from snapstream.startup.ranks import build_ranks

    if spec.num_threads is not None:
        import torch

        torch.set_num_threads(spec.num_threads)

    def make_runner(*given: Any) -> Runner:
        on_stage("reading the weights")
        return build_ranks(*given, on_unit=on_unit, on_lost=on_lost)

    on_stage("choosing and compiling kernels")
    return LLM(spec.model, spec.options, progress=False, draft_memory=spec.beside, make_runner=make_runner)


def child_main(connection: Connection, spec: EngineSpec) -> None:
    """Life of the engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole group; the front drains, then says Stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    port = PipePort(connection)
    is_loaded = False
    try:
        with build(
            spec, Pulse(port.send).note, partial(_end_without_rank, port), lambda stage: port.send(Loading(stage))
        ) as llm:
            connector = None if spec.transfer is None else _connect(spec, spec.transfer, llm, port)
            is_loaded = True
            port.send(Ready(_facts(spec, llm, connector)))
            EngineWorker(llm.engine, llm.config.max_rows, port).run()
    except FrontGone:
        return
    except Exception as error:
        if not is_loaded and isinstance(error, (ValueError, FileNotFoundError)):
            port.send(Failed("value", str(error)))
        else:
            port.send(Failed("error", f"the engine failed: {type(error).__name__}: {error}"))
            if is_loaded:  # else the front ends with that one line
                raise
            sys.exit(1)


def _connect(spec: EngineSpec, settings: TransferSettings, llm: LLM, port: PipePort) -> TcpConnector:
    """Connect the engine to its side of the KV transfer."""
    connector = make_connector(Path(spec.model), llm.model_config, llm.config, settings, port.wake)
    llm.engine.connect(connector)
    return connector


def _transfer_notes(spec: EngineSpec, connector: TcpConnector | None) -> tuple[str, ...]:
    """What the log should say of the KV transfer."""
    if connector is None or spec.transfer is None:
        return ()
    if connector.address is None:
        return ("rows go to the servers that ask for them",)
    how = "TLS" if spec.transfer.cert is not None else "no TLS"
    return (f"rows arrive at {connector.address[0]} port {connector.address[1]}, {how}",)


def _facts(spec: EngineSpec, llm: LLM, connector: TcpConnector | None) -> EngineFacts:
    return EngineFacts(
        model=spec.model,
        engine=llm.config,
        architecture=llm.model_config,
        has_tokenizer=llm.tokenizer is not None,
        pid=os.getpid(),
        notes=(*llm.notes, *_transfer_notes(spec, connector)),
        row_facts={} if connector is None else dict(connector.fingerprint),
    )


def _end_without_rank(port: PipePort, why: str) -> None:
    """End at once, in a step or idle: a collective without that rank may wait for very long."""
    with suppress(FrontGone):
        port.send(Failed("error", f"the engine failed: {why}"))
    os._exit(1)


def _end_with_parent() -> None:
    """A front that is killed leaves no engine behind, not even one that is loading or in a long step."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
