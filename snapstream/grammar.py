"""Grammars on the host: compiled once, advanced token by token, read as bit masks of the allowed tokens. No torch.

The library is llguidance (in the extra ``serve``), imported on first use. It limits the work of a grammar by counting
operations, and some schemas (like two large ``multipleOf``) escape its counts. So the server first compiles each new
grammar with a ``GrammarChecker``, in a process that is killed when it takes too long or too much memory; the engine
compiles a grammar that passes again, in a thread, during prefill. Masks are numpy words, bit ``t % 32`` of word
``t // 32`` for token t.

Invariants: a matcher does not raise errors of a grammar or a model; it reports that no token can follow, and why.
``GrammarChecker.check`` returns or raises within its limits, and the event loop never waits. It checks one grammar at a
time, with a bounded number of waiting callers: a hostile one delays only other callers' new grammars.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from snapstream.types import Grammar, QueueFull

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


MAX_DEPTH = 64  # of nested schemas; what is deeper is unchanged

_TOGETHER = ("allOf", "anyOf", "oneOf")
_OF_MANY = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_OF_ONE = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "then", "else")
_LISTS = (*_TOGETHER, "prefixItems", "items")


def resolve(ref: str, root: Mapping[str, Any]) -> Any:
    """The target of a reference within ``root``; None if there is none."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found: Any = root
    for part in ref.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def closed(schema: Any) -> Any:
    """A copy of the schema with ``additionalProperties: false`` for objects that name properties.

    By the standard, an object may have properties besides the named ones, and a constrained model then invents some
    until it runs out of tokens. Objects with ``additionalProperties``, ``unevaluatedProperties`` or (for names that
    match) ``patternProperties``, and any object (``{"type": "object"}``), are unchanged. So is a schema in which
    several parts apply to one object (``allOf``, or anything next to ``properties``): closing one would forbid what
    others name.
    """
    return schema if _has_joint_parts(schema, 0) else _closed(schema, 0)


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The members of a schema that hold schemas, each as a list."""
    for key, value in schema.items():
        if key in _OF_MANY and isinstance(value, Mapping):
            yield key, list(value.values())
        elif key in _LISTS and isinstance(value, list):
            yield key, value
        elif key in (*_OF_ONE, "items", "if") and isinstance(value, Mapping):
            yield key, [value]


def _has_joint_parts(schema: Any, depth: int) -> bool:
    """Whether several parts apply to one object, here or further in."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return False
    parts = sum(key in schema for key in ("$ref", "anyOf", "oneOf", "if", "dependentSchemas"))
    parts += any(key in schema for key in ("properties", "patternProperties", "required"))
    parts += len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    return parts > 1 or any(_has_joint_parts(one, depth + 1) for _, inner in _inner(schema) for one in inner)


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    result = dict(schema)
    for key, inner in _inner(schema):
        made = [_closed(one, depth + 1) for one in inner]
        given = schema[key]
        if isinstance(given, list):
            result[key] = made
        else:
            result[key] = dict(zip(given, made, strict=True)) if key in _OF_MANY else made[0]
    is_open = "additionalProperties" in schema or schema.get("unevaluatedProperties", False) is not False
    if is_open or not ("properties" in schema or "patternProperties" in schema):
        return result
    # A name that is only required is a property, too.
    own = result["properties"] if isinstance(result.get("properties"), Mapping) else {}
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    properties = {**own, **{name: True for name in required if isinstance(name, str) and name not in own}}
    return {**result, "properties": properties, "additionalProperties": False}


Words = NDArray[np.int32]

MAX_COMPILED = 64  # grammars kept
# Compact JSON: an uncertain model may otherwise write whitespace forever.
SCHEMA_OPTIONS = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}


def schema_options(*, strict: bool) -> dict[str, object]:
    """llguidance's options for a JSON schema; within a Lark grammar, the schema's ``x-guidance``."""
    return {**SCHEMA_OPTIONS, "lenient": not strict, "coerce_one_of": not strict}


class Matcher:
    """The state of one sample in its grammar."""

    def __init__(self, core: LLMatcher) -> None:
        self._core = core

    def copy(self) -> Matcher:
        """An independent copy in this state."""
        return Matcher(self._core.deep_copy())

    def take(self, token: int) -> None:
        """Advance by a token that ``fill`` allowed."""
        self._core.consume_token(token)

    def fill(self, words: Words) -> bool:
        """Write the mask of allowed tokens; False if there are none: ``fault`` is empty if the text is complete."""
        if not self._core.is_stopped():
            self._core.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._core.is_stopped()  # computing the mask may stop it

    def forced(self) -> list[int]:
        """Tokens to follow as far as each is the only one allowed."""
        return self._core.compute_ff_tokens()

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of ``tokens`` may follow, one after the other."""
        return self._core.deep_copy().validate_tokens(tokens)  # a copy: the library bounds the work of a matcher

    @property
    def fault(self) -> str:
        """Once no token is allowed: why the text cannot be completed; empty if it is complete."""
        if self._core.is_error():
            return f"grammar: {_first_line(self._core.get_error())}"
        return "" if self._core.is_accepting() else "grammar: no token of the vocabulary can follow"


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches ``MAX_COMPILED`` of them. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_ids: Sequence[int]) -> None:
        """``tokenizer_json`` returns the content of a tokenizer.json; ``vocab_size`` is the model's."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._end_ids = sorted(token for token in set(end_ids) if 0 <= token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._num_words = 0
        self._compiled: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def num_words(self) -> int:
        """Words of a mask: at least one bit per token of the model."""
        self.load()
        return self._num_words

    def prepare(self, grammar: Grammar) -> Future[Matcher]:
        """Compile in another thread, unless cached; the result must be copied before use."""
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher. ValueError with the compiler's reason."""
        return self.prepare(grammar).result().copy()

    def load(self) -> LLTokenizer:
        """Load the tokenizer, which takes a second for a large vocabulary; ValueError if it cannot be read."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
            self._num_words = -(-max(self._tokenizer.vocab_size, self._vocab_size) // 32)
        return self._tokenizer

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise ValueError("grammar: llguidance is not installed; run: pip install 'snapstream-llm[serve]'") from None
        if not self._end_ids:
            raise ValueError("grammar: this checkpoint names no end token")
        text = self._tokenizer_json()
        try:
            try:
                return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_ids)
            except ValueError:  # a tokenizer with more tokens than the model
                return LLTokenizer(text, eos_token=self._end_ids)
        except Exception as error:
            raise ValueError(f"grammar: llguidance cannot read this tokenizer: {_first_line(str(error))}") from None

    def _compile(self, grammar: Grammar) -> Matcher:
        tokenizer = self.load()
        from llguidance import LLMatcher

        try:
            core = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_limits())
        except ValueError as error:
            raise ValueError(f"grammar: {_first_line(str(error))}") from None
        matcher = Matcher(core)
        if core.is_error():
            raise ValueError(matcher.fault)
        # Some errors appear only with the first mask, such as a schema that no finite text matches.
        if not matcher.copy().fill(np.zeros(self._num_words, dtype=np.int32)):
            raise ValueError("grammar: it allows no text")
        return matcher


def _source(grammar: Grammar) -> str:
    """Source for the library; a preface makes it two grammars, one after the other."""
    if not grammar.preface:
        return _plain_source(grammar)
    text = _plain_source(grammar)
    inner = {"lark_grammar": text} if grammar.kind == "lark" else json.loads(text)["grammars"][0]
    outer = {"lark_grammar": f"start: preface @answer\n{grammar.preface}"}
    return json.dumps({"grammars": [outer, {**inner, "name": "answer"}]})


def _plain_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            _closed_text(grammar.text),
            overrides=schema_options(strict=grammar.strict),  # type: ignore[arg-type]
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(_lark(grammar.text))


def _lark(text: str) -> str:
    """Convert GBNF, the notation of llama.cpp, to Lark."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # of the converter's parser
        raise ValueError(f"the grammar cannot be read as GBNF: {error}") from None


def _closed_text(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not plain JSON: {error}") from None
    try:
        return json.dumps(closed(schema))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _limits() -> LLParserLimits:
    """A tenth of the library's defaults per step: a slow mask delays all rows of the batch."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000,
        verbose_errors=False,
    )  # fmt: skip


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    return " ".join(lines)[:300] if lines else "no reason given"


MAX_CHECK_BYTES = 4 * 2**30  # of address space: a grammar that needs more ends this process, not the machine


def child_main(connection: Connection, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Entry point of the process: reports an error or "" once loaded, then one error or "" per grammar.

    It imports neither torch nor transformers, so that it starts in a fraction of a second.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the process group; the server ends this process
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    compiler = GrammarCompiler(lambda: tokenizer_json, vocab_size, end_ids)
    try:
        compiler.load()
    except ValueError as error:
        connection.send(str(error))
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECK_BYTES, MAX_CHECK_BYTES))
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


def end_with_parent() -> None:
    """Exit when the process that started this one is killed, also during a long native call; for a daemon thread."""
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
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    @property
    def pid(self) -> int | None:
        """Id of the compiling process; None while there is none."""
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
