"""A decode step of one engine over several ranks of this machine: looped and eager, compared with one device's.

All engines share the cores that torch has, so on one socket this shows what meeting costs, and nothing of what more
memory channels give; for that, run it where each rank can have a NUMA node.

    python -m benchmarks.ranks --ranks 2 --rows 8 --context 512
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.executors import PARAMS, step_ms
from benchmarks.machine import ceilings, report
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM


def run(model: Path, ranks: int, rows: int, context: int, steps: int) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for size, executor in ((1, "looped"), (ranks, "looped"), (ranks, "eager"), (1, "looped")):
        with LLM(model, budget="full", executor=executor, max_rows=rows, max_model_len=context + steps + 16,
                 tensor_parallel=size, num_speculative_tokens=0, progress=False) as llm:  # fmt: skip
            for name, params in PARAMS.items():
                middle, least = step_ms(llm, rows, context, steps, params)
                figure = {"ranks": size, "executor": executor, "sampling": name, "ms": middle, "least_ms": least}
                figures.append(figure)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in figure.items()}, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL, help="folder of a checkpoint")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = run(args.model, args.ranks, args.rows, args.context, args.steps)
    found = {"model": args.model.name, "rows": args.rows, "context": args.context, "arms": figures}
    report("ranks", ceiling, found, save=args.save)


if __name__ == "__main__":
    main()
