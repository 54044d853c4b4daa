"""What a grammar costs a step: the mask of a row on the host, and what applying masks adds to greedy sampling.

Two vocabularies: the shipped tiny model's, and one of 128,256 made-up tokens (words, digits, punctuation, runs of
spaces) in the alphabet of byte-level BPE. Random allowed tokens are drawn, 150 per walk, so that the walk passes
through strings, numbers and structure alike.

    python -m benchmarks.grammar
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.machine import ceilings, report, timed_seconds
from snapstream.assets import TINY_MODEL
from snapstream.exec.row_state import NewRow, SamplingNeeds
from snapstream.exec.sampling import sample
from snapstream.exec.sampling_state import SamplingState
from snapstream.grammar import GrammarCompiler
from snapstream.types import Grammar, SamplingParams

ADDRESS = {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
PROPERTIES = {
    "name": {"type": "string"},
    "n": {"type": "integer"},
    "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}},
    "address": {"type": "object", "properties": ADDRESS, "required": [*ADDRESS], "additionalProperties": False},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
GRAMMARS = {"schema": Grammar.json_schema(SCHEMA), "json_object": Grammar.json_object()}
WALKS, WALK_LEN = 8, 150


def large_vocabulary(size: int) -> str:
    """A tokenizer.json of ``size`` tokens; the last ten are special."""
    draw = random.Random(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    kinds = (
        (0.45, "abcdefghijklmnopqrstuvwxyz", "\u0120", (2, 9)), (0.30, "abcdefghijklmnopqrstuvwxyz", "", (2, 9)),
        (0.10, "{}[]\":,\\/-_.()<>=+*&^%$#@!~`|;'", "", (2, 5)), (0.05, "\u0120", "", (2, 40)),
        (0.05, "0123456789", "", (2, 3)), (0.05, "".join(letters), "", (2, 6)),
    )  # fmt: skip
    while len(vocab) < size - 10:
        _, alphabet, first, (low, high) = draw.choices(kinds, [kind[0] for kind in kinds])[0]
        vocab.setdefault(first + "".join(draw.choices(alphabet, k=draw.randint(low, high))), len(vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([f"<|{index}|>" for index in range(10)])
    return str(core.to_str())


def microseconds(work: Any, repeats: int = 15) -> float:
    """Median of some calls after one warm-up."""
    return float(np.median(timed_seconds(work, repeats))) * 1e6


def measure_masks(compiler: GrammarCompiler, grammar: Grammar) -> dict[str, float]:
    began = perf_counter()
    compiler.matcher(grammar)
    compile_ms = (perf_counter() - began) * 1e3
    words = np.empty(compiler.num_words, dtype=np.int32)
    draw = random.Random(1)
    fill, take = [], []
    for _ in range(WALKS):
        matcher = compiler.matcher(grammar)
        for _ in range(WALK_LEN):
            began = perf_counter()
            goes_on = matcher.fill(words)
            fill.append(perf_counter() - began)
            if not goes_on:
                break
            token = int(draw.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))))
            began = perf_counter()
            matcher.take(token)
            take.append(perf_counter() - began)
    us = np.array(fill) * 1e6
    return {
        "compile_ms": compile_ms,
        "mask_us_median": float(np.median(us)),
        "mask_us_mean": float(us.mean()),
        "mask_us_p99": float(np.percentile(us, 99)),
        "mask_us_max": float(us.max()),
        "take_us_mean": float(np.mean(take)) * 1e6,
        "masks": len(fill),
    }


def measure_sampling(vocab_size: int, num_rows: int) -> dict[str, float]:
    """Greedy sampling of a batch, without and with masks on all of its rows."""
    state = SamplingState(num_rows, vocab_size, "cpu")
    for row in range(num_rows):
        state.set_rows([NewRow(row, SamplingParams(temperature=0.0), 0, (), ())])
    rows, logits = torch.arange(num_rows), torch.randn(num_rows, vocab_size)
    words = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32)
    state.allow(list(range(num_rows)), words)
    plain = microseconds(lambda: sample(logits, state, rows, SamplingNeeds()))
    masked = microseconds(lambda: sample(logits, state, rows, SamplingNeeds(grammar=True)))
    upload = microseconds(lambda: state.allow(list(range(num_rows)), words))
    extra = (masked - plain + upload) / num_rows
    return {"rows": num_rows, "plain_us": plain, "masked_us": masked, "upload_us": upload, "extra_us_per_row": extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the JSON to benchmarks/results")
    args = parser.parse_args()
    found = ceilings()
    tiny = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    runs = []
    for name, text, size, end in (("tiny", tiny, 4608, 2), ("128k", large_vocabulary(128256), 128256, 128250)):
        compiler = GrammarCompiler(lambda text=text: text, size, (end,))  # type: ignore[misc]
        began = perf_counter()
        compiler.load()
        load_s = perf_counter() - began
        masks = {kind: measure_masks(compiler, grammar) for kind, grammar in GRAMMARS.items()}
        sampling = [measure_sampling(size, num_rows) for num_rows in (1, 8, 32)]
        runs.append({"vocabulary": name, "size": size, "load_s": load_s, "masks": masks, "sampling": sampling})
        for kind, one in masks.items():
            print(f"{name} {kind}: mask {one['mask_us_mean']:.0f} us mean, {one['mask_us_p99']:.0f} us p99")
        for row in sampling:
            print(f"{name}, {row['rows']} rows: applying adds {row['extra_us_per_row']:.0f} us per row")
    report("grammar", found, {"runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
