"""Streams of /v1/responses, event by event and field by field; responses that are not streamed; and stored responses:
continued, read, deleted, bounded, and separate for each key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from snapstream.server.engine.api import RequestDelta
from snapstream.server.http.errors import ApiError
from snapstream.server.options import ServerSettings
from snapstream.server.responses.protocol import ResponseStore
from snapstream.types import Request
from tests.server.app_client import AppClient, client, error_of
from tests.server.fake_engine import ANSWER, FakeEngine, token_ids
from tests.server.templates import CALL, TELLING, THOUGHT, named_events, prompt_of
from tests.waiting import until_async

GET: dict[str, Any] = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {"a": {}}}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

# Members that the specification asks of each event, beside its type and sequence_number.
PLACE = {"item_id", "output_index"}
PART = PLACE | {"content_index"}
MEMBERS = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.content_part.added": PART | {"part"},
    "response.output_text.delta": PART | {"delta", "logprobs"},
    "response.output_text.done": PART | {"text", "logprobs"},
    "response.reasoning_text.delta": PART | {"delta"},
    "response.reasoning_text.done": PART | {"text"},
    "response.content_part.done": PART | {"part"},
    "response.function_call_arguments.delta": PLACE | {"delta"},
    "response.function_call_arguments.done": PLACE | {"arguments", "name"},
    "response.output_item.done": {"output_index", "item"},
    "response.completed": {"response"},
    "response.incomplete": {"response"},
    "response.failed": {"response"},
}
RESPONSE = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip


def ask(body: dict[str, Any], engine: FakeEngine | None = None, **settings: Any) -> Any:
    async def run() -> Any:
        async with client(engine or FakeEngine(), template=TELLING, **{"tool_parser": "hermes", **settings}) as http:
            return await http.post("/v1/responses", json={"input": "hi", **body})

    return asyncio.run(run())


def whole(body: dict[str, Any], answer: str = ANSWER) -> dict[str, Any]:
    response = ask(body, FakeEngine(answer=answer))
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    data: dict[str, Any] = response.json()
    assert data.keys() >= RESPONSE
    return data


def streamed(body: dict[str, Any], answer: str = ANSWER, engine: FakeEngine | None = None) -> list[dict[str, Any]]:
    """The events, each checked by itself and against the one before."""
    response = ask({**body, "stream": True}, engine or FakeEngine(answer=answer))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert set(event) == MEMBERS[event["type"]] | {"type", "sequence_number"}
        EVENT.validate_python(event)
    return events


def bare(value: Any) -> Any:
    """Without ids and times, which differ."""
    if isinstance(value, dict):
        dropped = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: bare(inner) for name, inner in value.items() if name not in dropped}
    return [bare(inner) for inner in value] if isinstance(value, list) else value


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types of events, deltas of one kind as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]  # fmt: skip
THINKING = [name.replace("output_text", "reasoning_text") for name in TEXT]
CALLING = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


@pytest.mark.parametrize(
    ("answer", "body", "order", "items"),
    [
        (ANSWER, {}, TEXT, ["message"]),
        (THOUGHT, {}, THINKING + TEXT, ["reasoning", "message"]),
        (THOUGHT.split("Hello")[0] + CALL, {"tools": [GET]}, THINKING + CALLING, ["reasoning", "function_call"]),
        ("So. " + CALL + CALL, {"tools": [GET]}, TEXT + CALLING * 2, ["message", "function_call", "function_call"]),
    ],
)
def test_the_order_of_events(answer: str, body: dict[str, Any], order: list[str], items: list[str]) -> None:
    events = streamed(body, answer)
    assert kinds(events) == ["created", "in_progress", *order, "completed"]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == items
    assert bare(last) == bare(whole(body, answer)), "a stream ends with what the other way gives"
    assert (last["status"], last["incomplete_details"], last["error"]) == ("completed", None, None)
    for event in events[:2]:
        first = event["response"]
        assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
        assert first["id"] == last["id"] and first["id"].startswith("resp_")


def test_events_put_together_are_the_items() -> None:
    events = streamed({"tools": [GET]}, THOUGHT.replace("Hello.", "Look: ") + CALL)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        added, done = own[0]["item"], own[-1]["item"]
        assert done == item and added["id"] == item["id"]
        assert (added["status"], done["status"]) == ("in_progress", "completed")
        assert all(event["item_id"] == item["id"] for event in own[1:-1])
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert (item["name"], item["arguments"]) == ("get", text) == ("get", '{"a": "wörld"}')
            assert item["call_id"].startswith("call_") and added["arguments"] == ""
        else:
            [part] = item["content"]
            assert part["text"] == text and added["content"] == []
            assert own[1]["part"]["text"] == "" and own[-2]["part"] == part


def test_usage_counts_thoughts() -> None:
    usage = whole({}, THOUGHT)["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_an_answer_that_is_cut_is_incomplete() -> None:
    events = streamed({"max_output_tokens": 3})
    assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
    last = events[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["output"][0]["status"] == "incomplete" and last["completed_at"] is None
    assert last["usage"]["output_tokens"] == 3
    for body, answer in (({"stop": ["wör"]}, CALL), ({}, CALL[: CALL.index("rld")])):
        last = streamed({"tools": [GET], **body}, answer)[-1]["response"]
        assert (last["status"], last["output"][0]["status"]) == ("completed", "incomplete")


def test_an_empty_answer_has_an_empty_message() -> None:
    [message] = whole({}, "")["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_a_fault_in_a_stream_is_the_response_s_own_end() -> None:
    events = streamed({}, engine=FakeEngine(fail_after=3))
    assert events[-1]["type"] == "response.failed"
    last = events[-1]["response"]
    assert last["status"] == "failed" and last["error"]["code"] == "server_error" and last["error"]["message"]
    error = error_of(ask({"stream": True}, FakeEngine(fail_after=0)), 503)
    assert error["code"] == "engine_unavailable", "before the first token a fault has a status of its own"


def test_log_probabilities_of_text_only() -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = whole(body, THOUGHT)["output"][-1]["content"][0]
    assert part["text"] == "Hello." and 0 < len(part["logprobs"]) <= 5
    assert set(part["logprobs"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    events = streamed(body, THOUGHT)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert whole({"top_logprobs": 2}, THOUGHT)["output"][-1]["content"][0]["logprobs"] == [], "nobody asked for them"


class Coalescing(FakeEngine):
    """Sends several tokens in one delta, as an engine with fast steps does."""

    num_tokens = 100

    async def _script(self, request: Request) -> AsyncIterator[RequestDelta]:
        waiting: list[RequestDelta] = []
        async for delta in super()._script(request):
            waiting.append(delta)
            if delta.is_finished or len(waiting) == self.num_tokens:
                samples = [own.samples[0] for own in waiting]
                joined = replace(
                    samples[-1],
                    text="".join(own.text for own in samples),
                    token_ids=tuple(token for own in samples for token in own.token_ids),
                    logprobs=tuple(one for own in samples for one in own.logprobs or ()),
                )
                yield replace(waiting[-1], samples=(joined,), compression=waiting[0].compression)
                waiting = []


@pytest.mark.parametrize("num_tokens", [2, 3, 100])
@pytest.mark.parametrize("answer", [ANSWER, ""])
def test_log_probabilities_do_not_depend_on_deltas(answer: str, num_tokens: int) -> None:
    """Of every token, also those without text: the end token, and half a character."""
    body = {"include": ["message.output_text.logprobs"], "max_output_tokens": 300}
    engine = Coalescing(answer=answer)
    engine.num_tokens = num_tokens
    parts = [
        streamed(body, answer, each)[-1]["response"]["output"][-1]["content"][0]
        for each in (FakeEngine(answer=answer), engine)
    ]
    assert parts[0] == parts[1]
    assert len(parts[0]["logprobs"]) == len(token_ids(answer)) + 1


def test_the_response_repeats_its_request() -> None:
    tool = {**GET, "description": "gets", "strict": False}
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": False}}
    body = {
        "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": False, "temperature": 0.5, "top_p": 0.9,
        "max_output_tokens": 100, "metadata": {"a": "b"}, "instructions": "Be brief.", "user": "me", "text": text,
        "reasoning": {"effort": "low"},
    }  # fmt: skip
    response = whole(body)
    assert response["text"] == {**text, "verbosity": "medium"} and response["reasoning"]["effort"] == "low"
    same = body.keys() - {"text", "reasoning"}
    assert {name: response[name] for name in same} == {name: body[name] for name in same}
    assert response["snapstream"]["kv_cache"]["budget"] == 128


def test_a_custom_tool_gets_a_text() -> None:
    tool = {"type": "custom", "name": "shell", "format": {"type": "grammar", "syntax": "regex", "definition": "ls.*"}}
    answer = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>'
    response = whole({"tools": [tool], "tool_choice": {"type": "custom", "name": "shell"}}, answer)
    [item] = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "shell", "ls -l")
    events = named_events(ask({"tools": [tool], "stream": True}, FakeEngine(answer=answer)).text)
    order = [name.replace("function_call_arguments", "custom_tool_call_input") for name in CALLING]
    assert kinds(events)[2:-1] == order
    for event in events:
        EVENT.validate_python(event)


def test_allowed_tools_are_some_of_the_tools() -> None:
    put = {**GET, "name": "put"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "put"}]}
    engine = FakeEngine()
    response = ask({"tools": [GET, put], "tool_choice": choice}, engine)
    assert response.status_code == 200 and response.json()["tool_choice"] == choice
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and "put" in grammar.text and '"get"' not in grammar.text


PATH = "/v1/responses"


def run(
    work: Callable[[AppClient, FakeEngine], Awaitable[None]], engine: FakeEngine | None = None, **more: Any
) -> None:
    async def main() -> None:
        own = engine or FakeEngine()
        async with client(own, template=TELLING, **{"responses_store": 8, **more}) as http:
            await work(http, own)

    asyncio.run(main())


async def create(http: AppClient, text: str, before: str | None = None, key: str = "", **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    sent = {"input": text, "previous_response_id": before, **body}
    response = await http.post(PATH, json=sent, headers=headers)
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


def test_a_conversation_goes_on_from_a_response() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        first = await create(http, "one", instructions="Be brief.")
        assert first["store"] is True
        second = await create(http, "two", first["id"])
        assert second["previous_response_id"] == first["id"]
        await http.delete(f"{PATH}/{first['id']}")  # the second holds the whole conversation
        await create(http, "three", second["id"])
        want = f"user: one\nassistant: {ANSWER}\nuser: two\nassistant: {ANSWER}\nuser: three\nassistant:"
        assert prompt_of(engine) == want, "instructions are not carried over"

    run(work)


def test_a_conversation_goes_on_from_a_call_that_was_cut() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        first = await create(http, "one", tools=[GET], stop=["rld"])
        [call] = first["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"a": "wö')
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Cut."}
        want = f'user: one\nassistant:  get({{"a": "wö"}})\ntool: Cut. for {call["call_id"]}\nassistant:'
        for items, before in (([output], first["id"]), ([{"role": "user", "content": "one"}, call, output], None)):
            await create(http, "", before, input=items)
            assert prompt_of(engine) == want
        await create(http, "two", first["id"])
        assert prompt_of(engine) == 'user: one\nassistant:  get({"a": "wö"})\nuser: two\nassistant:'

    run(work, FakeEngine(answer=CALL), tool_parser="hermes")


def test_stored_ones_are_read_and_deleted() -> None:
    async def work(http: AppClient, _: FakeEngine) -> None:
        streamed = (await http.post(PATH, json={"input": "hi", "stream": True})).text
        last = named_events(streamed)[-1]["response"]
        path = f"{PATH}/{last['id']}"
        assert (await http.get(path)).json() == last
        assert error_of(await http.get(path, params={"stream": "true"}), 400)["param"] == "stream"
        assert (await http.delete(path)).json() == {"id": last["id"], "object": "response", "deleted": True}
        for again in (await http.get(path), await http.delete(path)):
            assert error_of(again, 404)["code"] == "response_not_found"
        unstored = await create(http, "hi", store=False)
        assert unstored["store"] is False
        assert (await http.get(f"{PATH}/{unstored['id']}")).status_code == 404
        missing = await http.post(PATH, json={"input": "hi", "previous_response_id": last["id"]})
        assert error_of(missing, 400)["code"] == "previous_response_not_found"

    run(work)


def test_items_are_referred_to() -> None:
    """As the AI SDK does: every item of the assistant by its id, everything else in full."""

    async def work(http: AppClient, engine: FakeEngine) -> None:
        items: list[dict[str, Any]] = []
        lines = []
        for text in ("one", "two", "three"):
            items.append({"role": "user", "content": text})
            answer = await create(http, "", input=items)
            lines.append(f"user: {text}")
            assert prompt_of(engine) == "\n".join([*lines, "assistant:"])
            lines.append(f"assistant: {ANSWER}")
            items += [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
        assert answer["store"] is True
        items[-1] = {"id": items[-1]["id"]}  # the type may be left out
        await create(http, "", input=[*items, {"role": "user", "content": "four"}])
        unstored = await create(http, "hi", store=False)
        for name in (unstored["output"][0]["id"], "msg_1", 3):
            sent = {"input": [{"type": "item_reference", "id": name}]}
            error = error_of(await http.post(PATH, json=sent), 400)
            assert (error["param"], error["code"]) == ("input", "item_not_found")

    run(work)


def test_a_client_that_leaves_stores_nothing() -> None:
    async def work(http: AppClient, engine: FakeEngine) -> None:
        leaving = asyncio.create_task(http.post(PATH, json={"input": "hi"}))
        await engine.hanging.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until_async(lambda: engine.num_running == 0)
        assert (await http.get(f"{PATH}/{engine.requests[0].request_id}")).status_code == 404

    run(work, FakeEngine(hang_after=3))


def test_each_key_sees_its_own() -> None:
    async def work(http: AppClient, _: FakeEngine) -> None:
        mine = await create(http, "one", key="mine")
        path, others = f"{PATH}/{mine['id']}", {"x-api-key": "yours"}
        for response in (await http.get(path, headers=others), await http.delete(path, headers=others)):
            assert error_of(response, 404)["code"] == "response_not_found"
        sent = {"input": "x", "previous_response_id": mine["id"]}
        assert error_of(await http.post(PATH, json=sent, headers=others), 400)["param"] == "previous_response_id"
        assert (await http.get(path, headers={"x-api-key": "mine"})).status_code == 200

    run(work, api_keys=("mine", "yours"))


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    def keep(store: ResponseStore, name: str, text: str, before: str | None = None, owner: bytes = b"") -> None:
        own = [{"role": "user", "content": text, "id": f"i_{name}"}]
        store.keep({"id": name, "output": []}, owner, store.before(before, owner), own)

    def has_item(store: ResponseStore, name: str, owner: bytes = b"") -> bool:
        try:
            store.resolve([{"type": "item_reference", "id": f"i_{name}"}], owner)
        except ApiError:
            return False
        return True

    store = ResponseStore(2, 10_000)
    for name in ("a", "b", "c"):
        keep(store, name, "x")
    assert len(store) == 2 and store.get("c", b"")["id"] == "c"
    assert [has_item(store, name) for name in "abc"] == [False, True, True]
    keep(store, "c2", "x", "c")
    keep(store, "c3", "x", "c2")
    assert has_item(store, "c") and len(store) == 2, "an item stays as long as a conversation has it"
    keep(store, "y", "x" * 100, owner=b"you")
    assert len(store) == 3 and not has_item(store, "y"), "each key has a number of its own"
    keep(store, "d", "x" * 9_700)
    assert len(store) == 2 and store.num_bytes <= 10_000, "the oldest of the key with most bytes went"
    assert store.get("y", b"you")["id"] == "y" and has_item(store, "y", b"you")
    keep(store, "e", "x" * 400, "d")
    assert store.get("d", b"")["id"] == "d", "what is too large by itself is not kept"
    with pytest.raises(ValueError, match="responses_store is -1"):
        ServerSettings(responses_store=-1)
