"""Measures the exported checkpoint: held-out documents, chat template, full attention, greedy.

Loads the checkpoint with transformers alone, so that the figures do not depend on the engine. A prompt scores the
share of its values that the answer contains (case-insensitive). Run `python -m recipes.evaluate --help`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from recipes.documents import FAMILIES as ALL_FAMILIES
from recipes.documents import NUM_ANSWERS, make_document
from snapstream.models.tokenizer import load_tokenizer

FAMILIES = tuple(family for family in ALL_FAMILIES if family != "mixed")
QUESTION_FIRST = ("single_number", "multi_number", "multi_words", "kv")
_EXTRA_TOKENS = 24  # room for the template and a question with one key
_KEY_TOKENS = 6  # room for each of several keys

_loaded: tuple[Any, Any] | None = None  # model and tokenizer of a worker process


def _load(checkpoint: Path) -> None:
    global _loaded
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False, dtype=torch.float32).eval()
    _loaded = model, load_tokenizer(checkpoint)


@torch.inference_mode()
def measure(family: str, question_first: bool, length: int, count: int) -> dict[str, Any]:
    """Score of `count` prompts of at most `length` tokens, one at a time. Runs in a worker process."""
    assert _loaded is not None
    model, tokenizer = _loaded

    @functools.cache
    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    names_keys = family in ("multi_query", "recite")
    target = length - _EXTRA_TOKENS - (_KEY_TOKENS * NUM_ANSWERS[family] if names_keys else 0)
    scores: list[float] = []
    num_tokens = num_facts = 0
    for i in range(count):
        seed = f"evaluate/{length}/{i}"
        document = make_document(family=family, seed=seed, count_tokens=count_tokens, target_tokens=target)
        question = document.questions[0]
        messages = [{"role": "user", "content": document.prompt(question, question_first=question_first)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=count_tokens(f" {question.answer}") + 12)
        num_prompt = prompt["input_ids"].shape[1]
        answer = tokenizer.decode(output[0, num_prompt:], skip_special_tokens=True)
        scores.append(question.score(answer))
        num_tokens += num_prompt
        num_facts += sum(len(question.answers) for question in document.questions)
    return {
        "family": family,
        "question_first": question_first,
        "length": length,
        "mean_prompt_tokens": round(num_tokens / count),
        "mean_facts": round(num_facts / count, 1),
        "answers_per_question": NUM_ANSWERS.get(family, 1),
        "prompts": count,
        "accuracy": round(statistics.fmean(scores), 4),
        "standard_error": round(statistics.pstdev(scores) / math.sqrt(count), 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument(
        "--question-first", nargs="*", default=list(QUESTION_FIRST), choices=FAMILIES, help="families asked so, too"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=200, help="prompts per family and length")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each; a cell is one task")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    args = parser.parse_args()

    kinds = [(family, False) for family in args.families] + [(family, True) for family in args.question_first]
    tasks = [(family, first, length) for length in args.lengths for family, first in kinds]
    report = {
        "command": f"python -m recipes.evaluate {args.checkpoint} --lengths {' '.join(map(str, args.lengths))} "
        f"--families {' '.join(args.families)} --question-first {' '.join(args.question_first)} "
        f"--prompts {args.prompts}",
        "method": "held-out keys and values, chat template, full attention, greedy, fp32; "
        "score: share of a question's values that the answer contains",
        "device": f"{platform.machine()} CPU, {args.workers} processes of one thread",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    cells = []
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), _load, (args.checkpoint,)) as pool:
        for cell in pool.map(functools.partial(measure, count=args.prompts), *zip(*tasks, strict=True)):
            print(json.dumps(cell), flush=True)
            cells.append(cell)
            if args.output is not None:
                args.output.write_text(json.dumps({**report, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
