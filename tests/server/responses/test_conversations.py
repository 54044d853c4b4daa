"""What of a request to /v1/responses reaches the model: items, tools, formats; and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.server.app_client import client, error_of
from tests.server.fake_engine import FakeEngine
from tests.server.templates import TELLING, named_events, prompt_of

GET = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {"a": {}}}}
PUT = {**GET, "name": "put"}


def ask(body: dict[str, Any], **settings: Any) -> tuple[FakeEngine, Any]:
    async def run() -> tuple[FakeEngine, Any]:
        engine = FakeEngine()
        async with client(engine, template=TELLING, **{"tool_parser": "hermes", **settings}) as http:
            return engine, await http.post("/v1/responses", json={"input": "hi", **body})

    return asyncio.run(run())


def prompt(body: dict[str, Any]) -> str:
    engine, response = ask(body)
    assert response.status_code == 200, response.text
    return prompt_of(engine).removesuffix("assistant:")


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(name: str, number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": '{"a": 1}'}


def output(number: int, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": text}


CONVERSATIONS: list[tuple[Any, list[str]]] = [
    ("hi", ["user: hi"]),
    ([say("developer", "Be brief."), say("user", "hi")], ["system: Be brief.", "user: hi"]),
    (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                         {"type": "input_text", "text": "b"}]}],
        ["user: a", "b"],
    ),
    (
        [
            say("user", "hi"),
            {"id": "rs_1", "type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": "well"}]},
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            call("get", 1), call("put", 2), output(1, "one"), output(2, [{"type": "input_text", "text": "two"}]),
            say("assistant", "Done."), say("user", "more"),
        ],
        ["user: hi", 'assistant: <think>well</think>I look. get({"a": 1}) put({"a": 1})', "tool: one for c1",
         "tool: two for c2", "assistant: Done.", "user: more"],
    ),
    (
        [say("user", "hi"), call("get", 1), output(1, "x"), call("get", 2), output(2, "y")],
        ["user: hi", 'assistant:  get({"a": 1})', "tool: x for c1", 'assistant:  get({"a": 1})', "tool: y for c2"],
    ),
    (
        [say("user", "hi"), {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
         {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, say("system", "S"),
         say("user", "?")],
        ["user: hi", "assistant: No.", "system: S", "user: ?"],
    ),
    (
        [say("user", "hi"), {"type": "custom_tool_call", "call_id": "c1", "name": "get", "input": "ls -l"},
         {"type": "custom_tool_call_output", "call_id": "c1", "output": "files"}],
        ["user: hi", 'assistant:  get({"input": "ls -l"})', "tool: files for c1"],
    ),
]  # fmt: skip


def test_items_become_messages() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING) as http:
            for items, lines in CONVERSATIONS:
                response = await http.post("/v1/responses", json={"input": items})
                assert response.status_code == 200, response.text
                assert prompt_of(engine).removesuffix("assistant:").splitlines() == lines

    asyncio.run(run())


def test_instructions_come_first() -> None:
    assert prompt({"instructions": "Be kind."}).splitlines() == ["system: Be kind.", "user: hi"]


def test_tools_reach_the_template_and_choices_the_grammar() -> None:
    assert prompt({"tools": [GET, PUT]}).startswith("tools: get put ")
    assert prompt({"tools": [GET, PUT], "tool_choice": "none"}).startswith("user:")
    for choice, names in (("required", ("get", "put")), ({"type": "function", "name": "put"}, ("put",))):
        engine, response = ask({"tools": [GET, PUT], "tool_choice": choice})
        assert response.status_code == 200, response.text
        grammar = engine.requests[0].sampling.grammar
        assert grammar is not None and [name in grammar.text for name in ("get", "put")] == ["get" in names, True]
        assert response.json()["tool_choice"] == choice


SPACE = {"type": "namespace", "name": "crm", "description": "Customers.",
         "tools": [PUT, {"type": "custom", "name": "query"}]}  # fmt: skip


def test_tools_in_namespaces_have_flat_names_for_the_model_only() -> None:
    tools = [GET, SPACE, {"type": "web_search", "external_web_access": True}]
    put = '<tool_call>\n{"name": "crm__put", "arguments": {"a": 1}}\n</tool_call>'
    query = '<tool_call>\n{"name": "crm__query", "arguments": {"input": "x"}}\n</tool_call>'
    get = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'

    async def run() -> None:
        engine = FakeEngine(answer=put + query + get)
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            response = (await http.post("/v1/responses", json={"input": "hi", "tools": tools})).json()
            assert prompt_of(engine).startswith("tools: get crm__put crm__query <tool_call>")
            assert response["tools"] == [GET, SPACE], "what is left out is not repeated"
            names = [(item["name"], item.get("namespace")) for item in response["output"]]
            assert names == [("put", "crm"), ("query", "crm"), ("get", None)]
            streamed = (await http.post("/v1/responses", json={"input": "hi", "tools": tools, "stream": True})).text
            events = named_events(streamed)
            added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
            assert [(item["name"], item.get("namespace")) for item in added] == names
            history = [say("user", "hi"), *response["output"], output(1, "one")]
            await http.post("/v1/responses", json={"input": history, "tools": tools})
            assert 'crm__put({"a": 1}) crm__query({"input": "x"}) get({})' in prompt_of(engine)
            for choice in ({"name": "put"}, {"name": "put", "namespace": "crm"}):
                sent = {"input": "hi", "tools": tools, "tool_choice": {"type": "function", **choice}}
                assert (await http.post("/v1/responses", json=sent)).status_code == 200
                assert "crm__put" in engine.requests[-1].sampling.grammar.text

    asyncio.run(run())


def test_formats_of_text() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "string"}, "strict": True}
    for form, kind in (({"type": "text"}, None), ({"type": "json_object"}, "json_schema"), (schema, "json_schema")):
        engine, response = ask({"text": {"format": form}})
        assert response.status_code == 200, response.text
        grammar = engine.requests[0].sampling.grammar
        assert (grammar.kind if grammar else None) == kind


def test_sampling_and_our_own_fields() -> None:
    body = {
        "temperature": 0, "top_p": 0.5, "max_output_tokens": 9, "seed": 3, "stop": ["x"], "top_k": 4,
        "kv_cache": {"budget": 64}, "reasoning": {"effort": "none"}, "store": False,
        "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    engine, response = ask(body)
    assert response.status_code == 200, response.text
    [request] = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0, 0.5, 9, 3)
    assert (list(sampling.stop), sampling.top_k) == (["x"], 4)
    assert request.budget is not None and request.budget.capacity == 64
    assert prompt_of(engine).endswith("</think>\n\n")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input"),
    ({"input": {"role": "user"}}, "input"),
    ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input"),
    ({"input": "word " * 5000}, "input"),
    ({"instructions": ["x"]}, "instructions"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [GET, GET]}, "tools"),
    ({"tools": [GET] * 129}, "tools"),
    ({"tools": [GET], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tools": [GET], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"tools": [GET, {"type": "file_search", "vector_store_ids": ["v"]}]}, "tools"),
    ({"tools": [GET, {"type": "tool_search", "execution": "client"}]}, "tools"),
    ({"tools": [GET], "tool_choice": {"type": "function", "name": ["get"]}}, "tool_choice"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
    ({"tools": [{"type": "namespace", "tools": [GET]}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search", "name": "x"}]}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [GET, GET]}]}, "tools"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"reasoning": {"effort": "hard"}}, "reasoning"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
    ({"stream": "yes"}, "stream"),
    ({"kv_cache": {"budget": 10**6}}, "kv_cache"),
]


def test_wrong_input_is_a_400_that_names_the_field() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            for body, param in WRONG:
                error = error_of(await http.post("/v1/responses", json={"input": "hi", **body}), 400)
                assert error["param"] == param, (body, error)
        assert not engine.requests

    asyncio.run(run())


def test_what_a_server_without_a_store_refuses() -> None:
    for body, param in (
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ):
        assert error_of(ask(body, responses_store=0)[1], 400)["param"] == param


def test_tokens_are_counted() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, template=TELLING, tool_parser="hermes") as http:
            for body in ({"tools": [GET], "instructions": "Be kind."}, {"input": CONVERSATIONS[3][0]}):
                sent = {"input": "hi", **body}
                counted = await http.post("/v1/responses/input_tokens", json=sent)
                assert (await http.post("/v1/responses", json=sent)).status_code == 200
                want = len(engine.requests[-1].prompt_token_ids)
                assert counted.json() == {"object": "response.input_tokens", "input_tokens": want}
            assert error_of(await http.post("/v1/responses/input_tokens", json={"input": 3}), 400)["param"] == "input"

    asyncio.run(run())


def test_an_unknown_model_is_a_404() -> None:
    assert error_of(ask({"model": "none"})[1], 404)["code"] == "model_not_found"
