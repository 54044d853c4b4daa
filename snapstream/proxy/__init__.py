"""The proxy: an ASGI application (``make_proxy``) on a socket (``run_proxy``).

    body read -> options -> draft compresses (one thread) -> upstream -> answer forwarded, byte by byte

Invariants: an answer's header ``x-snapstream-prompt-compression`` reports what was done to its prompt, also when that
is nothing; its body is the upstream's own. Only prompt text changes: every other field is sent as the client wrote it,
and every other path below /v1 is forwarded untouched. Whatever happens upstream, the client gets an answer in the form
of its API or, once a stream has begun, a last frame with the error; when the client leaves, the upstream request is
closed at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import to_json
from starlette.types import ASGIApp, Scope, Send

from snapstream.server.apis import APIS
from snapstream.server.http.connections import ConnectionGuard, abort_connection
from snapstream.server.http.errors import ApiError, SelectApi, add_error_handlers, api_of, bad_value
from snapstream.server.http.lifecycle import (
    StartupApp,
    serve_until_signal,
    status_routes,
    url_of,
    uvicorn_config,
    warn_if_open,
)
from snapstream.server.http.middleware import BearerAuth, HostGuard, SingleBodyLength
from snapstream.server.http.prompt_compression import FIELD, DraftThread, parse_compression
from snapstream.server.http.requests import (
    DONE,
    Admission,
    OpenRequests,
    RequestContext,
    StreamedResponse,
    frame,
    run_until_disconnect,
)
from snapstream.server.options import ProxyOptions
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.types import CompressionSummary
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import CompressionReport, PromptCompressor


log = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProxyMetrics:
    """Prometheus metrics, in their own registry: two proxies in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"snapstream_proxy_{name}", text, list(labels), registry=self._registry)

        self.open = Gauge("snapstream_proxy_requests_open", "Requests being answered.", registry=self._registry)
        self._requests = counter("requests", "Requests, by status of the answer.", ("status",))
        self._prompts = counter("prompts", "Prompts, by whether the draft compressed them.", ("applied",))
        self._before = counter("prompt_tokens", "Tokens of prompts that were compressed, before.")
        self._dropped = counter("prompt_tokens_dropped", "Tokens that did not go upstream.")
        self._draft = Histogram(
            "snapstream_proxy_draft_seconds", "Draft time of a prompt.", buckets=_SECONDS, registry=self._registry
        )

    def count_answer(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def count_prompt(self, report: CompressionReport) -> None:
        self._prompts.labels("true" if report.is_applied else "false").inc()
        if report.is_applied:
            self._before.inc(report.tokens_before)
            self._dropped.inc(max(0, report.dropped_tokens))
        if report.draft_ms:
            self._draft.observe(report.draft_ms / 1e3)

    def render(self) -> bytes:
        return generate_latest(self._registry)


MAX_TEXTS = 256  # prompts of one completions request that are compressed


@dataclass(frozen=True, kw_only=True)
class CompressedBody:
    """A body ready to go, and what was done to it. ``reports`` is empty where nothing was even tried."""

    body: dict[str, Any]
    reports: tuple[CompressionReport, ...] = ()
    reason: str = ""  # why nothing was tried


async def compress_chat(body: dict[str, Any], options: PromptCompression, draft: DraftThread) -> CompressedBody:
    """A body of /v1/chat/completions. ApiError 400 for malformed messages: the draft would fail on them."""
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise bad_value("messages must be a list of objects", "messages")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise bad_value("tools must be a list of objects", "tools")
    kept, report = await draft.compress(messages, options, tools)
    return CompressedBody(body={**body, "messages": kept}, reports=(report,))


async def compress_completion(body: dict[str, Any], options: PromptCompression, draft: DraftThread) -> CompressedBody:
    """A body of /v1/completions: a text, or several. Token ids are another tokenizer's; they are sent as they are."""
    prompt = body.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return CompressedBody(body=body, reason="the prompt is not text")
    if len(texts) > MAX_TEXTS:
        raise bad_value(f"prompt holds {len(texts)} texts; the limit is {MAX_TEXTS}", "prompt")
    done = [await draft.compress(text, options) for text in texts]
    short = [text for text, _ in done]
    return CompressedBody(
        body={**body, "prompt": short[0] if isinstance(prompt, str) else short},
        reports=tuple(report for _, report in done),
    )


Headers = Iterable[tuple[bytes, bytes]]  # as they were on the wire; values are not decoded

DECODINGS = 3  # of a path by servers further on, at most

# Of one connection only (RFC 9110, section 7.6.1), or set anew for the next one.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"proxy-connection".split()
)
_KEY_HEADERS = (b"authorization", b"x-api-key")
_OWN_REQUEST_HEADERS = frozenset((b"host", b"content-length", b"expect"))


class Upstream:
    """The server behind the proxy."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(options.read_timeout_s, connect=options.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=options.max_requests, max_keepalive_connections=64),
            trust_env=False,  # no proxies of the environment: the upstream was named on purpose
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # one client's cookies are not another's
        )
        self.client.headers.clear()  # with our Accept-Encoding clients would get encodings that they did not request
        self._root = httpx.URL(options.root)
        self._prefix = self._root.raw_path.rstrip(b"/")

    async def open(self, method: str, path: bytes, query: bytes, headers: Headers, body: bytes) -> httpx.Response:
        """Send a request; returns once the answer's status and headers are there. ApiError 502 or 504 otherwise.

        ``path`` and ``query`` go on as they stood in the request line. ApiError 400 for a path that leads upwards.
        """
        check_path(path)
        target = self._prefix + path + (b"?" + query if query else b"")
        request = self.client.build_request(
            method, self._root, headers=self._request_headers(headers), content=body, extensions={"target": target}
        )
        try:
            return await self.client.send(request, stream=True)
        except httpx.TimeoutException as error:
            raise _fault(504, f"the upstream server did not answer in time ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _fault(502, f"the upstream server cannot be reached ({type(error).__name__})") from None

    def _request_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        headers = list(headers)
        dropped = _OWN_REQUEST_HEADERS | _connection_only(headers)
        kept = [(name, value) for name, value in headers if name.lower() not in dropped]
        key = self._options.upstream_key
        if self._options.api_keys or key is not None:  # the client's key was for us
            kept = [(name, value) for name, value in kept if name.lower() not in _KEY_HEADERS]
        return kept if key is None else [*kept, (b"authorization", b"Bearer " + key.encode("ascii"))]


class ForwardedResponse(StreamedResponse):
    """An upstream answer on its way to the client, with ``extra`` headers."""

    def __init__(self, answer: httpx.Response, extra: Mapping[str, str], on_end: Callable[[int, str], None]) -> None:
        super().__init__(answer.aclose, on_end, answer.status_code)
        self._answer = answer
        pairs = [(name.lower(), value) for name, value in answer.headers.raw]
        own = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in extra.items()]
        dropped = _connection_only(pairs) | {name for name, _ in own}
        self.raw_headers = [*((name, value) for name, value in pairs if name not in dropped), *own]

    async def send_all(self, scope: Scope, send: Send) -> None:
        # In the task of the first piece, so that both leave in one write.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError as error:
            self.end_reason = "upstream"
            log.warning("the upstream server broke off an answer: %s", type(error).__name__)
            kind = self._answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream") or "content-encoding" in self._answer.headers:
                await abort_connection(scope)  # so that the client sees that the answer is incomplete
                raise
            fault = _fault(502, "the upstream server broke off its answer")
            api = api_of(scope)
            event = None if api is None or api.error_event is None else api.error_event(fault)
            last = frame(fault.body) + DONE if event is None else frame(event)
            # A blank line first: the stream may have stopped inside of a frame.
            await send({"type": "http.response.body", "body": b"\n\n" + last, "more_body": False})
            return
        self.end_reason = ""
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_path(path: bytes) -> None:
    """ApiError 400 for a path with a segment ``.`` or ``..``, however it is encoded: it could leave /v1."""
    text = path.decode("latin-1")
    for _ in range(DECODINGS):
        text = unquote(text, "latin-1")
    # Some servers treat a backslash as a slash, and some drop what follows a semicolon.
    if any(segment.partition(";")[0] in (".", "..") for segment in re.split(r"[/\\]", text)):
        raise bad_value("the path has a segment '.' or '..'", None, "invalid_path")


def _connection_only(headers: Headers) -> frozenset[bytes]:
    """Names of headers that must not be forwarded: the fixed ones, and those that Connection names."""
    named = [
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    ]
    return _HOP_BY_HOP | frozenset(named)


def _fault(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="upstream_error", code="upstream_unavailable")


REPORT_HEADER = "x-snapstream-prompt-compression"
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
CompressBody = Callable[[dict[str, Any], PromptCompression, DraftThread], Awaitable[CompressedBody]]


def make_proxy(compressor: PromptCompressor, target: PreTrainedTokenizerBase | None, options: ProxyOptions) -> FastAPI:
    """``target`` counts the tokens of the model upstream; None counts with the draft's tokenizer.

    ``app.state.proxy`` is the state; set its ``is_draining`` to refuse new work.
    """
    proxy = Proxy(compressor, target, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = FastAPI(title="snapstream proxy", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.proxy = proxy

    app.include_router(status_routes(lambda: None, proxy.check_ready, proxy.metrics.render))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await proxy.answer(request, compress_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await proxy.answer(request, compress_completion)

    @app.api_route("/v1/{path:path}", methods=METHODS, include_in_schema=False)
    async def anything_else(request: Request, path: str) -> Response:
        return await proxy.answer(request, None)

    add_error_handlers(app)
    app.add_middleware(BearerAuth, keys=options.api_keys, apis=APIS)
    if options.allowed_hosts:  # a page on the web must not reach a proxy on its reader's machine
        app.add_middleware(HostGuard, allowed=options.allowed_hosts)
    app.add_middleware(SingleBodyLength)
    app.add_middleware(SelectApi, apis=APIS)
    return app


class Proxy(Admission):
    def __init__(
        self, compressor: PromptCompressor, target: PreTrainedTokenizerBase | None, options: ProxyOptions
    ) -> None:
        super().__init__(options, "proxy")
        self.options = options
        self.metrics = ProxyMetrics()
        self._upstream = Upstream(options)
        self.draft = DraftThread(
            compressor, target, max_waiting=options.max_waiting, retry_after_s=options.retry_after_s
        )

    async def check_ready(self) -> None:
        """503 while the proxy drains."""
        self.require_open()

    async def answer(self, request: Request, compress: CompressBody | None) -> Response:
        """Pass a request on, its prompt compressed by ``compress`` if it has one."""
        context = ProxyContext(self.open_requests, uuid4().hex, request, self.metrics)

        async def watched() -> Response:
            if compress is None:
                work = self._forward(request, await self.read_bytes(request, context), {}, context)
            else:
                work = self._shorten(request, await self.read_object(request, context), compress, context)
            return await run_until_disconnect(request.receive, work)

        return await self.handle(context, watched)

    async def _shorten(
        self, request: Request, data: dict[str, Any], compress: CompressBody, context: ProxyContext
    ) -> Response:
        compressed = await self._compress(compress, data, context)
        extra = {REPORT_HEADER: json.dumps(summary(compressed))}
        return await self._forward(request, to_json(compressed.body), extra, context)

    async def _forward(
        self, request: Request, body: bytes, extra: Mapping[str, str], context: ProxyContext
    ) -> Response:
        path, query = request.scope["raw_path"], request.scope["query_string"]
        answer = await self._upstream.open(request.method, path, query, request.headers.raw, body)
        try:
            return ForwardedResponse(answer, extra, context.end)
        except BaseException:
            await answer.aclose()
            raise

    async def _compress(self, compress: CompressBody, data: dict[str, Any], context: ProxyContext) -> CompressedBody:
        requested = data.pop(FIELD, None)  # ours: it is not sent upstream
        options = parse_compression(requested, self.options.compression)
        if options is None:
            return CompressedBody(body=data, reason="off")
        try:
            compressed = await compress(data, options, self.draft)
        except ApiError:
            raise
        except ValueError as error:  # e.g. a ceiling below what is protected
            if requested is not None or self.options.is_strict:
                raise bad_value(f"{FIELD}: {error}", FIELD) from None
            return CompressedBody(body=data, reason=str(error))  # the client did not ask for it
        except Exception:
            if self.options.is_strict:
                raise
            log.exception("request=%s the draft failed; the prompt stays uncompressed", context.request_id)
            return CompressedBody(body=data, reason="the draft failed")
        for report in compressed.reports:
            self.metrics.count_prompt(report)
            context.tokens_before += report.tokens_before
            context.tokens_after += report.tokens_after
        return compressed

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and let the open ones end for at most ``timeout_s``."""
        self.is_draining = True
        await self.open_requests.wait_idle(timeout_s)

    async def close(self) -> None:
        self.draft.close()
        await self._upstream.client.aclose()


class ProxyContext(RequestContext):
    """One request, counted and logged once."""

    def __init__(self, open_requests: OpenRequests, own_id: str, request: Request, metrics: ProxyMetrics) -> None:
        super().__init__(open_requests, own_id, own_id, request.url.path, api_of(request.scope))
        self.tokens_before = self.tokens_after = 0
        self._metrics = metrics

    def enter(self) -> None:
        super().enter()
        self._metrics.open.set(self.open_requests.num_open)

    def end(self, status: int, reason: str = "") -> None:
        super().end(status, reason)
        self._metrics.open.set(self.open_requests.num_open)
        self._metrics.count_answer(status)

    def fields(self, status: int, reason: str) -> dict[str, Any]:
        compressed = {"tokens_before": self.tokens_before, "tokens_after": self.tokens_after}
        return super().fields(status, reason) | compressed


def summary(compressed: CompressedBody) -> dict[str, Any]:
    """What the header says: plain numbers, no text of the prompt."""
    reports = compressed.reports
    if not reports:
        return {"applied": False, "reason": compressed.reason}
    return CompressionSummary.total(reports).as_json()


# Reads the draft, and the tokenizer that counts the upstream's tokens if there is one.
Load = Callable[[], "tuple[PromptCompressor, PreTrainedTokenizerBase | None]"]


def run_proxy(load: Load, options: ProxyOptions, listener: socket.socket) -> None:
    """Serve on ``listener`` until a signal. What ``load`` raises ends the proxy, and is raised here."""
    asyncio.run(_run(load, options, listener))


def proxy_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn_config(app, ConnectionGuard(), date_header=False)  # the upstream's own is forwarded


async def _run(load: Load, options: ProxyOptions, listener: socket.socket) -> None:
    warn_if_open(options.host, options.api_keys, "proxy")
    startup = StartupApp(options.retry_after_s, "proxy", apis=APIS)
    url = url_of(options.host, listener)
    log.info("loading the draft; %s answers 503 until then", url)

    async def start() -> Proxy:
        app = make_proxy(*await asyncio.to_thread(load), options)
        proxy: Proxy = app.state.proxy
        startup.start(app, proxy)
        log.info("proxy at %s/v1 for %s", url, options.shown)
        return proxy

    loading = asyncio.create_task(start())
    try:
        await serve_until_signal(proxy_config(startup), startup, listener, loading, options.drain_timeout)
    finally:
        loading.cancel()
        [proxy] = await asyncio.gather(loading, return_exceptions=True)
        if isinstance(proxy, Proxy):
            await proxy.close()
