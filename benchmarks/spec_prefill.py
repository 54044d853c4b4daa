"""Time to first token with a draft in front: what the draft costs, what the shorter prompt saves.

Floor: operations. The draft reads the whole prompt, the target what is kept; both run the same code, so the predicted
speed-up is target(N) / (draft(N) + target(keep N)) if a small model reaches the same rate as a large one. Weights are
random: which chunks are kept does not matter here, only how many.

    python -m benchmarks.spec_prefill --save
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.prefill import prefill_flop
from benchmarks.shapes import llama_folder
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.llm import LLM
from snapstream.models.sharding import num_parameters
from snapstream.models.tokenizer import load_tokenizer
from snapstream.spec_prefill.compressor import PromptCompressor
from snapstream.spec_prefill.settings import PromptCompression, ScoringSettings
from snapstream.types import SamplingParams

# About 7M parameters beside the 100M of the target.
DRAFT: dict[str, Any] = {
    "vocab_size": 4608, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@contextmanager
def folder_of(**changes: Any) -> Iterator[Path]:
    """A random checkpoint with the shipped tokenizer, so that it can read text."""
    with llama_folder(**changes) as folder:
        load_tokenizer(TINY_MODEL).save_pretrained(folder)
        yield folder


def measure(llm: LLM, draft: PromptCompressor, text: str, keeps: list[float]) -> Iterator[dict[str, Any]]:
    """The whole prompt, then every share of it; wall-clock from text to first token."""
    began = perf_counter()
    whole = llm.generate(text, FIRST_TOKEN)[0]
    full_s = perf_counter() - began
    prompt_len = len(whole.prompt_token_ids)
    small, large = draft.draft.decoder.config, llm.model_config
    for keep in keeps:
        began = perf_counter()
        how = PromptCompression(keep=keep, threshold=0)
        output = llm.generate(text, FIRST_TOKEN, prompt_compression=how)[0]
        seconds = perf_counter() - began
        assert output.prompt_compression is not None and output.prompt_compression.is_applied
        kept = output.prompt_compression.tokens_after
        yield {
            "prompt_len": prompt_len,
            "keep": keep,
            "kept_tokens": kept,
            "look_ahead": draft.scoring.look_ahead,
            "full_s": full_s,
            "first_token_s": seconds,
            "draft_s": output.prompt_compression.draft_ms / 1e3,
            "prefill_s": output.timings.prefill_ms / 1e3,
            "speedup": full_s / seconds,
            "predicted": prefill_flop(large, prompt_len)
            / (prefill_flop(small, prompt_len) + prefill_flop(large, kept)),
        }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every prompt length with every look-ahead."""
    arms, sizes = [], {}
    tokenizer = load_tokenizer(TINY_MODEL)
    with folder_of() as target, folder_of(**DRAFT) as small:
        for look_ahead in args.look_ahead:
            draft = PromptCompressor(small, scoring=ScoringSettings(look_ahead=look_ahead), cache_size=0)
            with LLM(target, budget=2048, max_rows=1, max_model_len=max(args.prompt_len) + 1024,
                     progress=False, draft=draft) as llm:  # fmt: skip
                sizes = {
                    "target_parameters": num_parameters(llm.model_config),
                    "draft_parameters": num_parameters(draft.draft.decoder.config),
                }
                llm.generate("warm up " * 300, FIRST_TOKEN, prompt_compression=PromptCompression(keep=0.5, threshold=0))
                for prompt_len in args.prompt_len:
                    text = make_document(
                        family="single_number",
                        seed=0,
                        count_tokens=lambda part: len(tokenizer(part)["input_ids"]),
                        target_tokens=prompt_len,
                    ).text
                    for arm in measure(llm, draft, text, args.keep):
                        arms.append(arm)
                        print({k: round(v, 4) if isinstance(v, float) else v for k, v in arm.items()}, flush=True)
    return {"model": "random Llama 100M fp32 behind a random draft of 7M", **sizes, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument("--look-ahead", type=int, nargs="+", default=[8, 0])
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    report("spec_prefill", ceiling, run(args), save=args.save)


if __name__ == "__main__":
    main()
