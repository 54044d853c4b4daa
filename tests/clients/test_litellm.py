"""LiteLLM, as a proxy would call us."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.clients.scripted import QUESTIONS, check_three_turns, scripted_server, three_turns

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks a host for prices
        return pytest.importorskip("litellm", reason="the extra `clients` is not installed")


def test_completion_and_stream(litellm: Any, server: ServerProcess, llm: LLM) -> None:
    [output] = llm.chat(HI, SamplingParams(max_tokens=16, temperature=0.0))
    fields: Any = {
        "model": "openai/tiny", "messages": HI, "api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 16,
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == output.text
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    chunks = list(litellm.completion(stream=True, **fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == output.text
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**fields, "model": "openai/none"})


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_three_turns_with_a_tool(litellm: Any, provider: str) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = []
    with scripted_server(three_turns("weather", '{"city": "Rome"}')) as running:
        fields: Any = {
            "model": f"{provider}/tiny", "api_base": f"{running.url}/v1" if provider == "openai" else running.url,
            "api_key": "none", "num_retries": 0, "max_tokens": 200, "tools": tools,
        }  # fmt: skip
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            messages.append(litellm.completion(messages=messages, **fields).choices[0].message)
            for one in messages[-1].tool_calls:
                messages.append({"role": "tool", "tool_call_id": one.id, "content": "sun in Rome"})
            messages.append(litellm.completion(messages=messages, **fields).choices[0].message)
            assert messages[-1].content == f"Done {number}."
        check_three_turns(running, "weather")
