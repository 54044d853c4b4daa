"""/v1/chat/completions: shapes, frames, what reaches the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapstream.kv.selectors.snapkv import SnapKV
from tests.server.app_client import HI, client, frames, text_of
from tests.server.fake_engine import ANSWER, METADATA, FakeEngine, logprob_of, token_ids, tokenizer


def chat(engine: FakeEngine | None = None, **body: Any) -> Any:
    """(status, JSON) or, for a stream, (status, frames)."""

    async def run() -> Any:
        async with client(engine or FakeEngine()) as http:
            response = await http.post("/v1/chat/completions", json={"messages": HI, **body})
            if not body.get("stream") or response.status_code != 200:
                return response.status_code, response.json()
            assert response.headers["content-type"].startswith("text/event-stream")
            return response.status_code, frames(response.text)

    return asyncio.run(run())


def test_answer_in_one_piece() -> None:
    engine = FakeEngine()
    status, body = chat(engine, model="alias", temperature=0, seed=3, max_tokens=40)
    assert status == 200
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["created"] > 0
    assert body["model"] == "alias"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = tokenizer().apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    (request,) = engine.requests
    assert list(request.prompt_token_ids) == token_ids(prompt)
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0, 3, 40)
    num_prompt, num_new = len(token_ids(prompt)), len(token_ids(ANSWER)) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    engine = FakeEngine()
    chat(engine)
    (request,) = engine.requests
    assert request.sampling.max_tokens == METADATA.max_model_len - len(request.prompt_token_ids)
    assert request.sampling.temperature == 1.0


def test_stream_frames() -> None:
    status, chunks = chat(stream=True, stream_options={"include_usage": True})
    assert status == 200
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert text_of(chunks) == ANSWER
    *good, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(token_ids(ANSWER)) + 1
    deltas = [chunk["choices"][0]["delta"] for chunk in good]
    assert deltas[0] == {"role": "assistant", "content": "H"}  # the role costs no chunk of its own
    assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert all(delta["content"] for delta in deltas[:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in good] == [None] * (len(good) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in good)
    assert not any("error" in chunk for chunk in chunks)


def test_stream_without_usage_has_only_choices() -> None:
    _, chunks = chat(stream=True)
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


def test_running_usage_grows_to_the_total() -> None:
    _, chunks = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == len(token_ids(ANSWER)) + 1


def test_n_choices_each_have_a_role_and_an_end() -> None:
    _, body = chat(n=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 3 * (len(token_ids(ANSWER)) + 1)
    _, chunks = chat(n=3, stream=True)
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "stop"
        assert text_of(chunks, index) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream: bool) -> None:
    _, answer = chat(logprobs=True, top_logprobs=2, stream=stream)
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in answer] if stream else [
        answer["choices"][0]["logprobs"]["content"]
    ]  # fmt: skip
    entries = [entry for part in parts for entry in part]
    ids = [*token_ids(ANSWER), 2]
    assert [entry["logprob"] for entry in entries] == [logprob_of(token, 0).logprob for token in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == ANSWER
    assert entries[0]["token"] == "H" and entries[-1]["token"] == "<|end|>"
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -1.5]
    halves = [entry["token"] for entry in entries if entry["token"].startswith("bytes:")]
    assert halves[0] == "bytes:\\xc3" and len(set(halves)) == len(halves)


def test_stop_string_over_token_borders_does_not_leak() -> None:
    _, body = chat(stop=["😀, good"])
    assert body["choices"][0]["message"]["content"] == "Hello wörld "
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "😀, good")
    _, chunks = chat(stop="😀, good", stream=True)
    assert text_of(chunks) == "Hello wörld "


def test_finish_reason_length() -> None:
    _, body = chat(max_completion_tokens=2, max_tokens=30)  # the newer name wins
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 2


def test_budget_is_applied_and_told() -> None:
    engine = FakeEngine()
    content = "word " * 100
    _, body = chat(engine, messages=[{"role": "user", "content": content}], kv_cache={"budget": 64})
    (request,) = engine.requests
    assert request.budget is not None and request.budget.capacity == 64
    report = body["snapstream"]
    assert report["kv_cache"]["budget"] == 64 and report["prompt_compression"] == "off"
    (prompt,) = report["prompts"]
    assert prompt["compression"]["kept_tokens"] == 64
    assert prompt["compression"]["prompt_tokens"] == body["usage"]["prompt_tokens"] > 64  # the logical count
    assert prompt["timings"]["prefill_ms"] == 2.0


def test_selector_is_applied_and_told() -> None:
    engine = FakeEngine()
    _, body = chat(engine, kv_cache={"selector": "snapkv"})
    (request,) = engine.requests
    assert request.selector == SnapKV() and request.budget is None
    assert body["snapstream"]["kv_cache"]["selector"] == "snapkv"
    _, chunks = chat(engine, stream=True)
    assert engine.requests[1].selector is None
    assert chunks[-1]["snapstream"]["kv_cache"]["selector"] == "snapkv"  # the server's own


@pytest.mark.parametrize(("ring_tokens", "has_outgrown"), [(3, True), (30, False)])
def test_an_answer_that_outgrew_its_ring_says_so(ring_tokens: int, has_outgrown: bool) -> None:
    for options in ({}, {"n": 2}):
        _, body = chat(FakeEngine(ring_tokens=ring_tokens), max_tokens=4, **options)
        (prompt,) = body["snapstream"]["prompts"]
        assert prompt["compression"]["ring_tokens"] == ring_tokens
        assert prompt["compression"]["has_outgrown_ring"] is has_outgrown


def test_the_server_budget_is_told_where_none_was_asked_for() -> None:
    engine = FakeEngine()
    _, chunks = chat(engine, stream=True)
    assert engine.requests[0].budget is None
    assert chunks[-1]["snapstream"]["kv_cache"]["budget"] == 128
    assert not any("snapstream" in chunk for chunk in chunks[:-1])


def test_parts_roles_and_continuation() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(
        engine,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}],
        add_generation_prompt=False,
    )
    text = tokenizer().decode(engine.requests[0].prompt_token_ids)
    assert text == "<|begin|><|system|> be brief<|end|><|user|> one\ntwo<|end|>"
    chat(engine, messages=[*HI, {"role": "assistant", "content": "Well, I"}], continue_final_message=True)
    assert tokenizer().decode(engine.requests[1].prompt_token_ids).endswith("<|assistant|> Well, I")


@pytest.mark.parametrize(
    "message", [{"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}]
)
def test_a_refusal_is_the_text_of_its_message(message: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert chat(engine, messages=[*HI, {"role": "assistant", **message}, *HI])[0] == 200
    assert "<|assistant|> No.<|end|>" in tokenizer().decode(engine.requests[0].prompt_token_ids)


def test_special_tokens_are_added_to_a_conversation_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    kind = type(tokenizer())
    encode = kind.__call__

    def spy(self: Any, text: str, *, add_special_tokens: bool, **options: Any) -> Any:
        if text != ANSWER:  # which the fake engine asks for
            given.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens, **options)

    monkeypatch.setattr(kind, "__call__", spy)
    chat()
    chat(add_special_tokens=False)
    chat(add_special_tokens=True)
    assert given == [False, False, True]
