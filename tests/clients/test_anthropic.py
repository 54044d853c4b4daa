"""The anthropic SDK over /v1/messages, and 30 turns of a coding agent in the form that such agents send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from benchmarks.server_process import ServerProcess
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.clients.scripted import call, scripted_server
from tests.waiting import HANG_S, HTTP

anthropic: Any = pytest.importorskip("anthropic", reason="the extra `clients` is not installed")

HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 24, "extra_body": {"temperature": 0}}
READ: Any = {
    "name": "read", "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}  # fmt: skip
TURNS = 30


def client(url: str, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def test_answers_are_those_of_the_engine(server: ServerProcess, llm: LLM) -> None:
    [output] = llm.chat(HI, SamplingParams(max_tokens=24, temperature=0.0))
    with client(server.url) as api:
        message = api.messages.create(messages=HI, **GREEDY)
        assert message.content[0].text == output.text
        num_prompt = len(output.prompt_token_ids)
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == num_prompt
        assert api.messages.count_tokens(model="tiny", messages=HI).input_tokens == num_prompt
        with api.messages.stream(messages=HI, **GREEDY) as stream:
            assert "".join(stream.text_stream) == output.text
            final = stream.get_final_message()
        assert final.content[0].text == output.text and final.stop_reason == message.stop_reason
        assert final.usage.output_tokens == message.usage.output_tokens


def test_async_streams_side_by_side(server: ServerProcess) -> None:
    async def one(api: Any, text: str) -> str:
        async with api.messages.stream(messages=[{"role": "user", "content": text}], **GREEDY) as stream:
            return "".join([piece async for piece in stream.text_stream])

    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(one(api, text) for text in ("hi", "Tell me about it.") * 3))

    texts = asyncio.run(run())
    assert texts == texts[:2] * 3 and all(texts)


def test_errors_have_their_own_exceptions(server: ServerProcess) -> None:
    with client(server.url) as api:
        with pytest.raises(anthropic.NotFoundError) as missing:
            api.messages.create(model="none", max_tokens=3, messages=HI)
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError):
            api.messages.create(model="tiny", max_tokens=0, messages=HI)
    with scripted_server(["x"], api_keys=("right",)) as running:
        with client(running.url, "wrong") as api, pytest.raises(anthropic.AuthenticationError):
            api.messages.create(model="tiny", max_tokens=3, messages=HI)
        with client(running.url, "right") as api:
            assert api.messages.create(model="tiny", max_tokens=3, messages=HI).stop_reason == "end_turn"


def test_thinking_and_tools_stream() -> None:
    answer = "<think>\nI read.\n</think>\n\nLook: " + call("read", '{"path": "a.py"}')
    with (
        scripted_server([answer]) as running,
        client(running.url) as api,
        api.messages.stream(
            model="tiny", max_tokens=200, messages=HI, tools=[READ], thinking={"type": "adaptive"}
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"path": "a.py"} and final.stop_reason == "tool_use"


def system_of(turn: int) -> list[dict[str, Any]]:
    """Three blocks, the first of which differs from turn to turn."""
    cached = {"cache_control": {"type": "ephemeral"}}
    header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={turn:05x};"
    return [
        {"type": "text", "text": header},
        {"type": "text", "text": "You are a coding agent.", **cached},
        {"type": "text", "text": "Use the tools. Be brief.\n" + "Rule.\n" * 20, **cached},
    ]


def test_thirty_turns_of_a_coding_agent() -> None:
    """Each prompt begins with the whole one before it: nothing volatile is in it, and nothing changes its place."""
    answers = [f"<think>\nStep {turn}.\n</think>\n\n" + call("read", json.dumps({"path": f"f{turn}.py"}))
               for turn in range(TURNS - 1)]  # fmt: skip
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Mend the bug."}]}]
    with scripted_server([*answers, "Done."]) as running, client(running.url) as api:
        for turn in range(TURNS):
            wish: Any = {"model": "tiny", "system": system_of(turn), "messages": messages, "tools": [READ]}
            counted = api.beta.messages.count_tokens(**wish).input_tokens
            with api.beta.messages.stream(
                **wish, max_tokens=1000, metadata={"user_id": "u"}, betas=["interleaved-thinking-2025-05-14"],
                context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            ) as stream:  # fmt: skip
                final = stream.get_final_message()
            assert final.usage.input_tokens == counted == len(running.engine.requests[turn].prompt_token_ids)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in final.content]})
            if final.stop_reason != "tool_use":
                break
            use = final.content[-1]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "x = 1"}],
                      "is_error": turn % 7 == 3}  # fmt: skip
            messages.append({"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]})
            messages.append({"role": "system", "content": f"{TURNS - turn} turns are left."})
        assert (turn, final.content[0].text) == (TURNS - 1, "Done.")
        prompts = running.engine.prompts
    for before, after in zip(prompts, prompts[1:], strict=False):
        assert after.startswith(before.removesuffix("assistant:")), "the beginning stays"
    assert "x-anthropic" not in prompts[-1] and prompts[-1].count("turns are left.") == TURNS - 1
    assert prompts[-1].count("<think>Step") == TURNS - 1 and "tool: Error: x = 1" in prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_sends_the_whole_conversation(stream: bool) -> None:
    """By default it continues a thread that the server holds; three turns, two calls."""

    @anthropic.beta_tool
    def read(path: str) -> str:
        """Reads a file."""
        return f"It says {path}."

    answers = ["One. " + call("read", '{"path": "a.py"}'), call("read", '{"path": "b.py"}'), "Done."]
    with scripted_server(answers) as running, client(running.url) as api:
        runner = api.beta.messages.tool_runner(
            model="tiny", max_tokens=200, system="Be brief.", tools=[read], messages=HI, stream=stream
        )
        final = runner.until_done()
        prompts = running.engine.prompts
    assert final.content[0].text == "Done." and len(prompts) == 3
    for number, prompt in enumerate(prompts):
        assert prompt.startswith("tools: read ") and "system: Be brief.\nuser: hi\n" in prompt
        assert prompt.count("tool: It says ") == number


def test_the_bare_requests_of_an_agent(server: ServerProcess) -> None:
    """What a client sends before its first message: a HEAD, a query string, its key as a bearer's."""
    assert httpx.head(f"{server.url}/", timeout=HANG_S).status_code < 500
    headers = {"Authorization": "Bearer none", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    body = {"model": "tiny", "max_tokens": 3, "messages": HI}
    done = HTTP.post(f"{server.url}/v1/messages?beta=true", json=body, headers=headers, timeout=HANG_S)
    assert done.status_code == 200 and done.json()["type"] == "message"
