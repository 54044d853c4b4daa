"""An engine's runner over all of its ranks: the leader's part, from followers started to followers ready.

    spawn followers -> hellos -> tasks -> joined -> the group is made -> every rank loads its share -> ready

A ``MakeRunner``, which ``LLM`` uses unless it is given another; for one rank it is ``build_runner``. Invariant:
whatever goes wrong on the way, no follower is left behind. ``follow.py`` is a follower's part of the same steps.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapstream.config import EngineConfig, ModelConfig
from snapstream.distributed.link import Door, shared_key, split_address
from snapstream.grammar import GrammarCompiler
from snapstream.models.fingerprint import fingerprint
from snapstream.start.build import build_rank, build_runner
from snapstream.step import Runner
from snapstream.version import __version__

if TYPE_CHECKING:
    from snapstream.distributed.launch import Followers
    from snapstream.distributed.messages import Hello

CHECK_VARIABLE = "SNAPSTREAM_CHECK_RANKS"  # 1: compare the drawn tokens of all ranks after every step
HELLO_S = 300.0  # for a process to start and import torch
JOIN_S = 120.0  # for all ranks to meet
LOAD_S = 1800.0  # large checkpoints on slow disks
ENTRY = "snapstream.start.follow:follow_leader"


def build_ranks(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: bool,
    *,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
) -> Runner:
    """Load the weights on every rank and put runners around them; a ``MakeRunner``.

    ``on_lost`` is called, on a thread, when a rank has gone: the engine is useless then, and a step of it may hang.
    ValueError for what a rank cannot serve; RankLost if one goes.
    """
    if config.parallel.size == 1:
        return build_runner(folder, model, config, grammars, progress, on_unit=on_unit)
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.distributed.launch import Followers
    from snapstream.runner.parallel import ParallelRunner, RankRunner

    if Ranks.is_joined():
        raise ValueError("this process has an engine over several ranks already; close it first")
    followers, before = Followers(config.parallel.size - 1, on_lost), torch.get_num_threads()
    num_threads = threads_of_rank(config.parallel.ranks_here)
    checks = os.environ.get(CHECK_VARIABLE) == "1"
    try:
        with _meeting_place(config.parallel.address) as meeting:
            for rank in range(1, config.parallel.ranks_here):
                followers.spawn(rank, ENTRY, _environment(rank, config.device, num_threads))
            with _waiting_for_others(followers, config):  # whose ranks come behind those of this machine
                followers.wait("here", LOAD_S if config.parallel.address else HELLO_S)
            check_versions(followers.hellos(), torch.__version__)
            _hand_out_tasks(followers, folder, config, meeting, num_threads, checks)
            torch.set_num_threads(num_threads)
            with on_network_of(meeting):
                group = Ranks.join(0, config.parallel.size, meeting, config.device, JOIN_S)
            group.set_timeout(LOAD_S)  # a rank may load longer than it takes to meet
            followers.when_lost(group.abandon)
            try:
                runner = build_rank(folder, model, config, grammars, progress, group, on_unit)
                followers.wait("ready", LOAD_S)  # until then they may look for the meeting place
            except BaseException:
                group.close()
                raise
    except BaseException as error:
        torch.set_num_threads(before)
        try:
            if isinstance(error, RuntimeError):  # perhaps of a collective: say who has gone
                followers.blame()
        finally:
            followers.close()
        raise

    def leave() -> None:
        torch.set_num_threads(before)
        group.close()

    return ParallelRunner(RankRunner(runner, group, checks=checks), followers, leave)


@contextmanager
def _meeting_place(address: str) -> Iterator[str]:
    """Where the ranks' group is made: a file that nobody else may see, or with ranks on other machines a free port of
    the leader's ``address``.
    """
    if not address:
        folder = tempfile.mkdtemp(prefix="snapstream-ranks-")
        try:
            yield f"file://{folder}/group"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    host, _ = split_address(address)
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    yield f"tcp://{host}:{port}"


@contextmanager
def _waiting_for_others(followers: Followers, config: EngineConfig) -> Iterator[None]:
    """Take in the followers of other machines, if there shall be any, in the order in which they come."""
    if not config.parallel.address:
        yield
        return
    from snapstream.distributed.messages import TO_LEADER

    door = Door(config.parallel.address, shared_key(), TO_LEADER, followers.admit)
    try:
        yield
    finally:
        door.close()


def threads_of_rank(num_ranks: int) -> int:
    """Threads of torch for each of the ranks that share this machine."""
    import torch

    return max(1, torch.get_num_threads() // num_ranks)


def check_versions(hellos: Sequence[Hello], torch_version: str) -> None:
    """ValueError where a follower runs other versions than the leader: it might compute other bits."""
    for rank, hello in enumerate(hellos, start=1):
        for what, theirs, ours in (("snapstream", hello.version, __version__), ("torch", hello.torch, torch_version)):
            if theirs != ours:
                raise ValueError(f"rank {rank} on {hello.host} runs {what} {theirs}; the leader runs {ours}")


def _hand_out_tasks(
    followers: Followers, folder: Path, config: EngineConfig, meeting: str, num_threads: int, checks: bool
) -> None:
    """Give the followers their tasks; returns when all have joined."""
    from snapstream.distributed.messages import Task

    told = fingerprint(folder)

    def task(rank: int) -> Task:
        return Task(
            rank=rank,
            model=str(folder.resolve()),
            fingerprint=told,
            config=config,
            meeting=meeting,
            num_threads=num_threads if rank < config.parallel.ranks_here else 0,
            checks_ranks=checks,
        )

    followers.hand_out([task(rank) for rank in range(1, config.parallel.size)])
    followers.wait("joined", HELLO_S)


def _environment(rank: int, device: str, num_threads: int) -> dict[str, str]:
    """What is different for a follower: it sees one GPU, its own, which is then the first."""
    own = {"OMP_NUM_THREADS": str(num_threads)}
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank].strip() if visible else str(rank)
    return own


@contextmanager
def on_network_of(meeting: str) -> Iterator[None]:
    """Ranks of one machine meet through a file, or at its own address: gloo, which reads a variable, shall use the
    loopback, where no other machine can reach it.
    """
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((own for _, own in socket.if_nameindex() if own in ("lo", "lo0")), None)
    if name in os.environ or loopback is None or not meeting.startswith(("file:", "tcp://127.")):
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]
