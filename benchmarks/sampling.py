"""What sampling takes in a decode step, apart from the step: by the looped library, and by PyTorch as in eager decode.

Logits are random normals, so most tokens of a large vocabulary weigh something; those of a trained model are more
peaked, which helps the native draw and does not change PyTorch's.

    python -m benchmarks.sampling --save
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ceilings, report, timed_seconds
from snapstream.config.values import num_cores
from snapstream.exec.looped_cpu import NativeDraw
from snapstream.exec.row_state import NewRow, SamplingNeeds
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import sample
from snapstream.exec.sampling_state import SamplingState
from snapstream.kernels.cpu.looped.library import ThreadPool, load
from snapstream.types import SamplingParams

PARAMS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k and top-p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top-p": SamplingParams(temperature=0.6, top_p=0.9),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "frequency penalty": SamplingParams(temperature=0.6, frequency_penalty=0.5),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}
SPREAD = 3.0  # standard deviation of the logits


def draw_ms(draw: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and least milliseconds."""
    times = [1e3 * seconds for seconds in timed_seconds(draw, repeats)]
    return {"median_ms": median(times), "least_ms": min(times)}


def state_of(params: SamplingParams, rows: int, vocab_size: int) -> SamplingState:
    state = SamplingState(rows, vocab_size, "cpu")
    for row in range(rows):
        state.set_rows([NewRow(row, params, row, range(0, vocab_size, 97), [])])
    return state


def native_ms(pool: ThreadPool, logits: Tensor, params: SamplingParams, repeats: int) -> dict[str, float]:
    count, vocab_size = logits.shape
    rows, needs = torch.arange(count), SamplingNeeds.of([params])
    native = NativeDraw(pool, state_of(params, count, vocab_size), Rows(count, "cpu"), count)
    return draw_ms(lambda: native.draw(logits, rows, needs), repeats)


def torch_ms(threads: int, logits: Tensor, params: SamplingParams, repeats: int) -> dict[str, float]:
    """On one thread or on all, whichever is faster."""
    count, vocab_size = logits.shape
    rows, needs = torch.arange(count), SamplingNeeds.of([params])
    state, counters = state_of(params, count, vocab_size), Rows(count, "cpu")
    found = []
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        times = draw_ms(lambda: counters.advance(rows, sample(logits, state, rows, needs).token_ids), repeats)
        found.append(times | {"threads": number})
    return min(found, key=lambda times: times["median_ms"])


def run(vocabularies: list[int], batches: list[int], threads: int, repeats: int) -> dict[str, Any]:
    """First all native draws, then PyTorch's: OpenMP's threads would take cores from the pool."""
    library = load()
    pool, generator = ThreadPool(library, threads), torch.Generator().manual_seed(0)
    scores = [torch.randn(batch, size, generator=generator) * SPREAD for size in vocabularies for batch in batches]
    arms: list[dict[str, Any]] = [
        {"vocabulary": logits.shape[1], "rows": len(logits), "sampling": name,
         "native": native_ms(pool, logits, params, repeats)}
        for logits in scores for name, params in PARAMS.items()
    ]  # fmt: skip
    pool.close()
    cases = [(logits, params) for logits in scores for params in PARAMS.values()]
    for arm, (logits, params) in zip(arms, cases, strict=True):
        arm["torch"] = torch_ms(threads, logits, params, max(repeats // 4, 2))
        arm["speedup"] = arm["torch"]["median_ms"] / arm["native"]["median_ms"]
        print(arm, flush=True)
    return {"model": "random logits", "threads": threads, "instructions": library.instructions, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    report("sampling", ceiling, run(args.vocabularies, args.rows, args.threads, args.repeats), save=args.save)


if __name__ == "__main__":
    main()
