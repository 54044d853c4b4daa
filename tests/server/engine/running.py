"""Requests, and ways to run them, shared by the tests of the two engines of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapstream.llm import LLM
from snapstream.server.engine.api import AsyncEngine, EngineStats
from snapstream.types import Compression, FinishReason, Request, SamplingParams, Timings
from tests.llm.conftest import write_checkpoint
from tests.waiting import until_async

MAX_ROWS = 4
MAX_WAITING = 12
BUDGET = 64
MAX_MODEL_LEN = 4096
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "max_rows": MAX_ROWS, "max_model_len": MAX_MODEL_LEN, "chunk_len": 32, "max_waiting": MAX_WAITING,
}  # fmt: skip
# Seconds of decoding: what happens to it in the middle also happens in the middle where the test comes late.
LONG = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
Whole = tuple[str, list[int], FinishReason | None]  # text, ids and end of an answer


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    compression: Compression | None = None
    timings: Timings | None = None
    num_deltas: int = 0


def write_model(folder: Path) -> Path:
    return write_checkpoint(folder, MAX_MODEL_LEN)


def prompt(number: int) -> tuple[int, ...]:
    """Some are shorter than the budget, most are longer."""
    return tuple(3 + (7 * number + 11 * i + i * i % 13) % 250 for i in range(20 + 29 * (number % 6)))


def short(number: int) -> SamplingParams:
    greedy = SamplingParams(max_tokens=8 + number % 5, temperature=0.0, ignore_eos=True)
    return greedy if number % 2 else SamplingParams(max_tokens=10, temperature=0.9, seed=number)


def make_request(number: int, params: SamplingParams | None = None, request_id: str | None = None) -> Request:
    return Request(
        request_id=request_id or f"id-{number}", prompt_token_ids=prompt(number), sampling=params or short(number)
    )


async def collect(engine: AsyncEngine, request: Request) -> Answer:
    answer = Answer()
    async for delta in engine.generate(request):
        assert delta.request_id == request.request_id
        answer.num_deltas += 1
        answer.compression = delta.compression or answer.compression
        answer.timings = delta.timings or answer.timings
        for sample in delta.samples:
            answer.text += sample.text
            answer.token_ids += sample.token_ids
            answer.finish_reason = sample.finish_reason or answer.finish_reason
    return answer


async def collect_all(engine: AsyncEngine, requests: Sequence[Request]) -> list[Answer | BaseException]:
    return await asyncio.gather(*(collect(engine, request) for request in requests), return_exceptions=True)


def expected(llm: LLM, count: int) -> list[Whole]:
    """The first answers of the in-process engine, each alone."""
    outputs = [llm.generate([prompt(number)], short(number))[0] for number in range(count)]
    return [(output.text, output.token_ids, output.finish_reason) for output in outputs]


def whole(answer: Answer | BaseException) -> Whole:
    assert isinstance(answer, Answer), answer
    return answer.text, answer.token_ids, answer.finish_reason


async def until_at_rest(engine: AsyncEngine) -> EngineStats:
    """Wait for the gauges to return to 0; the totals are then those of all that was asked."""

    def is_at_rest() -> bool:
        stats = engine.stats()
        return not (stats.num_running or stats.num_waiting) and stats.rows_free == stats.rows_total

    await until_async(is_at_rest)
    return engine.stats()
