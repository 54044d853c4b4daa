"""Life of a worker rank: it runs rank 0's plans over its shard.

It ends with the channel to rank 0, whatever it is doing at that moment: in a collective that waits for rank 0, a
rank could not notice otherwise. Invariant: a worker that cannot go on says why (``Failed``) and ends, and so ends the
engine. ``ranks.py`` is rank 0's part.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING

from snapstream.config.engine import launched
from snapstream.config.values import split_address
from snapstream.distributed.control import (
    TO_WORKER,
    ControlChannel,
    Failed,
    Hello,
    Joined,
    Ready,
    Refused,
    Task,
    connect,
    inherited,
    shared_key,
)
from snapstream.startup.ranks import CONTROL, JOIN_S, store_at
from snapstream.step import StepPlan
from snapstream.version import __version__
from snapstream.wire import ConnectionFailed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from snapstream.config import ModelConfig
    from snapstream.grammar import GrammarCompiler

Inbox = SimpleQueue[object]
RETRY_S = 0.5  # between two attempts to reach a rank 0 that is not there yet


def follow_parent(fileno: int) -> int:
    """Be a rank of the engine whose rank 0 started this process; the exit code. ``fileno``: the channel's end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; rank 0 decides, and closes the channel
        signal.signal(number, signal.SIG_IGN)
    return follow(inherited(fileno, TO_WORKER))


def follow_address(address: str, folder: Path, patience_s: float) -> int:
    """Be a rank of the engine whose store is at ``address``; the exit code. ``folder``: the checkpoint.

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
    return follow(channel, folder, store, rank)


def follow(channel: ControlChannel, folder: Path | None = None, store: Store | None = None, rank: int = 0) -> int:
    """Do rank 0's task until the channel closes, which ends the process. ``folder``: the checkpoint, if not there
    where rank 0 has it; ``store``: in which the ranks meet; ``rank``: this one's, if it is known. Returns the exit
    code of a worker that failed.
    """
    inbox: Inbox = SimpleQueue()
    tells = folder is not None  # only a worker on another machine has a terminal
    threading.Thread(target=_receive, args=(channel, inbox, tells), name="control-channel", daemon=True).start()
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
    """Of the GPUs that torchrun shows to all ranks of a machine, see that of LOCAL_RANK alone."""
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdigit():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local)] if int(local) < len(visible) > 1 else local


def _receive(channel: ControlChannel, inbox: Inbox, tells: bool) -> None:
    """Life of the thread that listens to rank 0; ``tells``: say why the process ends."""
    try:
        while True:
            message = channel.receive()
            if isinstance(message, Refused):
                print("error:", f"rank 0 does not admit this rank: {message.reason}", file=sys.stderr, flush=True)
                os._exit(1)
            inbox.put(message)
    except ConnectionFailed:
        if tells:
            print("rank 0 has closed its engine, or is gone: this rank ends", file=sys.stderr, flush=True)
        os._exit(0)  # whatever the other threads do
    except ValueError as error:  # a selector that this process does not know, or no message of ours
        with suppress(ConnectionFailed):
            channel.send(Failed("error", str(error)))
        os._exit(1)


def _serve(channel: ControlChannel, inbox: Inbox, folder: Path | None, store: Store | None, rank: int) -> None:
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.exec.parallel import RankRunner, answer
    from snapstream.models.config_json import fingerprint
    from snapstream.models.registry import read_model_config
    from snapstream.startup.build import build_rank
    from snapstream.startup.measure import measure_machine
    from snapstream.startup.ranks import LOAD_S, on_network_of
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
    from snapstream.grammar import GrammarCompiler
    from snapstream.models.tokenizer import load_tokenizer
    from snapstream.startup.build import tokenizer_json

    return GrammarCompiler(lambda: tokenizer_json(load_tokenizer(folder)), model.vocab_size, model.eos_token_ids)
