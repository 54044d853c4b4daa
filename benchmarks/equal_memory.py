"""The paper's headline (SnapStream, arXiv 2511.03092): the same bytes as few full rows or as many small ones.

Two rows that keep all of an 8k prompt take what eight rows of a quarter take; the eight give a step more tokens, and
read less for each. Of narrower numbers as many small rows as fit into the same bytes are run. Tokens per second of
decode alone; all rows hold the same prompt (``n`` samples: one prefill).

    python -m benchmarks.equal_memory --save
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from benchmarks.decode import prefill_seconds, step_seconds
from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt
from snapstream.config import KVBudget, KVDType
from snapstream.kv.spec import KVSpec
from snapstream.llm import LLM
from snapstream.models.registry import read_model_config

KINDS: tuple[KVDType, ...] = ("auto", "bfloat16", "int8")  # of small rows


def run(prompt_len: int, rows: int, part: int, steps: int, executor: str) -> list[dict[str, Any]]:
    prompt = random_prompt(prompt_len)
    most = -(-(prompt_len + steps + 16) // part) * part
    figures: list[dict[str, Any]] = []
    with llama_folder() as folder, ExitStack() as stack:
        small = KVBudget.of(most // part)
        arms: list[tuple[KVBudget, KVDType, int, int, LLM]] = []
        kinds: list[tuple[KVBudget, KVDType]] = [(KVBudget.full(most), "auto"), *((small, kind) for kind in KINDS)]
        for budget, kv_dtype in kinds:
            row_bytes = KVSpec.of(read_model_config(folder), "float32", kv_dtype).row_bytes(budget.capacity)
            count = arms[0][2] * arms[0][3] // row_bytes if arms else rows
            llm = LLM(folder, budget=budget, executor=executor, max_rows=count, max_model_len=most, kv_dtype=kv_dtype,
                      num_speculative_tokens=0, progress=False)  # fmt: skip
            arms.append((budget, kv_dtype, row_bytes, count, stack.enter_context(llm)))
            prefill_seconds(llm, prompt, count, steps)
        found = step_seconds([arm[-1] for arm in arms], steps)
        for (budget, kv_dtype, row_bytes, count, _), seconds in zip(arms, found, strict=True):
            tokens_per_s = count / seconds
            figure: dict[str, Any] = {
                "budget": _name(part if figures else 1, kv_dtype), "rows": count, "slots": budget.capacity,
                "row_mib": row_bytes / 2**20, "all_mib": count * row_bytes / 2**20, "step_ms": seconds * 1e3,
                "tokens_per_s": tokens_per_s,
                "speedup": tokens_per_s / (figures[0]["tokens_per_s"] if figures else tokens_per_s),
            }  # fmt: skip
            figures.append(figure)
            print(figure, flush=True)
    return figures


def _name(part: int, kv_dtype: KVDType) -> str:
    return ("full" if part == 1 else f"1/{part}") + ("" if kv_dtype == "auto" else f", {kv_dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=2, help="full rows")
    parser.add_argument("--part", type=int, default=4, help="small rows for each, of this part of its slots")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--executor", choices=["eager", "looped"], default="looped")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = run(args.prompt_len, args.rows, args.part, args.steps, args.executor)
    report("equal_memory", ceiling, {"model": "random Llama 100M fp32", "prompt_len": args.prompt_len,
                                     "executor": args.executor, "arms": figures}, save=args.save)  # fmt: skip


if __name__ == "__main__":
    main()
