"""``PromptCompressor`` on texts and conversations: amounts, ceilings, protection, cache, refusals."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.spec_prefill.compressor import PromptCompressor, Scorer, TokenCounter
from snapstream.spec_prefill.draft import Draft
from snapstream.spec_prefill.protection import Candidate
from snapstream.spec_prefill.settings import ChunkSettings, Protection, ScoringSettings
from tests.unit.spec_prefill.test_spans import texts
from tests.unit.spec_prefill.tokenizers import byte_tokenizer, word_tokenizer

# ``TokenCounter``: a conversation costs what the target's own template makes of it.


def test_developer_is_counted_by_the_name_that_the_template_knows() -> None:
    developer = [{"role": "developer", "content": "abc"}]
    body = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert TokenCounter(byte_tokenizer(body)).messages(developer) == len("system")
    assert TokenCounter(byte_tokenizer(body + "{# developer #}")).messages(developer) == len("developer")


def test_counts_are_those_of_the_template() -> None:
    template = "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{% for m in messages %}{{ m.content }};{% endfor %}"
    counter = TokenCounter(byte_tokenizer(template))
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": None}]
    assert counter.messages(messages) == len("abc;;")
    assert counter.messages(messages, [{"name": "search"}]) == len("<search>abc;;")
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    assert counter.messages(parts) == len("ab\nc;")  # as the engine joins them
    parts[0]["content"][1]["type"] = "input_text"  # type: ignore[index]
    assert counter.messages(parts) == len("ab\nc;")
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert counter.messages(picture) > 0  # an upstream's template may know it
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    bare = TokenCounter(byte_tokenizer(None)).messages([*messages, {"role": "assistant", "tool_calls": calls}])
    assert bare > len("abc") + len(str(calls)) / 2


TARGETS = {"bytes": byte_tokenizer(), "words": word_tokenizer()}
CHEAP = ScoringSettings(look_ahead=0)


@pytest.fixture(scope="module")
def compressor(draft: Draft) -> PromptCompressor:
    return PromptCompressor(draft, scoring=CHEAP)


def document(draft: Draft, tokens: int = 1500, seed: int = 0) -> tuple[str, str, str]:
    """Text, the sentence that matters, and the question about it."""
    found = make_document(
        family="single_number", seed=seed, count_tokens=draft.count_tokens, target_tokens=tokens, num_questions=1
    )
    (start, end), question = found.questions[0].spans[0], found.questions[0]
    return found.text, found.text[start:end], question.text


def test_a_share_keeps_so_many_chunks(draft: Draft) -> None:
    text, needle, question = document(draft)
    result = PromptCompressor(draft).compress(text, keep=0.25, query=question)
    report = result.report
    (own,) = report.texts
    assert report.is_applied and report.reason == "" and report.counted_with == "draft"
    assert sum(chunk.is_kept for chunk in own.chunks) == math.ceil(len(own.chunks) * 0.25)
    worst = min(chunk.score for chunk in own.chunks if chunk.is_kept)
    assert all(chunk.score <= worst for chunk in own.chunks if not chunk.is_kept)
    assert result.text is not None and result.messages is None and question not in result.text
    assert needle in result.text
    assert result.text.split("\n[...]\n") == [text[a:b] for a, b in own.spans]
    assert report.tokens_after == TokenCounter(draft.tokenizer).text(result.text)
    assert 0.2 < report.ratio < 0.4 and report.draft_ms > 0
    assert report.draft_tokens_after == pytest.approx(report.draft_tokens_before / 4, abs=32)


def test_ties_go_to_the_earlier_chunk(draft: Draft) -> None:
    """A text of one repeated token without positions to tell its chunks apart would be cut from the end."""
    from snapstream.spec_prefill.compressor import keep_ceiling, keep_share

    assert keep_share([[0.5] * 4], 0.5) == [{0, 1}]
    assert keep_share([[0.1, 0.9, 0.9, 0.2]], 0.25) == [{1}]
    assert keep_share([[0.5] * 30], 0.1) == [{0, 1, 2}]
    chosen = keep_ceiling([[0.5] * 4, [0.1, 0.2]], 3, lambda choice: sum(map(len, choice)))
    assert chosen == [{0, 1}, {1}]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=texts,
    repeats=st.integers(1, 12),
    target=st.sampled_from(list(TARGETS)),
    ceiling=st.integers(1, 200),
    chunk_len=st.integers(1, 12),
)
def test_the_ceiling_is_never_exceeded(
    draft: Draft, text: str, repeats: int, target: str, ceiling: int, chunk_len: int
) -> None:
    whole = text * repeats
    own = PromptCompressor(draft, scoring=ScoringSettings(look_ahead=0, context_len=150, overlap=10),
                           chunks=ChunkSettings(chunk_len=chunk_len))  # fmt: skip
    count = TokenCounter(TARGETS[target]).text
    try:
        result = own.compress(whole, max_tokens=ceiling, target_tokenizer=TARGETS[target])
    except ValueError as error:
        assert f"max_tokens is {ceiling}" in str(error)
        return
    assert result.text is not None
    assert count(result.text) <= ceiling and result.report.tokens_after == count(result.text)
    if not result.report.is_applied:
        assert result.text == whole


def conversation(draft: Draft) -> list[dict[str, Any]]:
    outputs = [document(draft, 600, seed)[0] for seed in range(3)]
    calls = [[{"id": str(i), "type": "function", "function": {"name": "read", "arguments": "{}"}}] for i in range(3)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief. " * 200},
        {"role": "user", "content": "Find the code."},
    ]
    for call, output in zip(calls, outputs, strict=True):
        messages.append({"role": "assistant", "content": None, "tool_calls": call})
        messages.append({"role": "tool", "tool_call_id": call[0]["id"], "content": output})
    return messages


def test_only_aged_tool_outputs_of_an_agent_are_cut(draft: Draft, compressor: PromptCompressor) -> None:
    messages = conversation(draft)
    before = [dict(message) for message in messages]
    result = compressor.compress(messages, keep=0.25)
    assert result.messages is not None and messages == before
    changed = [i for i, (old, new) in enumerate(zip(messages, result.messages, strict=True)) if old != new]
    assert changed == [3, 5]  # not the newest output
    for i in changed:
        assert {k: v for k, v in result.messages[i].items() if k != "content"} == {
            k: v for k, v in messages[i].items() if k != "content"
        }
    assert [text.message for text in result.report.texts] == [3, 5]


def test_outputs_stay_cached_as_the_conversation_grows(draft: Draft) -> None:
    own = PromptCompressor(draft, scoring=CHEAP, cache_size=3)
    messages = conversation(draft)
    first = own.compress(messages, keep=0.25)
    assert first.report.num_cached == 0
    grown = [*messages, {"role": "assistant", "content": "Not there."}, {"role": "user", "content": "Look again."},
             {"role": "tool", "tool_call_id": "9", "content": "nothing"}]  # fmt: skip
    second = own.compress(grown, keep=0.25)
    assert second.report.num_cached == 2 and len(second.report.texts) == 3
    assert first.messages is not None and second.messages is not None
    assert [second.messages[i] for i in (3, 5)] == [first.messages[i] for i in (3, 5)]
    again = own.compress(messages, keep=0.5)  # another amount needs no new scores
    assert again.report.num_cached == 2 and again.report.draft_ms == 0
    own.compress(document(draft, 1500, 9)[0], keep=0.5)  # a fourth text pushes out the one not used for longest
    assert own.compress(grown, keep=0.5).report.num_cached == 2
    assert PromptCompressor(draft, scoring=CHEAP, cache_size=0).compress(messages, keep=0.5).report.num_cached == 0


def test_the_request_in_a_long_last_message_stays(draft: Draft, compressor: PromptCompressor) -> None:
    text, needle, question = document(draft)
    content = f"Read this report.\n\n{text}\n\n{question}\n\nAnswer in one word."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    result = PromptCompressor(draft).compress(messages, max_tokens=300, target_tokenizer=TINY_MODEL)
    assert result.messages is not None
    shorter = result.messages[1]["content"]
    assert shorter.startswith("Read this report.\n\n") and shorter.endswith(f"{question}\n\nAnswer in one word.")
    assert needle in shorter
    assert result.messages[0] == messages[0]
    assert result.report.counted_with == "target" and result.report.tokens_after <= 300


def test_content_parts_are_cut_one_by_one(draft: Draft, compressor: PromptCompressor) -> None:
    text, _, question = document(draft)
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    content = [{"type": "text", "text": text}, image, {"type": "text", "text": question}]
    result = compressor.compress([{"role": "user", "content": content}], keep=0.2)
    assert result.messages is not None
    shorter = result.messages[0]["content"]
    assert shorter[1:] == content[1:] and len(shorter[0]["text"]) < len(text) / 2
    assert content[0]["text"] == text


def test_what_is_protected(draft: Draft, compressor: PromptCompressor) -> None:
    text, _, _ = document(draft)
    protected = [
        [{"role": "system", "content": text}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": text}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}],  # an answer to go on with
        [{"role": "user", "content": "hi"}, {"role": "tool", "content": text}],
    ]
    for messages in protected:
        result = compressor.compress(messages, keep=0.1)
        assert result.messages == tuple(messages)
        assert (result.report.is_applied, result.report.reason) == (False, "everything is protected")
    only_tools = PromptCompressor(draft, scoring=CHEAP, protection=Protection(roles=("tool",)))
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "hi"}]
    assert not only_tools.compress(messages, keep=0.1).report.is_applied
    assert compressor.compress(messages, keep=0.1).report.is_applied


def test_when_nothing_is_done(draft: Draft, compressor: PromptCompressor) -> None:
    text, _, _ = document(draft, 500)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"keep": 0.5}, "below the threshold of 1,024"),
        ({"keep": 1.0, "threshold": 0}, "keep is 1"),
        ({"max_tokens": 600}, "fit the ceiling of 600"),
    ]
    for options, reason in cases:
        result = compressor.compress(text, **options)
        assert result.text == text and not result.report.is_applied
        assert reason in result.report.reason and result.report.ratio == 1
    # So little is cut that the delimiter costs more.
    wordy = PromptCompressor(draft, scoring=CHEAP, chunks=ChunkSettings(delimiter="\n" + "- " * 99 + "\n", chunk_len=1))
    words = " ".join(f"word {number}" for number in range(40))
    result = wordy.compress(words, keep=0.5, threshold=0)
    assert "no fewer" in result.report.reason and result.text == words


def test_refusals(draft: Draft, compressor: PromptCompressor) -> None:
    text = document(draft)[0]
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (text, {"keep": 0.0}, "keep is 0.0; it must be in"),
        (text, {"keep": 1.5}, "keep is 1.5"),
        (text, {"keep": float("nan")}, "keep is nan"),
        (text, {}, "exactly one"),
        (text, {"keep": 0.5, "max_tokens": 5}, "exactly one"),
        (text, {"max_tokens": 0}, "max_tokens is 0"),
        (text, {"keep": 0.5, "threshold": -5}, "threshold is -5"),
        (text, {"keep": 0.5, "target_tokenizer": "/nowhere"}, "/nowhere is not a folder"),
    ]
    for prompt, options, words in cases:
        with pytest.raises(ValueError, match=words):
            compressor.compress(prompt, **options)
    with pytest.raises(ValueError, match="max_tokens is 100; what must stay takes 1[0-9]{3} tokens"):
        compressor.compress(messages, max_tokens=100)
    with pytest.raises(ValueError, match="look_ahead is -1"):
        ScoringSettings(look_ahead=-1)
    with pytest.raises(ValueError, match="roles has 'system'"):
        Protection(roles=("system",))
    with pytest.raises(ValueError, match="delimiter is empty"):
        ChunkSettings(delimiter="")


def test_threads_and_repeats_give_the_same(draft: Draft) -> None:
    text, _, question = document(draft, 600)
    once = PromptCompressor(draft, cache_size=0)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(once.compress, text, keep=0.2, query=question, threshold=0) for _ in range(6)]
        results = [job.result() for job in jobs]
    assert len({result.text for result in results}) == 1
    assert len({tuple(chunk.score for chunk in result.report.texts[0].chunks) for result in results}) == 1


def test_code_is_cut_at_definitions(draft: Draft) -> None:
    source = "".join(f"def function_{i}(x):\n    y = x + {i}\n    return y * {i}\n\n\n" for i in range(80))
    own = PromptCompressor(draft, scoring=CHEAP, chunks=ChunkSettings(mode="auto"))
    result = own.compress(source, keep=0.1, query="What does function_33 return?", threshold=0)
    assert result.text is not None and result.report.texts[0].is_code
    for piece in result.text.split("# omitted\n"):
        assert piece.lstrip("\n").startswith("def function_")


def test_what_a_score_depends_on_is_in_its_key(draft: Draft) -> None:
    text = document(draft, 600)[0]
    own = PromptCompressor(draft, scoring=CHEAP)
    first = own.compress(text, keep=0.5, query="Where is the mill?", threshold=0)
    assert own.compress(text, keep=0.2, query="Where is the mill?", threshold=0).report.num_cached == 1
    other = own.compress(text, keep=0.5, query="What was the code?", threshold=0)
    assert other.report.num_cached == 0 and other.report.texts[0].chunks != first.report.texts[0].chunks
    assert own.compress(text, keep=0.5, threshold=0).report.num_cached == 0
    candidate = Candidate(text=text, start=0, end=len(text))
    scorer = Scorer(draft, CHEAP, ChunkSettings(), 2)
    assert [scorer.score(candidate).num_passages for _ in range(2)] == [1, 0], "0: from the cache"
    assert scorer.score(replace(candidate, end=len(text) - 1)).num_passages == 1
