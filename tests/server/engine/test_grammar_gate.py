"""Grammars of strangers: tried in a process that is killed when it takes too long, and started again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.engine.validate import QueueFull
from snapstream.request import Grammar
from snapstream.server.engine.grammar_gate import GrammarGate
from tests.waiting import HANG_S, Lateness

HANGS = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (10007, 10009, 10037)]})
COMPILE_S = 2.0
TOKENIZER = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")


def gate_of(**options: Any) -> GrammarGate:
    return GrammarGate(lambda: TOKENIZER, (2,), **options)


async def verdict(gate: GrammarGate, grammar: Grammar) -> str:
    try:
        await gate.check(grammar, 4608)
    except ValueError as error:
        return str(error)
    return ""


def pid_of(gate: GrammarGate) -> int:
    assert gate._process is not None and gate._process.pid is not None
    return gate._process.pid


def test_verdicts_a_hanging_grammar_and_a_killed_process() -> None:
    async def main() -> None:
        gate = gate_of(compile_s=COMPILE_S)
        longest = 0.0

        async def beat() -> None:
            nonlocal longest
            while True:
                start = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - start)

        with Lateness() as late:
            beating = asyncio.create_task(beat())
            assert await verdict(gate, Grammar.json_object()) == ""
            first = pid_of(gate)
            assert "nope" in await verdict(gate, Grammar.json_schema({"type": "nope"}))
            hanging, waiting = await asyncio.gather(verdict(gate, HANGS), verdict(gate, Grammar.regex("a+")))
            assert f"takes more than {COMPILE_S:g} s" in hanging and waiting == ""  # it got a process of its own
            second = pid_of(gate)
            assert second != first
            os.kill(second, signal.SIGKILL)
            assert "ran out" in await verdict(gate, Grammar.regex("b+"))
            assert await verdict(gate, Grammar.regex("c+")) == ""
            assert pid_of(gate) != second
            beating.cancel()
        assert longest < late.allowed(COMPILE_S / 4), "the event loop was held up"
        gate.close()

    asyncio.run(main())


def test_the_verdict_is_remembered() -> None:
    async def main() -> None:
        gate = gate_of()
        assert await verdict(gate, Grammar.json_object()) == ""
        os.kill(pid_of(gate), signal.SIGKILL)
        for _ in range(3):
            assert await verdict(gate, Grammar.json_object()) == ""
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read() -> None:
    async def main() -> None:
        gate = GrammarGate(lambda: "{}", (2,))
        assert "cannot read this tokenizer" in await verdict(gate, Grammar.json_object())
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_is_no_fast_one() -> None:
    def refuse() -> str:
        raise ValueError("grammar: it needs a fast tokenizer")

    async def main() -> None:
        gate = GrammarGate(refuse, (2,))
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
        gate = GrammarGate(slow_tokenizer, (2,))
        checking = asyncio.create_task(verdict(gate, Grammar.json_object()))
        await asyncio.to_thread(entered.wait, HANG_S)
        gate.close()
        closed.set()
        assert "closed" in await checking
        assert gate._process is None

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
