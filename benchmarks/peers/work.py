"""What an engine does in its own process: the same prompts in every engine, and the seconds of each call.

The module of an engine calls ``main`` with a function that makes its ``Generate``. Time is measured around whole calls.
Decode alone is, of several prompts, a call for all tokens less a call for one, whatever an engine does inside; of one
prompt it begins with the first token of the same call, by the engine's own clock, since behind a long prompt two calls
differ by more than the answer takes. Every call has prompts that no call had before, so that no cache of prompts helps.
Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

# Prompts as token ids, and how many greedy tokens each shall have: the new tokens of each, and the seconds from the
# call to the first token of a prompt.
Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float]]

WARM_UP_LEN = 2048  # tokens, which every engine reads in more than one piece


@dataclass(frozen=True)
class Job:
    """What one process measures; a file of JSON carries it."""

    folder: str  # of the checkpoint, or the file that the engine reads
    option: str  # of the arm: a dtype, a file's format, an executor and a width
    threads: int
    vocab_size: int
    prompt_len: int
    new_tokens: int
    batches: list[int]
    repeats: int


def prompts_of(job: Job, batch: int, turn: int) -> list[list[int]]:
    """The prompts of a call: the same in every engine, others in every turn."""
    rng = Random(f"{batch}/{turn}")
    return [[rng.randrange(3, job.vocab_size) for _ in range(job.prompt_len)] for _ in range(batch)]


def measure(generate: Generate, job: Job, batch: int) -> dict[str, Any]:
    """Seconds until every first token and of every call, and the tokens of the first one with all tokens."""
    generate([prompt[:WARM_UP_LEN] for prompt in prompts_of(job, batch, 0)], 2)  # compiles, starts threads
    first_s: list[float] = []
    all_s: list[float] = []
    tokens = None
    for repeat in range(job.repeats):
        for num_new in (1, job.new_tokens)[batch == 1 :]:
            prompts = prompts_of(job, batch, 1 + 2 * repeat + (num_new > 1))
            began = perf_counter()
            found, first = generate(prompts, num_new)
            (first_s if num_new == 1 else all_s).append(perf_counter() - began)
            if batch == 1:
                first_s.append(first)
            short = [answer for answer in found if len(answer) != num_new]
            if short:
                raise RuntimeError(f"{len(short)} of {batch} answers have not {num_new} tokens but {len(short[0])}")
            tokens = found if tokens is None and num_new > 1 else tokens
    return {"batch": batch, "first_s": first_s, "all_s": all_s, "tokens": tokens}


def main(start: Callable[[Job, int], Generate], versions: Callable[[], dict[str, str]]) -> None:
    """Read a job from the file named first, write its result to the one named second.

    ``start`` makes the engine, for batches of at most so many.
    """
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    generate = start(job, max(job.batches))
    found = [measure(generate, job, batch) for batch in job.batches]
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions(), "batches": found}))


def write_job(job: Job, file: Path) -> None:
    """For ``main`` in another process."""
    file.write_text(json.dumps(asdict(job)))
