"""What is no fault of a value: unknown names, full queues, engines that are gone, templates that raise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.models import chat_template
from snapstream.server.engine.api import EngineDead
from snapstream.server.openai.protocol import ChatBody, CompletionBody
from snapstream.types import QueueFull
from tests.server.app_client import CHAT, HI, JSON, TEXT, TOOLS, call, client, error_of, frames
from tests.server.fake_engine import METADATA, FakeEngine, tokenizer


def test_unknown_model_path_and_method() -> None:
    error = error_of(call(CHAT, {"model": "other", "messages": HI}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(call("/v1/models/other", method="GET"), 404)["code"] == "model_not_found"
    error_of(call("/v1/embeddings", {}), 404)
    error_of(call(CHAT, method="GET"), 405)
    assert call(CHAT, method="GET").headers["allow"] == "POST"
    assert call("/v1/responses/resp_1", method="PUT").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("stream", [False, True])
def test_queue_full_and_dead_engine(stream: bool) -> None:
    body = {"messages": HI, "stream": stream}
    response = call(CHAT, body, engine=FakeEngine(refuse=QueueFull("9 requests are waiting")), retry_after_s=7)
    error_of(response, 429)
    assert response.headers["retry-after"] == "7"
    response = call(CHAT, body, engine=FakeEngine(refuse=EngineDead("gone")))
    error_of(response, 503)
    assert response.headers["retry-after"]
    error_of(call(CHAT, body, engine=FakeEngine(refuse=KeyError("bug"))), 500)
    error_of(call(CHAT, body, engine=FakeEngine(fail_after=0)), 503)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("noise_after", [0, 2])
def test_logits_that_are_not_finite_are_an_error(path: str, noise_after: int) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    error = error_of(call(path, body, engine=FakeEngine(noise_after=noise_after)), 500)
    assert error["code"] == "logits_not_finite" and error["message"].endswith("its logits are not finite")
    streamed = call(path, {**body, "stream": True}, engine=FakeEngine(noise_after=noise_after))
    assert streamed.status_code == (200 if noise_after else 500)  # the status line went with the first token
    assert "logits_not_finite" in streamed.text and '"finish_reason":"' not in streamed.text.replace(" ", "")


def test_not_ready_is_503_everywhere_it_matters() -> None:
    engine = FakeEngine(is_ready=False)
    error_of(call(CHAT, {"messages": HI}, engine=engine), 503)
    error_of(call(TEXT, {"prompt": "a"}, engine=engine), 503)
    for path in ("/health", "/health/ready"):
        error_of(call(path, engine=engine, method="GET"), 503)
    assert call("/health/live", engine=engine, method="GET").status_code == 200, "it loads, or is restarted"
    assert call("/metrics", engine=engine, method="GET").status_code == 200


def test_an_engine_that_stays_dead_says_why_and_invites_no_retry() -> None:
    class Dead(FakeEngine):
        unavailable = EngineDead("killed by SIGKILL; it is not restarted", is_final=True)

    for path, body, method in (
        (CHAT, {"messages": HI}, "POST"),
        ("/health", None, "GET"),
        ("/health/live", None, "GET"),
    ):
        response = call(path, body, engine=Dead(is_ready=False), method=method)
        assert error_of(response, 503)["message"] == "killed by SIGKILL; it is not restarted"
        assert "retry-after" not in response.headers
    response = call("/health", engine=FakeEngine(is_ready=False), method="GET")
    assert error_of(response, 503)["message"] == "the engine is loading" and response.headers["retry-after"]


def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_frame() -> None:

    response = call(CHAT, {"messages": HI, "stream": True}, engine=FakeEngine(fail_after=3))
    assert response.status_code == 200
    chunks = frames(response.text)  # ends with [DONE]
    assert set(chunks[-1]) == {"error"} and chunks[-1]["error"]["code"] == "engine_unavailable"
    assert all("error" not in chunk for chunk in chunks[:-1]) and len(chunks) == 4
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])
    error_of(call(CHAT, {"messages": HI}, engine=FakeEngine(fail_after=3)), 503)


def test_a_template_that_raises_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:

    for template in ("{{ raise_exception('no such role') }}", "{% for %}", "{{ messages.__class__.__mro__ }}"):
        monkeypatch.setattr(tokenizer(), "chat_template", template)
        assert error_of(call(CHAT, {"messages": HI}), 400)["param"] == "messages"


def test_a_template_without_end_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.1)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for template, words in (
        (endless, "more than 0.1 s of processor time"),
        ("{{ (messages | length) ** 0 * 9 ** (messages | length * 900000000) }}", "more than 0.1 s of processor time"),
        ("{{ messages | tojson(indent=1000000000) }}", "bytes of memory"),
        ("{{ messages[0].content * 5000000000 }}", "bytes of memory"),
        ("{{ messages[0].content * 70000000 }}", "characters; the limit is 67108864"),
        ("{{ range(100001) }}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ):
        monkeypatch.setattr(tokenizer(), "chat_template", template)
        monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.1 if "processor" in words else 60.0)
        assert words in error_of(call(CHAT, {"messages": HI}), 400)["message"]
    monkeypatch.undo()
    assert call(CHAT, {"messages": HI}).status_code == 200


def test_tools_reach_the_template_unless_none(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(tokenizer(), "chat_template", "{{ tools | length if tools else 'none' }}{{ mood }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for choice, expected in (("auto", "1sad"), ("none", "nonesad")):
        engine = FakeEngine()
        body = {"messages": HI, "tools": tools, "tool_choice": choice, "chat_template_kwargs": {"mood": "sad"}}
        assert call(CHAT, body, engine=engine).status_code == 200
        assert tokenizer().decode(engine.requests[0].prompt_token_ids) == expected


# Whatever a client gets wrong, it sees one shape, the right status, and the field at fault.


def schema_of(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, **fields}}


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "refusal": 5}, *HI]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "audio": {"id": "audio_1"}}, *HI]}, "messages"),
    ({"messages": HI, "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"messages": HI, "conversation": "conv_1"}, "conversation"),
    ({"messages": HI, "thread": {"type": "create"}}, "thread"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "temperature": "1"}, "temperature"),
    ({"messages": HI, "top_p": 0}, "top_p"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": True}, "max_tokens"),
    ({"messages": HI, "n": 5}, "n"),  # rows
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "stop": ["x"] * 17}, "stop"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": 3}, "stop"),
    ({"messages": HI, "stop_token_ids": [4608]}, "stop_token_ids"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"4608": 1}}, "logit_bias"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "best_of": 2}, "best_of"),
    ({"messages": HI, "tools": TOOLS}, "tools"),  # the template would leave them out
    ({"messages": HI, "logprobs": 1}, "logprobs"),
    ({"messages": HI, "kv_cache": {"budget": 8}}, "kv_cache"),
    ({"messages": HI, "kv_cache": {"budget": 129}}, "kv_cache"),  # the server's is the maximum
    ({"messages": HI, "kv_cache": {"budget": "full"}}, "kv_cache"),
    ({"messages": HI, "kv_cache": {"budget": "half"}}, "kv_cache"),
    ({"messages": HI, "kv_cache": {"bugdet": 64}}, "kv_cache"),
    ({"messages": HI, "kv_cache": {"selector": "best"}}, "kv_cache.selector"),
    ({"messages": HI, "kv_cache": {"selector": "hops"}}, "kv_cache.selector"),  # the server set no memory aside
    ({"messages": HI, "prompt_compression": {"keep": 0.2}}, "prompt_compression"),
    ({"messages": HI, "response_format": {"type": "yaml"}}, "response_format"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": HI, "response_format": schema_of(name=None)}, "response_format"),
    ({"messages": HI, "response_format": schema_of(name="a b")}, "response_format"),
    ({"messages": HI, "response_format": schema_of(schema=[])}, "response_format"),
    ({"messages": HI, "response_format": schema_of(strict="yes")}, "response_format"),
    ({"messages": HI, "response_format": schema_of(schema={"type": "nope"})}, "response_format"),
    ({"messages": HI, "response_format": schema_of(schema={"not": {}}, strict=True)}, "response_format"),
    ({"messages": HI, "response_format": schema_of(schema={"$ref": "#"})}, "response_format"),  # nothing fulfils it
    ({"messages": HI, "response_format": schema_of(schema={"const": "x" * 2**18})}, "response_format"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "tool_choice": "required", "tools": TOOLS}, "tool_choice"),  # nobody knows the format of calls
    ({"messages": HI, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"messages": HI, "tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice"),
    ({"messages": HI, "tool_choice": 7, "tools": TOOLS}, "tool_choice"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HI, "tools": TOOLS * 2}, "tools"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": 'f"'}}]}, "tools"),
    (
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools",
    ),
    ({"messages": HI, "echo": True}, "echo"),
    ({"messages": HI, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]}, "messages"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHAT)
def test_bad_chat_values_are_400_and_name_the_field(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    assert error_of(call(CHAT, body, engine=engine), 400)["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [4608]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "tool_choice": "required"}, "tool_choice"),
        ({"prompt": "a", "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"prompt": "a", "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"prompt": "a", "top_logprobs": 3}, "top_logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_bad_completion_values(body: dict[str, Any], param: str) -> None:
    assert error_of(call(TEXT, body, max_prompts=3), 400)["param"] == param


def test_harmless_values_and_unknown_fields_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    body = {
        "messages": HI, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "stop": None,
        "prompt_compression": "off", "user": "me", "store": False, "shoe_size": 44, "best_of": None,
        "stream_options": {"include_obfuscation": False}, "verbosity": "medium",
    }  # fmt: skip

    async def twice() -> None:
        async with client(FakeEngine()) as http:
            for _ in range(2):
                assert (await http.post(CHAT, json=body)).status_code == 200

    asyncio.run(twice())
    for name in ("shoe_size", "stream_options.include_obfuscation"):
        assert len([record for record in caplog.records if name in record.getMessage()]) == 1, name


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"kv_cache": {"budget": 99_999}}, "a budget of 99999 slots is larger than a row of this engine (128)"),
        ({"kv_cache": {"selector": "best"}}, "selector is 'best'; it must be one of snapkv, hops, diverse"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0; it must be a whole number >= 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be a whole number from 0 to 20"),
    ],
)
def test_messages_speak_of_what_was_sent(sent: dict[str, Any], message: str) -> None:
    assert error_of(call(CHAT, {"messages": HI, **sent}), 400)["message"] == message


def test_tools_that_no_template_tells_may_be_sent_if_they_are_off() -> None:
    assert call(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_prompt_too_long() -> None:
    error = error_of(call(TEXT, {"prompt": [5] * 500, "max_tokens": 20}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512" in error["message"]
    error = error_of(call(CHAT, {"messages": [{"role": "user", "content": "word " * 900}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def no_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(type(tokenizer()), "__call__", encode)


def test_texts_that_cannot_fit_are_refused_without_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:

    no_tokenizing(monkeypatch)
    longest = max(map(len, tokenizer().get_vocab()))
    text = "x" * (512 * longest + 1)
    for path, body, param in (
        (TEXT, {"prompt": text}, "prompt"),
        (TEXT, {"prompt": [text, "a"]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"prompt": text}, "prompt"),
    ):
        error = error_of(call(path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "512" in error["message"]
    assert call(TEXT, {"prompt": text[:-1]}).status_code == 500  # one less might fit: the tokenizer is asked


def test_id_lists_that_cannot_fit_are_refused_by_their_length_alone() -> None:
    from snapstream.server.http.errors import ApiError
    from snapstream.server.openai.prompts import as_prompts

    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("the list was walked through")

    for prompt in (Unread([1] * 20), [Unread([1] * 20), [1]]):
        with pytest.raises(ApiError) as caught:
            as_prompts(prompt, 4, 19)
        assert caught.value.code == "context_length_exceeded"
    assert as_prompts([1] * 19, 4, 19) == [[1] * 19]


def test_samples_are_counted_before_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_tokenizing(monkeypatch)
    for body, param in (({"prompt": ["a"] * 5}, "prompt"), ({"prompt": ["a"] * 3, "n": 2}, "n")):
        error = error_of(call(TEXT, body, max_samples=4), 400)
        assert error["param"] == param and "limit is 4" in error["message"]


def test_answers_that_list_too_much_are_refused() -> None:
    body = {"prompt": [[5] * 40, [5] * 10], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 1}
    assert call(TEXT, body, max_prompt_logprobs=200).status_code == 200
    error = error_of(call(TEXT, body, max_prompt_logprobs=199), 400)  # 50 tokens x 2 x 2
    assert error["param"] == "logprobs" and "200" in error["message"] and "limit is 199" in error["message"]
    long = {"prompt": [[5] * 200, [5] * 128], "kv_cache": {"return_kept": True}}  # the second fits its row
    num_heads = METADATA.architecture.num_layers * METADATA.architecture.num_kv_heads
    num_kept = num_heads * METADATA.engine.budget.num_topk
    assert call(TEXT, long, max_kept_positions=num_kept).status_code == 200
    error = error_of(call(TEXT, long, max_kept_positions=num_kept - 1), 400)
    assert error["param"] == "kv_cache" and f"limit is {num_kept - 1}" in error["message"]
    bits = {"prompt": [[5] * 200, [5] * 128], "kv_cache": {"return_kept": "bitmap"}}
    assert call(TEXT, bits, max_kept_bits=200 * num_heads).status_code == 200
    error = error_of(call(TEXT, bits, max_kept_bits=200 * num_heads - 1), 400)
    assert error["param"] == "kv_cache" and f"limit is {200 * num_heads - 1}" in error["message"]
    assert error_of(call(TEXT, {"prompt": "a", "kv_cache": {"return_kept": "lists"}}), 400)["param"] == "kv_cache"


# Whatever a client sends, it is answered or refused, never with a 5xx: clients would retry that.

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2**70, "", "full", "auto", 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": ANYTHING},
    optional={"tool_calls": ANYTHING, "name": ANYTHING, "tool_call_id": ANYTHING},
)


def bodies(kind: type, own: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.sampled_from(sorted(kind.model_fields))  # type: ignore[attr-defined]
    return st.builds(
        lambda base, extra: {**base, **extra}, st.just(own), st.dictionaries(fields, ANYTHING, min_size=1, max_size=2)
    )


def answer(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            response = await http.post(path, content=json.dumps(body).encode(), headers=JSON)
            if response.status_code != 200:
                assert 400 <= response.status_code < 500, response.text
                error_of(response, response.status_code)

    asyncio.run(run())


@settings(max_examples=80, deadline=None)
@given(bodies(ChatBody, {"messages": HI}) | st.builds(lambda one: {"messages": [one]}, MESSAGE))
def test_chat(body: dict[str, Any]) -> None:
    answer("/v1/chat/completions", body)


@settings(max_examples=80, deadline=None)
@given(bodies(CompletionBody, {"prompt": "a"}))
def test_completions(body: dict[str, Any]) -> None:
    answer("/v1/completions", body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_the_schema_describes_every_body(path: str) -> None:
    async def run() -> dict[str, Any]:
        async with client(FakeEngine()) as http:
            schema: dict[str, Any] = (await http.get("/openapi.json")).json()
            return schema

    content = asyncio.run(run())["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "properties" in content or all("properties" in one for one in content["anyOf"])
    assert "$ref" not in json.dumps(content)


def beyond(kind: dict[str, Any]) -> list[Any]:
    """Values that a schema excludes by its limits alone."""
    out: list[Any] = []
    if "minimum" in kind:
        out.append(kind["minimum"] - 1)
    if "exclusiveMinimum" in kind:
        out.append(kind["exclusiveMinimum"])
    if "maximum" in kind:
        out.append(kind["maximum"] + 1)
    if kind.get("minLength"):
        out.append("")
    if "maxLength" in kind:
        out.append("x" * (kind["maxLength"] + 1))
    if kind.get("minItems"):
        out.append([])
    if "maxItems" in kind:
        out.append([{"string": "x"}.get(kind["items"]["type"], 1)] * (kind["maxItems"] + 1))
    if isinstance(kind.get("items"), dict):
        out += [[value] for value in beyond(kind["items"])]
    if "maxProperties" in kind:
        out.append({str(number): 1 for number in range(kind["maxProperties"] + 1)})
        out += [{"1": value} for value in beyond(kind["additionalProperties"])]
    return out


BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "logprobs": True},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a", "include": ["message.output_text.logprobs"]},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/tokenize": {},
    "/detokenize": {},
}


def test_the_server_refuses_what_its_schema_excludes() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            paths = (await http.get("/openapi.json")).json()["paths"]
            for path, base in BASES.items():
                schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
                tried = set()
                for one in schema.get("anyOf", [schema]):
                    for name, field in one["properties"].items():
                        for value in (value for kind in field.get("anyOf", [field]) for value in beyond(kind)):
                            response = await http.post(path, json={**base, name: value})
                            assert response.status_code == 400, (path, name, value, response.text)
                            tried.add(name)
                assert tried >= {"messages", "temperature", "n"} & set(one["properties"]) and tried, path

    asyncio.run(run())


def test_the_schema_has_the_limits_that_are_enforced() -> None:
    async def run() -> dict[str, Any]:
        async with client(FakeEngine()) as http:
            return dict((await http.get("/openapi.json")).json()["paths"])

    paths = asyncio.run(run())

    def of(path: str, name: str) -> dict[str, Any]:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        field = schema["properties"][name]
        return dict(field.get("anyOf", [field])[0])

    assert of("/v1/chat/completions", "messages")["minItems"] == 1
    assert of("/v1/chat/completions", "temperature") == {"type": "number", "minimum": 0, "maximum": 100}
    assert of("/v1/chat/completions", "top_logprobs") == {"type": "integer", "minimum": 0, "maximum": 20}
    assert of("/v1/chat/completions", "max_tokens")["minimum"] == 1
    assert of("/v1/completions", "max_tokens")["minimum"] == 0, "with echo"
    assert of("/v1/completions", "prompt") == {"type": "string", "minLength": 1}
    assert of("/v1/messages", "max_tokens")["minimum"] == 1
    assert of("/v1/messages", "stop_sequences")["items"] == {"type": "string", "minLength": 1}
    assert of("/v1/responses", "max_output_tokens")["minimum"] == 1
