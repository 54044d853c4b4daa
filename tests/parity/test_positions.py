"""A prompt with tokens left out: the others keep their positions, and the answer goes on after the last one.

The reference reads prompt and answer anew for every token, with the same position ids.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from snapstream.llm import LLM
from snapstream.types import Request, SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save

NEW_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def greedy_at(model, ids, positions, count):  # type: ignore[no-untyped-def]
    ids, positions, drawn = list(ids), list(positions), []
    for _ in range(count):
        logits = model(torch.tensor([ids]), position_ids=torch.tensor([positions])).logits
        drawn.append(int(logits[0, -1].argmax()))
        ids.append(drawn[-1])
        positions.append(positions[-1] + 1)
    return drawn


@pytest.mark.parametrize("name", ["llama-gqa-tied", "llama-llama3", "qwen3"])
def test_kept_tokens_keep_their_positions(name: str, tmp_path: Path) -> None:
    model, rng = make_model(name), Random(1)
    prompts = []
    for length, kept in ((120, 40), (60, 60), (150, 7)):
        positions = sorted(rng.sample(range(length), kept))
        prompts.append((tuple(rng.randrange(3, VOCAB) for _ in positions), tuple(positions)))
    with LLM(save(model, tmp_path), budget="full", max_rows=4, chunk_len=16, max_model_len=256, progress=False) as llm:
        requests = [
            Request(request_id=str(i), prompt_token_ids=ids, sampling=PARAMS, positions=positions)
            for i, (ids, positions) in enumerate(prompts)
        ]
        outputs = llm.answer(requests)
    for (ids, positions), output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy_at(model, ids, positions, NEW_TOKENS)


def test_positions_survive_compression_of_the_row(tmp_path: Path) -> None:
    """Compressed, prefilled, compressed: a run of positions 0, 1, 2 ... is the same as none, and a shift changes it."""
    model, rng = make_model("qwen3"), Random(2)
    ids = tuple(rng.randrange(3, VOCAB) for _ in range(100))
    folder = save(model, tmp_path)
    with LLM(folder, budget=48, max_rows=3, chunk_len=16, max_model_len=256, progress=False) as llm:
        shifted = tuple(i if i < 50 else i + 37 for i in range(100))
        requests = [
            Request(request_id=str(i), prompt_token_ids=ids, sampling=PARAMS, positions=positions)
            for i, positions in enumerate((None, tuple(range(100)), shifted))
        ]
        plain, same, other = llm.answer(requests)
    assert plain.compression is not None and plain.compression.evicted_tokens == 52
    assert plain.token_ids == same.token_ids != other.token_ids
