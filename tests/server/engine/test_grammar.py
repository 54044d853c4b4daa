"""Grammars of strangers: tried in a process that is killed when it takes too long, and started again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.grammar import GrammarChecker
from snapstream.types import Grammar, QueueFull
from tests.waiting import HANG_S, until_async

HANGS = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (10007, 10009, 10037)]})
SHORT_S = 0.5
TOKENIZER = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")


def gate_of(**options: Any) -> GrammarChecker:
    """Patient with a machine that is busy."""
    return GrammarChecker(lambda: TOKENIZER, (2,), **{"compile_s": HANG_S, **options})


async def verdict(gate: GrammarChecker, grammar: Grammar) -> str:
    try:
        await gate.check(grammar, 4608)
    except ValueError as error:
        return str(error)
    return ""


def test_verdicts_and_a_killed_process() -> None:
    async def main() -> None:
        gate = gate_of()
        assert await verdict(gate, Grammar.json_object()) == ""
        first = gate.pid
        assert "nope" in await verdict(gate, Grammar.json_schema({"type": "nope"}))
        assert first is not None and gate.pid == first
        os.kill(first, signal.SIGKILL)
        assert "ran out" in await verdict(gate, Grammar.regex("b+"))
        assert await verdict(gate, Grammar.regex("c+")) == ""
        assert gate.pid != first
        gate.close()

    asyncio.run(main())


def test_a_grammar_that_hangs_is_given_up_and_the_next_gets_a_process_of_its_own() -> None:
    async def main() -> None:
        gate = gate_of(compile_s=SHORT_S)
        hanging = asyncio.create_task(verdict(gate, HANGS))
        await until_async(lambda: gate.pid)
        first = gate.pid
        assert f"takes more than {SHORT_S:g} s" in await hanging
        assert gate.pid is None
        while "takes more than" in (said := await verdict(gate, Grammar.regex("a+"))):
            pass  # a machine that is busy may need several tries
        assert said == "" and gate.pid not in (None, first)
        gate.close()

    asyncio.run(main())


def test_the_loop_is_free_while_a_grammar_hangs_and_close_ends_it() -> None:
    async def main() -> None:
        gate = gate_of()
        hanging = asyncio.create_task(verdict(gate, HANGS))
        await until_async(lambda: gate.pid)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not hanging.done()
        gate.close()
        assert "ran out" in await hanging
        assert gate.pid is None

    asyncio.run(main())


def test_the_verdict_is_remembered() -> None:
    async def main() -> None:
        gate = gate_of()
        assert await verdict(gate, Grammar.json_object()) == ""
        assert gate.pid is not None
        os.kill(gate.pid, signal.SIGKILL)
        for _ in range(3):
            assert await verdict(gate, Grammar.json_object()) == ""
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read() -> None:
    async def main() -> None:
        gate = GrammarChecker(lambda: "{}", (2,))
        assert "cannot read this tokenizer" in await verdict(gate, Grammar.json_object())
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_is_no_fast_one() -> None:
    def refuse() -> str:
        raise ValueError("grammar: it needs a fast tokenizer")

    async def main() -> None:
        gate = GrammarChecker(refuse, (2,))
        with pytest.raises(ValueError, match="fast tokenizer"):
            await gate.check(Grammar.json_object(), 4608)
        gate.close()

    asyncio.run(main())


def test_closed_while_its_process_starts() -> None:
    """``close`` meets a process that does not run yet; nothing may be left behind."""
    entered, closed = threading.Event(), threading.Event()

    def slow_tokenizer() -> str:
        entered.set()
        assert closed.wait(HANG_S)
        return TOKENIZER

    async def main() -> None:
        gate = GrammarChecker(slow_tokenizer, (2,))
        checking = asyncio.create_task(verdict(gate, Grammar.json_object()))
        await asyncio.to_thread(entered.wait, HANG_S)
        gate.close()
        closed.set()
        assert "closed" in await checking
        assert gate.pid is None

    asyncio.run(main())
    assert not [child for child in multiprocessing.active_children() if child.name == "snapstream-grammar"]


def test_checks_that_wait_are_bounded() -> None:
    async def main() -> None:
        gate = gate_of(max_waiting=2)
        grammars = [Grammar.regex(letter) for letter in "abc"]
        results = await asyncio.gather(*(gate.check(grammar, 4608) for grammar in grammars), return_exceptions=True)
        assert results[:2] == [None, None]
        assert isinstance(results[2], QueueFull) and "2 new grammars" in str(results[2])
        await gate.check(grammars[2], 4608)  # room again
        gate.close()

    asyncio.run(main())
