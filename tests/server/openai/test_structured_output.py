"""Structured answers and forced tool calls through the openai client, against the real engine and the tiny model.

What the tiny model says makes no sense; that it has the asked form shows that the grammar holds at every token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.tiny_server import tiny_server

HI: Any = [{"role": "user", "content": "Describe a colour as JSON."}]


class Shade(StrEnum):
    DARK = "dark"
    LIGHT = "light"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    channel: Literal["red", "green", "blue"]
    value: int = Field(ge=0, le=255)


class Colour(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern="^[a-z]{3,12}$")
    shade: Shade | None
    parts: list[Part] = Field(min_length=1, max_length=2)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
GET: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
STRICT: dict[str, Any] = {
    "type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": Colour.model_json_schema()}
}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(tool_parser="hermes") as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module", params=["hermes", "llama3_json"])
def caller(request: pytest.FixtureRequest, url: str) -> Iterator[openai.OpenAI]:
    """A client of a server that reads this format of calls."""
    if request.param == "hermes":
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        return
    with tiny_server(tool_parser=request.param) as own:
        yield openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0)


def arguments_of(call: Any) -> dict[str, Any]:
    """Checked against the function's schema, by hand."""
    assert call.type == "function" and call.id.startswith("call_")
    value: dict[str, Any] = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert value == {}
    else:
        assert call.function.name == "get_weather" and set(value) == {"city", "days"}
        assert value["city"] in ("Paris", "Rome") and value["days"] in range(1, 10)
    return value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_whole_and_streamed(client: openai.OpenAI, temperature: float) -> None:
    sent: Any = {"model": "tiny", "messages": HI, "temperature": temperature, "seed": 1, "response_format": STRICT}
    answer = client.chat.completions.create(**sent, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.message.content is not None
        Colour.model_validate_json(choice.message.content, strict=True)
    chunks = list(client.chat.completions.create(**sent, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_parse_gives_the_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Colour, temperature=1, seed=5)
    assert isinstance(answer.choices[0].message.parsed, Colour)
    with client.chat.completions.stream(model="tiny", messages=HI, response_format=Colour, seed=5) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Colour)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HI, response_format=Colour, max_tokens=5)


def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=300, seed=2,
        stop=["}"], extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_whole_and_streamed(caller: openai.OpenAI, choice: Any) -> None:
    sent: Any = {
        "model": "tiny", "messages": HI, "tools": [GET, NOW], "tool_choice": choice, "seed": 4,
        "parallel_tool_calls": False, "max_tokens": 300,
    }  # fmt: skip
    answer = caller.chat.completions.create(**sent).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert answer.message.tool_calls is not None and len(answer.message.tool_calls) == 1
    call: Any = answer.message.tool_calls[0]
    arguments_of(call)
    assert choice == "required" or call.function.name == "get_weather"

    chunks = list(caller.chat.completions.create(**sent, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].type == "function" and deltas[0].function
    assert deltas[0].function.name == call.function.name
    assert all(delta.index == 0 and (index == 0) == bool(delta.id) for index, delta in enumerate(deltas))
    pieces = [delta.function.arguments or "" for delta in deltas if delta.function]
    assert "".join(pieces) == call.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]

    with caller.chat.completions.stream(**sent) as stream:  # the helper that assembles a message
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.arguments == call.function.arguments


def test_several_calls_of_several_samples(caller: openai.OpenAI) -> None:
    answer = caller.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[GET, NOW],
        tool_choice="required",
        n=4,
        seed=1,
        max_tokens=250,
        temperature=1.0,
    )
    counts = []
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        is_cut = choice.finish_reason == "length"
        for call in calls[: len(calls) - is_cut]:
            arguments_of(call)
        counts.append(len(calls))
    assert min(counts) >= 1


def test_a_schema_or_calls(client: openai.OpenAI) -> None:
    """With both the answer is one of the two."""
    seen = set()
    for seed in range(4):
        choice = client.chat.completions.create(
            model="tiny", messages=HI, tools=[NOW], response_format=STRICT, parallel_tool_calls=False, seed=seed,  # type: ignore[arg-type]
            temperature=2.0,
        ).choices[0]  # fmt: skip
        if choice.finish_reason == "length":
            continue
        if choice.message.tool_calls:
            arguments_of(choice.message.tool_calls[0])
        else:
            Colour.model_validate_json(choice.message.content or "", strict=True)
        seen.add(choice.finish_reason)
    assert seen


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]  # fmt: skip
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[NOW], max_tokens=3)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    def param_of(**sent: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HI, **sent)
        return caught.value.param

    bad: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    assert param_of(tools=[bad], tool_choice="required") == "tools"
    assert param_of(tools=[NOW], tool_choice={"type": "function", "function": {"name": "g"}}) == "tool_choice"
    hangs = {"allOf": [{"type": "integer", "multipleOf": n} for n in (10007, 10009, 10037)]}
    sent = {"type": "json_schema", "json_schema": {"name": "x", "schema": hangs}}
    assert param_of(response_format=sent) == "response_format"
    assert client.chat.completions.create(model="tiny", messages=HI, max_tokens=1).choices


def test_side_by_side(url: str) -> None:
    """Bound and free requests together; the free one says what it says alone."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def ask(**sent: Any) -> Any:
                answer = await client.chat.completions.create(model="tiny", messages=HI, **sent)
                return answer.choices[0].message

            alone = await ask(temperature=0, max_tokens=40)
            free, bound, called = await asyncio.gather(
                ask(temperature=0, max_tokens=40),
                ask(response_format=STRICT, seed=1),
                ask(tools=[GET], tool_choice="required", parallel_tool_calls=False, seed=1),
            )
            assert free.content == alone.content
            Colour.model_validate_json(bound.content, strict=True)
            arguments_of(called.tool_calls[0])

    asyncio.run(run())


def test_the_example_of_the_documentation(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    block = text.split("\n## Structured answers\n")[1].split("```python\n")[1].split("```")[0]
    printed = "http://127.0.0.1:8000/v1"
    assert printed in block
    exec(compile(block.replace(printed, url), "docs/serving.md", "exec", dont_inherit=True), {"__name__": "example"})
    assert "name=" in capsys.readouterr().out
