"""``prompt_compression`` in the server itself: what the engine gets, what the answer reports, what is refused.

The draft is a fake that keeps the first words (``tests/proxy/upstream.py``).
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.cli import main
from snapstream.server.http.prompt_compression import DraftThread
from snapstream.spec_prefill.settings import PromptCompression
from tests.proxy.upstream import CUT, FakeDraft
from tests.server.app_client import HI, client, frames
from tests.server.fake_engine import METADATA, FakeEngine, token_ids, tokenizer
from tests.waiting import until_async

LONG = " ".join(f"word{i}" for i in range(40))
HALF = " ".join([*LONG.split()[:20], CUT])
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HALVED = PromptCompression(keep=0.5)


def ask(path: str, body: dict[str, Any], draft: Any = None, **settings: Any) -> tuple[httpx.Response, FakeEngine, Any]:
    """Answer, engine, and what /metrics and /v1/models say afterwards."""
    engine = FakeEngine()

    async def run() -> Any:
        async with client(engine, draft or FakeDraft(), **settings) as http:
            answer = await http.post(path, json=body)
            return answer, ((await http.get("/metrics")).text, (await http.get("/v1/models")).json()["data"][0])

    answer, after = asyncio.run(run())
    return answer, engine, after


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rendered(messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return token_ids(text)


def test_the_engine_gets_the_compressed_conversation_and_the_answer_tells() -> None:
    requested = {"keep": 0.5}
    answer, engine, (metrics, model) = ask(
        CHAT, {"messages": user(LONG), "prompt_compression": requested, "max_tokens": 3}
    )
    body = answer.json()
    (request,) = engine.requests
    assert list(request.prompt_token_ids) == rendered(user(HALF))
    report = body["snapstream"]
    assert report["prompt_compression"] == requested
    num_left = len(request.prompt_token_ids)
    assert report["prompts"][0]["prompt_compression"] == {
        "applied": True, "tokens_before": num_left + 20, "tokens_after": num_left, "draft_ms": 1.5, "num_cached": 0,
    }  # fmt: skip
    assert body["usage"]["prompt_tokens"] == num_left + 20  # the fake counts words: 20 were taken out
    assert body["usage"]["total_tokens"] == num_left + 20 + 3
    assert report["prompts"][0]["compression"]["prompt_tokens"] == num_left  # what the row was made of
    assert 'snapstream:prompt_tokens_dropped_total{model_name="tiny"} 20.0' in metrics
    assert f'snapstream:request_prompt_tokens_sum{{model_name="tiny"}} {num_left + 20}.0' in metrics
    assert model["snapstream"]["has_draft"] is True and model["snapstream"]["prompt_compression"] == "off"


def test_a_stream_tells_it_in_its_last_chunk() -> None:
    body = {"messages": user(LONG), "prompt_compression": {"max_tokens": 10}, "stream": True, "max_tokens": 3,
            "stream_options": {"include_usage": True}}  # fmt: skip
    answer, engine, _ = ask(CHAT, body)
    *_, last, usage = frames(answer.text)
    report = last["snapstream"]["prompts"][0]["prompt_compression"]
    assert last["snapstream"]["prompt_compression"] == {"max_tokens": 10} and report["applied"] is True
    assert report["tokens_after"] == len(engine.requests[0].prompt_token_ids) == report["tokens_before"] - 30
    assert usage["usage"]["prompt_tokens"] == report["tokens_before"]


def test_nothing_is_compressed_unless_asked_for() -> None:
    draft = FakeDraft()
    for more in ({}, {"prompt_compression": "off"}, {"prompt_compression": None}):
        answer, engine, (metrics, _) = ask(CHAT, {"messages": user(LONG), **more}, draft)
        assert list(engine.requests[0].prompt_token_ids) == rendered(user(LONG))
        report = answer.json()["snapstream"]
        assert report["prompt_compression"] == "off" and "prompt_compression" not in report["prompts"][0]
        assert 'prompt_tokens_dropped_total{model_name="tiny"} 0.0' in metrics
    assert draft.num_calls == 0


def test_the_servers_default_applies_where_a_request_does_not_say() -> None:
    settings = {"prompt_compression": HALVED}
    answer, engine, (_, model) = ask(CHAT, {"messages": user(LONG)}, **settings)
    assert list(engine.requests[0].prompt_token_ids) == rendered(user(HALF))
    assert (
        answer.json()["snapstream"]["prompt_compression"] == {"keep": 0.5} == model["snapstream"]["prompt_compression"]
    )
    answer, engine, _ = ask(CHAT, {"messages": user(LONG), "prompt_compression": "off"}, **settings)
    assert list(engine.requests[0].prompt_token_ids) == rendered(user(LONG))
    answer, engine, _ = ask(CHAT, {"messages": HI}, **settings)
    assert answer.json()["snapstream"]["prompts"][0]["prompt_compression"]["reason"] == "short"


def test_a_prompt_beyond_the_limit_is_taken_if_it_fits_when_compressed() -> None:
    text = " ".join(f"word{i}" for i in range(2000))
    assert len(token_ids(text)) > 4 * METADATA.max_model_len
    for path, prompt in ((CHAT, {"messages": user(text)}), (TEXT, {"prompt": text})):
        refused, _, _ = ask(path, {**prompt, "max_tokens": 5})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        answer, _, _ = ask(path, {**prompt, "max_tokens": 5, "prompt_compression": {"max_tokens": 60}})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] > 1940 > METADATA.max_model_len


def test_parts_and_tool_calls_are_compressed_as_the_template_takes_them() -> None:
    seen: list[Any] = []

    class Draft(FakeDraft):
        def compress(self, prompt: Any, *, tools: Any = None, **options: Any) -> Any:
            seen.append((prompt, tools))
            return super().compress(prompt, tools=tools, **options)

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "fine"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": messages, "tools": tools, "prompt_compression": {"keep": 0.5}}
    answer, engine, _ = ask(CHAT, body, Draft(), tool_parser="hermes")
    assert answer.status_code == 200, answer.text
    given, told = seen[0]
    assert given[0]["content"] == f"{LONG}\nb" and given[1]["content"] == "" and told == tools
    assert given[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    ask(CHAT, {**body, "tool_choice": "none"}, Draft())
    assert seen[1][1] is None  # the template will not be told of them


def test_completions_take_texts_and_leave_ids_to_those_who_did_not_ask() -> None:
    answer, engine, _ = ask(TEXT, {"prompt": [LONG, "short"], "prompt_compression": {"keep": 0.5}})
    assert [list(one.prompt_token_ids) for one in engine.requests] == [token_ids(HALF), token_ids("short")]
    reports = [one["prompt_compression"] for one in answer.json()["snapstream"]["prompts"]]
    assert [report["applied"] for report in reports] == [True, False] and reports[1]["reason"] == "short"
    ids = token_ids(LONG)
    refused, engine, _ = ask(TEXT, {"prompt": ids, "prompt_compression": {"keep": 0.5}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_compression"
    assert not engine.requests
    answer, engine, _ = ask(TEXT, {"prompt": ids}, prompt_compression=HALVED)
    assert list(engine.requests[0].prompt_token_ids) == ids
    assert answer.json()["snapstream"]["prompt_compression"] == "off"


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"echo": True, "logprobs": 1}, {"kv_cache": {"return_kept": True}}], ids=str
)
def test_what_points_into_the_prompt_keeps_it_whole(more: dict[str, Any]) -> None:
    refused, engine, _ = ask(TEXT, {"prompt": LONG, "prompt_compression": {"keep": 0.5}, **more})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_compression"
    assert not engine.requests
    answer, engine, _ = ask(TEXT, {"prompt": LONG, **more}, prompt_compression=HALVED)
    assert answer.status_code == 200 and list(engine.requests[0].prompt_token_ids) == token_ids(LONG)


@pytest.mark.parametrize(
    "value", [{"keep": 0}, {"keep": 2}, {"max_tokens": 0}, {}, {"keep": 0.5, "max_tokens": 9}, "on", 3]
)
def test_a_senseless_wish_is_refused_with_its_name(value: object) -> None:
    for path, prompt in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        answer, engine, _ = ask(path, {**prompt, "prompt_compression": value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_compression"
        assert not engine.requests


def test_without_a_draft_every_wish_is_refused() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            answer = await http.post(CHAT, json={"messages": HI, "prompt_compression": {"keep": 0.5}})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "prompt_compression"
            assert error["code"] == "unsupported_parameter" and "--draft" in error["message"]
            limits = (await http.get("/v1/models")).json()["data"][0]["snapstream"]
            assert limits["has_draft"] is False and limits["prompt_compression"] == "off"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(ValueError("the protected text has 900 tokens"), 400, "900"), (RuntimeError("secret"), 500, "the draft failed")],
)
def test_a_draft_that_cannot_fails_only_those_who_asked(error: Exception, status: int, reason: str) -> None:
    draft = FakeDraft()
    draft.error = error
    refused, engine, _ = ask(CHAT, {"messages": user(LONG), "prompt_compression": {"keep": 0.5}}, draft)
    assert refused.status_code == status and "secret" not in refused.text and not engine.requests
    answer, engine, _ = ask(CHAT, {"messages": user(LONG)}, draft, prompt_compression=HALVED)
    report = answer.json()["snapstream"]["prompts"][0]["prompt_compression"]
    assert answer.status_code == 200 and report["applied"] is False and reason in report["reason"]
    assert list(engine.requests[0].prompt_token_ids) == rendered(user(LONG))


def test_the_draft_reads_no_prompt_beyond_its_limit() -> None:
    draft = FakeDraft()
    body = {"messages": user(LONG), "prompt_compression": {"keep": 0.5}}
    refused, _, _ = ask(CHAT, body, draft, max_draft_chars=100)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    answer, _, _ = ask(CHAT, {"messages": user(LONG)}, draft, max_draft_chars=100, prompt_compression=HALVED)
    assert answer.json()["snapstream"]["prompts"][0]["prompt_compression"]["applied"] is False and draft.num_calls == 0


def test_waiting_for_the_draft_is_bounded_and_does_not_hold_up_others() -> None:
    async def run() -> None:
        draft = FakeDraft()
        draft.gate.clear()
        async with client(FakeEngine(), draft, max_draft_waiting=2) as http:
            body = {"messages": user(LONG), "prompt_compression": {"keep": 0.5}}
            waiting = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(2)]
            service = http.server.compression
            await until_async(lambda: service.draft.num_waiting == 2)
            full = await http.post(CHAT, json=body)
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
            assert (await http.post(CHAT, json={"messages": HI})).status_code == 200  # the loop is free
            draft.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
            assert service.draft.num_waiting == 0

    asyncio.run(run())


class Text(str):
    """A prompt whose life can be watched."""


def test_who_leaves_while_waiting_is_not_read_and_makes_room() -> None:
    async def run() -> None:
        draft = FakeDraft()
        draft.gate.clear()
        thread = DraftThread(draft, None, max_waiting=2, retry_after_s=1)  # type: ignore[arg-type]
        first = asyncio.create_task(thread.compress(LONG, HALVED))
        await until_async(lambda: draft.num_calls == 1)
        for _ in range(5):  # more than may wait at once
            prompt = Text(LONG)
            held = weakref.ref(prompt)
            second = asyncio.create_task(thread.compress(prompt, HALVED))
            del prompt
            await until_async(lambda: thread.num_waiting == 2)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            del second
            for _ in range(3):  # turns in which the loop lets go of the task
                await asyncio.sleep(0)
            gc.collect()
            assert thread.num_waiting == 1 and held() is None, "nothing keeps the prompt"
        first.cancel()  # the draft reads it already: it counts until that has ended
        await asyncio.gather(first, return_exceptions=True)
        assert thread.num_waiting == 1
        draft.gate.set()
        assert (await thread.compress(LONG, HALVED))[0] == HALF
        assert draft.num_calls == 2 and thread.num_waiting == 0
        thread.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("args", "message", "code"),  # 2: said wrong; 1: cannot be loaded
    [
        (("--prompt-keep", "0.5"), "--draft", 2),
        (("--prompt-threshold", "9"), "--draft", 2),
        (("--draft-context-len", "900"), "--draft", 2),
        (("--draft", str(TINY_DRAFT_MODEL), "--draft-context-len", "99999"), "context_len is 99999", 1),
        (("--draft", str(TINY_DRAFT_MODEL), "--prompt-keep", "0"), "keep", 2),
        (("--draft", str(TINY_DRAFT_MODEL), "--prompt-keep", "0.5", "--prompt-max-tokens", "9"), "give exactly one", 2),
        (("--draft", "/nowhere"), "/nowhere", 1),
        (("--draft", "EMPTY"), "tokenizer", 1),
    ],
)
def test_what_cannot_be_a_draft_is_refused_at_start(
    args: tuple[str, ...], message: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((TINY_DRAFT_MODEL / "config.json").read_bytes())
    given = [str(tmp_path) if arg == "EMPTY" else arg for arg in args]
    assert main(["serve", "--port", "0", *given]) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
