"""An engine's runner over all of its ranks: rank 0's part, from workers started to workers ready.

    spawn workers -> hellos -> tasks -> joined -> the group is made -> every rank loads its share -> ready

A ``MakeRunner``, which ``LLM`` uses unless it is given another; for one rank it is ``build_runner``. Invariant:
whatever goes wrong on the way, no worker is left behind. ``follow.py`` is a worker's part of the same steps.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.values import split_address
from snapstream.distributed.control import accept_workers, listen, shared_key
from snapstream.grammar import GrammarCompiler
from snapstream.models.config_json import fingerprint
from snapstream.startup.build import build_rank, build_runner
from snapstream.step import Runner
from snapstream.version import __version__

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from snapstream.distributed.control import Hello
    from snapstream.distributed.launch import WorkerRanks

CHECK_VARIABLE = "SNAPSTREAM_CHECK_RANKS"  # 1: compare the drawn tokens of all ranks after every step
CONTROL = "snapstream-control"  # key of the store: where workers connect
HELLO_S = 300.0  # for a process to start and import torch
JOIN_S = 120.0  # for all ranks to meet
LOAD_S = 1800.0  # large checkpoints on slow disks
ENTRY = "snapstream.startup.follow:follow_parent"


def build_ranks(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: bool,
    *,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    stall_timeout_s: float = 0.0,
) -> Runner:
    """Load the weights on every rank and put runners around them; a ``MakeRunner``.

    ``on_lost`` is called, on a thread, when a rank has gone: the engine is useless then, and a step of it may hang.
    ``stall_timeout_s``: a step that takes longer ends the engine with RankLost; 0: never. ValueError for what a rank
    cannot serve; RankLost if one goes.
    """
    if config.parallel.size == 1:
        return build_runner(folder, model, config, grammars, progress, on_unit=on_unit)
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.distributed.launch import WorkerRanks
    from snapstream.exec.parallel import ParallelRunner, RankRunner

    if Ranks.is_joined():
        raise ValueError("this process has an engine over several ranks already; close it first")
    if config.parallel.address == "env":
        raise ValueError("RANK is not 0; rank 0 makes the engine, and the others run `snapstream follow env MODEL`")
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
            _hand_out_tasks(workers, folder, expected, config, rendezvous, num_threads, checks)
            torch.set_num_threads(num_threads)
            with on_network_of(rendezvous):
                group = Ranks.join(0, config.parallel.size, rendezvous, config.device, JOIN_S, store)
            group.set_timeout(LOAD_S)  # a rank may load longer than it takes to meet
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
            if isinstance(error, RuntimeError):  # perhaps of a collective: say who has gone
                workers.blame()
        finally:
            workers.close()
        raise

    def leave() -> None:
        torch.set_num_threads(before)
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
    """The TCPStore that the ranks meet in; under torchrun its agent has it already."""
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
    """Admit the workers of other machines, if there are to be any. The store tells them where to connect."""
    if store is None:
        yield
        return
    from snapstream.distributed.control import TO_RANK_0

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


def _hand_out_tasks(
    workers: WorkerRanks,
    folder: Path,
    expected: str,
    config: EngineConfig,
    rendezvous: str,
    num_threads: int,
    checks: bool,
) -> None:
    """Give the workers their tasks; returns when all have joined."""
    from snapstream.distributed.control import Task

    def task(rank: int) -> Task:
        return Task(
            rank=rank,
            model=str(folder.resolve()),
            fingerprint=expected,
            config=config,
            rendezvous=rendezvous,
            num_threads=num_threads if rank < config.parallel.ranks_here else 0,
            checks_ranks=checks,
        )

    workers.hand_out([task(rank) for rank in range(1, config.parallel.size)])
    workers.wait("joined", HELLO_S)


def _environment(rank: int, device: str, num_threads: int) -> dict[str, str]:
    """What is different for a worker: it sees one GPU, its own, which is then the first."""
    own = {"OMP_NUM_THREADS": str(num_threads)}
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank].strip() if visible else str(rank)
    return own


@contextmanager
def on_network_of(rendezvous: str) -> Iterator[None]:
    """Ranks of one machine meet through a file, or at its own address: gloo, which reads a variable, shall use the
    loopback, where no other machine can reach it.
    """
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
