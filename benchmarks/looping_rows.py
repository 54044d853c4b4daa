"""A looped step over rows of fp32, bf16, int8 and FP8: are narrow rows ever slower than fp32 ones?

All four kinds of rows lie in memory at once, over the same weights, and take turns of a few steps, so that a machine
that others share disturbs them alike; a turn begins with a step that does not count, while the pool of the turn before
falls asleep. Bounds are those of ``looping.py``, with the bytes of each kind.

    python -m benchmarks.looping_rows --save        # 8 GB; some three minutes
    python -m benchmarks.looping_rows --shape tiny --contexts 512 --seconds 0.2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from time import perf_counter
from typing import Any, get_args

import torch

from benchmarks.looping import figure_of
from benchmarks.looping_parts import SHAPES, Ladder, NoDecode, decoder_of, fill_rows, forms_of, ladder_of, limits_of
from benchmarks.machine import report
from snapstream.config import EngineConfig, KVBudget, KVDType
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.cpu.looped.library import load
from snapstream.models.decoder import Decoder

NAMES = {"auto": "float32"}  # of kinds of rows
STEPS = 4  # of a turn, behind the one that does not count


def runner_of(decoder: Decoder, width: str, kv_dtype: KVDType, batch: int, context: int) -> ModelRunner:
    """``batch`` rows of that kind that hold ``context`` tokens."""
    config = EngineConfig(
        budget=KVBudget.full(context + 1), max_model_len=context + 1, max_rows=batch, executor="looped",
        weights=forms_of(width), kv_dtype=kv_dtype,
    )  # fmt: skip
    runner = ModelRunner(decoder, config, make_decode=NoDecode)
    fill_rows(runner.cache)
    return runner


def timed_in_turns(ladders: Mapping[str, Ladder], seconds: float) -> dict[str, list[float]]:
    """Seconds of every step that counts; so long in all, and three turns at least."""
    times: dict[str, list[float]] = {name: [] for name in ladders}
    until = perf_counter() + seconds
    while perf_counter() < until or len(next(iter(times.values()))) < 3 * STEPS:
        for name, ladder in ladders.items():
            for step in range(STEPS + 1):
                began = perf_counter()
                ladder.run(0, ladder.num_stages)
                if step:
                    times[name].append(perf_counter() - began)
    return times


def arm(args: argparse.Namespace, runners: Mapping[KVDType, ModelRunner], width: str, context: int) -> dict[str, Any]:
    """The kinds of rows at one length."""
    ladders = {NAMES.get(k, k): ladder_of(runner, args.batch, context, args.threads) for k, runner in runners.items()}
    before = limits_of(args.threads)
    times = timed_in_turns(ladders, args.seconds)
    limits = before.best(limits_of(args.threads))
    kinds = {
        name: {
            "mb": ladder.num_bytes / 1e6,
            "steps": len(times[name]),
            **figure_of(times[name], ladder, limits),
        }
        for name, ladder in ladders.items()
    }
    for ladder in ladders.values():
        ladder.close()
    figure = {"shape": args.shape, "width": width, "batch": args.batch, "context": context,
              "read_gb_per_s": limits.read_bytes_per_s / 1e9, "rows": kinds}  # fmt: skip
    print(f"{width} weights, {context} slots: "
          + ", ".join(f"{name} {own['p10_ms']:.3f} ms" for name, own in kinds.items()), flush=True)  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="100m")
    parser.add_argument(
        "--widths", nargs="+", default=["float32", "int8"], help="of weights, as benchmarks.looping has"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="of an arm, all kinds of rows together")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    arms = []
    for width in args.widths:
        decoder = decoder_of(args.shape, width)
        kinds: tuple[KVDType, ...] = get_args(KVDType)
        runners = {kind: runner_of(decoder, width, kind, args.batch, max(args.contexts)) for kind in kinds}
        arms += [arm(args, runners, width, context) for context in args.contexts]
        del runners
    ceiling = {"read_gb_per_s": max(own["read_gb_per_s"] for own in arms)}
    figures = {
        "model": "random Qwen3 shapes",
        "threads": args.threads,
        "instructions": load().instructions,
        "arms": arms,
    }
    report("looping_rows", ceiling, figures, save=args.save)


if __name__ == "__main__":
    main()
