"""One eager decode step against the looped one, on the same weights and rows, in one run.

What the looped step saves is the calls between the products and the products themselves; both shrink beside the bytes
of a long context, so the figure is given for several.

    python -m benchmarks.executors --rows 1 8 --context 128 512 2048
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.shapes import random_prompt
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import Request, SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1),
}


def step_ms(llm: LLM, rows: int, context: int, steps: int, params: SamplingParams) -> tuple[float, float]:
    """Median and least milliseconds of an engine step of ``rows`` rows that hold ``context`` tokens."""
    params = replace(params, n=rows, max_tokens=steps + 8, ignore_eos=True)
    prompt = tuple(random_prompt(context, llm.model_config.vocab_size))
    llm.engine.add_request(Request(request_id="steps", prompt_token_ids=prompt, sampling=params))
    while not llm.engine.step():
        pass
    times = []
    while llm.engine.has_work:
        began = perf_counter()
        llm.engine.step()
        times.append((perf_counter() - began) * 1e3)
    times = times[3:-2]
    return median(times), min(times)


def run(rows: int, contexts: list[int], steps: int) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for context in contexts:
        found: dict[str, dict[str, tuple[float, float]]] = {}
        starts = {}
        for executor in ("eager", "looped"):
            began = perf_counter()
            with LLM(TINY_MODEL, budget="full", executor=executor, max_rows=rows,
                     max_model_len=context + steps + 16, num_speculative_tokens=0, progress=False) as llm:  # fmt: skip
                starts[executor] = perf_counter() - began
                found[executor] = {name: step_ms(llm, rows, context, steps, params) for name, params in PARAMS.items()}
        for name in PARAMS:
            eager, looped = (found[executor][name] for executor in ("eager", "looped"))
            figure = {
                "rows": rows, "context": context, "sampling": name, "eager_ms": eager[0], "eager_least_ms": eager[1],
                "looped_ms": looped[0], "looped_least_ms": looped[1], "looped_speedup": eager[0] / looped[0],
                **{f"{executor}_start_s": seconds for executor, seconds in starts.items()},
            }  # fmt: skip
            figures.append(figure)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in figure.items()}, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    run(args.rows[0], args.context[:1], args.steps)  # the first engines of a process are slower
    figures = [figure for rows in args.rows for figure in run(rows, args.context, args.steps)]
    report("executors", ceiling, {"model": "the tiny model that ships", "arms": figures}, save=args.save)


if __name__ == "__main__":
    main()
