"""Measures the exported checkpoint: held-out documents, chat template, full attention, greedy.

Loads the checkpoint with transformers alone, so that the figures do not depend on the engine. A prompt is right
when its answer contains the value (case-insensitive). Run `python -m recipes.tiny.evaluate --help`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapstream.assets.documents import make_document

FAMILIES = (
    "single_number", "single_words", "single_uuid", "multi_number", "multi_words", "multi_uuid",
    "kv", "json", "variable", "paraphrase",
)  # fmt: skip
_EXTRA_TOKENS = 24  # room for the question and the template


_loaded: tuple[Any, Any] | None = None  # model and tokenizer of a worker process


def _load(checkpoint: Path) -> None:
    global _loaded
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    _loaded = model, AutoTokenizer.from_pretrained(checkpoint)


@torch.inference_mode()
def measure(family: str, length: int, count: int) -> dict[str, Any]:
    """Accuracy of `count` prompts of at most `length` tokens, one at a time. Runs in a worker process."""
    assert _loaded is not None
    model, tokenizer = _loaded

    @functools.cache
    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    right = num_tokens = num_facts = 0
    for i in range(count):
        document = make_document(
            family=family,
            seed=f"evaluate/{length}/{i}",
            count_tokens=count_tokens,
            target_tokens=length - _EXTRA_TOKENS,
            split="heldout",
        )
        question = document.questions[0]
        messages = [{"role": "user", "content": document.prompt(question)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=24)
        num_prompt = prompt["input_ids"].shape[1]
        answer = tokenizer.decode(output[0, num_prompt:], skip_special_tokens=True)
        right += question.value.lower() in answer.lower()
        num_tokens += num_prompt
        num_facts += len(document.questions)
    accuracy = right / count
    return {
        "family": family,
        "length": length,
        "mean_prompt_tokens": round(num_tokens / count),
        "mean_facts": round(num_facts / count, 1),
        "prompts": count,
        "accuracy": round(accuracy, 4),
        "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / count), 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("snapstream/assets/tiny"))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=200, help="prompts per family and length")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each; a cell is one task")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    args = parser.parse_args()

    tasks = [(family, length) for length in args.lengths for family in args.families]
    cells = []
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), _load, (args.checkpoint,)) as pool:
        for cell in pool.map(functools.partial(measure, count=args.prompts), *zip(*tasks, strict=True)):
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    if args.output is not None:
        report = {
            "command": f"python -m recipes.tiny.evaluate --lengths {' '.join(map(str, args.lengths))} "
            f"--families {' '.join(args.families)} --prompts {args.prompts}",
            "method": "held-out keys and values, chat template, full attention, greedy, fp32; "
            "right if the answer contains the value",
            "device": f"{platform.machine()} CPU, {args.workers} processes of one thread",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "cells": cells,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
