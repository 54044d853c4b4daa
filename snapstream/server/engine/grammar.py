"""Tries the grammars of callers before they reach the engine, where one that hangs would stop everybody.

The library's own limits count operations, and some schemas (like two large ``multipleOf``) escape them. So each new
grammar is compiled first in a process of its own, which is killed when it takes too long or too much memory. A grammar
that passes is compiled again by the engine, in a thread, while the prompt is prefilled.

Invariant: ``check`` returns or raises within the limits; the event loop never waits. Grammars are tried one after the
other, and callers that wait for that are bounded in number: hostile ones delay other callers' new grammars, and nothing
else. ``close`` leaves no process behind, whatever is under way.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from threading import Lock

from snapstream.engine.validate import QueueFull
from snapstream.grammar import GrammarCompiler
from snapstream.types import Grammar

# Compiles grammars for ``grammar_gate.py``, in a process that may be killed at any moment.
#
# Invariant: it says "ready" once, then one verdict per grammar, empty where the grammar is sound. It imports neither
# torch nor transformers, so that it starts in a fraction of a second.

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


COMPILE_S = 2.0
LOAD_S = 60.0  # for the tokenizer
MAX_VERDICTS = 1024  # remembered
MAX_WAITING = 64  # checks at once; one that compiles takes milliseconds


class GrammarGate:
    """Make it anywhere, use it on one event loop. The process starts with the first grammar."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        end_ids: tuple[int, ...],
        *,
        compile_s: float = COMPILE_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._end_ids = end_ids
        self._compile_s = compile_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        self._lock = Lock()  # of the three above: the pool's thread starts a process that close() must not miss
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-gate")

    @property
    def pid(self) -> int | None:
        """Of the process that tries grammars; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    async def check(self, grammar: Grammar, vocab_size: int) -> None:
        """ValueError, with the reason, for a grammar that the engine must not get; QueueFull if too many wait."""
        whole = f"{grammar.kind} {grammar.strict} {grammar.preface}\0{grammar.text}"
        digest = sha256(whole.encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict, is_lasting = await self._wait_for(grammar, vocab_size)
            if is_lasting:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise ValueError(verdict)

    async def _wait_for(self, grammar: Grammar, vocab_size: int) -> tuple[str, bool]:
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} new grammars are being tried, which is the limit")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._try, grammar, vocab_size)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the process; a check that runs is refused."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _try(self, grammar: Grammar, vocab_size: int) -> tuple[str, bool]:
        """Verdict, and whether it would always be the same. Runs on the pool's only thread."""
        try:
            connection = self._connection or self._start(vocab_size)
            connection.send(grammar)
            if connection.poll(self._compile_s):
                return connection.recv(), True
            self._end()
            return f"grammar: it takes more than {self._compile_s:g} s to compile; make it simpler", False
        except (EOFError, OSError):  # out of memory or stack: the library aborts
            self._end()
            return "grammar: the compiler ran out of its memory; make it simpler", False
        except ValueError as error:
            return str(error), False

    def _start(self, vocab_size: int) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._tokenizer_json(), vocab_size, self._end_ids)
        process = context.Process(target=child_main, args=arguments, name="snapstream-grammar", daemon=True)
        with self._lock:
            if self._is_closed:
                raise ValueError("grammar: the server was closed while it was tried")
            process.start()
            self._process, self._connection = process, ours
        theirs.close()
        fault = ours.recv() if ours.poll(LOAD_S) else f"grammar: the tokenizer was not read within {LOAD_S:g} s"
        if fault:
            self._end()
            raise ValueError(fault)
        return ours

    def _end(self) -> None:
        with self._lock:
            process, self._process, self._connection = self._process, None, None
        if process is not None:
            process.kill()
            process.join()
