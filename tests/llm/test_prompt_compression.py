"""``LLM(draft=...)``: a prompt is compressed, then prefilled, and the output says what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, PrefixStoreConfig, PromptCompression, PromptCompressor, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.spec_prefill.draft import Draft
from snapstream.spec_prefill.protection import Candidate
from snapstream.spec_prefill.request_compressor import body_places, token_ranges
from snapstream.spec_prefill.settings import Protection
from snapstream.startup import measure

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def compressor() -> PromptCompressor:
    return PromptCompressor(TINY_MODEL, protection=Protection(threshold=200, last_user_limit=100, tail=40))


@pytest.fixture(scope="module")
def tiny(compressor: PromptCompressor) -> Iterator[LLM]:
    with LLM(TINY_MODEL, budget=512, max_rows=2, max_model_len=4096, progress=False, draft=compressor) as llm:
        yield llm


def document(llm: LLM, tokens: int):  # type: ignore[no-untyped-def]
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    return make_document(
        family="single_number",
        seed=5,
        count_tokens=lambda text: len(tokenizer(text)["input_ids"]),
        target_tokens=tokens,
        num_questions=1,
    )


@pytest.mark.parametrize("hand_over", ["text", "ids"])
def test_a_conversation_is_compressed_and_answered(tiny: LLM, hand_over: str) -> None:
    found = document(tiny, 3000)
    messages = [{"role": "user", "content": found.prompt(found.questions[0])}]
    whole = tiny.chat(messages, GREEDY)[0]
    how = PromptCompression(max_tokens=700, hand_over=hand_over)  # type: ignore[arg-type]
    output = tiny.chat(messages, GREEDY, prompt_compression=how)[0]
    assert found.questions[0].is_answered_by(output.text)
    assert (
        output.prompt_compression is not None
        and output.prompt_compression.is_applied
        and output.prompt_compression.draft_ms > 0
    )
    assert output.num_prompt_tokens == output.prompt_compression.tokens_before == len(whole.prompt_token_ids)
    assert output.prompt_compression.tokens_after == len(output.prompt_token_ids) <= 700
    assert output.prompt_compression.dropped_tokens == len(whole.prompt_token_ids) - len(output.prompt_token_ids)
    assert output.compression is not None and output.compression.prompt_tokens == len(output.prompt_token_ids)
    assert output.compression.evicted_tokens > 0  # compressed, then compressed
    # Template and question are as they were.
    assert output.prompt_token_ids[:2] == whole.prompt_token_ids[:2]
    assert output.prompt_token_ids[-8:] == whole.prompt_token_ids[-8:]
    assert whole.prompt_compression is None and whole.num_prompt_tokens == len(whole.prompt_token_ids)


def test_plain_prompts_and_streams(tiny: LLM) -> None:
    text = document(tiny, 600).text
    ids = list(tiny.tokenizer(text)["input_ids"])  # type: ignore[misc]
    share = PromptCompression(keep=0.25)
    by_text = tiny.generate(text, SHORT, prompt_compression=share)[0]
    assert by_text.prompt is not None and len(by_text.prompt) < len(text) / 2
    assert by_text.prompt_compression is not None and by_text.prompt_compression.tokens_before == len(ids)
    kept = PromptCompression(keep=0.25, hand_over="ids")
    by_ids = tiny.generate([ids], SHORT, prompt_compression=kept)[0]
    streamed = list(tiny.stream(ids, SHORT, prompt_compression=kept))[-1]
    assert by_ids.prompt_token_ids == streamed.prompt_token_ids and by_ids.prompt_token_ids[-1] == ids[-1]
    assert len(by_ids.prompt_token_ids) == pytest.approx(len(ids) / 4, abs=33)
    assert by_ids.token_ids == streamed.token_ids


def test_short_prompts_are_left_alone(tiny: LLM) -> None:
    plain = tiny.generate("A short text.", SHORT)[0]
    for hand_over in ("text", "ids"):
        how = PromptCompression(keep=0.25, hand_over=hand_over)  # type: ignore[arg-type]
        output = tiny.generate("A short text.", SHORT, prompt_compression=how)[0]
        assert output.token_ids == plain.token_ids and output.prompt_token_ids == plain.prompt_token_ids
        assert (
            output.prompt_compression is not None
            and not output.prompt_compression.is_applied
            and "threshold" in output.prompt_compression.reason
        )
        assert output.prompt_compression.dropped_tokens == 0


def test_a_draft_of_another_family_hands_over_text(checkpoint: Path, compressor: PromptCompressor) -> None:
    with LLM(checkpoint, budget="full", max_rows=1, max_model_len=512, progress=False, draft=compressor) as llm:
        text = "The mill was closed. " * 60
        with pytest.raises(ValueError, match="the limit is 512"):
            llm.generate(text, SHORT)
        how = PromptCompression(max_tokens=300)
        output = llm.generate(text, SHORT, prompt_compression=how)[0]
        assert (
            output.prompt_compression is not None
            and output.prompt_compression.tokens_before == 1260
            and output.prompt_compression.tokens_after <= 300
        )
        with pytest.raises(ValueError, match="needs a draft with the target's tokenizer"):
            llm.generate(text, SHORT, prompt_compression=PromptCompression(keep=0.2, hand_over="ids"))


def test_the_draft_is_there_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    load = Draft.load
    monkeypatch.setattr(Draft, "load", lambda *given, **named: seen.append("draft") or load(*given, **named))
    monkeypatch.setattr(measure, "device_memory", lambda device: seen.append("memory") or (2**30, 2**30))
    with LLM(TINY_MODEL, budget=64, max_rows="auto", max_model_len=512, heads="none", progress=False, draft=TINY_MODEL):
        assert seen == ["memory", "draft", "memory"]  # what was wrong without it is refused before it is read


def test_refusals(tiny: LLM, llm: LLM) -> None:
    with pytest.raises(ValueError, match="make the LLM with draft="):
        llm.generate("x", SHORT, prompt_compression=PromptCompression(keep=0.5))
    with pytest.raises(ValueError, match="prompt is token ids"):
        tiny.generate([5, 6], SHORT, prompt_compression=PromptCompression(keep=0.5))
    for wrong, words in (({}, "exactly one"), ({"keep": 2.0}, "keep is 2.0"), ({"keep": 0.5, "hand_over": "x"}, "'x'"),
                         ({"keep": 0.5, "query": "q", "hand_over": "ids"}, "query needs")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            PromptCompression(**wrong)  # type: ignore[arg-type]


def test_only_tokens_wholly_inside_a_body_may_go() -> None:
    offsets = [(0, 3), (3, 5), (5, 5), (5, 8), (8, 12), (12, 14)]
    assert token_ranges(offsets, [(3, 12)]) == [(1, 5)]
    assert token_ranges(offsets, [(4, 12), (12, 13)]) == [(3, 5)]


def test_a_document_that_the_system_message_has_too_is_cut_in_its_own_place(tiny: LLM) -> None:
    found = document(tiny, 900)
    system, user = f"Rules. {found.text}", f"{found.text}\n\n{found.questions[0].text}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    how = PromptCompression(keep=0.2, hand_over="ids", threshold=0)
    output = tiny.chat(messages, SHORT, prompt_compression=how)[0]
    assert output.prompt_compression is not None and output.prompt_compression.is_applied
    assert system in tiny.tokenizer.decode(output.prompt_token_ids)  # type: ignore[union-attr]


def places(contents: list[str], template: Callable[[str], str] = str) -> list[str]:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"<u>{template(message['content'])}" for message in messages)

    messages = [{"content": content} for content in contents]
    bodies = [Candidate(text=text, start=0, end=len(text), message=i) for i, text in enumerate(contents) if "o" in text]
    text = render(messages)
    return [f"{start}:{text[start:stop]}" for start, stop in body_places(text, messages, bodies, render)]


def test_bodies_are_found_where_the_template_puts_them() -> None:
    assert places(["one", "a", "one"]) == ["3:one", "13:one"]
    assert places([" one\n", "two "], str.strip) == ["3:one", "9:two"]
    assert places(["one", "two"], lambda text: text[:2]) == []  # altered: protected
    assert places(["one", "two"], lambda text: text * 2) == []
    assert places(["one", "two"], str.upper) == []


def test_what_is_stored_is_not_compressed(compressor: PromptCompressor) -> None:
    """Look up first, compress second: a conversation whose beginning is stored stays whole; a ceiling still holds."""
    store = PrefixStoreConfig(num_bytes=2**28, block_len=64, min_tokens=256)
    with LLM(
        TINY_MODEL, budget=512, max_rows=1, max_model_len=4096, progress=False, draft=compressor, prefix_store=store,
        chunk_len=64,
    ) as llm:  # fmt: skip
        found = document(llm, 1500)
        messages = [{"role": "user", "content": found.prompt(found.questions[0])}]
        how = PromptCompression(keep=0.3)
        cold = llm.chat(messages, SHORT, prompt_compression=how)[0]
        assert cold.prompt_compression is not None and cold.prompt_compression.is_applied, "nothing was stored yet"
        whole = llm.chat(messages, SHORT)[0]
        assert whole.cached_tokens < 400
        for hand_over in ("text", "ids"):
            again = llm.chat(messages, SHORT, prompt_compression=replace(how, hand_over=hand_over))[0]  # type: ignore[arg-type]
            assert again.prompt_compression is not None and not again.prompt_compression.is_applied
            assert "tokens are in the prefix store" in again.prompt_compression.reason
            assert again.token_ids == whole.token_ids and again.cached_tokens > 1300
        limited = llm.chat(messages, SHORT, prompt_compression=PromptCompression(max_tokens=700))[0]
        assert (
            limited.prompt_compression is not None
            and limited.prompt_compression.is_applied
            and limited.prompt_compression.tokens_after <= 700
        )
