"""How a draft reads: the text found again inside a template, passages, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.assets import TINY_MODEL
from snapstream.spec_prefill.draft import Draft, passages_of
from snapstream.spec_prefill.lookahead import token_scores
from snapstream.spec_prefill.settings import ScoringSettings
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
    reader = Draft(draft.decoder, tokenizer, "")
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
    with pytest.raises(ValueError, match="200 tokens, 8 of them ahead; this text has [0-9]+"):
        draft.score(read, ScoringSettings(context_len=200, long_texts="refuse"))
    with pytest.raises(ValueError, match="context_len is 20000; the draft reads at most 16384"):
        draft.score(read, ScoringSettings(context_len=20000))
    crowded = draft.read(TEXT, after="why " * 300, as_chat=True)
    with pytest.raises(ValueError, match="leave no room among the 200 that the draft reads"):
        draft.score(crowded, ScoringSettings(context_len=200))

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow is a slow tokenizer"):
        Draft(draft.decoder, Slow(), "")  # type: ignore[arg-type]
    bare = tmp_path / "bare"
    shutil.copytree(TINY_MODEL, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="no tokenizer"):
        Draft.load(bare)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        Draft.load(TINY_MODEL, dtype="int8")  # type: ignore[arg-type]


def test_the_digest_follows_the_checkpoint(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY_MODEL, copy)
    first = Draft.load(copy).digest
    assert Draft.load(copy).digest == first
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert Draft.load(copy).digest != first


@pytest.mark.parametrize("keys", ["all_layers", "one_layer"])
def test_logits_that_are_not_finite_are_an_error(keys: Any) -> None:
    """Scores of such a draft would look like any others."""
    own = Draft.load(TINY_MODEL)
    own.decoder.weights.embed.dense()[100] = torch.nan
    with pytest.raises(RuntimeError, match="the draft's logits are not finite"):
        token_scores(own.decoder, (*range(50, 120), 7), ScoringSettings(keys=keys))
