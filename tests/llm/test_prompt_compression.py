"""``LLM(draft=...)``: a prompt is compressed, then prefilled, and the output says what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstream import LLM, PrefixStoreConfig, PromptCompression, PromptCompressor, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.spec_prefill.draft import Draft
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


def test_a_conversation_is_compressed_and_answered(tiny: LLM) -> None:
    found = document(tiny, 3000)
    messages = [{"role": "user", "content": found.prompt(found.questions[0])}]
    whole = tiny.chat(messages, GREEDY)[0]
    how = PromptCompression(max_tokens=700)
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
    streamed = list(tiny.stream(text, SHORT, prompt_compression=share))[-1]
    assert by_text.prompt_token_ids == streamed.prompt_token_ids and by_text.token_ids == streamed.token_ids


def test_short_prompts_are_left_alone(tiny: LLM) -> None:
    plain = tiny.generate("A short text.", SHORT)[0]
    output = tiny.generate("A short text.", SHORT, prompt_compression=PromptCompression(keep=0.25))[0]
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
    for wrong, words in (({}, "exactly one"), ({"keep": 2.0}, "keep is 2.0")):
        with pytest.raises(ValueError, match=words):
            PromptCompression(**wrong)  # type: ignore[arg-type]


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
        again = llm.chat(messages, SHORT, prompt_compression=how)[0]
        assert again.prompt_compression is not None and not again.prompt_compression.is_applied
        assert "tokens are in the prefix store" in again.prompt_compression.reason
        assert again.token_ids == whole.token_ids and again.cached_tokens > 1300
        limited = llm.chat(messages, SHORT, prompt_compression=PromptCompression(max_tokens=700))[0]
        assert (
            limited.prompt_compression is not None
            and limited.prompt_compression.is_applied
            and limited.prompt_compression.tokens_after <= 700
        )
