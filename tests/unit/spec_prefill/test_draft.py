"""How a draft reads: the text found again inside a template, passages, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from snapstream.assets import TINY_MODEL
from snapstream.exec.eager import StepParts
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.kernels.cpu.looped.library import library_problem, load
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import make_matrix
from snapstream.models.panels import PanelMatrix, make_panels
from snapstream.models.registry import read_model_config
from snapstream.spec_prefill import draft
from snapstream.spec_prefill import draft as lookahead
from snapstream.spec_prefill.draft import Draft, Importance, chunk_means, passages_of, token_scores
from snapstream.spec_prefill.settings import ScoringSettings
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.unit.spec_prefill import scores_by_lists
from tests.unit.spec_prefill.tokenizers import byte_tokenizer, word_tokenizer

TEXT = "The old mill  stood near Köln – 👍🏽.\n\nIt rained.\n"


def read_back(draft: Draft, read: Any, text: str) -> list[str]:
    return [text[a:b] for a, b in zip(read.starts, [*read.starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), byte_tokenizer(None), word_tokenizer()])
@pytest.mark.parametrize("text", [TEXT, "  " + TEXT, "x"])
@pytest.mark.parametrize("around", [("", ""), ("Read this:\n\n", "\n\nWhere?"), ("", "\n\nWhere?  ")])
@pytest.mark.parametrize("as_chat", [False, True])
def test_the_text_is_found_among_the_words_around_it(
    draft: Draft, tokenizer: Any, text: str, around: tuple[str, str], as_chat: bool
) -> None:
    reader = Draft(draft.decoder, tokenizer)
    read = reader.read(text, before=around[0], after=around[1], as_chat=as_chat)
    pieces = read_back(reader, read, text)
    assert len(pieces) == read.num_tokens
    # What a template stripped is read by no token: it goes to the piece before it, or is missing at the front.
    assert text.endswith("".join(pieces)) and text.strip() in "".join(pieces)
    decoded = tokenizer.decode(read.ids[read.first : read.stop])
    assert text.strip() in decoded
    if as_chat and tokenizer.chat_template is not None:
        assert tokenizer.decode(read.ids).count("assistant") == 1


def test_nothing_to_read(draft: Draft) -> None:
    assert draft.read("").num_tokens == 0
    assert draft.read("", after="What?", as_chat=True).num_tokens == 0


@pytest.mark.parametrize(("total", "room", "overlap"), [(10, 4, 1), (10, 4, 2), (11, 4, 0), (9, 3, 0), (100, 99, 40)])
def test_passages_cover_everything_and_have_one_size(total: int, room: int, overlap: int) -> None:
    found = passages_of(total, room, overlap)
    assert found[0][0] == 0 and found[-1][1] == total
    assert all(b - a == room for a, b in found)
    assert all(b - c >= overlap for (_, b), (c, _) in zip(found, found[1:], strict=False))


def test_a_text_that_fits_is_read_at_once(draft: Draft) -> None:
    read = draft.read(TEXT * 10, after="Where?", as_chat=True)
    settings = ScoringSettings(context_len=len(read.ids) + 8)
    scores, num_passages = draft.score(read, settings)
    assert num_passages == 1
    whole = token_scores(draft.decoder, read.ids, ScoringSettings())[read.first : read.stop]
    assert torch.equal(scores, whole)


def test_a_longer_text_is_read_in_passages_with_the_question_in_each(draft: Draft) -> None:
    text = TEXT * 30
    read = draft.read(text, after="Where?", as_chat=True)
    settings = ScoringSettings(context_len=200, overlap=30)
    scores, num_passages = draft.score(read, settings)
    around = len(read.ids) - read.num_tokens
    passages = passages_of(read.num_tokens, 200 - 8 - around, 30)
    assert num_passages == len(passages) > 3
    head, tail, own = read.ids[: read.first], read.ids[read.stop :], read.ids[read.first : read.stop]
    parts = [
        token_scores(draft.decoder, (*head, *own[a:b], *tail), settings)[len(head) : len(head) + b - a]
        for a, b in passages
    ]
    for i in (0, 100, passages[1][0], passages[0][1] - 1, passages[-1][0], read.num_tokens - 1):
        seen = [part[i - a] for part, (a, b) in zip(parts, passages, strict=True) if a <= i < b]
        torch.testing.assert_close(scores[i], torch.stack(seen).mean())


def test_refusals(draft: Draft, tmp_path: Path) -> None:
    read = draft.read(TEXT * 30)
    with pytest.raises(ValueError, match="context_len is 20000; the draft reads at most 16384"):
        draft.score(read, ScoringSettings(context_len=20000))
    crowded = draft.read(TEXT, after="why " * 300, as_chat=True)
    with pytest.raises(ValueError, match="leave no room among the 200 that the draft reads"):
        draft.score(crowded, ScoringSettings(context_len=200))

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow is a slow tokenizer"):
        Draft(draft.decoder, Slow())  # type: ignore[arg-type]
    bare = tmp_path / "bare"
    shutil.copytree(TINY_MODEL, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="no tokenizer"):
        Draft.load(bare)
    windows = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (bare / "config.json").write_text(json.dumps(json.loads((bare / "config.json").read_text()) | windows))
    with pytest.raises(ValueError, match="layers with sliding windows; a draft must see the whole text"):
        Draft.load(bare)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        Draft.load(TINY_MODEL, dtype="int8")  # type: ignore[arg-type]


def test_logits_that_are_not_finite_are_an_error() -> None:
    """Scores of such a draft would look like any others."""
    own = Draft.load(TINY_MODEL)
    embed = own.decoder.weights.embed
    embed.fill(embed.dense().index_fill(0, torch.tensor([100]), torch.nan))
    with pytest.raises(RuntimeError, match="the draft's logits are not finite"):
        token_scores(own.decoder, (*range(50, 120), 7), ScoringSettings())


def test_a_draft_is_read_and_decoded_by_the_looped_library(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := library_problem():
        pytest.skip(problem)
    assert isinstance(draft.decoder.weights.lm_head, PanelMatrix)
    made: list[LoopedDecode] = []

    def looped(parts: StepParts) -> LoopedDecode:
        made.append(LoopedDecode(parts))
        return made[0]

    monkeypatch.setattr(lookahead, "LoopedDecode", looped)
    read = draft.read(TEXT)
    scores, _ = draft.score(read, ScoringSettings())
    config = draft.decoder.config
    eager = Decoder.load(TINY_MODEL, config, "float32", "cpu", progress=False)
    assert len(made) == 1
    torch.testing.assert_close(
        scores, token_scores(eager, read.ids, ScoringSettings())[read.first : read.stop], rtol=1e-4, atol=1e-6
    )
    assert len(made) == 1  # plain weights decode eagerly


# Scores against the list-based program over transformers' layers, for two architectures with grouped heads.

NAMES = ("llama-gqa-tied", "qwen3", "llama-dynamic", "gpt-oss-full", "gemma2-full")


@pytest.fixture(scope="module", params=["eager", "looped"])
def drafts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Decoder]]:
    """By what multiplies and decodes: plain PyTorch, or the library of the looped executor."""
    if request.param == "looped" and (problem := library_problem()):
        pytest.skip(problem)
    make = make_matrix if request.param == "eager" else make_panels(load())
    found = {}
    for name in NAMES:
        model = make_model(name)
        folder = save(model, Path(tmp_path_factory.mktemp(name)))
        config = read_model_config(folder)
        found[name] = model, Decoder.load(folder, config, "float32", "cpu", progress=False, make=make)
    return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("name", [*NAMES[:2], "gpt-oss-full", "gemma2-full"])
@pytest.mark.parametrize("look_ahead", [0, 1, 8])
@pytest.mark.parametrize("length", [5, 70])
def test_scores_are_the_published_ones(drafts: Any, name: str, look_ahead: int, length: int) -> None:
    theirs, decoder = drafts[name]
    prompt = prompt_of(length)
    expected = scores_by_lists.token_scores(theirs, prompt, look_ahead=look_ahead, ends=decoder.config.eos_token_ids)
    scores = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_look_ahead_stops_where_the_draft_ends(drafts: Any) -> None:
    theirs, decoder = drafts["qwen3"]
    prompt = prompt_of(30)
    third = scores_by_lists.drawn_tokens(theirs, prompt, 8, ())[2]
    ending = Decoder(replace(decoder.config, eos_token_ids=(third,)), decoder.weights)
    expected = torch.tensor(scores_by_lists.token_scores(theirs, prompt, look_ahead=8, ends=(third,)))
    torch.testing.assert_close(token_scores(ending, prompt, ScoringSettings()), expected, rtol=1e-4, atol=1e-6)
    beyond = token_scores(ending, prompt, ScoringSettings(ignore_eos=True))
    whole = scores_by_lists.token_scores(theirs, prompt, look_ahead=8)
    torch.testing.assert_close(beyond, torch.tensor(whole), rtol=1e-4, atol=1e-6)


def test_passages_look_ahead_together_as_they_would_alone(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them ends after its third token, which the others do not draw; the last group is smaller."""
    theirs, decoder = drafts["qwen3"]
    passages = [prompt_of(30, seed) for seed in range(5)]
    third = scores_by_lists.drawn_tokens(theirs, passages[1], 8, ())[2]
    ending = Decoder(replace(decoder.config, eos_token_ids=(third,)), decoder.weights)
    drawn = [scores_by_lists.drawn_tokens(theirs, passage, 8, (third,)) for passage in passages]
    assert len(drawn[1]) == 3 and len(drawn[0]) == len(drawn[2]) == 8
    expected = [scores_by_lists.token_scores(theirs, passage, look_ahead=8, ends=(third,)) for passage in passages]
    for size in (1, 3):
        monkeypatch.setattr(draft, "num_passages", lambda kind, size=size: size)
        found = list(draft.scores_of_passages(ending, passages, ScoringSettings()))
        torch.testing.assert_close(torch.stack(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_dynamic_rope_counts_the_prompt(drafts: Any) -> None:
    """Where the angles depend on the length, every prompt token is rotated for the whole prompt."""
    theirs, decoder = drafts["llama-dynamic"]
    prompt = prompt_of(90)  # beyond the original window
    for look_ahead in (0, 1):
        expected = scores_by_lists.token_scores(theirs, prompt, look_ahead=look_ahead)
        scores = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("look_ahead", [0, 8])
def test_pieces_of_prefill_change_nothing(drafts: Any, look_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompt = drafts["qwen3"][1], prompt_of(50)
    whole = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
    for prefill_len in (1, 7, 48):
        monkeypatch.setattr(draft, "num_prefill_tokens", lambda kind, size=prefill_len: size)
        pieces = token_scores(decoder, prompt, ScoringSettings(look_ahead=look_ahead))
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


def test_chunks_of_keys_change_nothing() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(6, 4, 16), torch.randn(2, 100, 16)
    for first in (94, 99):
        whole = Importance(6, 100, torch.device("cpu"))
        whole.add(queries, keys, first)
        for chunk in (1, 5, 13, 64, 99):
            parts = Importance(6, 100, torch.device("cpu"))
            parts.add(queries, keys, first, chunk=chunk)
            torch.testing.assert_close(parts.best, whole.best)


def test_scores_are_deterministic(drafts: Any) -> None:
    decoder, prompt = drafts["qwen3"][1], prompt_of(60)
    first, second = (token_scores(decoder, prompt, ScoringSettings()) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_chunk_means(length: int) -> None:
    scores = torch.rand(length)
    expected = scores_by_lists.chunk_means(scores.tolist(), 32)
    torch.testing.assert_close(chunk_means(scores, 32), torch.tensor(expected))
