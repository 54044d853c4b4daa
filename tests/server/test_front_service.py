"""Around the API: keys, CORS, models, health, metrics, tokenizer; clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from snapstream.engine.validate import QueueFull
from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineDead
from snapstream.server.logs import TextFormatter
from snapstream.server.settings import ServerSettings
from tests.server.fake_engine import FACTS, FakeEngine, token_ids, tokenizer
from tests.server.front_client import HI, JSON, app_of, client
from tests.waiting import HANG_S


def test_bearer_keys_guard_v1_only() -> None:
    async def run() -> None:
        async with client(FakeEngine(), api_keys=("one", "two")) as http:
            for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
                response = await http.get("/v1/models", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
            for key in ("one", "two"):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 401
            for path in ("/health", "/metrics", "/version", "/tokenizer_info"):
                assert (await http.get(path)).status_code == 200

    asyncio.run(run())


def test_only_named_hosts_are_answered_where_names_are_given() -> None:
    async def run() -> None:
        async with client(FakeEngine(), allowed_hosts=("localhost", "my.box")) as http:
            for host in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "my.box"):
                assert (await http.get("/v1/models", headers={"Host": host})).status_code == 200, host
            for host in (
                "evil.example",
                "evil.example:8000",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "10.0.0.1",
            ):
                response = await http.get("/v1/models", headers={"Host": host})
                assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed"), host
        async with client(FakeEngine()) as http:
            assert (await http.get("/v1/models", headers={"Host": "evil.example"})).status_code == 200

    asyncio.run(run())


def test_cors_only_for_named_origins() -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }

    async def run() -> None:
        async with client(FakeEngine(), api_keys=("k",), cors_origins=("http://good",)) as http:
            response = await http.options("/v1/models", headers={"Origin": "http://good", **preflight})
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "http://good"
            allowed = response.headers["access-control-allow-headers"].lower()
            assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
            response = await http.options("/v1/models", headers={"Origin": "http://evil", **preflight})
            assert "access-control-allow-origin" not in response.headers
            assert (response.status_code, response.json()["error"]["code"]) == (400, "cors_refused")
            response = await http.get("/v1/models", headers={"Origin": "http://good"})  # errors are readable, too
            assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://good"
        async with client(FakeEngine()) as http:
            response = await http.get("/v1/models", headers={"Origin": "http://good"})
            assert "access-control-allow-origin" not in response.headers

    asyncio.run(run())


def test_models_version_and_request_id() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            models = (await http.get("/v1/models")).json()
            assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["tiny", "alias"]
            one = (await http.get("/v1/models/alias")).json()
            assert (one["id"], one["object"], one["max_model_len"]) == ("alias", "model", 512)
            assert (await http.get("/version")).json()["version"]
            body = {"messages": HI}
            response = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"
            response = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "a b"})
            assert response.headers["x-request-id"] in response.json()["id"]
            for path in ("/nothing", "/health", "/v1/models/none"):
                response = await http.get(path, headers={"X-Request-Id": "mine-2"})
                assert response.headers.get_list("x-request-id") == ["mine-2"]
                assert (await http.get(path, headers={"X-Request-Id": "x" * 129})).headers["x-request-id"] != "x" * 129

    asyncio.run(run())


def test_head_is_get_without_a_body() -> None:
    """Health checks of proxies ask so."""

    async def run() -> None:
        engine = FakeEngine()
        async with client(engine, api_keys=("k",)) as http:
            for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/nothing", 404)):
                answer = await http.head(path)
                assert (answer.status_code, answer.content) == (status, b""), path
                assert answer.headers["x-request-id"]
            models = {"url": "/v1/models", "headers": {"Authorization": "Bearer k"}}
            assert (await http.head(**models)).headers["content-length"] == str(len((await http.get(**models)).content))
            assert (await http.head("/tokenize")).status_code == 405
            engine.is_ready = False
            answer = await http.head("/health")
            assert (answer.status_code, answer.content) == (503, b"") and answer.headers["retry-after"]

    asyncio.run(run())


def test_tokenizer_endpoints() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            response = await http.post("/tokenize", json={"prompt": "Hello wörld", "return_token_strs": True})
            body = response.json()
            ids = token_ids("Hello wörld")
            assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
            assert body["token_strs"][0] == "H"
            assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "Hello wörld"}
            body = (await http.post("/tokenize", json={"messages": HI})).json()
            assert tokenizer().decode(body["tokens"]) == "<|begin|><|user|> hi<|end|><|assistant|>"
            info = (await http.get("/tokenizer_info")).json()
            assert info["eos_token"] == "<|end|>" and "messages" in info["chat_template"]
            for bad in ({"tokens": [99999]}, {"tokens": [-1]}, {"tokens": "x"}, {}):
                assert (await http.post("/detokenize", json=bad)).status_code == 400

    asyncio.run(run())


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_metrics_under_both_names() -> None:
    async def run() -> tuple[dict[str, float], dict[str, float]]:
        async with client(FakeEngine()) as http:
            before = samples((await http.get("/metrics")).text)
            await http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3})
            await http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
            return before, samples((await http.get("/metrics")).text)

    before, after = asyncio.run(run())
    assert before.keys() == after.keys()  # every series is there from the start
    for prefix in ("vllm:", "snapstream:"):
        label = '{model_name="tiny"}'
        assert after[f"{prefix}num_requests_running{label}"] == 0
        assert after[f"{prefix}num_requests_waiting{label}"] == 0
        assert after[f"{prefix}kv_cache_usage_perc{label}"] == 0
        assert after[f"{prefix}generation_tokens_total{label}"] > 6
        assert after[prefix + 'request_success_total{finished_reason="length",model_name="tiny"}'] == 2
        assert after[prefix + 'request_success_total{finished_reason="stop",model_name="tiny"}'] == 1
        for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                          "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                          "request_generation_tokens"):  # fmt: skip
            assert after[f"{prefix}{histogram}_count{label}"] == 3, histogram
        assert after[f"{prefix}inter_token_latency_seconds_count{label}"] > 4
        assert f"{prefix}prompt_tokens_total{label}" in after
        assert after[f"{prefix}request_queue_time_seconds_sum{label}"] == pytest.approx(0.003)
    ours = ("rows_used", "rows_free", "evicted_tokens_total", "compressions_total", "compression_seconds_total",
            "prompt_tokens_trimmed_total", "engine_restarts_total")  # fmt: skip
    assert all(f'snapstream:{name}{{model_name="tiny"}}' in after for name in ours)
    assert not any("_created" in name for name in after)


class Visitor:
    """A client at the ASGI level, which can leave."""

    def __init__(self, engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
        self.app = make_app(engine, tokenizer(), ServerSettings(), lambda: FACTS)
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._body: bytes | None = json.dumps(body).encode()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "server": ("t", 80), "client": ("c", 1),
        }  # fmt: skip

    async def run(self) -> None:
        async def receive() -> dict[str, Any]:
            if self._body is not None:
                body, self._body = self._body, None
                return {"type": "http.request", "body": body, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(self._scope, receive, send)


@pytest.mark.parametrize("hang_after", [0, 4], ids=["in prefill", "in decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [("/v1/chat/completions", {"messages": HI}, 1), ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3)],
)
def test_a_client_that_leaves_frees_its_rows(
    path: str, fields: dict[str, Any], count: int, stream: bool, hang_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def run() -> None:
        engine = FakeEngine(hang_after=hang_after)
        visitor = Visitor(engine, path, {**fields, "stream": stream})
        task = asyncio.create_task(visitor.run())
        await asyncio.wait_for(engine.hanging.wait(), HANG_S)
        while engine.num_running < count:
            await asyncio.sleep(0)
        visitor.gone.set()  # the engine itself stays silent: only the watch can notice
        await asyncio.wait_for(task, HANG_S)
        assert engine.num_running == 0 and len(engine.aborted) == count
        text = visitor.app.state.front.metrics.render().decode()
        assert samples(text)['vllm:request_success_total{finished_reason="abort",model_name="tiny"}'] == count
        assert visitor.app.state.front.visits.num_open == 0
        visitor.app.state.front.close()

    asyncio.run(run())
    (line,) = [line for line in map(TextFormatter().format, caplog.records) if " end=" in line]
    assert ("status=200 end=left" if stream and hang_after else "status=499 end=-") in line


@pytest.mark.parametrize("stream", [False, True])
def test_every_request_leaves_one_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def line(engine: FakeEngine, **body: Any) -> str:
        async def run() -> None:
            async with client(engine) as http:
                headers = {"X-Request-Id": "mine"}
                await http.post("/v1/completions", json={"prompt": "a", "stream": stream, **body}, headers=headers)

        caplog.clear()
        asyncio.run(run())
        (found,) = [line for line in map(TextFormatter().format, caplog.records) if "request=mine " in line]
        return found

    num_prompt = len(token_ids("a"))
    facts = f"prompt_tokens={num_prompt} trimmed_tokens=0 kept_tokens={num_prompt} "
    facts += "completion_tokens=3 queue_ms=1.0 ttft_ms="
    assert f"status=200 end=length {facts}" in line(FakeEngine(), max_tokens=3)
    status, end = (200, "engine_unavailable") if stream else (503, "-")
    assert f"status={status} end={end} prompt_tokens={num_prompt} " in line(FakeEngine(fail_after=2))
    refused = line(FakeEngine(), temperature=-1)
    assert (
        "status=400 end=- prompt_tokens=0 trimmed_tokens=0 kept_tokens=0 completion_tokens=0 queue_ms=- ttft_ms=- ms="
        in refused
    )


def test_a_drain_waits_for_prompts_that_wait_in_the_front() -> None:
    """A batch larger than the queue was accepted as a whole: the engine may not close before its last prompt."""

    class OneAtATime(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if not self.is_ready:
                raise EngineDead("the engine is shutting down")
            if self.num_running:
                raise QueueFull("full")
            async for delta in super().generate(request):
                yield delta

    async def run() -> None:
        engine = OneAtATime(hang_after=1)
        async with client(engine) as http:
            body = {"prompt": ["a", "b", "c"], "max_tokens": 3}
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            front = app_of(http).state.front
            drain = asyncio.create_task(front.drain(10 * HANG_S))
            await asyncio.sleep(0)
            assert (await http.post("/v1/completions", json=body)).status_code == 503  # new work
            refused = await http.get("/health")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down; try again later"
            engine.released.set()
            response = await answer
            assert response.status_code == 200, response.text
            assert len(response.json()["choices"]) == 3
            await asyncio.wait_for(drain, HANG_S)
            assert engine.is_shut and front.visits.num_open == 0

    asyncio.run(run())


def test_a_request_that_is_being_tokenized_survives_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if not self.is_ready:
                raise EngineDead("the engine is shutting down")
            async for delta in super().generate(request):
                yield delta

    async def run() -> None:
        engine = Strict()
        async with client(engine) as http:
            front = app_of(http).state.front
            encode, may_go, is_there = front.prompts.encode, asyncio.Event(), asyncio.Event()

            async def slowly(*args: Any, **options: Any) -> Any:
                is_there.set()
                await may_go.wait()
                return await encode(*args, **options)

            monkeypatch.setattr(front.prompts, "encode", slowly)
            answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
            await asyncio.wait_for(is_there.wait(), HANG_S)
            drain = asyncio.create_task(front.drain(10 * HANG_S))
            await asyncio.sleep(0.05)
            may_go.set()
            assert (await answer).status_code == 200
            await asyncio.wait_for(drain, HANG_S)

    asyncio.run(run())


def test_a_drain_ends_in_time_whatever_is_open() -> None:
    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine) as http:
            answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            await asyncio.wait_for(app_of(http).state.front.drain(0.1), HANG_S)
            assert (await answer).status_code == 503

    asyncio.run(run())


def test_requests_over_the_limit_are_refused_before_their_body_is_read() -> None:
    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_requests=2, retry_after_s=3) as http:
            body = {"prompt": "a", "stream": True}
            taken = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            while engine.num_running < 2:
                await asyncio.sleep(0)

            async def unread() -> Any:
                raise AssertionError("the body was asked for")
                yield b""

            for path in ("/v1/completions", "/tokenize"):
                response = await http.post(path, content=unread(), headers=JSON)
                assert (response.status_code, response.headers["retry-after"]) == (429, "3")
            engine.released.set()
            assert [response.status_code for response in await asyncio.gather(*taken)] == [200, 200]
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_open_bodies_are_bounded_together() -> None:
    body = {"prompt": "a", "user": "u" * 600}

    async def run() -> None:
        engine = FakeEngine(hang_after=1)
        async with client(engine, max_body_bytes=1000, max_open_body_bytes=1000) as http:
            taken = asyncio.create_task(http.post("/v1/completions", json={**body, "stream": True}))
            await asyncio.wait_for(engine.hanging.wait(), HANG_S)
            visits = app_of(http).state.front.visits
            held = visits.num_bytes
            assert 600 < held < 1000
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert response.headers["retry-after"] == "1" and "1000 bytes" in response.json()["error"]["message"]
            assert visits.num_bytes == held, "what was refused holds nothing"
            engine.released.set()
            assert (await taken).status_code == 200 and visits.num_bytes == 0
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_a_body_that_trickles_is_given_up() -> None:
    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(10 * HANG_S)

    async def run() -> None:
        async with client(FakeEngine(), body_timeout_s=0.05) as http:
            response = await asyncio.wait_for(http.post("/v1/completions", content=trickle(), headers=JSON), HANG_S)
            assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
            assert app_of(http).state.front.visits.num_open == 0

    asyncio.run(run())


def test_many_log_probabilities_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(num_samples: int) -> int:
        async with client(FakeEngine(answer=30 * "word ")) as http:
            prompts, count = app_of(http).state.front.prompts, 0
            offload = prompts.offload

            async def counted(work: Any) -> Any:
                nonlocal count
                count += 1
                return await offload(work)

            monkeypatch.setattr(prompts, "offload", counted)
            body = {"messages": HI, "n": num_samples, "logprobs": True, "top_logprobs": 15}
            response = await http.post("/v1/chat/completions", json=body)
            assert len(response.json()["choices"]) == num_samples
            return count

    assert asyncio.run(run(1)) == 0
    assert asyncio.run(run(4)) == 1
