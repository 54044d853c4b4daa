"""The same random weights, prompts and greedy tokens in transformers, vLLM for CPUs, llama.cpp and here, in one run.

    make peers                                  # once: vLLM and llama.cpp, in environments of their own (4 GB)
    python -m benchmarks.peers --save           # all arms, batches of 1, 4, 8 and 32
    python -m benchmarks.peers --quick          # two batch sizes, short prompts and answers
    python -m benchmarks.peers --only llama.cpp "snapstream looped" --batches 1

Weights are fp32 of a Qwen3 shape, or of a hybrid with recurrent layers (``--shape lfm2-100m``); an arm's format rounds
them. *First token* is a call for one new token: prefill, and what an engine does around it. *Decode* is what the other
tokens take: a call for all, less a call for one, of prompts of the same lengths. The shortest call of each kind counts.
Our arms have a full cache, so nothing is lost to a budget; ``same_tokens`` is the share of greedy tokens that are those
of transformers in fp32. An arm that is not installed or fails is left out, and the result says why.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ceilings, report
from benchmarks.peers.arms import ARMS
from benchmarks.peers.compare import compare
from benchmarks.peers.work import Job
from benchmarks.shapes import GRANITE_H_100M, LFM2_100M, QWEN3_100M, QWEN3_TINY, QWEN35_100M, random_checkpoint

SHAPES = {
    "100m": QWEN3_100M,
    "tiny": QWEN3_TINY,
    "lfm2-100m": LFM2_100M,
    "qwen3.5-100m": QWEN35_100M,
    "granite-h-100m": GRANITE_H_100M,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--prompt-len", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="arms whose names begin so")
    parser.add_argument("--quick", action="store_true", help="batches of 1 and 8, 64 tokens and 17 more, twice")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args(argv)
    usual: dict[str, Any] = {"batches": [1, 4, 8, 32], "prompt_len": 128, "new_tokens": 65, "repeats": 3}
    if args.quick:
        usual = {"batches": [1, 8], "prompt_len": 64, "new_tokens": 17, "repeats": 2}
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse_args()
    ceiling = ceilings()
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder), shape)
        job = Job(
            folder=folder, option="", threads=args.threads, vocab_size=shape["vocab_size"], prompt_len=args.prompt_len,
            new_tokens=args.new_tokens, batches=args.batches, repeats=args.repeats,
        )  # fmt: skip
        found = compare(ARMS, job, args.only)
    settings = {
        "model": f"random {'' if '-' in args.shape else 'Qwen3 '}{args.shape}, fp32 as stored", "threads": args.threads,
        "prompt_len": args.prompt_len, "new_tokens": args.new_tokens,
    }  # fmt: skip
    report(f"peers_all_{args.shape}", ceiling, settings | found, save=args.save)


if __name__ == "__main__":
    main()
