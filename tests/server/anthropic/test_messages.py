"""Answers of /v1/messages, whole and event by event."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.fake_engine import ANSWER, FakeEngine, token_ids
from tests.server.templates import CALL, THOUGHT, named_events, template_client

GET: dict[str, Any] = {"name": "get", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
USAGE = {
    "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens", "output_tokens_details",
}  # fmt: skip

# Members that the API's documentation gives each event, beside its type.
MEMBERS = {
    "message_start": {"message"},
    "ping": set(),
    "content_block_start": {"index", "content_block"},
    "content_block_delta": {"index", "delta"},
    "content_block_stop": {"index"},
    "message_delta": {"delta", "usage", "snapstream"},
    "message_stop": set(),
}
DELTAS = {
    "text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature",
    "input_json_delta": "partial_json",
}  # fmt: skip


def ask(body: dict[str, Any], engine: FakeEngine | None = None) -> Any:
    async def run() -> Any:
        async with template_client(engine or FakeEngine(), tool_parser="hermes") as http:
            wish = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **body}
            return await http.post("/v1/messages", json=wish)

    return asyncio.run(run())


def whole(body: dict[str, Any], answer: str = ANSWER) -> dict[str, Any]:
    response = ask(body, FakeEngine(answer=answer))
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    assert set(data) == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "snapstream"
    }  # fmt: skip
    assert (data["type"], data["role"], data["model"]) == ("message", "assistant", "tiny")
    assert data["id"].startswith("msg_") and set(data["usage"]) == USAGE
    return data


def streamed(body: dict[str, Any], answer: str = ANSWER, engine: FakeEngine | None = None) -> list[dict[str, Any]]:
    response = ask({**body, "stream": True}, engine or FakeEngine(answer=answer))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text, end="")
    for event in events:
        if event["type"] != "error":
            assert set(event) == MEMBERS[event["type"]] | {"type"}
        if event["type"] == "content_block_delta":
            assert set(event["delta"]) == {"type", DELTAS[event["delta"]["type"]]}
    return events


def order(events: list[dict[str, Any]]) -> list[str]:
    """What happened, deltas of one kind as one."""
    names = [event["delta"]["type"] if "index" in event and "delta" in event else event["type"] for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


def block(*deltas: str) -> list[str]:
    return ["content_block_start", *deltas, "content_block_stop"]


TEXT, THINKING, TOOL = block("text_delta"), block("thinking_delta", "signature_delta"), block("input_json_delta")


@pytest.mark.parametrize(
    ("answer", "body", "blocks", "reason"),
    [
        (ANSWER, {}, TEXT, "end_turn"),
        (THOUGHT, {}, THINKING + TEXT, "end_turn"),
        (THOUGHT.split("Hello")[0] + CALL, {"tools": [GET]}, THINKING + TOOL, "tool_use"),
        ("So. " + CALL + CALL, {"tools": [GET]}, TEXT + TOOL + TOOL, "tool_use"),
        (CALL.replace('{"a": "wörld"}', '{"a": "x\ny\x01", b: oops,}'), {"tools": [GET]}, TOOL, "tool_use"),
        ("", {}, [], "end_turn"),
    ],
)
def test_the_order_of_events(answer: str, body: dict[str, Any], blocks: list[str], reason: str) -> None:
    events, message = streamed(body, answer), whole(body, answer)
    assert order(events) == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
    assert message["stop_reason"] == events[-2]["delta"]["stop_reason"] == reason
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == message["usage"]["input_tokens"] > 0
    assert events[-2]["usage"] == message["usage"]
    assert put_together(events) == [without_id(one) for one in message["content"]]


def without_id(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "id"}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as a client makes them of the events."""
    blocks: list[dict[str, Any]] = []
    pieces = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(without_id(event["content_block"]))
            pieces = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            name = DELTAS[event["delta"]["type"]]
            if name == "partial_json":
                pieces += event["delta"][name]
                blocks[-1]["input"] = json.loads(pieces) if pieces.endswith("}") else {}
            else:
                blocks[-1][name] += event["delta"][name]
    return blocks


def test_blocks_of_each_kind() -> None:
    thinking, text, use = whole({"tools": [GET]}, THOUGHT + CALL)["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Let me see.") and thinking["signature"]
    assert text == {"type": "text", "text": "Hello."}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get", {"a": "wörld"}) and use["id"]
    usage = whole({}, THOUGHT)["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


def test_why_an_answer_stopped() -> None:
    cut = whole({"max_tokens": 3})
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 3)
    stopped = whole({"stop_sequences": ["wör", "x"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wör")
    assert stopped["content"] == [{"type": "text", "text": "Hello "}]
    half = whole({"tools": [GET], "max_tokens": len(token_ids(CALL)) - 8}, CALL)
    assert half["stop_reason"] == "max_tokens" and isinstance(half["content"][0]["input"], dict)


def test_a_fault_in_a_stream_is_an_error_event() -> None:
    last = streamed({}, engine=FakeEngine(fail_after=3))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error" and last["error"]["message"]
    early = ask({"stream": True}, FakeEngine(fail_after=0))
    assert early.status_code == 503 and early.json()["error"]["type"] == "overloaded_error"
