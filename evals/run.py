"""Runs families x budgets x arms through the public ``LLM`` and stores one JSON per resolved configuration.

    python -m evals.run                                   # the shipped model, 2,048 tokens, 1/4 and 1/8
    python -m evals.run --model DIR --prompt-len 4096 --parts 2 4 8 16 --num-prompts 200

A stored configuration is not run again (delete its file to repeat it), so an interrupted run goes on where it stopped.
Every arm of a cell sees the same prompts. Answers are greedy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from evals.arms import ARMS, Arm, make_arm
from evals.score import is_right_after_first, share
from evals.tasks import FAMILIES, Item, make_items
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.request import RequestOutput, SamplingParams

RESULTS = Path(__file__).parent / "results"
MAX_TOKENS = 32  # longest answer; the values are about ten tokens


class Chat:
    """A model's tokenizer as ``tasks`` wants it, with a memo because generated sentences repeat."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ValueError("the model has no tokenizer")
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._counts: dict[str, int] = {}

    def count_tokens(self, text: str) -> int:
        if text not in self._counts:
            self._counts[text] = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._counts[text]

    def chat_token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return self._llm.chat_token_ids(messages)


def settings_of(args: argparse.Namespace, arm: Arm, family: str) -> dict[str, Any]:
    """All that decides a cell's result; its hash names the file."""
    return {
        "model": "tiny" if args.model == TINY_MODEL else str(args.model),
        "family": family,
        "arm": arm.name,
        "slots": arm.slots,
        "budget": asdict(arm.budget),
        "prompt_len": args.prompt_len,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
        "max_tokens": MAX_TOKENS,
    }


def path_of(settings: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{settings['family']}_{settings['prompt_len']}_{settings['arm']}_{settings['slots']}_{digest}.json"
    return RESULTS / Path(settings["model"]).name / name


def judge(llm: LLM, items: list[Item], outputs: list[RequestOutput]) -> dict[str, Any]:
    """Scores of one cell, and the counters that prove that compression ran."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    right, later = [], []
    for item, output in zip(items, outputs, strict=True):
        right.append(item.question.is_answered_by(output.text))
        value = tokenizer(" " + item.question.answer, add_special_tokens=False)["input_ids"]
        texts = [[tokenizer.decode([token]) for token in ids] for ids in (output.token_ids, value)]
        later.append(is_right_after_first(texts[0], texts[1]))
    kept = [output.compression for output in outputs if output.compression is not None]
    accuracy, error = share(right)
    return {
        "accuracy": accuracy,
        "standard_error": error,
        "accuracy_after_first_token": share(later)[0],
        "mean_prompt_tokens": sum(c.prompt_tokens for c in kept) / len(kept),
        "mean_evicted_tokens": sum(c.evicted_tokens for c in kept) / len(kept),
        "row_bytes": kept[0].row_bytes,
    }


def run_arm(args: argparse.Namespace, arm: Arm, cells: dict[str, list[Item]]) -> Iterator[dict[str, Any]]:
    """One engine for the arm, one batch per family."""
    max_len = args.prompt_len + MAX_TOKENS
    with LLM(
        args.model, budget=arm.budget, max_rows=args.max_rows, max_model_len=max_len, chunk_len=args.chunk_len
    ) as llm:
        for family, items in cells.items():
            began = perf_counter()
            prompts = [arm.prompt(item.token_ids, MAX_TOKENS) for item in items]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
            settings = settings_of(args, arm, family)
            yield {
                "settings": settings,
                **describe(),
                "seconds": round(perf_counter() - began, 1),
                "result": judge(llm, items, outputs),
            }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells, stored or run now, in the order of the table."""
    max_len = args.prompt_len + MAX_TOKENS
    arms = [make_arm("full", max_len, max_len, MAX_TOKENS)] if "full" in args.arms else []
    for part in args.parts:
        arms += [make_arm(name, args.prompt_len // part, max_len, MAX_TOKENS) for name in args.arms if name != "full"]
    with LLM(args.model, budget="full", max_rows=1, max_model_len=max_len, progress=False) as llm:
        chat = Chat(llm)
        items = {f: make_items(chat, f, args.num_prompts, args.prompt_len, args.seed) for f in args.families}
    done = []
    for arm in arms:
        missing = {f: items[f] for f in args.families if not path_of(settings_of(args, arm, f)).exists()}
        for cell in run_arm(args, arm, missing) if missing else ():
            path = path_of(cell["settings"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(cell, indent=1) + "\n")
        done += [json.loads(path_of(settings_of(args, arm, f)).read_text()) for f in args.families]
    return done


def table_of(cells: list[dict[str, Any]], families: list[str]) -> Table:
    """One line per arm and size: accuracy +- standard error per family, in points."""
    table = Table(title="accuracy in points, +- one standard error")
    for heading in ("arm", "slots", *families):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for cell in cells:
        settings, result = cell["settings"], cell["result"]
        line = lines.setdefault((settings["arm"], settings["slots"]), {})
        line[settings["family"]] = f"{result['accuracy']:.1f} +-{result['standard_error']:.1f}"
    for (arm, slots), line in lines.items():
        table.add_row(arm, f"{slots:,}", *(line[family] for family in families))
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8], help="slots as parts of --prompt-len")
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--chunk-len", type=int, default=512)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    Console(width=160).print(table_of(run(args), args.families))


if __name__ == "__main__":
    main()
