"""LangChain's ChatOpenAI against a real server."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.request import SamplingParams

openai_of_langchain = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")

QUESTIONS = ["hi", "Tell me about the report.", "word " * 300]


@pytest.fixture
def chat(server: ServerProcess) -> Any:
    return openai_of_langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=20, temperature=0, max_retries=0,
        extra_body={"kv_cache": {"budget": 256}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def want(llm: LLM) -> list[str]:
    conversations: Any = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = [llm.chat(one, SamplingParams(max_tokens=20, temperature=0.0), budget=256)[0] for one in conversations]
    return [output.text for output in outputs]


def test_invoke(chat: Any, want: list[str]) -> None:
    answer = chat.invoke(QUESTIONS[0])
    assert answer.content == want[0]
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_stream(chat: Any, want: list[str]) -> None:
    chunks = list(chat.stream(QUESTIONS[0]))
    assert "".join(chunk.content for chunk in chunks) == want[0]
    assert len([chunk for chunk in chunks if chunk.content]) > 1


def test_batch(chat: Any, want: list[str]) -> None:
    assert [answer.content for answer in chat.batch(QUESTIONS)] == want
