"""What the prefix store saves a later turn, and what it costs the first: times to the first token, in process.

Turn 1 is a long conversation, cold; turn 2 begins alike and ends in other tokens. Stated are the factor by which turn 2
comes sooner with the store, the share of it that is copies (the rest is computation that nobody can spare), and what a
cold prefill costs with the store on, beside one of the same length with the store off. ``--rounds`` repeats all of it
with other tokens, one side after the other, so that both meet the same machine; medians are stated.

    python -m benchmarks.turns --save                 # 32,768 tokens: the 100M shape, some 12 minutes on two cores
    python -m benchmarks.turns --quick                # 8,192 tokens, two rounds: some 4 minutes
    python -m benchmarks.turns --quick --shape qwen3.5-100m --save      # recurrent layers, whose states are stored
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from torch import Tensor

from benchmarks.machine import ceilings, report
from benchmarks.shapes import GRANITE_H_100M, LFM2_100M, QWEN35_100M, llama_folder, random_checkpoint, random_prompt
from snapstream.config import PrefixStoreConfig
from snapstream.exec.prefix_store import PrefixMover
from snapstream.exec.runner import ModelRunner
from snapstream.llm import LLM
from snapstream.step import JobSpec, PrefillEntry
from snapstream.types import SamplingParams

HYBRIDS = {"lfm2-100m": LFM2_100M, "qwen3.5-100m": QWEN35_100M, "granite-h-100m": GRANITE_H_100M}
ONE = SamplingParams(max_tokens=1, temperature=0.0)


class TimedMover(PrefixMover):
    """Counts the seconds of its copies."""

    seconds = 0.0

    def place(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        began = perf_counter()
        super().place(job, entry, layer, keys, values)
        self.seconds += perf_counter() - began

    def save(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        began = perf_counter()
        super().save(job, entry, layer, keys, values)
        self.seconds += perf_counter() - began


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the tokens that were cached."""
    output = llm.generate([prompt], ONE)[0]
    return output.timings.first_token_ms / 1e3, output.cached_tokens


def timed(llm: LLM) -> TimedMover:
    """Put a mover that counts into an engine that has a store."""
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner) and runner.mover is not None
    runner.mover = mover = TimedMover(runner.mover.blocks)
    return mover


@contextmanager
def checkpoint(shape: str) -> Iterator[Path]:
    """A folder of random weights in fp32; deleted at the end."""
    if shape not in HYBRIDS:
        with llama_folder() as folder:
            yield folder
        return
    with TemporaryDirectory() as scratch:
        random_checkpoint(Path(scratch), HYBRIDS[shape])
        yield Path(scratch)


def measure(shape: str, context: int, new: int, rounds: int, slots: int) -> dict[str, Any]:
    settings = {"budget": slots, "max_rows": 1, "max_model_len": context + new + 8, "progress": False}
    cold: list[float] = []
    filling: list[float] = []
    hits: list[float] = []
    copies: list[float] = []
    copied_out: list[float] = []
    cached = 0
    with checkpoint(shape) as folder:
        store = PrefixStoreConfig(num_bytes=4 * 2**30)
        with LLM(folder, **settings) as off, LLM(folder, prefix_store=store, **settings) as on:  # type: ignore[arg-type]
            mover = timed(on)
            for llm in (off, on):
                llm.generate([random_prompt(min(2048, context), seed=1)], ONE)  # touches what is new
            for turn in range(rounds):
                prompt = random_prompt(context, seed=10 + turn)
                first, second = (prompt + random_prompt(new, seed=1000 + 2 * turn + i) for i in range(2))
                cold.append(first_token_s(off, second)[0])
                mover.seconds = 0.0
                filling.append(first_token_s(on, first)[0])
                copied_out.append(mover.seconds)
                mover.seconds = 0.0
                seconds, cached = first_token_s(on, second)
                hits.append(seconds)
                copies.append(mover.seconds)
                on.reset_prefix_store()
                print(
                    {"cold_s": cold[-1], "filling_s": filling[-1], "hit_s": hits[-1], "copies_s": copies[-1]},
                    flush=True,
                )
    return {
        "model": f"random {'Llama 100M' if shape not in HYBRIDS else shape} fp32", "context": context, "new": new,
        "slots": slots, "rounds": rounds,
        "cached_tokens": cached,
        "cold_s": median(cold),
        "cold_store_on_s": median(filling),
        "cold_slowdown": median(b / a for a, b in zip(cold, filling, strict=True)),
        "copied_out_s": median(copied_out),  # less blurred than the difference of two long times
        "copied_out_share": median(b / (a - b) for a, b in zip(filling, copied_out, strict=True)),
        "hit_s": median(hits),
        "speedup": median(a / b for a, b in zip(cold, hits, strict=True)),
        "hit_copies_s": median(copies),
        "hit_copies_share": median(b / (a - b) for a, b in zip(hits, copies, strict=True)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--shape", choices=["llama-100m", *HYBRIDS], default="llama-100m")
    parser.add_argument("--quick", action="store_true", help="8,192 tokens")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    context = min(args.context, 8192) if args.quick else args.context
    ceiling = ceilings()
    name = f"turns_{args.shape}" if args.shape in HYBRIDS else "turns"
    report(name, ceiling, measure(args.shape, context, args.new, args.rounds, args.slots), save=args.save)


if __name__ == "__main__":
    main()
