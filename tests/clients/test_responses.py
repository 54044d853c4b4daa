"""openai-python's Responses API: sync, async, the stream helper, parsed answers and tools."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.clients.scripted import call, scripted_server

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function", "name": "add", "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}  # fmt: skip


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_answers_are_those_of_the_engine(server: ServerProcess, llm: LLM) -> None:
    [output] = llm.chat(HI, SamplingParams(max_tokens=24, temperature=0.0))
    with client(server.url) as api:
        response = api.responses.create(model="tiny", input="hi", temperature=0, max_output_tokens=24)
        assert response.output_text == output.text
        assert response.usage is not None and response.usage.input_tokens == len(output.prompt_token_ids)
        text = ""
        for event in api.responses.create(model="tiny", input=HI, temperature=0, max_output_tokens=24, stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == output.text
        with api.responses.stream(model="tiny", input="hi", temperature=0, max_output_tokens=24) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == output.text


def test_async_streams_side_by_side(server: ServerProcess) -> None:
    async def one(api: openai.AsyncOpenAI, text: str) -> str:
        async with api.responses.stream(model="tiny", input=text, temperature=0, max_output_tokens=16) as stream:
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(one(api, text) for text in ("hi", "Tell me about it.") * 3))

    texts = asyncio.run(run())
    assert texts == texts[:2] * 3 and all(texts)


def test_errors_name_the_field(server: ServerProcess) -> None:
    with client(server.url) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            api.responses.create(model="tiny", input="hi", tools=[{"type": "web_search"}])
        assert bad.value.param == "tools"
        with pytest.raises(openai.BadRequestError) as unstored:
            api.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert unstored.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve("resp_1")


def test_a_tool_is_called_and_its_output_sent_back() -> None:
    with scripted_server(["<think>\nAdd.\n</think>\n\n" + call("add", '{"a": 1, "b": 2}'), "It is 3."]) as running:
        with client(running.url) as api:
            first = api.responses.create(model="tiny", input="1 + 2?", tools=[TOOL])
            assert [item.type for item in first.output] == ["reasoning", "function_call"]
            made: Any = first.output[1]
            assert (made.name, made.arguments) == ("add", '{"a": 1, "b": 2}')
            items: Any = [{"role": "user", "content": "1 + 2?"}, *first.output]
            items.append({"type": "function_call_output", "call_id": made.call_id, "output": "3"})
            second = api.responses.create(model="tiny", input=items, tools=[TOOL])
        assert second.output_text == "It is 3."
        told = running.engine.prompts[1]
        assert '<think>Add.</think> add({"a": 1, "b": 2})' in told and f"tool: 3 for {made.call_id}" in told


def test_answers_are_parsed_and_events_of_calls_put_together() -> None:
    class Colour(BaseModel):
        name: str

    with scripted_server(['{"name":"blue"}', "Look. " + call("add", '{"a": 1, "b": 2}')]) as running:
        with client(running.url) as api:
            assert api.responses.parse(model="tiny", input="?", text_format=Colour).output_parsed == Colour(name="blue")
            with api.responses.stream(model="tiny", input="?", tools=[TOOL]) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_response()
        assert final.output_text == "Look. " and final.output[1].type == "function_call"
        assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
        assert running.engine.requests[0].sampling.grammar is not None


def test_stored_responses_go_on_and_are_deleted() -> None:
    with scripted_server(["One.", "Two."], responses_store=4) as running, client(running.url) as api:
        first = api.responses.create(model="tiny", input="first")
        second = api.responses.create(model="tiny", input="second", previous_response_id=first.id)
        assert second.output_text == "Two." and "assistant: One.\nuser: second" in running.engine.prompts[1]
        assert api.responses.retrieve(second.id).output_text == "Two."
        api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(second.id)
