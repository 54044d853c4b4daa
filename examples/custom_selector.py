"""A selection method of your own: keep the prompt tokens whose keys are longest.

A selector is one method. It sees one layer's exact keys and the prompt's last queries, and returns the positions that
the row's top-k slots keep. The fields of the dataclass are its settings.

python examples/custom_selector.py
"""

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from snapstream import LLM, SamplingParams, Selector
from snapstream.assets import TINY_MODEL
from snapstream.config import SELECTORS


@dataclass(frozen=True, kw_only=True)
class LongestKeys(Selector):
    """Scores a token by the norm of its key."""

    name: ClassVar[str] = "longest_keys"

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Any
    ) -> Tensor:
        """Positions ``[G, K]``, ascending, of ``keys [G, N, E]`` among the candidates."""
        norms = keys[:, candidates.start : candidates.stop].float().norm(dim=-1)  # [G, n]
        chosen = norms.topk(num_topk, dim=-1).indices.sort(dim=-1).values
        return chosen + candidates.start


SELECTORS.add("longest_keys", LongestKeys)  # now also --selector longest_keys, where this module is imported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY_MODEL))
    args = parser.parse_args()
    prompt = "The quick brown fox jumps over the lazy dog. " * 60 + "What does the fox jump over?"
    params = SamplingParams(max_tokens=16, temperature=0.0, return_kept=True)
    with LLM(args.model, budget=64, selector="longest_keys", progress=False) as llm:
        for selector in (None, "snapkv"):  # the engine's own, and another for one request
            (output,) = llm.generate(prompt, params, selector=selector)
            print(selector or "longest_keys", output.compression.kept_positions[0][0][:8], repr(output.text))


if __name__ == "__main__":
    main()
