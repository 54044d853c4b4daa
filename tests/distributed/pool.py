"""Processes that stay: W ranks over gloo, started once, that run one function after the other.

A function is called as ``function(group, *arguments)`` in every rank, and its results come back by rank. It must be
defined in a module that a new process can import (``cases.py``), its arguments and result plain data or tensors.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from snapstream.distributed.group import Ranks
from tests.waiting import HANG_S


class Pool:
    """The ranks, as a test sees them."""

    def __init__(self, ends: list[Connection]) -> None:
        self._ends = ends

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(group, *arguments)`` returned, by rank; AssertionError with the trace of one that failed."""
        for end in self._ends:
            end.send((function, arguments))
        answers = []
        for rank, end in enumerate(self._ends):
            assert end.poll(HANG_S), f"rank {rank} does not answer"
            answers.append(end.recv())
        failed = [trace for _, trace in answers if trace]
        assert not failed, "\n".join(failed)
        return [result for result, _ in answers]


@contextmanager
def ranks(size: int, folder: Path) -> Iterator[Pool]:
    """``size`` processes that meet through a file in ``folder``; they end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    address = f"file://{folder / f'meeting-{size}'}"
    children = [
        context.Process(target=_serve, args=(rank, size, address, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        yield Pool([own for own, _ in pipes])
    finally:
        for own, theirs in pipes:
            own.close()
            theirs.close()
        for child in children:
            child.join(HANG_S)
            child.kill()


def _serve(rank: int, size: int, address: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    group = Ranks.join(rank, size, address, "cpu", HANG_S)
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            group.close()
            return
        try:
            with torch.inference_mode():
                calls.send((function(group, *arguments), ""))
        except Exception:
            calls.send((None, traceback.format_exc()))
