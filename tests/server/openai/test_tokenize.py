"""/tokenize takes a prompt as the endpoint does that it is counted for: the same fields, the same refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, tokenizer
from tests.server.front_client import HI, client

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOLD = "{{ tools | length if tools else 'none' }}"


def post(path: str, *bodies: Any, **settings: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with client(FakeEngine(), **settings) as http:
            return [await http.post(path, json=body) for body in bodies]

    return asyncio.run(run())


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    # What only the answer would need is known: a whole request may be sent to be counted.
    chat = {"messages": HI, "shoe_size": 44, "max_tokens": 9, "stream_options": {"include_usage": True}}
    text = {"prompt": "a", "hat_size": 58, "return_token_strs": True, "logprobs": 1}
    assert [answer.status_code for answer in post("/tokenize", chat, text, chat, text)] == [200] * 4
    assert [answer.status_code for answer in post("/detokenize", {"tokens": [5], "glove_size": 8})] == [200]
    logged = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert [line.split("'")[1] for line in logged] == ["shoe_size", "hat_size", "glove_size"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HI, "functions": [{}]},
        {"messages": HI, "documents": [{}]},
        {"messages": HI, "chat_template": "x"},
        {"messages": HI, "tools": TOOLS},  # the tiny model's template has no place for them
        {"messages": HI, "tools": TOOLS, "tool_choice": "required"},
        {"messages": HI, "tools": [{"type": "robot"}]},
        {"messages": HI, "tool_choice": "x"},
        {"prompt": "a", "truncate_prompt_tokens": 3},
        {"prompt": "a", "tools": TOOLS},
    ],
)
def test_what_the_endpoint_refuses_is_refused_here(body: dict[str, Any]) -> None:
    [refused] = post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    [answer] = post("/tokenize", body)
    assert answer.status_code == refused.status_code == 400
    assert answer.json() == refused.json()


def test_tools_are_counted_where_the_template_is_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [dropped] = post("/tokenize", {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    assert dropped.json()["tokens"] == post("/tokenize", {"messages": HI})[0].json()["tokens"]
    monkeypatch.setattr(tokenizer(), "chat_template", TOLD)
    for choice, told in ((None, "1"), ("auto", "1"), ("none", "none")):
        [answer] = post("/tokenize", {"messages": HI, "tools": TOOLS, "tool_choice": choice})
        assert tokenizer().decode(answer.json()["tokens"]) == told
