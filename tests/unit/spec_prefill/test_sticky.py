"""Sticky cuts: a conversation that goes on begins as it was cut before, and nobody else's cuts are found."""

from __future__ import annotations

from typing import Any

import pytest

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.assets.documents import Document, make_document
from snapstream.spec_prefill.counting import TokenCounter
from snapstream.spec_prefill.settings import PromptCompression, Protection
from snapstream.spec_prefill.sticky import StickyTrimmer
from snapstream.spec_prefill.text_trimmer import TextTrimmer

KEPT = PromptCompression(keep=0.3, sticky=True)
RULES = Protection(threshold=200, last_user_limit=100, min_message=60, head=16, tail=64)


@pytest.fixture(scope="module")
def trimmer() -> TextTrimmer:
    return TextTrimmer(TINY_DRAFT_MODEL, protection=RULES)


@pytest.fixture(scope="module")
def document(trimmer: TextTrimmer) -> Document:
    return make_document(
        family="multi_number", seed="sticky", count_tokens=trimmer.draft.count_tokens, target_tokens=600,
        num_questions=3,
    )  # fmt: skip


def turns(document: Document, count: int) -> list[dict[str, Any]]:
    """A conversation that ends with question number ``count``."""
    first, *later = document.questions
    messages = [{"role": "user", "content": document.prompt(first)}]
    for before, question in zip(document.questions[: count - 1], later, strict=False):
        messages += [{"role": "assistant", "content": before.answer}, {"role": "user", "content": question.text}]
    return messages


def cut(sticky: StickyTrimmer, messages: list[dict[str, Any]], how: PromptCompression = KEPT, scope: str = "") -> Any:
    result = sticky.trim(messages, how, None, scope=scope)
    return list(result.messages or ()), result.report


def test_a_later_turn_begins_as_it_was_cut(trimmer: TextTrimmer, document: Document) -> None:
    sticky = StickyTrimmer(trimmer)
    (first,), report = cut(sticky, turns(document, 1))
    assert report.is_applied and len(first["content"]) < len(turns(document, 1)[0]["content"])
    for number in (2, 3):
        messages, report = cut(sticky, turns(document, number))
        assert messages[0] == first and messages[1:] == turns(document, number)[1:]
        assert report.tokens_before > report.tokens_after and report.draft_ms == 0
    anew = trimmer.trim(turns(document, 3), keep=0.3).messages
    assert anew is not None and anew[0] != first, "or this shows nothing"


def test_cuts_are_those_of_a_conversation_its_settings_and_its_callers(
    trimmer: TextTrimmer, document: Document
) -> None:
    sticky = StickyTrimmer(trimmer)
    (first,), _ = cut(sticky, turns(document, 1))
    anew = trimmer.trim(turns(document, 2), keep=0.3).messages
    assert anew is not None and anew[0] != first
    assert cut(sticky, turns(document, 2), scope="another caller")[0] == list(anew)
    other = PromptCompression(keep=0.5, sticky=True)
    assert cut(sticky, turns(document, 2), other)[0] == list(trimmer.trim(turns(document, 2), keep=0.5).messages or ())
    edited = turns(document, 2)
    edited[0]["content"] += " "
    assert cut(sticky, edited)[0][0]["content"].rstrip() != first["content"]


def test_a_message_that_is_sent_twice_is_cut_alike(trimmer: TextTrimmer, document: Document) -> None:
    sticky = StickyTrimmer(trimmer)
    once, twice = cut(sticky, turns(document, 1)), cut(sticky, turns(document, 1))
    assert once[0] == twice[0] and twice[1].is_applied


def test_tool_outputs_are_cut_when_they_are_no_longer_recent(trimmer: TextTrimmer, document: Document) -> None:
    sticky = StickyTrimmer(trimmer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What does the page say?"}]
    call = {"role": "assistant", "content": "", "tool_calls": []}
    long, short = document.text, "nothing new"
    messages += [call, {"role": "tool", "tool_call_id": "1", "content": long}]
    messages += [call, {"role": "tool", "tool_call_id": "2", "content": long[::-1]}]
    first, _ = cut(sticky, messages)
    assert first[4]["content"] == long[::-1] and len(first[2]["content"]) < len(long)
    messages += [call, {"role": "tool", "tool_call_id": "3", "content": short}]
    second, _ = cut(sticky, messages)
    assert second[:4] == first[:4] and len(second[4]["content"]) < len(long) and second[6]["content"] == short
    messages += [{"role": "assistant", "content": "It says so."}, {"role": "user", "content": "Sure?"}]
    assert cut(sticky, messages)[0][:7] == second


def test_a_ceiling_holds_whatever_was_cut_before(trimmer: TextTrimmer, document: Document) -> None:
    sticky, how = StickyTrimmer(trimmer), PromptCompression(max_tokens=320, sticky=True)
    counter = TokenCounter(trimmer.draft.tokenizer)
    for number in (1, 2, 3):
        messages, report = cut(sticky, turns(document, number), how)
        assert counter.messages(messages, None) <= 320 and report.tokens_after <= 320


def test_old_conversations_are_forgotten(trimmer: TextTrimmer, document: Document) -> None:
    sticky = StickyTrimmer(trimmer, max_conversations=1)
    (first,), _ = cut(sticky, turns(document, 1))
    cut(sticky, turns(document, 1), scope="other")
    assert cut(sticky, turns(document, 2))[0][0] != first


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sticky": 1}, "sticky is 1; it must be true or false"),
        ({"sticky": True, "hand_over": "ids"}, "sticky needs hand_over='text'"),
        ({"sticky": True, "query": "what?"}, "no query"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptCompression(keep=0.5, **fields)
