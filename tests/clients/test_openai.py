"""openai-python against a real server: what it answers is what the engine answers in-process."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.waiting import HANG_S, HTTP, until, until_async

HI: Any = [{"role": "user", "content": "hi"}]
PROMPTS = ["Once upon a time", "The report was signed by", "word " * 900, "A"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
EXTRA: Any = {"ignore_eos": True}


def client(server: ServerProcess, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **{"max_retries": 0, **options})


def gauges(server: ServerProcess) -> dict[str, float]:
    lines = [
        line
        for line in HTTP.get(f"{server.url}/metrics", timeout=HANG_S).text.splitlines()
        if line.startswith("snapstream:")
    ]
    return {line.split("{")[0].removeprefix("snapstream:"): float(line.rsplit(" ", 1)[1]) for line in lines}


def wait_until_at_rest(server: ServerProcess) -> None:
    def is_at_rest() -> bool:
        now = gauges(server)
        return not (now["num_requests_running"] or now["num_requests_waiting"] or now["rows_used"])

    until(is_at_rest)


@pytest.fixture(scope="module")
def want(llm: LLM) -> list[str]:
    return [output.text for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_the_engine(stream: bool, server: ServerProcess, want: list[str]) -> None:
    fields: Any = {"model": "tiny", "max_tokens": 24, "temperature": 0, "extra_body": EXTRA}
    with client(server) as api:
        for prompt, text in zip(PROMPTS, want, strict=True):
            if stream:
                chunks = list(api.completions.create(prompt=prompt, stream=True, **fields))
                assert "".join(chunk.choices[0].text for chunk in chunks) == text
                assert len(chunks) > 1 and chunks[-1].choices[0].finish_reason == "length"
            else:
                assert api.completions.create(prompt=prompt, **fields).choices[0].text == text
        if not stream:
            answer = api.completions.create(prompt=PROMPTS, **fields)
            assert [choice.text for choice in answer.choices] == want


def test_chat_is_that_of_the_engine(server: ServerProcess, llm: LLM) -> None:
    [output] = llm.chat(HI, SamplingParams(max_tokens=24, temperature=0.0))
    with client(server) as api:
        answer = api.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == output.text
        assert answer.usage is not None and answer.usage.prompt_tokens == len(output.prompt_token_ids)
        with api.chat.completions.stream(model="tiny", messages=HI, temperature=0, max_tokens=24) as stream:
            assert stream.get_final_completion().choices[0].message.content == output.text


def test_async_clients_side_by_side(server: ServerProcess, want: list[str]) -> None:
    async def one(api: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await api.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True, extra_body=EXTRA
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(one(api, prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(run()) == want * 4


def test_errors_have_their_own_exceptions(server: ServerProcess) -> None:
    with client(server) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            api.chat.completions.create(model="none", messages=HI)
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model="tiny", messages=HI, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            api.completions.create(model="tiny", prompt="word " * 40_000)
        assert long.value.code == "context_length_exceeded"


def test_a_timeout_and_an_abort_free_the_row(server: ServerProcess) -> None:
    endless: Any = {"model": "tiny", "max_tokens": 12_000, "temperature": 0, "extra_body": EXTRA}
    with client(server) as api:
        with pytest.raises(openai.APITimeoutError):
            api.with_options(timeout=0.3).completions.create(prompt="Once", **endless)
        wait_until_at_rest(server)
        stream = api.completions.create(prompt="Once", stream=True, **endless)
        next(stream)
        until(lambda: gauges(server)["rows_used"] == 1)  # reported ten times a second
        stream.close()
        wait_until_at_rest(server)

    async def cancelled() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            task = asyncio.create_task(api.completions.create(prompt="Once", **endless))
            await until_async(lambda: gauges(server)["rows_used"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    wait_until_at_rest(server)
