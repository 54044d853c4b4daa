"""The same weights, prompts and greedy tokens in transformers' ``generate`` and here, in one run.

Both sides get the same batch of equal-length prompts (the kindest case for a static batch) and decode with a full
cache, so the difference is the engine, not the budget; further arms show eager decode and the budget. The greedy tokens
under a full cache must agree.

    python -m benchmarks.peers.generate                 # the 100M shape, random weights
    python -m benchmarks.peers.generate --model tiny    # the tiny model that ships
    python -m benchmarks.peers.generate --batches 1 4 8 --prompt-len 128   # a full cache alone, batch by batch
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from time import perf_counter
from typing import Any, Literal

import torch

from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt
from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.types import SamplingParams


def transformers_run(folder: str, prompts: list[list[int]], new_tokens: int, repeats: int) -> tuple[float, list[Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    best, tokens = float("inf"), []
    for _ in range(repeats):
        began = perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                                 pad_token_id=0)  # fmt: skip
        best = min(best, perf_counter() - began)
        tokens = out[:, ids.shape[1] :].tolist()
    return best, tokens


def snapstream_run(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int,
    repeats: int,
    budget: int | Literal["full"],
    executor: str | None,
) -> tuple[float, list[Any]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    max_len = len(prompts[0]) + new_tokens
    best, tokens = float("inf"), []
    settings: dict[str, Any] = {"max_rows": len(prompts), "max_model_len": max_len, "progress": False}
    settings["num_speculative_tokens"] = 0  # random weights repeat themselves more than text does
    with LLM(folder, budget=budget, executor=executor, **settings) as llm:
        for _ in range(repeats):
            began = perf_counter()
            outputs = llm.generate(prompts, params)
            best = min(best, perf_counter() - began)
            tokens = [output.token_ids for output in outputs]
    return best, tokens


def compare(folder: str, vocab_size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = [random_prompt(args.prompt_len, vocab_size, seed) for seed in range(args.rows)]
    theirs, want = transformers_run(folder, prompts, args.new_tokens, args.repeats)
    figures = [_figure("transformers generate", theirs, theirs, args)]
    arms: list[tuple[str, int | Literal["full"], str | None]] = [
        ("snapstream, full", "full", None),  # the executor that the engine chooses
        ("snapstream, full, eager", "full", "eager"),
        ("snapstream, 1/4", args.prompt_len // 4, None),
        ("snapstream, 1/4, eager", args.prompt_len // 4, "eager"),
    ]
    if args.batches:
        arms = arms[:1]
    for name, budget, executor in arms:
        seconds, tokens = snapstream_run(folder, prompts, args.new_tokens, args.repeats, budget, executor)
        figure = _figure(name, seconds, theirs, args)
        same = sum(a == b for mine, other in zip(tokens, want, strict=True) for a, b in zip(mine, other, strict=True))
        figure["same_tokens"] = same / (args.rows * args.new_tokens)
        figures.append(figure)
        print(figure, flush=True)
    return figures


def _figure(name: str, seconds: float, theirs: float, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "engine": name,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(args.rows * args.new_tokens / seconds, 1),
        "speedup": round(theirs / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["100m", "tiny"], default="100m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", help="rows, one after the other; a full cache")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = []
    with nullcontext(TINY_MODEL) if args.model == "tiny" else llama_folder() as folder:
        for rows in args.batches or [args.rows]:
            args.rows = rows
            own = compare(str(folder), 1000 if args.model == "tiny" else 32000, args)
            figures += [{"rows": rows, **figure} if args.batches else figure for figure in own]
    settings = {"rows": args.batches or args.rows, "prompt_len": args.prompt_len, "new_tokens": args.new_tokens}
    name = f"peers_batches_{args.model}" if args.batches else f"peers_{args.model}"
    report(name, ceiling, {**settings, "arms": figures}, save=args.save)


if __name__ == "__main__":
    main()
