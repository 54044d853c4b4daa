"""Whole conversations of any Unicode through drafts and targets of any two tokenizers: what may change, and how."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.assets.documents import Document, make_document
from snapstream.spec_prefill.compressor import PromptCompressor, StickyCompressor, TokenCounter
from snapstream.spec_prefill.draft import Draft
from snapstream.spec_prefill.protection import head_end, tail_start
from snapstream.spec_prefill.settings import ChunkSettings, PromptCompression, Protection, ScoringSettings
from tests.unit.spec_prefill.test_spans import PIECES
from tests.unit.spec_prefill.tokenizers import byte_tokenizer, word_tokenizer

CUT = "\ue000cut\ue000"  # of a private character, which no text here has
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
SPEAKERS = ["system", "developer", "user", "assistant"]
TARGETS = {"bytes": byte_tokenizer(), "words": word_tokenizer()}

words = st.one_of(
    st.lists(st.sampled_from((*PIECES, "\n\n", "quiet river ", "stone 42. ")), min_size=1, max_size=40).map("".join),
    st.text(alphabet=st.characters(exclude_categories=("Cs", "Co")), min_size=1, max_size=80),
)
contents = st.one_of(
    words,
    st.lists(
        st.one_of(
            words.map(lambda text: {"type": "text", "text": text}),
            st.just({"type": "image_url", "image_url": {"url": "data:,x"}}),
        ),
        min_size=1,
        max_size=3,
    ),
)
messages_of_any_kind = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(SPEAKERS), "content": contents}),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.just("c1"), "content": words}),
        st.just(
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}]}
        ),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def drafts(draft: Draft) -> dict[str, Draft]:
    return {"words": draft, "bytes": Draft(draft.decoder, byte_tokenizer())}


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or [] if part["type"] == "text"]


def without_texts(message: dict[str, Any]) -> dict[str, Any]:
    """All of a message but the words that may be cut."""
    content = message["content"]
    if isinstance(content, list):
        content = [{**part, "text": ""} if part["type"] == "text" else part for part in content]
    return {**message, "content": "" if isinstance(content, str) else content}


def is_in_order(pieces: list[str], source: str) -> bool:
    place = 0
    for piece in pieces:
        found = source.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


def protected(messages: list[dict[str, Any]], rules: Protection, own: Draft) -> set[int]:
    """Messages that must come out as they went in, said anew."""
    tools = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    found = {i for i, message in enumerate(messages) if message["role"] in ("system", "developer")}
    found |= set(tools[max(0, len(tools) - rules.recent_tools) :])
    found |= {len(messages) - 1} if messages[-1]["role"] == "assistant" else set()
    for i, message in enumerate(messages):
        most = rules.last_user_limit if users and i == users[-1] else rules.min_message - 1
        if all(own.count_tokens(text) <= most for text in texts_of(message)):
            found.add(i)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=messages_of_any_kind,
    repeats=st.integers(1, 6),
    reader=st.sampled_from(["words", "bytes"]),
    target=st.sampled_from(list(TARGETS)),
    amount=st.one_of(st.sampled_from([0.1, 0.5]), st.integers(20, 400)),
    rules=st.builds(
        Protection, threshold=st.just(0), recent_tools=st.integers(0, 2), min_message=st.integers(0, 40),
        last_user_limit=st.integers(0, 60), head=st.integers(0, 30), tail=st.integers(0, 40),
    ),
    chunk_len=st.integers(1, 12),
)  # fmt: skip
def test_only_what_may_change_changes_and_only_by_leaving_out(
    drafts: dict[str, Draft], messages: list[dict[str, Any]], repeats: int, reader: str, target: str,
    amount: float | int, rules: Protection, chunk_len: int,
) -> None:  # fmt: skip
    messages = [
        {**m, "content": m["content"] * repeats if isinstance(m["content"], str) else m["content"]} for m in messages
    ]
    own = drafts[reader]
    compressor = PromptCompressor(
        own,
        scoring=ScoringSettings(look_ahead=0),
        chunks=ChunkSettings(chunk_len=chunk_len, delimiter=CUT),
        protection=rules,
    )
    how = {"max_tokens": amount} if isinstance(amount, int) else {"keep": amount}
    count = TokenCounter(TARGETS[target])
    try:
        result = compressor.compress(messages, target_tokenizer=TARGETS[target], tools=TOOLS, **how)  # type: ignore[arg-type]
    except ValueError as error:
        assert isinstance(amount, int) and f"max_tokens is {amount}" in str(error)
        return
    assert result.messages is not None
    if isinstance(amount, int):
        assert count.messages(result.messages, TOOLS) <= amount
    assert result.report.tokens_after == count.messages(result.messages, TOOLS)
    assert [without_texts(m) for m in result.messages] == [without_texts(m) for m in messages]
    for i in protected(messages, rules, own):
        assert result.messages[i] == messages[i]
    for before, after in zip(messages, result.messages, strict=True):
        for old, new in zip(texts_of(before), texts_of(after), strict=True):
            assert is_in_order([piece for piece in new.split(CUT) if piece], old)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last = texts_of(messages[users[-1]]) if users else []
    if last and result.report.is_applied:
        old, new = last[-1], texts_of(result.messages[users[-1]])[-1]
        assert new.endswith(old[tail_start(old, rules.tail, own.count_tokens) :])
        assert new.startswith(old[: head_end(old, rules.head, own.count_tokens)])


# Sticky cuts: a conversation that goes on begins as it was cut before, and nobody else's cuts are found.

KEPT = PromptCompression(keep=0.3, sticky=True)
RULES = Protection(threshold=200, last_user_limit=100, min_message=60, head=16, tail=64)


@pytest.fixture(scope="module")
def compressor() -> PromptCompressor:
    return PromptCompressor(TINY_DRAFT_MODEL, protection=RULES)


@pytest.fixture(scope="module")
def document(compressor: PromptCompressor) -> Document:
    return make_document(
        family="multi_number", seed="sticky", count_tokens=compressor.draft.count_tokens, target_tokens=600,
        num_questions=3,
    )  # fmt: skip


def turns(document: Document, count: int) -> list[dict[str, Any]]:
    """A conversation that ends with question number ``count``."""
    first, *later = document.questions
    messages = [{"role": "user", "content": document.prompt(first)}]
    for before, question in zip(document.questions[: count - 1], later, strict=False):
        messages += [{"role": "assistant", "content": before.answer}, {"role": "user", "content": question.text}]
    return messages


def cut(
    sticky: StickyCompressor, messages: list[dict[str, Any]], how: PromptCompression = KEPT, scope: str = ""
) -> Any:
    result = sticky.compress(messages, how, None, scope=scope)
    return list(result.messages or ()), result.report


def test_a_later_turn_begins_as_it_was_cut(compressor: PromptCompressor, document: Document) -> None:
    sticky = StickyCompressor(compressor)
    (first,), report = cut(sticky, turns(document, 1))
    assert report.is_applied and len(first["content"]) < len(turns(document, 1)[0]["content"])
    for number in (2, 3):
        messages, report = cut(sticky, turns(document, number))
        assert messages[0] == first and messages[1:] == turns(document, number)[1:]
        assert report.tokens_before > report.tokens_after and report.draft_ms == 0
    anew = compressor.compress(turns(document, 3), keep=0.3).messages
    assert anew is not None and anew[0] != first, "or this shows nothing"


def test_cuts_are_those_of_a_conversation_its_settings_and_its_callers(
    compressor: PromptCompressor, document: Document
) -> None:
    sticky = StickyCompressor(compressor)
    (first,), _ = cut(sticky, turns(document, 1))
    anew = compressor.compress(turns(document, 2), keep=0.3).messages
    assert anew is not None and anew[0] != first
    assert cut(sticky, turns(document, 2), scope="another caller")[0] == list(anew)
    other = PromptCompression(keep=0.5, sticky=True)
    assert cut(sticky, turns(document, 2), other)[0] == list(
        compressor.compress(turns(document, 2), keep=0.5).messages or ()
    )
    edited = turns(document, 2)
    edited[0]["content"] += " "
    assert cut(sticky, edited)[0][0]["content"].rstrip() != first["content"]


def test_a_message_that_is_sent_twice_is_cut_alike(compressor: PromptCompressor, document: Document) -> None:
    sticky = StickyCompressor(compressor)
    once, twice = cut(sticky, turns(document, 1)), cut(sticky, turns(document, 1))
    assert once[0] == twice[0] and twice[1].is_applied


def test_tool_outputs_are_cut_when_they_are_no_longer_recent(compressor: PromptCompressor, document: Document) -> None:
    sticky = StickyCompressor(compressor)
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


def test_a_ceiling_holds_whatever_was_cut_before(compressor: PromptCompressor, document: Document) -> None:
    sticky, how = StickyCompressor(compressor), PromptCompression(max_tokens=320, sticky=True)
    counter = TokenCounter(compressor.draft.tokenizer)
    for number in (1, 2, 3):
        messages, report = cut(sticky, turns(document, number), how)
        assert counter.messages(messages, None) <= 320 and report.tokens_after <= 320


def test_old_conversations_are_forgotten(compressor: PromptCompressor, document: Document) -> None:
    sticky = StickyCompressor(compressor, max_conversations=1)
    (first,), _ = cut(sticky, turns(document, 1))
    cut(sticky, turns(document, 1), scope="other")
    assert cut(sticky, turns(document, 2))[0][0] != first


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sticky": 1}, "sticky is 1; it must be true or false"),
        ({"sticky": True, "query": "what?"}, "sticky takes no query"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptCompression(keep=0.5, **fields)
