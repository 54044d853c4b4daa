"""The engine process: loads the model, reports it, and serves until it is stopped or the server is gone.

``snapstream/engine/worker.py`` is the loop; ``process.py`` is the other end of the pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from snapstream.disaggregation.connector import TcpConnector
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.engine.worker import Beat, EngineWorker, ToEngine
from snapstream.server.engine.api import EngineMetadata, EngineSpec, Failed, FromProcess, Loading, Ready
from snapstream.startup.build import make_connector

if TYPE_CHECKING:
    from snapstream.config import EngineOptions
    from snapstream.llm import LLM
    from snapstream.step import Runner

BEAT_S = 0.1


class ServerGone(Exception):
    """The other end of the pipe is closed."""


class Heartbeat:
    """Reports to the server, at most every ``BEAT_S``, that a long step makes progress."""

    def __init__(self, send: Callable[[Beat], None], *, clock: Callable[[], float] = monotonic) -> None:
        self._send, self._clock = send, clock
        self._at = clock()

    def note(self) -> None:
        now = self._clock()
        if now - self._at >= BEAT_S:
            self._at = now
            self._send(Beat())


class PipePort:
    """The engine loop's port: a pipe, and a socket pair by which other threads wake it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # the loss of a rank is reported on another thread
        self._wake_send, self._wake_receive = socket.socketpair()
        for end in (self._wake_send, self._wake_receive):
            end.setblocking(False)

    def wake(self) -> None:
        """From any thread: there is an event besides the messages."""
        with suppress(BlockingIOError):  # a wake-up is pending
            self._wake_send.send(b"\0")

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            if block and self._connection not in wait([self._connection, self._wake_receive]):
                self._wake_receive.recv(4096)
                return None
            if not block and not self._connection.poll():
                return None
            message: ToEngine = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ServerGone from error
        return message

    def send(self, message: FromProcess) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise ServerGone from error


def build(
    spec: EngineSpec,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> LLM:
    """Load the model and build everything around it; ``on_unit`` and ``on_lost`` as in ``build_ranks``. ``on_stage``
    receives the current stage."""
    from snapstream.llm import LLM
    from snapstream.startup.build import build_ranks

    if spec.num_threads is not None:
        import torch

        torch.set_num_threads(spec.num_threads)

    def make_runner(*given: Any) -> Runner:
        last = -1

        def note(share: float) -> None:
            nonlocal last
            if (percent := int(100 * share)) > last:
                last = percent
                on_stage(f"reading the weights, {percent} %" if percent < 100 else "preparing the engine")

        note(0.0)
        folder, model, config, grammars, _ = given
        return build_ranks(folder, model, config, grammars, note, on_unit=on_unit, on_lost=on_lost)

    on_stage("choosing and compiling kernels")
    options, about_heads = spec.options, ""
    if options.heads == "auto":
        options, about_heads = _automatic_heads(spec, on_stage)
    llm = LLM(spec.model, options, progress=False, draft_memory=spec.draft_memory, make_runner=make_runner)
    if about_heads:
        llm.notes = (about_heads, *llm.notes)
    return llm


def _automatic_heads(spec: EngineSpec, on_stage: Callable[[str], None]) -> tuple[EngineOptions, str]:
    if spec.transfer is not None:  # both engines must have the same, and each would find its own
        why = "engines that transfer rows need the same profile: name a file for both"
        return replace(spec.options, heads=None), f"heads: equal; {why}"
    from snapstream.calibration.automatic import automatic_heads
    from snapstream.models.hub import local_folder
    from snapstream.models.registry import read_model_config

    folder = local_folder(spec.model, progress=False)
    return automatic_heads(Path(folder), read_model_config(folder), spec.options, on_stage=on_stage)


def child_main(connection: Connection, spec: EngineSpec) -> None:
    """Entry point of the engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the process group; the server drains, then sends Stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    port = PipePort(connection)
    is_loaded = False
    try:
        with build(
            spec, Heartbeat(port.send).note, partial(_end_without_rank, port), lambda stage: port.send(Loading(stage))
        ) as llm:
            connector = None if spec.transfer is None else _connect(spec, spec.transfer, llm, port)
            is_loaded = True
            port.send(Ready(_metadata(spec, llm, connector)))
            interval_s = spec.stream_interval_ms / 1e3
            EngineWorker(llm.engine, llm.config.max_rows, port, delta_interval_s=interval_s).run()
    except ServerGone:
        return
    except Exception as error:
        if not is_loaded and isinstance(error, (ValueError, FileNotFoundError)):
            port.send(Failed("value", str(error)))
        else:
            port.send(Failed("error", f"the engine failed: {type(error).__name__}: {error}"))
            if is_loaded:  # else the server ends with that one line
                raise
            sys.exit(1)


def _connect(spec: EngineSpec, settings: TransferSettings, llm: LLM, port: PipePort) -> TcpConnector:
    """Connect the engine to its side of the KV transfer."""
    connector = make_connector(Path(spec.model), llm.model_config, llm.config, settings, port.wake)
    llm.engine.connect(connector)
    return connector


def _transfer_notes(spec: EngineSpec, connector: TcpConnector | None) -> tuple[str, ...]:
    """Of the KV transfer, for the log."""
    if connector is None or spec.transfer is None:
        return ()
    if connector.address is None:
        return ("rows go to the servers that ask for them",)
    how = "TLS" if spec.transfer.cert is not None else "no TLS"
    return (f"rows arrive at {connector.address[0]} port {connector.address[1]}, {how}",)


def _metadata(spec: EngineSpec, llm: LLM, connector: TcpConnector | None) -> EngineMetadata:
    return EngineMetadata(
        model=spec.model,
        engine=llm.config,
        architecture=llm.model_config,
        has_tokenizer=llm.tokenizer is not None,
        pid=os.getpid(),
        notes=(*llm.notes, *_transfer_notes(spec, connector)),
        transfer_fingerprint={} if connector is None else dict(connector.fingerprint),
    )


def _end_without_rank(port: PipePort, why: str) -> None:
    """Exit at once, in a step or idle: a collective without that rank may hang."""
    with suppress(ServerGone):
        port.send(Failed("error", f"the engine failed: {why}"))
    os._exit(1)


def _end_with_parent() -> None:
    """Exit when the server is killed, also while loading or in a long step."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
