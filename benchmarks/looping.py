"""The ladder of kernel looping on a CPU (arXiv 2410.23668): the same step in more and more of one piece.

B0 calls every stage of every layer, B1 every layer, and B2 is one call for the whole step. Variants of an arm take
turns, so that a shared machine disturbs them alike. A bound is max(bytes / read bandwidth, operations / rate), both
measured by the same threads in the same run: bytes of weights and of visible slots, multiply-adds of products and
attention. That of stages adds the bounds of attention and of products, since a barrier separates them.

    python -m benchmarks.looping --quick            # two shapes, short contexts: some four minutes
    python -m benchmarks.looping --save             # all of it; with --seconds 1 it took seven minutes
    python -m benchmarks.looping --shapes tiny --widths float32 --seconds 0.1
    SNAPSTREAM_INSTRUCTIONS=avx2 python -m benchmarks.looping --save    # as on a processor without AVX-512
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks import bounds
from benchmarks.looping_parts import SHAPES, Ladder, Limits, decoder_of, forms_of, ladder_of, limits_of, runner_of
from benchmarks.machine import report
from snapstream.kernels.cpu.looped.library import ThreadPool, load

WIDTHS = ("float32", "bfloat16", "int8", "int4", "bfloat16-wide", "int8-wide", "int4-wide")
ROWS_BYTES = 7 * 2**29  # arms whose rows need more are left out
QUICK: dict[str, Any] = {"shapes": ["tiny", "100m"], "batches": [1, 8, 32], "contexts": [512], "seconds": 1.0}


def timed(variants: Mapping[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call; the variants take turns for so long in all."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    until = perf_counter() + seconds
    while perf_counter() < until or len(next(iter(times.values()))) < 5:
        for name, call in variants.items():
            began = perf_counter()
            call()
            times[name].append(perf_counter() - began)
    return times


def variants_of(ladder: Ladder) -> dict[str, Callable[[], None]]:
    """The ladder's rungs."""
    layers = ladder.layer_bounds

    def by_stage() -> None:
        for stage in range(ladder.num_stages):
            ladder.run(stage, stage + 1)

    def by_layer() -> None:
        for first, last in zip(layers, layers[1:], strict=False):
            ladder.run(first, last)

    return {
        "B0": by_stage,
        "B1": by_layer,
        "B2": lambda: ladder.run(0, ladder.num_stages),
    }


def figure_of(times: list[float], ladder: Ladder, limits: Limits) -> dict[str, float]:
    """Of one variant: the median, and the tenth percentile, which other programs disturb least."""
    best = sorted(times)[len(times) // 10]
    return {
        "ms": median(times) * 1e3,
        "p10_ms": best * 1e3,
        "of_bandwidth": ladder.num_bytes / limits.read_bytes_per_s / best,
        "times_bound": best / limits.seconds(ladder),
        "times_stages": best / limits.stages(ladder),
    }


def arms(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The ladder of every arm. What the machine reaches differs from minute to minute where others share its memory, so
    the limits are measured right before and behind each arm."""
    figures = []
    for shape in args.shapes:
        for width in args.widths:
            decoder = decoder_of(shape, width)
            for context in args.contexts:
                runner = runner_of(decoder, forms_of(width), max(args.batches), context, ROWS_BYTES)
                for batch in args.batches:
                    if batch > runner.config.max_rows:
                        continue
                    ladder = ladder_of(runner, batch, context, args.threads)
                    before = limits_of(args.threads)
                    times = timed(variants_of(ladder), args.seconds)
                    limits = before.best(limits_of(args.threads))
                    ladder.close()
                    figure: dict[str, Any] = {
                        "shape": shape, "width": width, "batch": batch, "context": context, "steps": len(times["B2"]),
                        "mb": ladder.num_bytes / 1e6,
                        "gflop": ladder.all_operations / 1e9,
                        "read_gb_per_s": limits.read_bytes_per_s / 1e9,
                        **{name: figure_of(own, ladder, limits) for name, own in times.items()},
                    }  # fmt: skip
                    figures.append(figure)
                    print_arm(figure)
                del runner
    return figures


def print_arm(figure: dict[str, Any]) -> None:
    rungs = ", ".join(f"{name} {figure[name]['p10_ms']:.3f}" for name in ("B0", "B1", "B2"))
    two = figure["B2"]
    print(f"{figure['shape']} {figure['width']} batch {figure['batch']} context {figure['context']}: {rungs} ms; "
          f"B2 {two['of_bandwidth']:.0%} of the bandwidth, {two['times_bound']:.2f} x bound, "
          f"{two['times_stages']:.2f} x that of its stages", flush=True)  # fmt: skip


def ablations(args: argparse.Namespace) -> dict[str, Any]:
    """Threads, and what a barrier and waking cost."""
    found: dict[str, Any] = {"threads": []}
    shape = args.shapes[-1]
    runner = runner_of(decoder_of(shape, "bfloat16"), forms_of("bfloat16"), 8, 512, ROWS_BYTES)
    for threads in range(1, args.threads + 1):
        for batch in (1, 8):
            ladder = ladder_of(runner, batch, 512, threads)
            times = timed({"B2": partial(ladder.run, 0, ladder.num_stages)}, args.seconds)["B2"]
            ladder.close()
            found["threads"].append(
                {"threads": threads, "batch": batch, "p10_ms": sorted(times)[len(times) // 10] * 1e3}
            )
    return {"shape": shape, **found, **waiting(args.threads)}


def waiting(threads: int) -> dict[str, float]:
    """Microseconds of a barrier, of a call right after another, and of one after the threads fell asleep."""
    pool, rounds = ThreadPool(load(), threads), 20_000
    bounds.run(pool, "barriers", 100)
    began = perf_counter()
    bounds.run(pool, "barriers", rounds)
    barrier = (perf_counter() - began) / rounds
    calls = {"call_us": 0.0, "call_after_sleep_us": 0.01}
    found = {"barrier_us": barrier * 1e6}
    for name, pause in calls.items():
        times = []
        for _ in range(50):
            sleep(pause)
            began = perf_counter()
            bounds.run(pool, "barriers", 1)
            times.append(perf_counter() - began)
        found[name] = median(times) * 1e6
    pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"the arms of {QUICK}")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=list(WIDTHS[:4]))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="of an arm")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    limits = limits_of(args.threads)
    print(
        f"ceiling: read {limits.read_bytes_per_s / 1e9:.1f} GB/s, fp32 {limits.operations_per_s / 1e9:.0f} GFLOP/s, "
        f"bf16 {limits.bf16_operations_per_s / 1e9:.0f} GFLOP/s, int8 {limits.code_operations_per_s / 1e9:.0f} GOP/s"
    )
    figures = {"threads": args.threads, "instructions": load().instructions, "arms": arms(args)}
    figures["ablations"] = ablations(args)
    ceiling = {
        "read_gb_per_s": limits.read_bytes_per_s / 1e9,
        "fp32_gflop_per_s": limits.operations_per_s / 1e9,
        "bf16_gflop_per_s": limits.bf16_operations_per_s / 1e9,
        "int8_gop_per_s": limits.code_operations_per_s / 1e9,
    }
    report("looping", ceiling, {"model": "random Qwen3 shapes", **figures}, save=args.save)


if __name__ == "__main__":
    main()
