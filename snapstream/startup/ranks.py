"""The ranks of an engine, from workers started to workers ready: rank 0's part, and a worker's.

    spawn workers -> hellos -> tasks -> joined -> the group is made -> every rank loads its shard -> ready -> plans

``build_ranks`` is a ``MakeRunner``, which ``LLM`` uses unless it is given another; for one rank it is ``build_runner``.
Invariants: whatever goes wrong on the way, no worker is left behind. A worker ends with the channel to rank 0 even in
the middle of a collective; one that cannot go on says why (``Failed``) and ends, and so ends the engine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.engine import launched
from snapstream.config.values import split_address
from snapstream.distributed.control import (
    TO_RANK_0,
    TO_WORKER,
    ControlChannel,
    Failed,
    Hello,
    Joined,
    Ready,
    Refused,
    Task,
    accept_workers,
    connect,
    inherited,
    listen,
    shared_key,
)
from snapstream.grammar import GrammarCompiler
from snapstream.models.config_json import fingerprint
from snapstream.startup.build import build_rank, build_runner, tokenizer_json
from snapstream.step import Runner, StepPlan
from snapstream.version import __version__
from snapstream.wire import ConnectionFailed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from snapstream.distributed.control import WorkerRanks
    from snapstream.models.checkpoint import LoadProgress

CHECK_VARIABLE = "SNAPSTREAM_CHECK_RANKS"  # 1: compare the drawn tokens of all ranks after every step
CONTROL = "snapstream-control"  # key of the store: where workers connect
HELLO_S = 300.0  # for a process to start and import torch
JOIN_S = 120.0  # for all ranks to join the group
LOAD_S = 1800.0  # large checkpoints on slow disks
RETRY_S = 0.5  # between two attempts to reach a rank 0 that is not there yet
ENTRY = "snapstream.startup.ranks:spawned_worker"

Inbox = SimpleQueue[object]


def build_ranks(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: LoadProgress,
    *,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    stall_timeout_s: float = 0.0,
) -> Runner:
    """Load the weights on every rank and put runners around them; a ``MakeRunner``.

    ``on_lost`` is called, on a thread, when a rank is lost: the engine is useless then, and a step of it may hang.
    ``stall_timeout_s``: a step that takes longer ends the engine with RankLost; 0: never. ValueError for what a rank
    cannot serve; RankLost if one is lost.
    """
    if config.parallel.size == 1:
        return build_runner(folder, model, config, grammars, progress, on_unit=on_unit)
    import torch

    from snapstream.distributed.control import WorkerRanks
    from snapstream.distributed.group import Ranks
    from snapstream.exec.parallel import ParallelRunner, RankRunner

    if Ranks.is_joined():
        raise ValueError("this process has an engine over several ranks already; close it first")
    if config.parallel.address == "env":
        raise ValueError("RANK is not 0; rank 0 makes the engine, and the others run `snapstream worker env MODEL`")
    expected, before = fingerprint(folder), torch.get_num_threads()
    if config.parallel.address:
        shared_key()  # or its ValueError, before anybody is waited for

    def refuses(hello: Hello) -> str:
        return "" if hello.fingerprint == expected else "its checkpoint is not rank 0's; copy it there, all files"

    workers = WorkerRanks(config.parallel.size - 1, on_lost, stall_timeout_s, refuses)
    num_threads = threads_of_rank(config.parallel.ranks_here)
    checks = os.environ.get(CHECK_VARIABLE) == "1"
    try:
        with _rendezvous(config.parallel.address) as (rendezvous, store):
            for rank in range(1, config.parallel.ranks_here):
                workers.spawn(rank, ENTRY, _environment(rank, config.device, num_threads))
            with _waiting_for_others(workers, config, store):
                workers.wait("here", LOAD_S if config.parallel.address else HELLO_S)
            check_versions(workers.hellos(), torch.__version__)
            workers.hand_out([
                Task(
                    rank=rank, model=str(folder.resolve()), fingerprint=expected, config=config, rendezvous=rendezvous,
                    num_threads=num_threads if rank < config.parallel.ranks_here else 0, checks_ranks=checks,
                )
                for rank in range(1, config.parallel.size)
            ])  # fmt: skip
            workers.wait("joined", HELLO_S)
            torch.set_num_threads(num_threads)
            with on_network_of(rendezvous):
                group = Ranks.join(0, config.parallel.size, rendezvous, config.device, JOIN_S, store)
            group.set_timeout(LOAD_S)  # a rank may load longer than it takes to join
            workers.when_lost(group.abandon)
            try:
                runner = build_rank(folder, model, config, grammars, progress, group, on_unit)
                workers.wait("ready", LOAD_S)  # until then they may look for the rendezvous
                if stall_timeout_s:  # where a rank of another machine was stopped, which cannot be killed from here
                    group.set_timeout(2 * stall_timeout_s)
            except BaseException:
                group.close()
                raise
    except BaseException as error:
        torch.set_num_threads(before)
        try:
            if isinstance(error, RuntimeError):  # perhaps of a collective: report the lost rank
                workers.check_lost()
        finally:
            workers.close()
        raise

    def leave() -> None:
        torch.set_num_threads(before)
        runner.close()  # graphs first: leaving waits for those that hold collectives
        group.close()

    return ParallelRunner(RankRunner(runner, group, checks=checks), workers, leave)


@contextmanager
def _rendezvous(address: str) -> Iterator[tuple[str, Store | None]]:
    """Where the ranks' group is made: a private file, or with ranks on other machines torch's TCPStore
    at rank 0's ``address``, under a prefix of this engine's.
    """
    if address:
        host, port = split_address(address)
        yield f"tcp://{host}:{port}/{secrets.token_hex(8)}", _own_store(host, port)
        return
    folder = tempfile.mkdtemp(prefix="snapstream-ranks-")
    try:
        yield f"file://{folder}/group", None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_store(host: str, port: int) -> Store:
    """The TCPStore of the ranks' rendezvous; under torchrun its agent has it already."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store_at(host, port, JOIN_S)
    listener = listen(host, port)  # by the address: TCPStore itself would listen at all of them
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def store_at(host: str, port: int, timeout_s: float) -> Store:
    """The store of rank 0 on another machine; torch's DistNetworkError where there is none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


@contextmanager
def _waiting_for_others(workers: WorkerRanks, config: EngineConfig, store: Store | None) -> Iterator[None]:
    """Admit the workers of other machines, if there are to be any. The store has the address to connect to."""
    if store is None:
        yield
        return
    host, _ = split_address(config.parallel.address)
    listener = accept_workers(host, shared_key(), TO_RANK_0, workers.admit)
    store.set(CONTROL, f"{host}:{listener.port}")
    try:
        yield
    finally:
        listener.close()


def threads_of_rank(num_ranks: int) -> int:
    """Threads of torch for each of the ranks that share this machine."""
    import torch

    return max(1, torch.get_num_threads() // num_ranks)


def check_versions(hellos: Sequence[Hello], torch_version: str) -> None:
    """ValueError where a worker runs other versions than rank 0: it might compute other bits."""
    for rank, hello in enumerate(hellos, start=1):
        for what, theirs, ours in (("snapstream", hello.version, __version__), ("torch", hello.torch, torch_version)):
            if theirs != ours:
                raise ValueError(f"rank {rank} on {hello.host} runs {what} {theirs}; rank 0 runs {ours}")


def _environment(rank: int, device: str, num_threads: int) -> dict[str, str]:
    """What is different for a worker: it sees one GPU, its own, which is then the first."""
    own = {"OMP_NUM_THREADS": str(num_threads)}
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank].strip() if visible else str(rank)
    return own


@contextmanager
def on_network_of(rendezvous: str) -> Iterator[None]:
    """Where all ranks are on this machine, gloo uses the loopback, which no other machine can reach."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((own for _, own in socket.if_nameindex() if own in ("lo", "lo0")), None)
    if name in os.environ or loopback is None or not rendezvous.startswith(("file:", "tcp://127.")):
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]


# A worker rank


def spawned_worker(fileno: int) -> int:
    """Run a rank of the engine whose rank 0 started this process; the exit code. ``fileno``: the channel's end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; rank 0 decides, and closes the channel
        signal.signal(number, signal.SIG_IGN)
    return _work(inherited(fileno, TO_WORKER))


def run_worker(address: str, folder: Path, patience_s: float) -> int:
    """Run a rank of the engine whose store is at ``address``; the exit code. ``folder``: the checkpoint.

    ``address`` "env" takes the rank and the address from the environment. ValueError if no rank 0 answered within
    ``patience_s`` seconds, or where the keys differ.
    """
    from torch.distributed import DistError

    key, deadline, rank = shared_key(), monotonic() + patience_s, 0
    if address == "env":
        rank, _, address = launched()
        use_own_gpu()
    host, port = split_address(address)
    while True:
        try:
            store = store_at(host, port, RETRY_S * 4)
            channel = connect(store.get(CONTROL).decode(), key, TO_WORKER)
            break
        except (OSError, DistError) as error:
            if monotonic() >= deadline:
                raise ValueError(f"no rank 0 at {address} within {patience_s:g} s: {error}") from None
            sleep(RETRY_S)
    store.set_timeout(timedelta(seconds=JOIN_S))
    return _work(channel, folder, store, rank)


def _work(channel: ControlChannel, folder: Path | None = None, store: Store | None = None, rank: int = 0) -> int:
    """Do rank 0's task until the channel closes, which ends the process; the exit code of a worker that failed.

    ``folder``: the checkpoint, if it is not where rank 0 has it; ``store``: of the rendezvous; ``rank``: this one's, if
    it is known.
    """
    inbox: Inbox = SimpleQueue()
    has_terminal = folder is not None  # that is, it is on another machine
    threading.Thread(target=_receive, args=(channel, inbox, has_terminal), name="control-channel", daemon=True).start()
    try:
        _serve(channel, inbox, folder, store, rank)
    except Exception as error:
        print("error:", f"this rank cannot go on: {error}", file=sys.stderr)
        is_value = isinstance(error, (ValueError, FileNotFoundError))
        why = str(error) if is_value else f"{type(error).__name__}: {error}"
        with suppress(ConnectionFailed):
            channel.send(Failed("value" if is_value else "error", why))
    return 1


def use_own_gpu() -> None:
    """Of the GPUs that torchrun shows to all ranks of a machine, keep that of LOCAL_RANK."""
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdigit():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local)] if int(local) < len(visible) > 1 else local


def _receive(channel: ControlChannel, inbox: Inbox, has_terminal: bool) -> None:
    """Thread that listens to rank 0."""
    try:
        while True:
            message = channel.receive()
            if isinstance(message, Refused):
                print("error:", f"rank 0 does not admit this rank: {message.reason}", file=sys.stderr, flush=True)
                os._exit(1)
            inbox.put(message)
    except ConnectionFailed:
        if has_terminal:
            print("rank 0 has closed its engine, or is lost: this rank ends", file=sys.stderr, flush=True)
        os._exit(0)  # whatever the other threads do
    except ValueError as error:  # a selector that this process does not know, or no message of ours
        with suppress(ConnectionFailed):
            channel.send(Failed("error", str(error)))
        os._exit(1)


def _serve(channel: ControlChannel, inbox: Inbox, folder: Path | None, store: Store | None, rank: int) -> None:
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.exec.parallel import RankRunner, answer
    from snapstream.models.registry import read_model_config
    from snapstream.startup.measure import measure_machine
    from snapstream.startup.resolve import check_rank

    own_print = "" if folder is None else fingerprint(folder)
    channel.send(Hello(version=__version__, torch=torch.__version__, host=socket.gethostname(), pid=os.getpid(),
                    fingerprint=own_print, rank=rank))  # fmt: skip
    task = inbox.get()
    assert isinstance(task, Task), "Task is rank 0's first message"
    config, own = task.config, folder or Path(task.model)
    if (own_print or fingerprint(own)) != task.fingerprint:
        raise ValueError(f"{own} on {socket.gethostname()} is not rank 0's checkpoint; copy it there, all files")
    model = read_model_config(own)
    check_rank(model, config, measure_machine(config.device))
    if task.num_threads:
        torch.set_num_threads(task.num_threads)
    channel.send(Joined())
    with on_network_of(task.rendezvous):
        group = Ranks.join(task.rank, config.parallel.size, task.rendezvous, config.device, JOIN_S, store)
    group.set_timeout(LOAD_S)
    runner = build_rank(own, model, config, _grammars(own, model), False, group, lambda: None)
    runs = RankRunner(runner, group, checks=task.checks_ranks)
    channel.send(Ready())
    files = runner.prefix_tier
    while True:
        message = inbox.get()
        if isinstance(message, StepPlan):
            runs.submit(message)
        else:
            assert files is not None, "without files, rank 0 sends only plans"
            answer(files, message, channel.send)


def _grammars(folder: Path, model: ModelConfig) -> GrammarCompiler:
    """The compiler of rank 0's grammars; the tokenizer is read when the first one comes."""
    from snapstream.models.tokenizer import load_tokenizer

    return GrammarCompiler(lambda: tokenizer_json(load_tokenizer(folder)), model.vocab_size, model.eos_token_ids)
