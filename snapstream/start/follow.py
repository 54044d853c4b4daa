"""Life of a follower: a rank that runs what the leader's plans say, over its own share, and answers nobody.

It ends with the link to its leader, whatever it is doing at that moment: in a collective that waits for the leader, a
rank could not notice otherwise. Invariant: a follower that cannot go on says why (``Failed``) and ends, and so ends the
engine. ``ranks.py`` is the leader's part.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING

from snapstream.distributed.link import Link, LinkClosed, inherited, knock, shared_key
from snapstream.distributed.messages import TO_FOLLOWER, Failed, Hello, Joined, Ready, Task
from snapstream.step import StepPlan
from snapstream.version import __version__

if TYPE_CHECKING:
    from snapstream.config import ModelConfig
    from snapstream.grammar import GrammarCompiler

Inbox = SimpleQueue[object]
KNOCK_S = 0.5  # between two attempts to reach a leader that is not there yet


def follow_leader(fileno: int) -> int:
    """Follow the leader that started this process and left the end of a link as an open file; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; the leader decides, and closes the link
        signal.signal(number, signal.SIG_IGN)
    return follow(inherited(fileno, TO_FOLLOWER))


def follow_address(address: str, folder: Path, patience_s: float) -> int:
    """Follow the leader that waits at ``address``, once it is there; the exit code. ``folder``: the checkpoint here.

    ValueError where no leader came to be within ``patience_s`` seconds, or where the keys differ.
    """
    key, deadline = shared_key(), monotonic() + patience_s
    while True:
        try:
            link = knock(address, key, TO_FOLLOWER)
            break
        except OSError as error:
            if monotonic() >= deadline:
                raise ValueError(f"no leader at {address} within {patience_s:g} s: {error}") from None
            sleep(KNOCK_S)
    return follow(link, folder)


def follow(link: Link, folder: Path | None = None) -> int:
    """Do the leader's task until the link closes, which ends the process. ``folder``: the checkpoint, if not there
    where the leader has it. Returns the exit code of a follower that failed.
    """
    inbox: Inbox = SimpleQueue()
    tells = folder is not None  # one on the leader's machine has nobody who waits for it
    threading.Thread(target=_receive, args=(link, inbox, tells), name="leader-link", daemon=True).start()
    try:
        _serve(link, inbox, folder)
    except Exception as error:
        print("error:", f"this rank cannot go on: {error}", file=sys.stderr)
        is_value = isinstance(error, (ValueError, FileNotFoundError))
        why = str(error) if is_value else f"{type(error).__name__}: {error}"
        with suppress(LinkClosed):
            link.send(Failed("value" if is_value else "error", why))
    return 1


def _receive(link: Link, inbox: Inbox, tells: bool) -> None:
    """Life of the thread that listens to the leader; ``tells``: say why the process ends."""
    try:
        while True:
            inbox.put(link.receive())
    except LinkClosed:
        if tells:
            print("the leader has closed its engine, or is gone: this rank ends", file=sys.stderr, flush=True)
        os._exit(0)  # whatever the other threads do
    except ValueError as error:  # a selector that this process does not know, or no message of ours
        with suppress(LinkClosed):
            link.send(Failed("error", str(error)))
        os._exit(1)


def _serve(link: Link, inbox: Inbox, folder: Path | None) -> None:
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.models.fingerprint import fingerprint
    from snapstream.models.registry import read_model_config
    from snapstream.runner.parallel import RankRunner
    from snapstream.runner.rank_files import answer
    from snapstream.start.build import build_rank
    from snapstream.start.measure import measure_machine
    from snapstream.start.ranks import JOIN_S, LOAD_S, on_network_of
    from snapstream.start.resolve import check_rank

    link.send(Hello(version=__version__, torch=torch.__version__, host=socket.gethostname(), pid=os.getpid()))
    task = inbox.get()
    assert isinstance(task, Task), "the leader speaks second"
    config, own = task.config, folder or Path(task.model)
    if fingerprint(own) != task.fingerprint:
        raise ValueError(f"{own} on {socket.gethostname()} is not the leader's checkpoint; copy it there, all files")
    model = read_model_config(own)
    check_rank(model, config, measure_machine(config.device))
    if task.num_threads:
        torch.set_num_threads(task.num_threads)
    link.send(Joined())
    with on_network_of(task.meeting):
        group = Ranks.join(task.rank, config.parallel.size, task.meeting, config.device, JOIN_S)
    group.set_timeout(LOAD_S)
    runner = build_rank(own, model, config, _grammars(own, model), False, group, lambda: None)
    rank = RankRunner(runner, group, checks=task.checks_ranks)
    link.send(Ready())
    files = runner.prefix_tier
    while True:
        message = inbox.get()
        if isinstance(message, StepPlan):
            rank.submit(message)
        else:
            assert files is not None, "a leader whose ranks have no files sends plans alone"
            answer(files, message, link.send)


def _grammars(folder: Path, model: ModelConfig) -> GrammarCompiler:
    """The compiler of the leader's grammars; the tokenizer is read when the first one comes."""
    from snapstream.grammar import GrammarCompiler
    from snapstream.models.tokenizer import load_tokenizer
    from snapstream.start.build import tokenizer_json

    return GrammarCompiler(lambda: tokenizer_json(load_tokenizer(folder)), model.vocab_size, model.eos_token_ids)
