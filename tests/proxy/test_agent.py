"""Real use: an agent's long transcript with tools, openai-python as the client, the shipped draft.

First against an upstream that records what reaches it, then ``snapstream proxy`` in front of ``snapstream serve``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.proxy.app import make_proxy
from snapstream.proxy.settings import ProxySettings
from snapstream.spec_prefill.draft import Draft
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.spec_prefill.text_trimmer import TextTrimmer
from tests.proxy.agent import AGAIN, SYSTEM, TASK, TOOLS, output, transcript
from tests.proxy.test_cli import process
from tests.proxy.upstream import Seen, make_upstream, on_socket
from tests.waiting import HANG_S

HEADER = "x-snapstream-prompt-compression"
KEEP = PromptCompression(keep=0.25)
FIRST = 6  # tool outputs of the first request; the last of them stays as it is


@pytest.fixture(scope="module")
def draft() -> Draft:
    return Draft.load(TINY_DRAFT_MODEL)


@pytest.fixture
def recorded(draft: Draft) -> Iterator[tuple[openai.OpenAI, Seen]]:
    """A proxy whose draft remembers nothing yet, and what reached its upstream."""
    seen = Seen()
    with on_socket(make_upstream(seen)) as upstream:
        settings = ProxySettings(upstream=upstream, wish=KEEP)
        with on_socket(make_proxy(TextTrimmer(draft), None, settings)) as url:
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S), seen


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """The answer, and what the header says."""
    raw = client.chat.completions.with_raw_response.create(
        messages=messages, **{"model": "tiny", "tools": TOOLS, "temperature": 0.0, "max_tokens": 8, **more}
    )
    return raw.parse(), json.loads(raw.headers[HEADER]) if HEADER in raw.headers else {}


def pieces(text: str) -> list[str]:
    return [piece for piece in re.split(r"\s*\[\.\.\.\]\s*", text) if piece]


def check_trimmed(short: str, source: str) -> None:
    """``short`` is made of pieces of ``source``, in their order, and has less than half of it."""
    place = 0
    for piece in pieces(short):
        found = source.find(piece, place)
        assert found >= 0, piece
        place = found + len(piece)
    assert "[...]" in short and 0 < len(short) < len(source) / 2


def test_what_an_agent_needs_arrives_verbatim_and_old_outputs_shortened(
    recorded: tuple[openai.OpenAI, Seen],
) -> None:
    client, seen = recorded
    messages = transcript(FIRST)
    answer, told = ask(client, messages)
    assert answer.choices[0].message.content == "fine"
    assert told["applied"] is True and told["tokens_after"] < 0.6 * told["tokens_before"]
    assert told["num_cached"] == 0 and told["draft_ms"] > 0
    (body,) = seen.bodies
    assert body["tools"] == TOOLS and "prompt_compression" not in body
    got = body["messages"]
    assert got[0]["content"] == SYSTEM and got[1]["content"] == TASK and got[-1] == messages[-1]
    for index in range(3, 2 * FIRST, 2):
        check_trimmed(got[index]["content"], messages[index]["content"])
    without = [{**message, "content": None} if message["role"] == "tool" else message for message in messages]
    assert [{**one, "content": None} if one["role"] == "tool" else one for one in got] == without


def test_the_next_turn_reads_only_what_is_new(
    recorded: tuple[openai.OpenAI, Seen], draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = recorded
    read: list[str] = []
    reads = draft.read
    monkeypatch.setattr(draft, "read", lambda text, **around: (read.append(text), reads(text, **around))[1])
    _, first = ask(client, transcript(FIRST))  # scores all outputs but the last
    assert len(read) == FIRST - 1
    _, second = ask(client, transcript(FIRST + 1))  # one more has aged
    assert (first["num_cached"], second["num_cached"]) == (0, FIRST - 1) and read[FIRST - 1 :] == [
        transcript(FIRST)[-1]["content"]
    ]
    third = list(ask_stream(client, transcript(FIRST + 1)))  # the same again, as a stream
    assert "".join(third) == "".join(f"t{i} " for i in range(8))
    assert seen.bodies[-1]["messages"] == seen.bodies[-2]["messages"]
    _, last = ask(client, transcript(FIRST + 1, asks_again=True))  # another request: old outputs served the first
    assert last["num_cached"] == FIRST
    got = seen.bodies[-1]["messages"]
    assert got[-3]["content"] == AGAIN and got[-1]["content"] == output(FIRST + 1)
    assert [one["content"] for one in got[3 : 2 * FIRST + 2 : 2]] == [
        one["content"] for one in seen.bodies[-2]["messages"][3 : 2 * FIRST + 2 : 2]
    ]


def ask_stream(client: openai.OpenAI, messages: list[Any]) -> Iterator[str]:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=messages,
        tools=TOOLS,
        max_tokens=8,
        stream=True,  # type: ignore[arg-type]
    )
    told = json.loads(raw.headers[HEADER])
    assert told["num_cached"] == FIRST and told["draft_ms"] == 0
    for chunk in raw.parse():
        yield chunk.choices[0].delta.content or ""


def test_an_agent_through_the_proxy_in_front_of_our_server() -> None:
    """The proxy's own draft first; then the server's, asked directly. Both count with the target's tokenizer."""
    options = {"extra_body": {"prompt_compression": {"keep": 0.25}}}
    with (
        process("serve", "--draft", str(TINY_DRAFT_MODEL), "--tool-parser", "hermes") as (_, server),
        process("proxy", "--upstream", server, "--target", str(TINY_MODEL)) as (_, proxy),
    ):
        client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        answer, first = ask(client, transcript(FIRST))
        assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens > 0
        assert first["applied"] is True and answer.usage.prompt_tokens == first["tokens_after"]
        assert answer.snapstream["prompt_compression"] == "off"  # of the server: the proxy keeps the field
        answer, second = ask(client, transcript(FIRST + 1))
        assert second["num_cached"] == FIRST - 1 and answer.usage.prompt_tokens == second["tokens_after"]
        assert second["draft_ms"] > 0 and first["tokens_before"] > 2000
        chunks, told = ask(client, transcript(FIRST + 1), stream=True, stream_options={"include_usage": True})
        *parts, last = list(chunks)
        assert told["num_cached"] == FIRST and last.usage.prompt_tokens == second["tokens_after"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
        assert text == (answer.choices[0].message.content or "")

        direct = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        own, _ = ask(direct, transcript(FIRST + 1), **options)
        trim = own.snapstream["prompts"][0]["trim"]
        assert trim["applied"] is True and own.usage.prompt_tokens == trim["tokens_before"] == second["tokens_before"]
        assert trim["tokens_after"] == second["tokens_after"] and trim["num_cached"] == 0
        assert own.choices[0].message.content == answer.choices[0].message.content
        again, _ = ask(direct, transcript(FIRST + 1, asks_again=True), **options)
        assert again.snapstream["prompts"][0]["trim"]["num_cached"] == FIRST
        whole, _ = ask(direct, transcript(FIRST + 1))
        assert whole.usage.prompt_tokens == second["tokens_before"]
        assert whole.snapstream["prompts"][0]["compression"]["prompt_tokens"] == second["tokens_before"]
