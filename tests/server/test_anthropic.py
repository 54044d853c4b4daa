"""Answers of /v1/messages, whole and event by event; what of a request reaches the model, what is counted, and what is
refused in Anthropic's form.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.app_client import AppClient, client
from tests.server.fake_engine import ANSWER, FakeEngine, token_ids
from tests.server.templates import CALL, TELLING, THOUGHT, named_events, prompt_of

HI = [{"role": "user", "content": "hi"}]
GET: dict[str, Any] = {"name": "get", "description": "gets", "input_schema": {"type": "object", "properties": {}}}
PUT = {**GET, "name": "put"}
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(number: int, name: str = "get") -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"a": number}}


def result(number: int, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, **more}


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"system": "Be brief."}, ["system: Be brief.", "user: hi"]),
    (
        {"system": [text(HEADER), text("You are X.", cache_control={"type": "ephemeral"}), text("GrammarBuilder.")]},
        ["system: You are X.", "GrammarBuilder.", "user: hi"],
    ),
    ({"system": HEADER + "\nYou are X.\n" + HEADER}, ["system: You are X.", HEADER, "user: hi"]),
    ({"system": [text(HEADER)]}, ["user: hi"]),
    (
        {
            "messages": [
                say("user", [text("a"), text("b", cache_control={"type": "ephemeral"})]),
                say("assistant", [
                    {"type": "thinking", "thinking": "well", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"}, text("I look."), use(1), use(2, "put"),
                ]),
                say("user", [result(1, "one"), result(2, [text("two"), text("lines")], is_error=True), text("go on")]),
                say("system", "A reminder."),
                say("assistant", [text("Done.")]),
                say("user", "more"),
            ]
        },
        [
            "user: a", "b", 'assistant: <think>well</think>I look. get({"a": 1}) put({"a": 2})', "tool: one for t1",
            "tool: Error: two", "lines for t2", "user: go on", "system: A reminder.", "assistant: Done.", "user: more",
        ],
    ),
    (
        {"messages": [*HI, say("assistant", [use(1)]), say("user", [result(1)])]},
        ["user: hi", 'assistant:  get({"a": 1})', "tool:  for t1"],
    ),
]  # fmt: skip


async def ask(http: AppClient, body: dict[str, Any], path: str = "/v1/messages") -> Any:
    sent = {"messages": HI, **({"max_tokens": 50} if path == "/v1/messages" else {}), **body}
    return await http.post(path, json=sent)


def test_conversations_become_messages_and_are_counted() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING) as http:
            for body, lines in CONVERSATIONS:
                response = await ask(http, body)
                assert response.status_code == 200, response.text
                assert prompt_of(engine).removesuffix("assistant:").splitlines() == lines
                counted = (await ask(http, body, "/v1/messages/count_tokens")).json()
                assert counted == {"input_tokens": len(engine.requests[-1].prompt_token_ids)}
                assert counted["input_tokens"] == response.json()["usage"]["input_tokens"]

    asyncio.run(run())


def test_an_answer_that_was_begun_goes_on() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING) as http:
            response = await ask(http, {"messages": [*HI, say("assistant", "Once upon")]})
            assert response.status_code == 200, response.text
            assert prompt_of(engine) == "user: hi\nassistant: Once upon"

    asyncio.run(run())


def test_tools_choices_and_formats() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING, tool_parser="hermes") as http:

            async def grammar(body: dict[str, Any]) -> Any:
                response = await ask(http, body)
                assert response.status_code == 200, response.text
                return engine.requests[-1].sampling.grammar

            tools = {"tools": [GET, {**PUT, "type": "custom"}]}
            assert await grammar({**tools, "tool_choice": {"type": "auto"}}) is None
            assert prompt_of(engine).startswith("tools: get put ")
            assert await grammar({**tools, "tool_choice": {"type": "none"}}) is None
            assert prompt_of(engine).startswith("user:")
            both = await grammar({**tools, "tool_choice": {"type": "any"}})
            assert "get" in both.text and "put" in both.text
            one = await grammar({**tools, "tool_choice": {"type": "tool", "name": "put"}})
            assert "put" in one.text and '"get"' not in one.text
            single = await grammar({**tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
            assert len(single.text) < len(both.text)
            form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
            for body in (
                {"output_config": {"format": form}},
                {"output_config": {"effort": "low"}, "output_format": form},
            ):
                assert (await grammar(body)).kind == "json_schema"

    asyncio.run(run())


def test_tools_that_anthropic_runs_are_left_out_beside_others() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            served = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "code_execution_20260521"}]
            assert (await ask(http, {"tools": [*served, GET]})).status_code == 200
            assert prompt_of(engine).startswith("tools: get <tool_call>")

    asyncio.run(run())


def test_thinking_and_sampling() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING) as http:
            body = {
                "thinking": {"type": "disabled"}, "temperature": 0, "top_p": 0.5, "top_k": 3, "stop_sequences": ["x"],
                "metadata": {"user_id": "u"}, "kv_cache": {"budget": 64}, "service_tier": "auto",
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            }  # fmt: skip
            assert (await ask(http, body)).status_code == 200
            assert prompt_of(engine).endswith("</think>\n\n")
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, list(sampling.stop)) == (0, 0.5, 3, ["x"])
            assert sampling.max_tokens == 50
            for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
                assert (await ask(http, {"thinking": thinking})).status_code == 200
                assert prompt_of(engine).endswith("assistant:")

    asyncio.run(run())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages.0"),
    ({"messages": [say("tool", "x")]}, "messages[0].role is 'tool'"),
    ({"messages": [say([], "x")]}, "messages[0].role is []"),
    ({"messages": [say("user", None)]}, "messages[0].content must be"),
    ({"messages": [say("user", [{"type": "image", "source": {}}])]}, "messages[0].content[0] has the type 'image'"),
    ({"messages": [say("user", [{"type": "document"}])]}, "messages[0].content[0]"),
    ({"messages": [say("user", [use(1)])]}, "messages[0].content[0]"),
    ({"messages": [*HI, say("assistant", [{"type": "tool_use", "id": "t", "name": "get"}])]}, "input must be"),
    ({"messages": [say("user", [{"type": "tool_result", "content": "x"}])]}, "tool_use_id"),
    ({"messages": [say("user", [result(1, [{"type": "image"}])])]}, "content[0].content[0]"),
    ({"messages": [say("user", [result(1, "x", is_error=1)])]}, "is_error"),
    ({"messages": [say("user", "word " * 600)]}, "prompt is too long: 1808"),
    ({"messages": [say("user", "word " * 600)]}, " tokens > 512 maximum"),
    ({"messages": [say("user", "word " * 50_000)]}, " tokens > 512 maximum"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] has the type"),
    ({"tools": [{"name": "get"}]}, "input_schema"),
    ({"tools": [{**GET, "name": "a b"}]}, "name"),
    ({"tools": [GET, GET]}, "two functions of the same name"),
    ({"tools": [GET] * 129}, "limit is 128"),
    ({"tools": [GET], "tool_choice": {"type": "all"}}, "tool_choice"),
    ({"tools": [GET], "tool_choice": {"type": []}}, "tool_choice"),
    ({"tools": [GET], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    ({"tools": [GET], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "hard"}}, "thinking"),
    ({"output_config": {"effort": "hard"}}, "output_config"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 5000}, "input length and `max_tokens` exceed context limit: "),
    ({"max_tokens": 5000}, " + 5000 > 512, decrease input length or `max_tokens`"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop_sequences": [""]}, "stop"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}, GET]}, "tools[0] has the type"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"fallbacks": [{"model": "tiny"}]}, "fallbacks"),
    ({"kv_cache": {"budget": 10**6}}, "budget"),
]


def test_wrong_input_is_a_400_in_anthropic_s_form() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            for body, words in WRONG:
                response = await ask(http, body)
                assert response.status_code == 400, (body, response.text)
                data = response.json()
                assert set(data) == {"type", "error"} and set(data["error"]) == {"type", "message"}
                assert (data["type"], data["error"]["type"]) == ("error", "invalid_request_error")
                assert words in data["error"]["message"], (body, data)
            missing = await ask(http, {"model": "claude"})
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
            bare = await http.post("/v1/messages", content=b"{", headers={"Content-Type": "application/json"})
            assert (bare.status_code, bare.json()["type"]) == (400, "error")
        assert not engine.requests

    asyncio.run(run())


def test_threads_are_refused_in_the_words_that_make_sdks_send_everything() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING) as http:
            for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    fallbacks = [{"model": "tiny"}]
                    response = await ask(http, {"thread": thread, "fallbacks": fallbacks, "compaction": None}, path)
                    assert response.status_code == 400
                    assert response.json()["error"]["details"] == {
                        "error_code": "thread_unsupported_request", "unsupported": ["thread", "fallbacks"],
                    }  # fmt: skip
            assert not engine.requests
            for harmless in ({"thread": None}, {"fallbacks": []}, {"fallbacks": "default"}, {"compaction": None}):
                assert (await ask(http, harmless)).status_code == 200
            compaction = {"compaction": {"type": "summarize"}}
            assert (await ask(http, compaction, "/v1/messages/count_tokens")).status_code == 200

    asyncio.run(run())


GET_WEATHER: dict[str, Any] = {
    "name": "get",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
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


def ask_about(body: dict[str, Any], engine: FakeEngine | None = None) -> Any:
    async def run() -> Any:
        async with client(engine or FakeEngine(), template=TELLING, tool_parser="hermes") as http:
            sent = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **body}
            return await http.post("/v1/messages", json=sent)

    return asyncio.run(run())


def whole(body: dict[str, Any], answer: str = ANSWER) -> dict[str, Any]:
    response = ask_about(body, FakeEngine(answer=answer))
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    assert set(data) == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "snapstream"
    }  # fmt: skip
    assert (data["type"], data["role"], data["model"]) == ("message", "assistant", "tiny")
    assert data["id"].startswith("msg_") and set(data["usage"]) == USAGE
    return data


def streamed(body: dict[str, Any], answer: str = ANSWER, engine: FakeEngine | None = None) -> list[dict[str, Any]]:
    response = ask_about({**body, "stream": True}, engine or FakeEngine(answer=answer))
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
        (THOUGHT.split("Hello")[0] + CALL, {"tools": [GET_WEATHER]}, THINKING + TOOL, "tool_use"),
        ("So. " + CALL + CALL, {"tools": [GET_WEATHER]}, TEXT + TOOL + TOOL, "tool_use"),
        (CALL.replace('{"a": "wörld"}', '{"a": "x\ny\x01", b: oops,}'), {"tools": [GET_WEATHER]}, TOOL, "tool_use"),
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
    thinking, text, use = whole({"tools": [GET_WEATHER]}, THOUGHT + CALL)["content"]
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
    half = whole({"tools": [GET_WEATHER], "max_tokens": len(token_ids(CALL)) - 8}, CALL)
    assert half["stop_reason"] == "max_tokens" and isinstance(half["content"][0]["input"], dict)
    half = whole({"tools": [GET_WEATHER]}, CALL[: CALL.index("rld")])  # the model itself ends it
    assert half["stop_reason"] == "end_turn" and half["content"][0]["type"] == "tool_use"
    back = [*HI, say("assistant", half["content"]), say("user", "more")]
    assert ask_about({"messages": back, "tools": [GET_WEATHER]}).status_code == 200


def test_a_fault_in_a_stream_is_an_error_event() -> None:
    last = streamed({}, engine=FakeEngine(fail_after=3))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error" and last["error"]["message"]
    early = ask_about({"stream": True}, FakeEngine(fail_after=0))
    assert early.status_code == 503 and early.json()["error"]["type"] == "overloaded_error"
