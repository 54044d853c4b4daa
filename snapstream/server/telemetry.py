"""Prometheus metrics, and OpenTelemetry traces.

Metrics are what the server measures per request, and the engine's gauges and totals at each scrape. Everything is named
``snapstream:...``; the names that dashboards, routers and benchmark clients know are the same series under ``vllm:``,
made when they are read. Invariant: no global registry; two apps in one process do not mix.

Traces have a span for each HTTP request under /v1/, and one for each of its prompts below it:

            POST /v1/chat/completions          the caller's trace goes on, by W3C's traceparent
              generate                         one per prompt: tokens, how it ended
                queue, prefill, decode         as the engine timed them
                first_token                    from the arrival of the request to its first token

Invariant: nothing of a prompt, an answer or a key is in a span. Without ``--otlp-traces-endpoint`` nothing of
OpenTelemetry is imported or called. Its packages are those of the extra [otel]; spans are sent on a separate thread.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.server.engine.api import EngineStats, RequestDelta
from snapstream.server.http.connections import REASONS, ConnectionGuard
from snapstream.server.http.errors import Middleware
from snapstream.types import FinishReason, Request

OURS, THEIRS = "snapstream:", "vllm:"
Values = Mapping[Any, float]  # by the values of further labels, a tuple
ALIASED = frozenset(
    """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens request_success
    time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
    prefix_cache_queries prefix_cache_hits spec_decode_num_draft_tokens spec_decode_num_accepted_tokens""".split()
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(2**power for power in range(0, 21))
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Arrival to first token.", _SECONDS),
    (
        "inter_token_latency_seconds",
        "Time between one token and the next; tokens that come together share it.",
        _SECONDS,
    ),
    ("e2e_request_latency_seconds", "Arrival to last token.", _SECONDS),
    ("request_queue_time_seconds", "Arrival to the start of prefill.", _SECONDS),
    ("request_prefill_time_seconds", "Start of prefill to first token.", _SECONDS),
    ("request_decode_time_seconds", "First token to last.", _SECONDS),
    ("request_prompt_tokens", "Prompt tokens of a request, before any compression.", _TOKENS),
    ("request_generation_tokens", "Generated tokens of a request.", _TOKENS),
)
# Errors that are listed from the first scrape on, so that an alert sees the first of a kind.
_USUAL_FAULTS = (
    (400, "invalid_request_error"),
    (401, "invalid_api_key"),
    (429, "queue_full"),
    (500, "internal_error"),
    (503, "engine_unavailable"),
)


class Metrics:
    """All metrics of one app. ``model_name`` gives "" while the engine loads; nothing is shown until then."""

    def __init__(
        self,
        model_name: Callable[[], str],
        stats: Callable[[], EngineStats],
        *,
        has_vllm_names: bool,
        has_transfers: bool = False,
        guard: ConnectionGuard | None = None,
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._has_vllm_names, self._has_transfers = has_vllm_names, has_transfers
        self._guard = guard
        self.on_request: Callable[[RequestWatch], None] | None = None  # called at the end of every prompt
        self._registry = CollectorRegistry(auto_describe=False)
        self._histograms = {
            name: Histogram(OURS + name, text, ["model_name"], buckets=buckets, registry=self._registry)
            for name, text, buckets in _HISTOGRAMS
        }
        self._num_dropped = 0
        self._faults = Counts(dict.fromkeys(_USUAL_FAULTS, 0))  # by status and reason
        self._series: dict[tuple[str, str], Histogram] = {}
        self._success = Counter(
            OURS + "request_success", "Ended samples.", ["model_name", "finished_reason"], registry=self._registry
        )

    def observe(self, name: str, value: float) -> None:
        """Called for every token: the series of a name and model are looked up once."""
        key = (name, self._model_name())
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._histograms[name].labels(key[1])
        series.observe(max(0.0, value))

    def count_end(self, reason: FinishReason) -> None:
        self._success.labels(self._model_name(), reason.value).inc()

    def count_fault(self, status: int, reason: str) -> None:
        """An answer that is an error, also one within a stream."""
        self._faults[status, reason] += 1

    def count_dropped(self, num_tokens: int) -> None:
        self._num_dropped += num_tokens

    def render(self) -> bytes:
        """The Prometheus text of this moment."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        model = self._model_name()
        if not model:  # still loading: series without a name would stay forever
            return
        for histogram in self._histograms.values():
            histogram.labels(model)  # so that every series exists from the first scrape on
        for reason in FinishReason:
            self._success.labels(model, reason.value)
        for family in (*self._registry.collect(), *self._engine_families(model)):
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if self._has_vllm_names and family.name.removeprefix(OURS) in ALIASED:
                yield _alias(family)

    def _engine_families(self, model: str) -> Iterator[Metric]:
        def family(
            kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, values: Values, *labels: str
        ) -> Metric:
            found = kind(OURS + name, text, labels=["model_name", *labels])
            for own, value in values.items():
                found.add_metric([model, *own], value)
            return found

        stats, guard = self._stats(), self._guard
        rows_used = stats.rows_total - stats.rows_free
        for name, text, value in (
            ("num_requests_running", "Requests in prefill or decode.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Rows in use, 1 is all.", rows_used / stats.rows_total if stats.rows_total else 0),
            ("rows_used", "Rows in use.", rows_used),
            ("rows_free", "Rows free.", stats.rows_free),
            ("prefix_store_blocks_used", "Blocks of the prefix store in use.", stats.prefix_blocks_used),
            ("prefix_store_blocks", "Blocks that the prefix store holds; 0: there is none.", stats.prefix_blocks_total),
        ):
            yield family(GaugeMetricFamily, name, text, {(): value})
        of_rows = (
            ("rows_sent", "Rows sent to decode servers.", stats.rows_sent_total),
            ("rows_received", "Rows received from prefill servers.", stats.rows_received_total),
            ("rows_lost", "Rows that were lost in transfer, or refused.", stats.rows_lost_total),
            ("row_bytes_received", "Bytes of the received rows.", stats.row_bytes_received_total),
        )
        for name, text, total in (
            ("prompt_tokens", "Prompt tokens prefilled.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("spec_decode_num_draft_tokens", "Tokens drafted by prompt lookup.", stats.drafted_tokens_total),
            ("spec_decode_num_accepted_tokens", "Drafted tokens of the answers.", stats.accepted_tokens_total),
            ("evicted_tokens", "Prompt tokens that rows did not keep.", stats.evicted_tokens_total),
            ("compressions", "Prompts longer than their row.", stats.compressions_total),
            ("compression_seconds", "Spent on scoring, selection and writing rows.", stats.compression_seconds_total),
            ("prompt_tokens_dropped", "Prompt tokens that the draft dropped before prefill.", self._num_dropped),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix store.", stats.prefix_queries_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix store.", stats.prefix_hits_total),
            ("prefix_saved_tokens", "Tokens put into the prefix store.", stats.prefix_saved_total),
            ("prefix_lost_answer_tokens", "Generated tokens not copied from rows.", stats.prefix_lost_answers_total),
            ("prefix_evicted_blocks", "Blocks evicted from the prefix store.", stats.prefix_evicted_blocks_total),
            *(of_rows if self._has_transfers else ()),
            ("engine_restarts", "Restarts of the engine process.", stats.restarts_total),
            ("engine_stalls", "Engines that were killed because they made no progress.", stats.stalls_total),
        ):
            yield family(CounterMetricFamily, name, text, {(): total})
        of_answers, idle = stats.prefix_answer_hits_total, stats.prefix_idle_hits_total
        origins = {("prompt",): stats.prefix_hits_total - of_answers - idle, ("answer",): of_answers, ("idle",): idle}
        yield family(CounterMetricFamily, "prefix_hits", "Tokens found in the prefix store.", origins, "origin")
        faults = {(str(status), reason): total for (status, reason), total in sorted(self._faults.items())}
        faults |= {("400", "malformed_http"): 0 if guard is None else guard.num_malformed}
        yield family(CounterMetricFamily, "http_errors", "Answers that are errors.", faults, "status", "reason")
        closed = {(reason,): 0 if guard is None else guard.closed[reason] for reason in REASONS}
        text = "Connections that the server closed."
        yield family(CounterMetricFamily, "connections_closed", text, closed, "reason")


@dataclass(kw_only=True)
class RequestWatch:
    """Measures one prompt: ``see`` each delta, ``end`` once. Times are seconds of ``monotonic``; None: not reached."""

    metrics: Metrics
    request: Request
    arrived_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float = 0.0
    queue_s: float | None = None
    prefill_s: float | None = None
    num_tokens: int = 0  # generated, of all samples
    finish_reasons: list[str] = field(default_factory=list)  # of its samples

    def see(self, delta: RequestDelta) -> None:
        now, metrics = monotonic(), self.metrics
        num_new = sum(len(sample.token_ids) for sample in delta.samples)
        if num_new:
            self.num_tokens += num_new
            if self.last_token_at is None:
                self.first_token_at = now
                metrics.observe("time_to_first_token_seconds", now - self.arrived_at)
            else:
                for _ in range(num_new):
                    metrics.observe("inter_token_latency_seconds", (now - self.last_token_at) / num_new)
            self.last_token_at = now
        for sample in delta.samples:
            if sample.finish_reason is not None:
                self._count_end(sample.finish_reason)
        if delta.timings is not None:
            self.queue_s, self.prefill_s = delta.timings.queue_ms / 1e3, delta.timings.prefill_ms / 1e3
            metrics.observe("request_queue_time_seconds", self.queue_s)
            metrics.observe("request_prefill_time_seconds", self.prefill_s)
            metrics.observe("request_decode_time_seconds", delta.timings.decode_ms / 1e3)
        if delta.is_finished:
            metrics.observe("e2e_request_latency_seconds", now - self.arrived_at)
            metrics.observe("request_prompt_tokens", self.request.num_prompt_tokens)
            metrics.observe("request_generation_tokens", self.num_tokens)

    def end(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Samples that are still open end with ``reason``: aborted by their client, or lost by the engine."""
        for _ in range(self.request.sampling.n - len(self.finish_reasons)):
            self._count_end(reason)
        self.ended_at = monotonic()
        if self.metrics.on_request is not None:
            self.metrics.on_request(self)

    def _count_end(self, reason: FinishReason) -> None:
        self.finish_reasons.append(reason.value)
        self.metrics.count_end(reason)


def _alias(family: Metric) -> Metric:
    alias = Metric(THEIRS + family.name.removeprefix(OURS), family.documentation, family.type)
    alias.samples = [
        Sample(THEIRS + sample.name.removeprefix(OURS), sample.labels, sample.value, sample.timestamp, sample.exemplar)
        for sample in family.samples
    ]
    return alias


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

    def note(self, seen: RequestWatch) -> None:
        """The spans of a prompt that has ended, below the request that is being answered."""
        from opentelemetry.trace import set_span_in_context

        zero = time_ns() - int(1e9 * monotonic())

        def at(seconds: float) -> int:
            return zero + int(1e9 * seconds)

        attributes = {
            "gen_ai.usage.input_tokens": seen.request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": seen.num_tokens,
            "gen_ai.response.finish_reasons": seen.finish_reasons,
        }
        whole = self._tracer.start_span("generate", start_time=at(seen.arrived_at), attributes=attributes)
        below = set_span_in_context(whole)
        for name, start, end in parts(seen):
            self._tracer.start_span(name, context=below, start_time=at(start)).end(at(end))
        whole.end(at(seen.ended_at))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def parts(seen: RequestWatch) -> list[tuple[str, float, float]]:
    """Name, start and end of what happened to a prompt; the engine's times end with the first token seen here."""
    if seen.first_token_at is None:
        return []
    found = [("first_token", seen.arrived_at, seen.first_token_at), ("decode", seen.first_token_at, seen.ended_at)]
    if seen.queue_s is not None and seen.prefill_s is not None:
        begun = seen.first_token_at - seen.prefill_s
        found += [("queue", begun - seen.queue_s, begun), ("prefill", begun, seen.first_token_at)]
    return found


class TraceRequests(Middleware):
    """A span around each request of the API."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        super().__init__(app)
        self._tracing = tracing

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(TRACED):
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
            f"--otlp-traces-endpoint needs {error.name}; run: pip install 'snapstream-llm[otel]'"
        ) from None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must be like http://localhost:4318/v1/traces")
    resource = Resource.create({"service.name": SERVICE})  # OTEL_SERVICE_NAME wins
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
