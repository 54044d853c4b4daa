"""Worker ranks as rank 0 sees them, and the control channel to each: messages, how workers connect, how they end.

      rank 0 ==channel==> worker rank 1       a thread for each worker receives; a channel closes when its process dies,
             ==channel==> worker rank 2 ...   and when rank 0 dies all channels close, which ends all workers

    worker: Hello ---> rank 0: Task ---> worker: Joined, later Ready ---> rank 0: StepPlan, StepPlan, ...

Between plans rank 0 may send requests for the prefix cache's files (``ReadBlocks``, ``WriteBlock``, ``ForgetBlocks``);
the worker serves them between steps and answers with ``BlocksDone``. A worker of another machine that cannot be a
rank gets ``Refused`` in place of ``Task``. A worker that cannot go on sends ``Failed`` as its last message. There is no
message for the end: a process that finds its channel closed ends.

On one machine the channel is a pair of sockets; between machines it is TCP, and both sides prove first that they know a
shared key. Codec, framing and handshake: ``snapstream/wire.py``. After the handshake nothing is encrypted or signed, as
in the collectives of ``torch.distributed``: ranks belong on a network that others cannot reach.

Invariant: when a worker is lost, ``lost`` says so and every wait here ends; after ``close``, or when this process
dies, no process that was started here is left, stopped ones included. Workers on this machine are started here; those
of others connect to rank 0's address. A worker's part: ``startup/build.py``. ``exec/parallel.py`` sends the plans.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

from snapstream.config import EngineConfig
from snapstream.config.values import read_text, split_address
from snapstream.step import StepPlan, StoredBlock
from snapstream.wire import HANDSHAKE_S, Connection, ConnectionFailed, Kind, Listener, WireError, pack, unpack

MAX_BYTES = 2**28  # of a message: a plan holds the token ids of its prompts, 8 bytes each
KEY_VARIABLE = "SNAPSTREAM_RANKS_KEY"  # or that with _FILE: a file that holds it
MIN_KEY = 16  # characters
PURPOSE = b"ranks"  # of the handshake
# A machine that vanishes is noticed after idle + count x interval seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker rank on itself. Ranks of other versions might compute other bits."""

    version: str  # of snapstream
    torch: str  # its version
    host: str
    pid: int
    fingerprint: str = ""  # of the checkpoint on another machine
    rank: int = 0  # from RANK; 0: the next free one


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a worker needs to be a rank of the engine."""

    rank: int
    model: str  # the checkpoint's folder at rank 0; a worker on another machine has its own
    fingerprint: str  # of the checkpoint: it must be the same one
    config: EngineConfig
    rendezvous: str  # of the process group: file://PATH, or tcp://HOST:PORT/PREFIX of a TCPStore
    num_threads: int  # of torch; 0: its default
    checks_ranks: bool = False  # compare sampled tokens after every step


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0 does not admit this worker, and waits for another one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker has the same checkpoint and can do its task; next it joins the process group."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's runner is built and warm."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Fill blocks of the prefix cache from the files of this rank."""

    number: int  # of this request, for the answer
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a block, which must not change until the answer has come."""

    number: int
    block: StoredBlock


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Delete the files of a namespace; of all, if ``place`` is empty."""

    number: int
    place: str


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """The answer to one of the three."""

    number: int
    count: int  # of the first blocks that could be read


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker process ends. "value": it does not support the settings."""

    kind: Literal["value", "error"]
    reason: str


TO_WORKER: dict[str, type] = {
    kind.__name__: kind for kind in (Task, Refused, StepPlan, ReadBlocks, WriteBlock, ForgetBlocks)
}
TO_RANK_0: dict[str, type] = {kind.__name__: kind for kind in (Hello, Joined, Ready, BlocksDone, Failed)}


class ControlChannel:
    """One end. Threads may send while another receives."""

    def __init__(self, sock: socket.socket, kinds: Mapping[str, type]) -> None:
        """``kinds``: the messages that may be received, by name."""
        self._connection, self._kinds = Connection(sock), kinds
        self._sends = threading.Lock()

    def send(self, message: object) -> None:
        """ConnectionFailed if it cannot be sent."""
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """Send a message that was packed once for several ranks."""
        with self._sends:
            self._connection.send(Kind.MESSAGE, data)

    def receive(self) -> object:
        """Wait for the next message. ConnectionFailed at the end; ValueError for bytes that are not a message."""
        return unpack(self._connection.receive(_allocate), self._kinds)

    def close(self) -> None:
        """End the channel both ways; a thread that receives here wakes up.

        The descriptor is closed with the object: a reused number could still be read by that thread.
        """
        self._connection.cut()


def _allocate(kind: int, number: int, size: int) -> bytearray:
    if kind != Kind.MESSAGE or size > MAX_BYTES:
        raise WireError(f"a frame of kind {kind} and {size} bytes; a message is of kind 0 and at most {MAX_BYTES}")
    return bytearray(size)


def pair(kinds: Mapping[str, type]) -> tuple[ControlChannel, socket.socket]:
    """A channel on this machine, and the socket of its other end, which the other process inherits."""
    ours, theirs = socket.socketpair()
    return ControlChannel(ours, kinds), theirs


def inherited(fileno: int, kinds: Mapping[str, type]) -> ControlChannel:
    """The other end, in the process that inherited it."""
    return ControlChannel(socket.socket(fileno=fileno), kinds)


def shared_key() -> bytes:
    """The key of this engine's ranks, from the environment; ValueError where there is none, or a short one."""
    key, file = os.environ.get(KEY_VARIABLE, ""), os.environ.get(f"{KEY_VARIABLE}_FILE", "")
    if file and not key:
        key = read_text(Path(file)).strip()
    if len(key) < MIN_KEY:
        raise ValueError(
            f"{KEY_VARIABLE} has {len(key)} characters; ranks on other machines need a key of at least {MIN_KEY}, the "
            f"same everywhere, in that variable or in a file that {KEY_VARIABLE}_FILE names"
        )
    return key.encode()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; ValueError for a port that is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"master_addr is {f'{host}:{port}'!r}; cannot listen there: {error}") from None


def accept_workers(
    host: str, key: bytes, kinds: Mapping[str, type], admit: Callable[[ControlChannel], None]
) -> Listener:
    """Listen at a free port of ``host``; ``admit`` is called, on other threads, with each peer that knows the key."""

    def serve(sock: socket.socket, ticket: bytes, proof: bytes) -> None:
        try:
            Connection(sock).send(Kind.ACCEPTED, proof)
        except ConnectionFailed:
            sock.close()
            return
        _keep_alive(sock)
        admit(ControlChannel(sock, kinds))

    return Listener(listen(host, 0), key, PURPOSE, serve)


def connect(address: str, key: bytes, kinds: Mapping[str, type]) -> ControlChannel:
    """A channel to rank 0 at ``address``. OSError if nothing listens there; ValueError if the keys differ."""
    sock = socket.create_connection(split_address(address), HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(sock)
    try:
        Connection(sock, within_s=HANDSHAKE_S).prove(key, PURPOSE)
    except (ConnectionFailed, WireError) as error:
        sock.close()
        raise ValueError(
            f"rank 0 at {address} did not prove that it has the same {KEY_VARIABLE}, or admits no worker: {error}"
        ) from None
    return ControlChannel(sock, kinds)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


log = logging.getLogger(__name__)

State = Literal["here", "joined", "ready"]

STOP_S = 5.0  # for a worker to end when its channel is closed
STALL_TICKS = 10  # checks of a running step within the stall timeout
LOST_S = 1.0  # between a collective that fails and the report of the lost rank
_ORDER: dict[type, State] = {Hello: "here", Joined: "joined", Ready: "ready"}


class RankLost(RuntimeError):
    """A rank is lost, and with it the engine."""


@dataclass(eq=False)
class WorkerRank:
    """Guarded by the lock of ``WorkerRanks``."""

    rank: int
    channel: ControlChannel
    process: subprocess.Popen[bytes] | None = None  # None: on another machine
    hello: Hello | None = None
    state: State | None = None
    failure: Failed | None = None


class WorkerRanks:
    """``on_lost`` is called once, on a thread, when a worker is lost that had joined, unless this is closed."""

    def __init__(
        self,
        count: int,
        on_lost: Callable[[str], None] = lambda why: None,
        stall_timeout_s: float = 0.0,
        refuses: Callable[[Hello], str] = lambda hello: "",
    ) -> None:
        """``count`` of them will be spawned or admitted; ``stall_timeout_s``: how long a step may take, 0: any time.

        ``refuses`` says why one of another machine cannot be a rank; nothing if it can.
        """
        self._refuses = refuses
        self._count, self._on_lost, self._stall_timeout_s = count, on_lost, stall_timeout_s
        self._step_since: float | None = None  # when the step began that runs
        self._closing = threading.Event()
        self._all: list[WorkerRank] = []
        self._change = threading.Condition()
        self._lost: Failed | None = None
        self._on_end: list[Callable[[], None]] = []
        self._on_done: Callable[[int, BlocksDone], None] = lambda rank, done: None
        self._is_watched = False

    def __len__(self) -> int:
        return self._count

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on; None while all ranks are connected."""
        return None if self._lost is None else self._lost.reason

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers on this machine."""
        return tuple(own.process.pid for own in self._all if own.process is not None)

    def spawn(self, rank: int, entry: str, environment: Mapping[str, str]) -> None:
        """Start a worker on this machine, which calls ``entry`` (``module:function``) with the number of its channel's
        file. It does not import the caller's main module, so that a script needs no guard. ``environment``: changes.
        """
        channel, theirs = pair(TO_RANK_0)
        module, _, function = entry.partition(":")
        code = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}\n"
            f"from snapstream.distributed.control import die_with_parent\ndie_with_parent({os.getpid()})\n"
            f"from {module} import {function}\nsys.exit({function}({theirs.fileno()}))"
        )
        own = WorkerRank(rank, channel)
        started: Future[None] = Future()

        def run() -> None:
            try:
                with theirs:
                    own.process = subprocess.Popen(
                        [sys.executable, "-c", code],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env={**os.environ, **environment},
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,  # only rank 0 gets Ctrl-C from the terminal
                    )
                with self._change:
                    self._all.append(own)
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._receive(own)
            own.process.wait()

        # Not on the caller's thread: the system kills the process when the thread ends that started it.
        threading.Thread(target=run, name=f"rank-{rank}", daemon=True).start()
        started.result()

    def admit(self, channel: ControlChannel) -> None:
        """Admit a worker from another machine, as the rank that it names or the next free one. Rank 0 refuses one that
        cannot be a rank, with the reason, and keeps waiting.
        """
        threading.Thread(target=self._admit, args=(channel,), name="rank-admission", daemon=True).start()

    def _admit(self, channel: ControlChannel) -> None:
        """Thread that waits for a new worker's ``Hello``."""
        try:
            hello = channel.receive()
        except (ConnectionFailed, ValueError):
            hello = None
        if not isinstance(hello, Hello):
            channel.close()
            return
        why = self._refuses(hello)
        with self._change:
            free = sorted(set(range(1, self._count + 1)) - {own.rank for own in self._all})
            rank = hello.rank or next(iter(free), 0)
            if self._closing.is_set() or not free:
                why = "all ranks are connected"
            elif rank not in free:
                why = why or f"rank {rank} is not missing; missing are {free}"
            own = WorkerRank(rank, channel, hello=hello, state="here")
            if not why:
                self._all.append(own)
                self._change.notify_all()
        if why:
            log.warning("a worker on %s was refused: %s", hello.host, why)
            with suppress(ConnectionFailed):
                channel.send(Refused(why))
            channel.close()
            return
        self._receive(own)

    def hand_out(self, tasks: Sequence[Task]) -> None:
        """Send every worker the task of its rank; ``wait`` reports a channel that is closed."""
        by_rank = {task.rank: task for task in tasks}
        for own in self._all:
            with suppress(ConnectionFailed):
                own.channel.send(by_rank[own.rank])

    def hellos(self) -> list[Hello]:
        """The workers' greetings by rank; call after ``wait("here")``."""
        return [own.hello for own in sorted(self._all, key=lambda own: own.rank) if own.hello is not None]

    def wait(self, state: State, timeout_s: float) -> None:
        """Wait until all workers are in ``state``.

        ValueError if one does not support the settings, RankLost if one is lost.
        """
        states = list(_ORDER.values())
        reached = states[states.index(state) :]
        deadline = monotonic() + timeout_s
        with self._change:
            while self._lost is None and self._late(reached):
                if not self._change.wait(max(deadline - monotonic(), 0.0)) and monotonic() >= deadline:
                    raise RankLost(f"ranks {self._late(reached)} were not {state} within {timeout_s:g} s")
        self.check()

    def _late(self, reached: Sequence[State]) -> list[int]:
        """Ranks that are not in these states."""
        done = {own.rank for own in self._all if own.state in reached}
        return [rank for rank in range(1, self._count + 1) if rank not in done]

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call ``act`` when a rank is lost, on a thread, or at once if one is. It must not wait."""
        with self._change:
            self._on_end.append(act)
            if self._lost is not None:
                act()

    def when_done(self, act: Callable[[int, BlocksDone], None]) -> None:
        """Call ``act`` with a rank and its answer about the prefix store's files, on a thread. It must not wait."""
        self._on_done = act

    def check(self) -> None:
        """RankLost, or the ValueError that a worker reported, if one is lost."""
        if self._lost is not None:
            raise ValueError(self._lost.reason) if self._lost.kind == "value" else RankLost(self._lost.reason)

    def send(self, message: object) -> None:
        """Send one message to all workers. RankLost if one cannot receive it."""
        self.check()
        data = pack(message)
        for own in self._all:
            try:
                own.channel.send_packed(data)
            except ConnectionFailed:
                self.check_lost()
                raise RankLost(f"rank {own.rank} has closed its channel") from None

    @contextmanager
    def step(self) -> Iterator[None]:
        """While all ranks run a step; one that takes longer than the stall timeout ends the engine: a rank hangs."""
        if self._stall_timeout_s and not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._watch, name="ranks-stall", daemon=True).start()
        self._step_since = monotonic()
        try:
            yield
        finally:
            self._step_since = None

    def _watch(self) -> None:
        """Thread that looks for steps that take too long."""
        while not self._closing.wait(self._stall_timeout_s / STALL_TICKS):
            since = self._step_since
            if since is None or monotonic() - since < self._stall_timeout_s:
                continue
            with self._change:
                self._lost = self._lost or Failed(
                    "error", f"a step did not end within {self._stall_timeout_s:g} s (stall_timeout)"
                )
                self._change.notify_all()
            for own in self._all:  # which ends the collectives that wait for them
                own.channel.close()
                if own.process is not None:
                    own.process.kill()
            return

    def check_lost(self) -> None:
        """RankLost if a rank is lost, now or within ``LOST_S``: the cause of another failure."""
        with self._change:
            self._change.wait_for(lambda: self._lost is not None, LOST_S)
        self.check()

    def close(self) -> None:
        """End all workers; returns when those of this machine are reaped. May be called twice."""
        with self._change:
            self._closing.set()
        for own in self._all:
            own.channel.close()
        deadline = monotonic() + STOP_S
        for own in self._all:
            if own.process is not None:
                try:
                    own.process.wait(max(deadline - monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    own.process.kill()
                    own.process.wait()

    def _receive(self, own: WorkerRank) -> None:
        """Thread that listens to one worker."""
        why = ""
        try:
            while True:
                message = own.channel.receive()
                if isinstance(message, BlocksDone):
                    self._on_done(own.rank, message)
                    continue
                with self._change:
                    if isinstance(message, Failed):
                        own.failure = message
                    else:
                        own.state = _ORDER[type(message)]
                        own.hello = message if isinstance(message, Hello) else own.hello
                    self._change.notify_all()
        except ConnectionFailed:
            pass
        except ValueError as error:  # not one of our messages
            why = f"rank {own.rank} sent {error}"
        self._note_end(own, why)

    def _note_end(self, own: WorkerRank, why: str) -> None:
        if own.failure is not None:
            end = Failed(own.failure.kind, f"rank {own.rank}: {own.failure.reason}")
        else:
            end = Failed("error", why or f"rank {own.rank} {_describe(own.process)}")
        with self._change:
            is_first = self._lost is None and not self._closing.is_set()
            if is_first:
                self._lost = end
            for act in self._on_end:
                act()
            had_joined = own.state in ("joined", "ready")  # else rank 0 waits for it, and reports it
            self._change.notify_all()
        if is_first and had_joined and end.kind == "error":
            self._on_lost(end.reason)


def _describe(process: subprocess.Popen[bytes] | None) -> str:
    """How a process ended that closed its channel."""
    if process is None:
        return "is lost: its machine, its process or the network between"
    try:
        code = process.wait(LOST_S / 2)
    except subprocess.TimeoutExpired:
        return "closed its channel"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def die_with_parent(parent: int) -> None:
    """End this process when the thread of process ``parent`` that started it ends, on Linux: also where this process is
    stopped, and could not notice that its channel is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os._exit(0)
