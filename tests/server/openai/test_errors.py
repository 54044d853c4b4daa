"""What is no fault of a value: unknown names, full queues, engines that are gone, templates that raise."""

from __future__ import annotations

import pytest

from snapstream.engine.validate import QueueFull
from snapstream.server.engine.api import EngineDead
from tests.server.fake_engine import FakeEngine, tokenizer
from tests.server.front_client import CHAT, HI, TEXT, call, error_of, frames


def test_unknown_model_path_and_method() -> None:
    error = error_of(call(CHAT, {"model": "other", "messages": HI}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(call("/v1/models/other", method="GET"), 404)["code"] == "model_not_found"
    error_of(call("/v1/embeddings", {}), 404)
    error_of(call(CHAT, method="GET"), 405)


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


def test_tools_reach_the_template_unless_none(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(tokenizer(), "chat_template", "{{ tools | length if tools else 'none' }}{{ mood }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for choice, expected in (("auto", "1sad"), ("none", "nonesad")):
        engine = FakeEngine()
        body = {"messages": HI, "tools": tools, "tool_choice": choice, "chat_template_kwargs": {"mood": "sad"}}
        assert call(CHAT, body, engine=engine).status_code == 200
        assert tokenizer().decode(engine.requests[0].prompt_token_ids) == expected
