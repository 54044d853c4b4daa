"""The same random weights, prompts and greedy tokens in transformers, vLLM for CPUs, llama.cpp and here, in one run.

    make peers                                  # once: vLLM and llama.cpp, in environments of their own (4 GB)
    python -m benchmarks.peers --save           # all arms, batches of 1, 4, 8 and 32
    python -m benchmarks.peers --quick          # two batch sizes, short prompts and answers
    python -m benchmarks.peers --only llama.cpp "snapstream looped" --batches 1
    python -m benchmarks.peers --shape lfm2-100m --prompt-len 4096 --only transformers snapstream --batches 1 8

Weights are fp32 of a Qwen3 shape, or of a hybrid with recurrent layers (``--shape lfm2-100m``); an arm's format rounds
them. *First token* is a call for one new token: prefill, and what an engine does around it; of one row it is the time
until a call for all tokens has the first. *Decode* is what the other tokens take: of several rows a call for all, less
a call for one, of prompts of the same lengths; of one row what follows its first token. The shortest of each counts.
Our arms have a full cache, so nothing is lost to a budget; ``same_tokens`` is the share of greedy tokens that are those
of transformers in fp32; ``read_share``, of one row, is what weights of the arm's width read at that rate take of the
measured bandwidth, without keys and values. An arm that is not installed or fails is left out, and the result says why.
"""

from __future__ import annotations

import argparse
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.machine import ceilings, report
from benchmarks.peers.arms import ARMS, Arm
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

PROMPT_LEN = 128
BITS = {
    "float32": 32,
    "f32": 32,
    "bfloat16": 16,
    "float16": 16,
    "f16": 16,
    "q8_0": 8.5,
    "int8": 8,
    "q4_0": 4.5,
    "int4": 4.5,
}


def weights_per_token(folder: Path) -> int:
    """Numbers of a checkpoint that a decoded token multiplies: all but an input embedding that is not the output's."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not iterable)
    is_tied = not any(name.startswith("lm_head") for name in sizes)
    return sum(prod(shape) for name, shape in sizes.items() if is_tied or "embed_tokens" not in name)


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
    usual: dict[str, Any] = {"batches": [1, 4, 8, 32], "prompt_len": PROMPT_LEN, "new_tokens": 65, "repeats": 3}
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
        numbers = weights_per_token(Path(folder))

        def read_share(arm: Arm, line: dict[str, Any]) -> dict[str, Any]:
            if line["batch"] != 1 or not line["decode_tokens_per_s"]:
                return {}
            rate = line["decode_tokens_per_s"] * numbers * BITS[arm.name.split()[-1]] / 8e9
            return {"read_share": round(rate / ceiling["read_gb_per_s"], 3)}

        found = compare(ARMS, job, args.only, read_share)
    settings = {
        "model": f"random {'' if '-' in args.shape else 'Qwen3 '}{args.shape}, fp32 as stored", "threads": args.threads,
        "prompt_len": args.prompt_len, "new_tokens": args.new_tokens,
    }  # fmt: skip
    name = f"peers_all_{args.shape}" + ("" if args.prompt_len == PROMPT_LEN else f"_{args.prompt_len}")
    if min(args.batches) > 1:  # the record of one row stays
        name += f"_{min(args.batches)}rows"
    report(name, ceiling, settings | found, save=args.save)


if __name__ == "__main__":
    main()
