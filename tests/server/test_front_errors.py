"""Whatever goes wrong, a client sees one shape, the right status, and the field at fault."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from snapstream.engine.validate import QueueFull
from snapstream.server.engine_api import EngineDead
from snapstream.server.settings import ServerSettings
from tests.server.fake_engine import FACTS, FakeEngine
from tests.server.front_client import HI, JSON, client


def call(
    path: str, body: Any = None, *, engine: FakeEngine | None = None, method: str = "POST", **settings: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(engine or FakeEngine(), **settings) as http:
            given = (
                {"content": body, "headers": JSON}
                if isinstance(body, bytes)
                else {"json": body}
                if body is not None
                else {}
            )
            return await http.request(method, path, **given)

    return asyncio.run(run())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def schema_of(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, **fields}}


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
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


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b"\xff", b"[" * 10000]
)
def test_bodies_that_are_not_json_objects(body: bytes) -> None:
    error_of(call(TEXT, body), 400)


def test_harmless_values_and_unknown_fields_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    body = {
        "messages": HI, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "stop": None,
        "prompt_compression": "off", "user": "me", "store": False, "shoe_size": 44, "best_of": None,
        "stream_options": {"include_obfuscation": False},
    }  # fmt: skip

    async def twice() -> None:
        async with client(FakeEngine()) as http:
            for _ in range(2):
                assert (await http.post(CHAT, json=body)).status_code == 200

    asyncio.run(twice())
    for name in ("shoe_size", "stream_options.include_obfuscation"):
        assert len([record for record in caplog.records if name in record.getMessage()]) == 1, name


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"kv_cache": {"budget": 99_999}}, "a budget of 99999 slots is larger than a row of this engine (128)"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0; it must be a whole number >= 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be a whole number from 0 to 20"),
    ],
)
def test_messages_speak_of_what_was_sent(wish: dict[str, Any], message: str) -> None:
    assert error_of(call(CHAT, {"messages": HI, **wish}), 400)["message"] == message


def test_tools_that_no_template_tells_may_be_sent_if_they_are_off() -> None:
    assert call(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_prompt_too_long() -> None:
    error = error_of(call(TEXT, {"prompt": [5] * 500, "max_tokens": 20}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512" in error["message"]
    error = error_of(call(CHAT, {"messages": [{"role": "user", "content": "word " * 900}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def no_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapstream.server import prompts

    def encode(*_: Any) -> Any:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(prompts, "_encode", encode)


def test_texts_that_cannot_fit_are_refused_without_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.server.fake_engine import tokenizer

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
    from snapstream.server.errors import ApiError
    from snapstream.server.prompts import as_prompts

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
    num_topk = FACTS.engine.budget.num_topk
    assert call(TEXT, long, max_kept_positions=num_topk).status_code == 200
    error = error_of(call(TEXT, long, max_kept_positions=num_topk - 1), 400)
    assert error["param"] == "kv_cache" and f"limit is {num_topk - 1}" in error["message"]
    bits = {"prompt": [[5] * 200, [5] * 128], "kv_cache": {"return_kept": "bitmap"}}
    assert call(TEXT, bits, max_kept_bits=200).status_code == 200
    error = error_of(call(TEXT, bits, max_kept_bits=199), 400)
    assert error["param"] == "kv_cache" and "limit is 199" in error["message"]
    assert error_of(call(TEXT, {"prompt": "a", "kv_cache": {"return_kept": "lists"}}), 400)["param"] == "kv_cache"


def test_other_content_types_are_refused() -> None:
    """A page may send these to any server without asking it first."""

    async def run() -> None:
        engine = FakeEngine()
        async with client(engine) as http:
            body = b'{"prompt": "a"}'
            for kind in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", None):
                headers = {"Origin": "http://evil.example"} | ({"Content-Type": kind} if kind else {})
                for path in (TEXT, CHAT, "/tokenize"):
                    response = await http.post(path, content=body, headers=headers)
                    assert error_of(response, 400)["code"] == "invalid_content_type"
            assert engine.requests == []
            headers = {"Content-Type": "Application/JSON; charset=utf-8"}
            assert (await http.post(TEXT, content=body, headers=headers)).status_code == 200

    asyncio.run(run())


def test_a_template_that_raises_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.server.fake_engine import tokenizer

    for template in ("{{ raise_exception('no such role') }}", "{% for %}", "{{ messages.__class__.__mro__ }}"):
        monkeypatch.setattr(tokenizer(), "chat_template", template)
        assert error_of(call(CHAT, {"messages": HI}), 400)["param"] == "messages"


def test_tools_reach_the_template_unless_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.server.fake_engine import tokenizer

    monkeypatch.setattr(tokenizer(), "chat_template", "{{ tools | length if tools else 'none' }}{{ mood }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for choice, expected in (("auto", "1sad"), ("none", "nonesad")):
        engine = FakeEngine()
        body = {"messages": HI, "tools": tools, "tool_choice": choice, "chat_template_kwargs": {"mood": "sad"}}
        assert call(CHAT, body, engine=engine).status_code == 200
        assert tokenizer().decode(engine.requests[0].prompt_token_ids) == expected


def test_unknown_model_path_and_method() -> None:
    error = error_of(call(CHAT, {"model": "other", "messages": HI}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(call("/v1/models/other", method="GET"), 404)["code"] == "model_not_found"
    error_of(call("/v1/embeddings", {}), 404)
    error_of(call(CHAT, method="GET"), 405)


def test_body_limit_declared_and_chunked() -> None:
    big = {"prompt": "x" * 2000}
    error_of(call(TEXT, big, max_body_bytes=1000), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async def chunked() -> httpx.Response:
        async with client(FakeEngine(), max_body_bytes=1000) as http:
            return await http.post(TEXT, content=pieces(), headers=JSON)

    error_of(asyncio.run(chunked()), 413)


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
    error_of(call("/health", engine=engine, method="GET"), 503)
    assert call("/metrics", engine=engine, method="GET").status_code == 200


def test_an_engine_that_stays_dead_says_why_and_invites_no_retry() -> None:
    class Dead(FakeEngine):
        absence = EngineDead("killed by SIGKILL; it is not restarted", is_final=True)

    for path, body, method in ((CHAT, {"messages": HI}, "POST"), ("/health", None, "GET")):
        response = call(path, body, engine=Dead(is_ready=False), method=method)
        assert error_of(response, 503)["message"] == "killed by SIGKILL; it is not restarted"
        assert "retry-after" not in response.headers
    response = call("/health", engine=FakeEngine(is_ready=False), method="GET")
    assert error_of(response, 503)["message"] == "the engine is loading" and response.headers["retry-after"]


def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_frame() -> None:
    from tests.server.front_client import frames

    response = call(CHAT, {"messages": HI, "stream": True}, engine=FakeEngine(fail_after=3))
    assert response.status_code == 200
    chunks = frames(response.text)  # ends with [DONE]
    assert set(chunks[-1]) == {"error"} and chunks[-1]["error"]["code"] == "engine_unavailable"
    assert all("error" not in chunk for chunk in chunks[:-1]) and len(chunks) == 4
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])
    error_of(call(CHAT, {"messages": HI}, engine=FakeEngine(fail_after=3)), 503)


def test_settings_refuse_what_would_open_the_server() -> None:
    with pytest.raises(ValueError, match="CORS origin"):
        ServerSettings(cors_origins=("*",))
    with pytest.raises(ValueError, match="API key"):
        ServerSettings(api_keys=("",))
