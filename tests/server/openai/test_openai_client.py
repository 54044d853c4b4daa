"""The real openai client, sync and async, against the app on uvicorn and a loopback port (with the fake engine)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from snapstream.engine.validate import QueueFull
from tests.server.fake_engine import ANSWER, logprob_of, token_ids
from tests.server.front_server import Running, running_server
from tests.waiting import HANG_S, until

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server("key") as running:
        yield running


def test_chat_and_completions(server: Running) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=2, extra_body={"kv_cache": {"budget": 64}}
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
        client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    pieces = list(client.completions.create(model="tiny", prompt="Hi", stream=True, max_tokens=50))
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    with client.chat.completions.stream(model="tiny", messages=HI) as stream:  # the helper that assembles a message
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_async_clients_side_by_side(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
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
        client.chat.completions.create(model="none", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
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
        for chunk in server.client().chat.completions.create(model="tiny", messages=HI, stream=True):
            seen.append(chunk)
    assert len(seen) == 3


def test_leaving_and_timing_out_free_the_row(server: Running) -> None:
    server.engine.hang_after = 2
    client = server.client()
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    next(stream)
    assert server.engine.num_running == 1
    stream.close()
    until(lambda: server.engine.num_running == 0)
    seconds = 0.5
    while len(server.engine.requests) == 1:  # until one has come so far before it is given up
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=seconds).chat.completions.create(model="tiny", messages=HI)
        seconds *= 2
    until(lambda: len(server.engine.aborted) == 2 and server.engine.num_running == 0)
