"""LangChain's ChatOpenAI against a real server."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.clients.scripted import QUESTIONS, check_three_turns, scripted_server, three_turns

openai_of_langchain = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")

TEXTS = ["hi", "Tell me about the report.", "word " * 300]


@pytest.fixture
def chat(server: ServerProcess) -> Any:
    return openai_of_langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=20, temperature=0, max_retries=0,
        extra_body={"kv_cache": {"budget": 256}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def want(llm: LLM) -> list[str]:
    conversations: Any = [[{"role": "user", "content": question}] for question in TEXTS]
    outputs = [llm.chat(one, SamplingParams(max_tokens=20, temperature=0.0), budget=256)[0] for one in conversations]
    return [output.text for output in outputs]


def test_invoke(chat: Any, want: list[str]) -> None:
    answer = chat.invoke(TEXTS[0])
    assert answer.content == want[0]
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_stream(chat: Any, want: list[str]) -> None:
    chunks = list(chat.stream(TEXTS[0]))
    assert "".join(chunk.content for chunk in chunks) == want[0]
    assert len([chunk for chunk in chunks if chunk.content]) > 1


def test_batch(chat: Any, want: list[str]) -> None:
    assert [answer.content for answer in chat.batch(TEXTS)] == want


@pytest.mark.parametrize("is_responses", [False, True])
def test_three_turns_with_a_tool(is_responses: bool) -> None:
    def weather(city: str) -> str:
        """The weather."""
        return f"sun in {city}"

    with scripted_server(three_turns("weather", '{"city": "Rome"}')) as running:
        model = openai_of_langchain.ChatOpenAI(
            model="tiny", base_url=f"{running.url}/v1", api_key="none", max_retries=0, use_responses_api=is_responses
        ).bind_tools([weather])
        messages: list[Any] = []
        for number, question in enumerate(QUESTIONS, 1):
            messages.append(("user", question))
            messages.append(model.invoke(messages))
            for one in messages[-1].tool_calls:
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": weather(**one["args"])})
            messages.append(model.invoke(messages))
            assert messages[-1].text == f"Done {number}."
        check_three_turns(running, "weather")
