"""Compiles grammars for ``grammar_gate.py``, in a process that may be killed at any moment.

Invariant: it says "ready" once, then one verdict per grammar, empty where the grammar is sound. It imports neither
torch nor transformers, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from snapstream.grammar import GrammarCompiler
from snapstream.request import Grammar

MAX_BYTES = 4 * 2**30  # of address space: a grammar that needs more ends this process, not the machine


def child_main(connection: Connection, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Life of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole group; the front ends this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compiler = GrammarCompiler(lambda: tokenizer_json, vocab_size, end_ids)
    try:
        compiler.load()
    except ValueError as error:
        connection.send(str(error))
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    connection.send("")
    while True:
        try:
            grammar: Grammar = connection.recv()
            connection.send(_verdict(compiler, grammar))
        except (EOFError, OSError):
            return


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.matcher(grammar)
    except ValueError as error:
        return str(error)
    return ""


def _end_with_parent() -> None:
    """A front that is killed leaves none behind, not even one that compiles for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
