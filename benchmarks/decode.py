"""Decode speed against the cache budget: rows of a long prompt, full cache against 1/4 and 1/8.

A decode step reads every weight once and the visible slots of every row once, so on a memory-bound machine the speed-up
of a smaller budget is known before it is measured: the ratio of those bytes. ``measured / predicted`` is the figure
that counts. All rows hold the same prompt (``n`` samples: one prefill, ``rows`` rows).

    python -m benchmarks.decode --prompt-len 16384 --rows 8
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt
from snapstream.config import KVBudget
from snapstream.kv.spec import KVSpec
from snapstream.llm import LLM
from snapstream.models.sharding import decode_weight_bytes
from snapstream.types import Request, SamplingParams

TURN = 6  # steps of an engine before another has its turn; the first does not count


def prefill_seconds(llm: LLM, prompt: list[int], rows: int, steps: int) -> float:
    """Starts a request of ``rows`` rows that go on for at least ``steps`` steps."""
    params = SamplingParams(n=rows, max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
    llm.engine.add_request(Request(request_id="decode", prompt_token_ids=tuple(prompt), sampling=params))
    began = perf_counter()
    while not llm.engine.step():
        pass
    return perf_counter() - began


def step_seconds(llms: list[LLM], steps: int) -> list[float]:
    """Median seconds of a decode step of each engine. They take turns, so that a shared machine disturbs all alike."""
    times: list[list[float]] = [[] for _ in llms]
    for _ in range(-(-steps // TURN)):
        for own, llm in zip(times, llms, strict=True):
            for step in range(TURN):
                began = perf_counter()
                llm.engine.step()
                if step:
                    own.append(perf_counter() - began)
    return [median(own) for own in times]


def run(prompt_len: int, rows: int, steps: int, parts: list[int], executor: str | None) -> list[dict[str, Any]]:
    prompt = random_prompt(prompt_len)
    max_len = prompt_len + steps + 16
    figures: list[dict[str, Any]] = []
    budgets = [KVBudget.full(max_len), *(KVBudget.of(prompt_len // part) for part in parts)]
    with llama_folder() as folder, ExitStack() as stack:
        llms = [
            stack.enter_context(LLM(folder, budget=budget, executor=executor, max_rows=rows, max_model_len=max_len,
                                    num_speculative_tokens=0, progress=False))
            for budget in budgets
        ]  # fmt: skip
        prefills = [prefill_seconds(llm, prompt, rows, steps) for llm in llms]
        found = step_seconds(llms, steps)
        for part, budget, llm, seconds, prefill in zip([1, *parts], budgets, llms, found, prefills, strict=True):
            read = decode_weight_bytes(llm.model_config, "float32")
            read += rows * KVSpec.of(llm.model_config, "float32").row_bytes(min(prompt_len, budget.capacity))
            figure: dict[str, Any] = {
                "budget": "full" if part == 1 else f"1/{part}",
                "slots": budget.capacity,
                "step_ms": seconds * 1e3,
                "tokens_per_s": rows / seconds,
                "gb_per_step": read / 1e9,
                "gb_per_s": read / seconds / 1e9,
                "prefill_s": prefill,
            }
            if figures:
                figure["speedup"] = figures[0]["step_ms"] / figure["step_ms"]
                figure["predicted"] = figures[0]["gb_per_step"] / figure["gb_per_step"]
                figure["measured_over_predicted"] = figure["speedup"] / figure["predicted"]
            figures.append(figure)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in figure.items()}, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8], help="budgets as parts of the prompt")
    parser.add_argument("--executor", choices=["eager", "graph", "looped"], help="default: what the engine chooses")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = run(args.prompt_len, args.rows, args.steps, args.parts, args.executor)
    name = "decode" if args.executor is None else f"decode_{args.executor}"
    report(name, ceiling, {"model": "random Llama 100M fp32", "rows": args.rows,
                               "prompt_len": args.prompt_len, "arms": figures}, save=args.save)  # fmt: skip


if __name__ == "__main__":
    main()
