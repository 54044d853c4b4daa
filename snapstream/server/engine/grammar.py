"""Compiles callers' grammars in a separate process before they reach the engine, where one that hangs would stop all
requests.

The library's own limits count operations, and some schemas (like two large ``multipleOf``) escape them. So each new
grammar is compiled first in a process that is killed when it takes too long or too much memory. A grammar that passes
is compiled again by the engine, in a thread, during prefill.

Invariant: ``check`` returns or raises within the limits; the event loop never waits. Grammars are checked one at a
time, and the number of waiting callers is bounded: a hostile one delays only other callers' new grammars. ``close``
leaves no process behind.
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

MAX_BYTES = 4 * 2**30  # of address space: a grammar that needs more ends this process, not the machine


def child_main(connection: Connection, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Entry point of the process: reports an error or "" once loaded, then one error or "" per grammar.

    It imports neither torch nor transformers, so that it starts in a fraction of a second.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the process group; the server ends this process
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
            connection.send(_compile_error(compiler, grammar))
        except (EOFError, OSError):
            return


def _compile_error(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.matcher(grammar)
    except ValueError as error:
        return str(error)
    return ""


def _end_with_parent() -> None:
    """Exit when the server is killed, also while a grammar compiles."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


COMPILE_S = 2.0
LOAD_S = 60.0  # for the tokenizer
MAX_RESULTS = 1024  # cached
MAX_WAITING = 64  # checks at once; one that compiles takes milliseconds


class GrammarChecker:
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
        self._results: OrderedDict[bytes, str] = OrderedDict()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        self._lock = Lock()  # of the three above: the pool's thread starts a process that close() must not miss
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-gate")

    @property
    def pid(self) -> int | None:
        """Of the compiling process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    async def check(self, grammar: Grammar, vocab_size: int) -> None:
        """ValueError, with the reason, for a grammar that the engine must not get; QueueFull if too many wait."""
        whole = f"{grammar.kind} {grammar.strict} {grammar.preface}\0{grammar.text}"
        digest = sha256(whole.encode(errors="surrogatepass")).digest()
        error = self._results.get(digest)
        if error is None:
            error, is_final = await self._check_new(grammar, vocab_size)
            if is_final:
                self._results[digest] = error
                if len(self._results) > MAX_RESULTS:
                    self._results.popitem(last=False)
        if error:
            raise ValueError(error)

    async def _check_new(self, grammar: Grammar, vocab_size: int) -> tuple[str, bool]:
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} new grammars are being checked, which is the limit")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._compile, grammar, vocab_size)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the process; a check that runs is refused."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _compile(self, grammar: Grammar, vocab_size: int) -> tuple[str, bool]:
        """The error or "", and whether it would be the same again. Runs on the pool's only thread."""
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
                raise ValueError("grammar: the server was closed while it was checked")
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
