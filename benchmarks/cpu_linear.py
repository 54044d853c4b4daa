"""Products of few tokens with the weights of a 100M model: GB/s of every way, and which one a load would choose.

    python -m benchmarks.cpu_linear

The trial is that of a load (``kernels/cpu/trial.py``), the figures are best of several longer runs of the same kind.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from time import perf_counter

import torch

from benchmarks.shapes import LLAMA_100M
from snapstream.kernels.cpu.linear import ways_for
from snapstream.kernels.cpu.trial import choose, pieces_of, seconds

TOKENS = (1, 4, 8)
_REPEATS = 100


def shapes() -> dict[str, tuple[int, int, int]]:
    """Name of a product: rows and columns of its weight, and how many layers have one."""
    hidden, layers = LLAMA_100M["hidden_size"], LLAMA_100M["num_hidden_layers"]
    heads, groups, dim = (LLAMA_100M[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    inner = LLAMA_100M["intermediate_size"]
    return {
        "qkv": ((heads + 2 * groups) * dim, hidden, layers),
        "o": (hidden, heads * dim, layers),
        "gate_up": (2 * inner, hidden, layers),
        "down": (hidden, inner, layers),
        "lm_head": (LLAMA_100M["vocab_size"], hidden, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args()
    weights = {name: [torch.randn(out, width) for _ in range(n)] for name, (out, width, n) in shapes().items()}
    began = perf_counter()
    choice = choose([weight for group in weights.values() for weight in group], max(TOKENS))
    print(f"{torch.get_num_threads()} threads; the trial took {perf_counter() - began:.2f} s")
    for name, group in weights.items():
        num_out, num_in = group[0].shape
        pieces = pieces_of(group)
        for tokens in TOKENS:
            x = torch.randn(tokens, num_in)
            ways = ways_for(num_out, num_in, tokens)
            times = {way: min(seconds(way, x, piece) for piece in islice(cycle(pieces), _REPEATS)) for way in ways}
            rates = "  ".join(f"{way} {pieces[0].nbytes / time / 1e9:5.1f}" for way, time in times.items())
            print(f"{name:8} {num_out:6} x {num_in:5}  {tokens} tokens: {rates} GB/s; chosen: "
                  f"{choice[num_out, num_in, tokens]}")  # fmt: skip


if __name__ == "__main__":
    main()
