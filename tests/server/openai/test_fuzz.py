"""Whatever a client sends, it is answered or refused, never with a 5xx: clients would retry that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.server.openai.protocol import ChatBody, CompletionBody
from tests.server.fake_engine import FakeEngine
from tests.server.front_client import HI, JSON, client
from tests.server.openai.test_bad_values import error_of

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
