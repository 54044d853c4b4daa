"""Tool calls that a model makes of its own accord, read out of scripted answers, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, tokenizer
from tests.server.front_client import HI, client, frames

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("get", "put")
]
GET = '<tool_call>\n{"name": "get", "arguments": {"a": "wörld 😀"}}\n</tool_call>'
PUT = '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get", "arguments": oops}\n</tool_call>'


def ask(answer: str, stream: bool = False, **body: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(FakeEngine(answer=answer), tool_parser="hermes") as http:
            wish = {"messages": HI, "tools": TOOLS, "stream": stream, **body}
            return await http.post("/v1/chat/completions", json=wish)

    response = asyncio.run(run())
    assert response.status_code == 200, response.text
    return response


def whole(answer: str, **body: Any) -> tuple[dict[str, Any], str]:
    choice = ask(answer, **body).json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def streamed(answer: str, **body: Any) -> tuple[dict[str, Any], str]:
    """The deltas put together as the API says."""
    message: dict[str, Any] = {"content": None}
    ends = []
    for number, chunk in enumerate(frames(ask(answer, stream=True, **body).text)):
        choice = chunk["choices"][0]
        delta = choice["delta"]
        assert ("role" in delta) == (number == 0)
        assert delta.get("content") or delta.get("tool_calls") or choice["finish_reason"], "a chunk says something"
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_") and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"]:
            ends.append(choice["finish_reason"])
    assert len(ends) == 1
    return message, ends[0]


def bare(message: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    return message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


A = '{"a": "wörld 😀"}'


@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        ("no call < here", "no call < here", [], "stop"),
        (GET, None, [("get", A)], "tool_calls"),
        ("I look. " + GET, "I look. ", [("get", A)], "tool_calls"),
        (GET + "\n" + PUT, None, [("get", A), ("put", "{}")], "tool_calls"),
        ("<think>\nso\n</think>\n\n" + PUT, "<think>\nso\n</think>\n\n", [("put", "{}")], "tool_calls"),
        (BROKEN, BROKEN, [], "stop"),
        (BROKEN.replace("get", "nobody"), BROKEN.replace("get", "nobody"), [], "stop"),
    ],
)
def test_calls_whole_and_streamed(answer: str, content: str | None, calls: list[tuple[str, str]], reason: str) -> None:
    for message, end in (whole(answer), streamed(answer)):
        assert (bare(message), end) == ((content, calls), reason)


def test_arguments_come_in_pieces() -> None:
    pieces = [
        call["function"]["arguments"]
        for chunk in frames(ask(GET, stream=True).text)
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"a": "wörld 😀"}


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    for message, end in (whole(GET + PUT, parallel_tool_calls=False), streamed(GET + PUT, parallel_tool_calls=False)):
        assert (bare(message), end) == ((None, [("get", A)]), "tool_calls")


def test_a_call_that_is_cut_is_no_whole_one() -> None:
    num_tokens = len(tokenizer()(GET, add_special_tokens=False)["input_ids"])
    message, end = whole(GET, max_tokens=num_tokens - 8)
    assert end == "length"
    assert bare(message)[1][0][0] == "get"


def test_calls_are_text_where_they_were_not_asked_for() -> None:
    for body in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        assert whole(GET, **body) == ({"role": "assistant", "content": GET, "refusal": None}, "stop")
        assert streamed(GET, **body) == ({"content": GET}, "stop")


def test_every_choice_has_calls_of_its_own() -> None:
    choices = ask(GET, n=3).json()["choices"]
    assert [bare(choice["message"])[1] for choice in choices] == [[("get", A)]] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_logprobs_of_a_call_are_all_there() -> None:
    listed = ask(GET, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    chunks = frames(ask(GET, stream=True, logprobs=True).text)
    streamed_ones = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed_ones == listed and len(listed) > 10


def test_the_grammar_reaches_the_engine() -> None:
    async def run(**body: Any) -> Any:
        engine = FakeEngine()
        async with client(engine, tool_parser="hermes") as http:
            assert (await http.post("/v1/chat/completions", json={"messages": HI, **body})).status_code == 200
        return engine.requests[0].sampling.grammar

    async def main() -> None:
        assert await run() is None
        assert await run(tools=TOOLS) is None
        assert await run(response_format={"type": "text"}) is None
        assert (await run(response_format={"type": "json_object"})).kind == "json_schema"
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
        assert (await run(response_format=schema)).strict is False
        forced = await run(tools=TOOLS, tool_choice="required")
        assert forced.kind == "lark" and "answer" not in forced.text
        assert "answer" in (await run(tools=TOOLS, response_format=schema)).text
        named = await run(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "put"}})
        assert "put" in named.text and "get" not in named.text

    asyncio.run(main())
