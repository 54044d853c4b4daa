"""Scores against the list-based program over transformers' layers, for two architectures with grouped heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from snapstream.models.decoder import Decoder
from snapstream.models.loader import load_weights
from snapstream.models.registry import read_model_config
from snapstream.spec_prefill import lookahead
from snapstream.spec_prefill.importance import Importance, chunk_means
from snapstream.spec_prefill.lookahead import token_scores
from snapstream.spec_prefill.settings import ScoringSettings
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.unit.spec_prefill import scores_by_lists

NAMES = ("llama-gqa-tied", "qwen3", "llama-dynamic")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Decoder]]:
    found = {}
    for name in NAMES:
        model = make_model(name)
        folder = save(model, Path(tmp_path_factory.mktemp(name)))
        config = read_model_config(folder)
        found[name] = model, Decoder(config, load_weights(folder, config, torch.float32, "cpu", False))
    return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("look_ahead", [0, 1, 8])
@pytest.mark.parametrize("length", [5, 70])
def test_scores_are_the_published_ones(drafts: Any, name: str, look_ahead: int, length: int) -> None:
    theirs, decoder = drafts[name]
    prompt = prompt_of(length)
    expected = scores_by_lists.token_scores(theirs, prompt, look_ahead=look_ahead, ends=decoder.config.eos_token_ids)
    for keys in ("all_layers", "one_layer"):
        settings = ScoringSettings(look_ahead=look_ahead, keys=keys, prefill_len=32)
        torch.testing.assert_close(
            token_scores(decoder, prompt, settings), torch.tensor(expected), rtol=1e-4, atol=1e-6
        )


def test_look_ahead_stops_where_the_draft_ends(drafts: Any) -> None:
    theirs, decoder = drafts["qwen3"]
    prompt = prompt_of(30)
    third = scores_by_lists.drawn_tokens(theirs, prompt, 8, ())[2]
    ending = Decoder(replace(decoder.config, eos_token_ids=(third,)), decoder.weights)
    expected = torch.tensor(scores_by_lists.token_scores(theirs, prompt, look_ahead=8, ends=(third,)))
    for keys in ("all_layers", "one_layer"):
        short = token_scores(ending, prompt, ScoringSettings(keys=keys))
        torch.testing.assert_close(short, expected, rtol=1e-4, atol=1e-6)
    beyond = token_scores(ending, prompt, ScoringSettings(ignore_eos=True))
    whole = scores_by_lists.token_scores(theirs, prompt, look_ahead=8)
    torch.testing.assert_close(beyond, torch.tensor(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keys", ["all_layers", "one_layer"])
def test_passages_look_ahead_together_as_they_would_alone(drafts: Any, keys: Any) -> None:
    """One of them ends after its third token, which the others do not draw; the last group is smaller."""
    theirs, decoder = drafts["qwen3"]
    passages = [prompt_of(30, seed) for seed in range(5)]
    third = scores_by_lists.drawn_tokens(theirs, passages[1], 8, ())[2]
    ending = Decoder(replace(decoder.config, eos_token_ids=(third,)), decoder.weights)
    drawn = [scores_by_lists.drawn_tokens(theirs, passage, 8, (third,)) for passage in passages]
    assert len(drawn[1]) == 3 and len(drawn[0]) == len(drawn[2]) == 8
    expected = [scores_by_lists.token_scores(theirs, passage, look_ahead=8, ends=(third,)) for passage in passages]
    for size in (1, 3):
        settings = ScoringSettings(keys=keys, passages_at_once=size)
        found = list(lookahead.scores_of_passages(ending, passages, settings))
        torch.testing.assert_close(torch.stack(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_dynamic_rope_counts_the_prompt(drafts: Any) -> None:
    """Where the angles depend on the length, every prompt token is rotated for the whole prompt."""
    theirs, decoder = drafts["llama-dynamic"]
    prompt = prompt_of(90)  # beyond the original window
    for look_ahead in (0, 1):
        expected = scores_by_lists.token_scores(theirs, prompt, look_ahead=look_ahead)
        scores = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    held = token_scores(decoder, prompt, ScoringSettings())
    again = token_scores(decoder, prompt, ScoringSettings(keys="one_layer"))
    torch.testing.assert_close(held, again, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("look_ahead", [0, 8])
def test_pieces_of_prefill_change_nothing(drafts: Any, look_ahead: int) -> None:
    decoder, prompt = drafts["qwen3"][1], prompt_of(50)
    whole = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
    for prefill_len in (1, 7, 48):
        pieces = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead, prefill_len=prefill_len))
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


def test_chunks_of_keys_change_nothing() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(6, 4, 16), torch.randn(2, 100, 16)
    for first in (94, 99):
        whole = Importance(6, 100, 13, torch.device("cpu"))
        whole.add(queries, keys, first)
        for chunk in (1, 5, 13, 64, 99):
            parts = Importance(6, 100, 13, torch.device("cpu"))
            parts.add(queries, keys, first, chunk=chunk)
            torch.testing.assert_close(parts.best, whole.best)


def test_scores_are_deterministic(drafts: Any) -> None:
    decoder, prompt = drafts["qwen3"][1], prompt_of(60)
    first, second = (token_scores(decoder, prompt, ScoringSettings()) for _ in range(2))
    assert torch.equal(first, second)


def test_a_compressed_row_can_draw(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row smaller than the prompt the tokens may differ, the scores are those of whatever was drawn."""
    decoder, prompt = drafts["qwen3"][1], prompt_of(90)
    monkeypatch.setattr(lookahead, "ROW", lookahead.KVBudget.of(48))
    scores = token_scores(decoder, prompt, ScoringSettings(keys="one_layer"))
    assert scores.shape == (90,) and bool((scores > 0).all())


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_chunk_means(length: int) -> None:
    scores = torch.rand(length)
    expected = scores_by_lists.chunk_means(scores.tolist(), 32)
    torch.testing.assert_close(chunk_means(scores, 32), torch.tensor(expected))
