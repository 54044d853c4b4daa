"""OpenTelemetry traces: a span for each HTTP request under /v1/, and one for each of its prompts below it.

            POST /v1/chat/completions          the caller's trace goes on, by W3C's traceparent
              generate                         one per prompt: tokens, how it ended
                queue, prefill, decode         as the engine timed them
                first_token                    from the arrival of the request to its first token

Invariant: nothing of a prompt, an answer or a key is in a span. Without ``--otlp-traces-endpoint`` nothing here is
imported or called. The packages are those of the extra [otel]; spans are sent on a separate thread.
"""

from __future__ import annotations

from time import monotonic, time_ns
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.server.metrics import RequestTimes

TRACED = "/v1/"
SERVICE = "snapstream"


class Tracing:
    """Spans of one application; ``provider`` is a ``TracerProvider`` of the SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, method: str, path: str, headers: dict[str, str]) -> Any:
        """A context manager around a request; it gives the span, which is the current one within."""
        from opentelemetry.trace import SpanKind

        attributes = {"http.request.method": method, "url.path": path}
        return self._tracer.start_as_current_span(
            method,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,  # its text may quote a prompt
            set_status_on_exception=False,
        )

    def note(self, times: RequestTimes) -> None:
        """The spans of a prompt that has ended, below the request that is being answered."""
        from opentelemetry.trace import set_span_in_context

        zero = time_ns() - int(1e9 * monotonic())

        def at(seconds: float) -> int:
            return zero + int(1e9 * seconds)

        attributes = {
            "gen_ai.usage.input_tokens": times.num_prompt,
            "gen_ai.usage.output_tokens": times.num_tokens,
            "gen_ai.response.finish_reasons": times.finish_reasons,
        }
        whole = self._tracer.start_span("generate", start_time=at(times.arrived_at), attributes=attributes)
        below = set_span_in_context(whole)
        for name, start, end in parts(times):
            self._tracer.start_span(name, context=below, start_time=at(start)).end(at(end))
        whole.end(at(times.ended_at))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def parts(times: RequestTimes) -> list[tuple[str, float, float]]:
    """Name, start and end of what happened to a prompt; the engine's times end with the first token seen here."""
    if times.first_token_at is None:
        return []
    found = [("first_token", times.arrived_at, times.first_token_at), ("decode", times.first_token_at, times.ended_at)]
    if times.queue_s is not None and times.prefill_s is not None:
        begun = times.first_token_at - times.prefill_s
        found += [("queue", begun - times.queue_s, begun), ("prefill", begun, times.first_token_at)]
    return found


class TraceRequests:
    """Middleware: a span around each request of the API."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(TRACED):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracing.request(scope["method"], scope["path"], headers) as span:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status != 404:  # else clients could make any number of names
                        span.update_name(f"{scope['method']} {scope['path']}")
                    if status >= 500:
                        span.set_attribute("error.type", str(status))
                await send(message)

            await self._app(scope, receive, watched)


def otlp_tracing(endpoint: str) -> Tracing:
    """Traces sent to ``endpoint``, like http://localhost:4318/v1/traces. ValueError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs {error.name}; in a checkout run: pip install '.[otel]'"
        ) from None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must be like http://localhost:4318/v1/traces")
    resource = Resource.create({"service.name": SERVICE})  # OTEL_SERVICE_NAME wins
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
