"""Around the API: models, versions, request ids, the tokenizer, metrics, the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest

from snapstream.config import KVBudget
from snapstream.server.http.lifecycle import TextFormatter
from snapstream.server.openai.protocol import ChatBody
from snapstream.types import QueueFull
from tests.server.app_client import CHAT, HI, TEXT, call, client, error_of, frames, samples
from tests.server.app_server import Running, running_server
from tests.server.fake_engine import ANSWER, METADATA, FakeEngine, logprob_of, token_ids, tokenizer
from tests.waiting import HANG_S, until

# The real openai client, sync and async, against the app on uvicorn and a loopback port (with the fake engine).

OPENAI_CLIENT_HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server("key") as running:
        yield running


def test_chat_and_completions(server: Running) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model="tiny",
        messages=OPENAI_CLIENT_HI,
        n=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"kv_cache": {"budget": 64}},
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * (len(token_ids(ANSWER)) + 1)
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert logprobs.content[0].logprob == logprob_of(token_ids(ANSWER)[0], 0).logprob
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.model_extra is not None and answer.model_extra["snapstream"]["kv_cache"]["budget"] == 64

    text = client.completions.create(model="tiny", prompt="Hi", max_tokens=50, stop=" wörld", echo=True, logprobs=1)
    assert text.choices[0].text == "HiHello"
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.text_offset is not None and text.choices[0].logprobs.text_offset[0] == 0
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_streams(server: Running) -> None:
    client = server.client()
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=OPENAI_CLIENT_HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    pieces = list(client.completions.create(model="tiny", prompt="Hi", stream=True, max_tokens=50))
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    with client.chat.completions.stream(
        model="tiny", messages=OPENAI_CLIENT_HI
    ) as stream:  # the helper that assembles a message
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_async_clients_side_by_side(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=OPENAI_CLIENT_HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=HANG_S) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(run()) == [ANSWER] * 8


def test_errors_have_their_own_exceptions(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=OPENAI_CLIENT_HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=OPENAI_CLIENT_HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="word " * 900)
    assert long.value.code == "context_length_exceeded"
    server.engine.refuse = QueueFull("full")
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="tiny", prompt="Hi")
    assert full.value.response.headers["retry-after"] == "1"
    server.engine.refuse = None
    server.engine.is_ready = False
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="tiny", prompt="Hi")
    assert down.value.status_code == 503


def test_an_error_in_mid_stream_raises(server: Running) -> None:
    server.engine.fail_after = 3
    seen = []
    with pytest.raises(openai.APIError, match="engine process ended"):
        for chunk in server.client().chat.completions.create(model="tiny", messages=OPENAI_CLIENT_HI, stream=True):
            seen.append(chunk)
    assert len(seen) == 3


def test_leaving_and_timing_out_free_the_row(server: Running) -> None:
    server.engine.hang_after = 2
    client = server.client()
    stream = client.chat.completions.create(model="tiny", messages=OPENAI_CLIENT_HI, stream=True)
    next(stream)
    assert server.engine.num_running == 1
    stream.close()
    until(lambda: server.engine.num_running == 0)
    seconds = 0.5
    while len(server.engine.requests) == 1:  # until one has come so far before it is given up
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=seconds).chat.completions.create(model="tiny", messages=OPENAI_CLIENT_HI)
        seconds *= 2
    until(lambda: len(server.engine.aborted) == 2 and server.engine.num_running == 0)


# Fields for those who run a server: priority and fingerprint.


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": ["a", "b"]})])
def test_a_priority_reaches_the_engine(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert call(path, {**body, "priority": -3}, engine=engine).status_code == 200
    assert {request.priority for request in engine.requests} == {-3}
    assert "priority" in ChatBody.model_fields
    assert error_of(call(path, {**body, "priority": 101}), 400)["param"] == "priority"
    assert error_of(call(path, {**body, "priority": "high"}), 400)["param"] == "priority"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "a"})])
def test_every_answer_and_chunk_has_the_fingerprint(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            whole = (await http.post(path, json=body)).json()
            chunks = frames((await http.post(path, json={**body, "stream": True})).text)
            assert {part["system_fingerprint"] for part in (whole, *chunks)} == {METADATA.fingerprint}

    asyncio.run(run())


def test_a_fingerprint_tells_engines_apart() -> None:
    other = replace(METADATA, engine=replace(METADATA.engine, budget=KVBudget.of(64)))
    assert METADATA.fingerprint == replace(METADATA, created=0).fingerprint
    assert len({METADATA.fingerprint, other.fingerprint, replace(METADATA, names=("b",)).fingerprint}) == 3


def test_models_version_and_request_id() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            models = (await http.get("/v1/models")).json()
            assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["tiny", "alias"]
            one = (await http.get("/v1/models/alias")).json()
            assert (one["id"], one["object"], one["max_model_len"]) == ("alias", "model", 512)
            assert (one["type"], one["display_name"]) == ("model", "alias")  # Anthropic's members
            created = datetime.fromisoformat(one["created_at"])
            assert created.timestamp() == one["created"] and one["created_at"].endswith("Z")
            assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "tiny", "alias")
            assert (await http.get("/version")).json()["version"]
            body = {"messages": HI}
            response = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"
            response = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "a b"})
            assert response.headers["x-request-id"] in response.json()["id"]
            for path in ("/nothing", "/health", "/v1/models/none"):
                response = await http.get(path, headers={"X-Request-Id": "mine-2"})
                assert response.headers.get_list("x-request-id") == ["mine-2"]
                assert (await http.get(path, headers={"X-Request-Id": "x" * 129})).headers["x-request-id"] != "x" * 129

    asyncio.run(run())


def test_tokenizer_endpoints() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            response = await http.post("/tokenize", json={"prompt": "Hello wörld", "return_token_strs": True})
            body = response.json()
            ids = token_ids("Hello wörld")
            assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
            assert body["token_strs"][0] == "H"
            assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "Hello wörld"}
            body = (await http.post("/tokenize", json={"messages": HI})).json()
            assert tokenizer().decode(body["tokens"]) == "<|begin|><|user|> hi<|end|><|assistant|>"
            info = (await http.get("/tokenizer_info")).json()
            assert info["eos_token"] == "<|end|>" and "messages" in info["chat_template"]
            for bad in ({"tokens": [99999]}, {"tokens": [-1]}, {"tokens": "x"}, {}):
                assert (await http.post("/detokenize", json=bad)).status_code == 400

    asyncio.run(run())


def test_metrics_under_both_names() -> None:
    async def run() -> tuple[dict[str, float], dict[str, float]]:
        async with client(FakeEngine()) as http:
            before = samples((await http.get("/metrics")).text)
            await http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3})
            await http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
            return before, samples((await http.get("/metrics")).text)

    before, after = asyncio.run(run())
    assert before.keys() == after.keys()  # every series is there from the start
    for prefix in ("vllm:", "snapstream:"):
        label = '{model_name="tiny"}'
        assert after[f"{prefix}num_requests_running{label}"] == 0
        assert after[f"{prefix}num_requests_waiting{label}"] == 0
        assert after[f"{prefix}kv_cache_usage_perc{label}"] == 0
        assert after[f"{prefix}generation_tokens_total{label}"] > 6
        assert after[prefix + 'request_success_total{finished_reason="length",model_name="tiny"}'] == 2
        assert after[prefix + 'request_success_total{finished_reason="stop",model_name="tiny"}'] == 1
        for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                          "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                          "request_generation_tokens"):  # fmt: skip
            assert after[f"{prefix}{histogram}_count{label}"] == 3, histogram
        assert after[f"{prefix}inter_token_latency_seconds_count{label}"] > 4
        assert f"{prefix}prompt_tokens_total{label}" in after
        assert after[f"{prefix}request_queue_time_seconds_sum{label}"] == pytest.approx(0.003)
    ours = ("rows_used", "rows_free", "evicted_tokens_total", "compressions_total", "compression_seconds_total",
            "prompt_tokens_dropped_total", "engine_restarts_total")  # fmt: skip
    assert all(f'snapstream:{name}{{model_name="tiny"}}' in after for name in ours)
    assert not any("_created" in name for name in after)


@pytest.mark.parametrize("stream", [False, True])
def test_every_request_leaves_one_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def line(engine: FakeEngine, **body: Any) -> str:
        async def run() -> None:
            async with client(engine) as http:
                headers = {"X-Request-Id": "mine"}
                await http.post("/v1/completions", json={"prompt": "a", "stream": stream, **body}, headers=headers)

        caplog.clear()
        asyncio.run(run())
        (found,) = [line for line in map(TextFormatter().format, caplog.records) if "request=mine " in line]
        return found

    num_prompt = len(token_ids("a"))
    fields = f"prompt_tokens={num_prompt} dropped_tokens=0 cached_tokens=0 diverged_at=- kept_tokens={num_prompt} "
    fields += "completion_tokens=3 queue_ms=1.0 ttft_ms="
    assert f"status=200 end=length {fields}" in line(FakeEngine(), max_tokens=3)
    status, end = (200, "engine_unavailable") if stream else (503, "-")
    assert f"status={status} end={end} prompt_tokens={num_prompt} " in line(FakeEngine(fail_after=2))
    refused = line(FakeEngine(), temperature=-1)
    fields = "dropped_tokens=0 cached_tokens=0 diverged_at=- kept_tokens=0 completion_tokens=0 queue_ms=- ttft_ms=- ms="
    assert f"status=400 end=- prompt_tokens=0 {fields}" in refused


def test_many_log_probabilities_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(num_samples: int) -> int:
        async with client(FakeEngine(answer=30 * "word ")) as http:
            prompts, count = http.server.prompts, 0
            offload = prompts.offload

            async def counted(work: Any) -> Any:
                nonlocal count
                count += 1
                return await offload(work)

            monkeypatch.setattr(prompts, "offload", counted)
            body = {"messages": HI, "n": num_samples, "logprobs": True, "top_logprobs": 15}
            response = await http.post("/v1/chat/completions", json=body)
            assert len(response.json()["choices"]) == num_samples
            return count

    assert asyncio.run(run(1)) == 0
    assert asyncio.run(run(4)) == 1


# /tokenize takes a prompt as the endpoint does that it is counted for: the same fields, the same refusals.

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOLD = "{{ tools | length if tools else 'none' }}"


def post(path: str, *bodies: Any, **settings: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with client(FakeEngine(), **settings) as http:
            return [await http.post(path, json=body) for body in bodies]

    return asyncio.run(run())


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    # What only the answer would need is known: a whole request may be sent to be counted.
    chat = {"messages": HI, "shoe_size": 44, "max_tokens": 9, "stream_options": {"include_usage": True}}
    text = {"prompt": "a", "hat_size": 58, "return_token_strs": True, "logprobs": 1}
    assert [answer.status_code for answer in post("/tokenize", chat, text, chat, text)] == [200] * 4
    assert [answer.status_code for answer in post("/detokenize", {"tokens": [5], "glove_size": 8})] == [200]
    logged = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert [line.split("'")[1] for line in logged] == ["shoe_size", "hat_size", "glove_size"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HI, "functions": [{}]},
        {"messages": HI, "documents": [{}]},
        {"messages": HI, "chat_template": "x"},
        {"messages": HI, "tools": TOOLS},  # the tiny model's template has no place for them
        {"messages": HI, "tools": TOOLS, "tool_choice": "required"},
        {"messages": HI, "tools": [{"type": "robot"}]},
        {"messages": HI, "tool_choice": "x"},
        {"prompt": "a", "truncate_prompt_tokens": 3},
        {"prompt": "a", "tools": TOOLS},
    ],
)
def test_what_the_endpoint_refuses_is_refused_here(body: dict[str, Any]) -> None:
    [refused] = post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    [answer] = post("/tokenize", body)
    assert answer.status_code == refused.status_code == 400
    assert answer.json() == refused.json()


def test_tools_are_counted_where_the_template_is_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [dropped] = post("/tokenize", {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    assert dropped.json()["tokens"] == post("/tokenize", {"messages": HI})[0].json()["tokens"]
    monkeypatch.setattr(tokenizer(), "chat_template", TOLD)
    for choice, expected in ((None, "1"), ("auto", "1"), ("none", "none")):
        [answer] = post("/tokenize", {"messages": HI, "tools": TOOLS, "tool_choice": choice})
        assert tokenizer().decode(answer.json()["tokens"]) == expected
