"""The requests of ``soak.py``: sound ones with the answer they must get, broken ones, and what becomes of each.

Every answer is the in-process engine's at temperature 0, each computed alone; whatever runs beside a request in the
server must not change it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams

BUDGET = 512  # of the server
BUDGETS = (64, 128, 300, BUDGET)
NUM_JOBS = 64
WORDS = "the river report king stone of and a bright old seven letters were in house that garden went".split()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request, and what must come back."""

    path: str
    body: dict[str, Any]
    want: str = ""
    is_sound: bool = True
    cancel_after_s: float | None = None  # the client leaves then
    cancel_after_chunks: int | None = None


def sound_jobs(seed: int, max_rows: int, count: int = NUM_JOBS) -> list[Job]:
    """Texts and conversations of many lengths and budgets, with their answers."""
    rng = random.Random(seed)
    jobs = []
    with LLM(TINY_MODEL, budget=BUDGET, max_rows=max_rows, progress=False) as llm:
        for index in range(count):
            num_words = rng.choice((3, 20, 60, 150, 400))
            text = " ".join(rng.choices(WORDS, k=num_words))
            budget, max_tokens = rng.choice(BUDGETS), rng.randrange(1, 48)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            body: dict[str, Any] = {
                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "kv_cache": {"budget": budget},
            }  # fmt: skip
            if index % 2:
                messages = [{"role": "user", "content": text}]
                [output] = llm.chat(messages, params, budget=budget)
                jobs.append(Job(path="/v1/chat/completions", body={**body, "messages": messages}, want=output.text))
            else:
                [output] = llm.generate(text, params, budget=budget)
                jobs.append(Job(path="/v1/completions", body={**body, "prompt": text}, want=output.text))
    return jobs


def broken_job(rng: random.Random) -> Job:
    body: dict[str, Any] = rng.choice(
        [
            {},
            {"prompt": "a", "temperature": -1},
            {"prompt": "a", "max_tokens": "many"},
            {"prompt": [[]]},
            {"prompt": [10**9]},
            {"prompt": "word " * 30_000},
            {"prompt": "a", "n": 10_000},
            {"prompt": "a", "kv_cache": {"budget": 1}},
            {"prompt": "a", "model": "another"},
            {"prompt": "a", "stream": True, "logit_bias": {"x": 1}},
        ]
    )
    return Job(path="/v1/completions", body=body, is_sound=False)


def plan(jobs: list[Job], num_requests: int, seed: int, *, cancelled: float, malformed: float) -> list[Job]:
    """``num_requests`` of them in random order; shares of the whole are cancelled and malformed."""
    rng = random.Random(seed + 1)
    planned = []
    for _ in range(num_requests):
        lot = rng.random()
        if lot < malformed:
            planned.append(broken_job(rng))
            continue
        job = rng.choice(jobs)
        job = replace(job, body={**job.body, "stream": rng.random() < 0.5})
        if lot < malformed + cancelled:
            if job.body["stream"] and rng.random() < 0.5:
                job = replace(job, cancel_after_chunks=rng.randrange(1, 12))
            else:  # in the queue, in prefill or in decode, whatever it has come to
                job = replace(job, cancel_after_s=rng.uniform(0, rng.choice((0.02, 0.2, 2.0))))
        planned.append(job)
    return planned
