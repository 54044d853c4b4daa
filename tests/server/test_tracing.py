"""Spans of requests and prompts, in the memory exporter of OpenTelemetry; skipped without its SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineStats
from snapstream.server.options import ServerSettings
from snapstream.server.telemetry import Metrics, RequestWatch, Tracing, otlp_tracing, parts
from snapstream.types import QueueFull, Request, SamplingParams
from tests.server.app_client import CHAT, HI, TEXT, AppClient, client
from tests.server.fake_engine import ANSWER, METADATA, FakeEngine, tokenizer

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "sesame"


def traced(*calls: tuple[str, dict[str, Any]], engine: FakeEngine | None = None) -> list[Any]:
    """The spans of these requests, in the order of their ends."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    settings = ServerSettings(api_keys=(SECRET,))
    app = make_app(engine or FakeEngine(), tokenizer(), settings, lambda: METADATA, tracing=Tracing(provider))

    async def run() -> None:
        async with AppClient(app) as http:
            headers = {"Authorization": f"Bearer {SECRET}", "traceparent": f"00-{TRACE}-{CALLER}-01"}
            for path, body in calls:
                await http.post(path, json=body, headers=headers)
            await http.get("/health")
        http.server.close()

    asyncio.run(run())
    return list(memory.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_its_callers_trace_with_its_phases_below(stream: bool) -> None:
    spans = traced((CHAT, {"messages": HI, "stream": stream}))
    names = {span.name: span for span in spans}
    assert set(names) == {f"POST {CHAT}", "generate", "queue", "prefill", "first_token", "decode"} and len(spans) == 6
    server, generate = names[f"POST {CHAT}"], names["generate"]
    assert f"{server.context.trace_id:032x}" == TRACE and f"{server.parent.span_id:016x}" == CALLER
    assert server.attributes["http.response.status_code"] == 200
    assert generate.parent.span_id == server.context.span_id
    assert generate.attributes["gen_ai.usage.output_tokens"] > 3
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    for name in ("queue", "prefill", "first_token", "decode"):
        assert names[name].parent.span_id == generate.context.span_id
        assert names[name].start_time <= names[name].end_time
    assert names["queue"].end_time == names["prefill"].start_time
    assert names["prefill"].end_time == names["first_token"].end_time == names["decode"].start_time
    written = "".join(span.to_json() for span in spans)
    assert not any(word in written for word in (SECRET, ANSWER[:5], HI[0]["content"] + '"'))


def test_every_prompt_has_its_own_and_faults_are_told() -> None:
    engine = FakeEngine()
    spans = traced((TEXT, {"prompt": ["a", "b"]}), (TEXT, {"prompt": "a", "temperature": -1}), engine=engine)
    assert sorted(span.name for span in spans).count("generate") == 2
    assert [span.attributes["http.response.status_code"] for span in spans if span.name == f"POST {TEXT}"] == [200, 400]
    engine.fail_after = 2
    generate, server = traced((TEXT, {"prompt": "a"}), engine=engine)[-2:]
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert server.attributes["error.type"] == "503"
    engine.refuse = QueueFull("full")
    assert [span.name for span in traced((TEXT, {"prompt": "a"}), engine=engine)] == [f"POST {TEXT}"]


def test_the_parts_of_a_prompt() -> None:
    metrics = Metrics(lambda: "tiny", EngineStats, has_vllm_names=False)
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams())

    def found(**times: Any) -> list[tuple[str, float, float]]:
        return parts(RequestWatch(metrics=metrics, request=request, arrived_at=1.0, ended_at=9.0, **times))

    assert found() == []
    assert found(first_token_at=5.0) == [("first_token", 1.0, 5.0), ("decode", 5.0, 9.0)]
    assert found(first_token_at=5.0, queue_s=1.0, prefill_s=2.0)[2:] == [("queue", 2.0, 3.0), ("prefill", 3.0, 5.0)]


def test_the_exporter_asks_for_its_packages_and_a_url() -> None:
    with pytest.raises(ValueError, match=r"\[otel\]|it must be like http://"):
        otlp_tracing("localhost:4317")


def test_without_tracing_nothing_is_called() -> None:
    async def run() -> None:
        async with client(FakeEngine()) as http:
            assert http.server.metrics.on_request is None

    asyncio.run(run())
