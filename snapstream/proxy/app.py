"""``make_proxy``: the proxy as one ASGI application.

    body read -> options -> draft compresses (one thread) -> upstream -> answer passed on, byte by byte

Invariant: an answer says in ``x-snapstream-prompt-compression`` what was done to its prompt, also when that is nothing;
its body is the upstream's own. Every other path below /v1 is passed on untouched. ``bodies.py`` knows what may be
compressed, ``forward.py`` how to pass on, ``run.py`` puts it on a socket.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from snapstream.config import as_number
from snapstream.server.apis import APIS
from snapstream.server.http.admission import Admission, OpenRequests, RequestContext
from snapstream.server.http.connections import cut_off
from snapstream.server.http.errors import ApiError, SelectApi, add_error_handlers, api_of, bad_value
from snapstream.server.http.lifecycle import LIVE_PATH
from snapstream.server.http.middleware import BearerAuth, HostGuard, OneLength
from snapstream.server.http.prompt_compression import FIELD, DraftThread, parse_compression
from snapstream.server.http.sse import DONE, ClientGone, frame, until_gone
from snapstream.server.options import RequestLimits, check_hosts, check_keys
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.types import CompressionSummary
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor
    from snapstream.spec_prefill.report import CompressionReport


# The proxy's settings, given once at start.


@dataclass(frozen=True, kw_only=True)
class ProxySettings(RequestLimits):
    """Where prompts go, how much of them, and the limits on the way."""

    upstream: str  # base URL of the server, with or without /v1
    compression: PromptCompression  # of requests that bring none
    # Any of them opens /v1/*, and stays here; without, the proxy is open and clients' own keys go upstream.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, beside loopback ones; none means any
    upstream_key: str | None = field(default=None, repr=False)  # sent instead of the client's
    max_waiting: int = 64  # prompts waiting for the draft; more get 429
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0  # the longest silence of the upstream
    is_strict: bool = False  # a failing draft is a 500; else the prompt goes on whole, and the answer says so

    def __post_init__(self) -> None:
        if not _is_base_url(self.upstream):
            raise ValueError(f"upstream is {self.upstream!r}; it must be of the form http(s)://host[:port][/path]")
        check_keys((*self.api_keys, *(() if self.upstream_key is None else (self.upstream_key,))))
        check_hosts(self.allowed_hosts)
        super().__post_init__()
        for name in ("connect_timeout_s", "read_timeout_s"):
            as_number(name, getattr(self, name), 0.001, 86400.0)

    @property
    def root(self) -> str:
        """The upstream without a trailing /v1: paths are appended as they came."""
        return self.upstream.rstrip("/").removesuffix("/v1")

    @property
    def shown(self) -> str:
        """Scheme, host and port of the upstream, for logs: the rest of the URL may hold secrets."""
        parts = urlsplit(self.upstream)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_place = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number or above 65535, half an IPv6 address
        return False
    is_whole = not any(char.isspace() for char in text)
    return parts.scheme in ("http", "https") and has_place and is_whole and not (parts.query or parts.fragment)


# Prometheus metrics of the proxy. Invariant: a registry of its own; two proxies in one process do not mix.

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProxyMetrics:
    """Requests by status, prompts by what became of them, tokens in and out, seconds of the draft."""

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


# Which parts of a request body a draft may compress, and the body that goes upstream.
#
# Invariant: only prompt text changes; every other field travels as the client wrote it, and ``prompt_compression``,
# which is ours, stays here.

MAX_TEXTS = 256  # prompts of one completions request that are compressed


@dataclass(frozen=True, kw_only=True)
class CompressedBody:
    """A body ready to go, and what was done to it. ``reports`` is empty where nothing was even tried."""

    body: dict[str, Any]
    reports: tuple[CompressionReport, ...] = ()
    reason: str = ""  # why nothing was tried


async def compress_chat(
    body: Mapping[str, Any], default: PromptCompression | None, draft: DraftThread
) -> CompressedBody:
    """A body of /v1/chat/completions. ApiError 400 for messages that are none: the draft would trip over them."""
    options, rest = _options(body, default)
    if options is None:
        return CompressedBody(body=rest, reason="off")
    messages = rest.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise bad_value("messages must be a list of objects", "messages")
    tools = rest.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise bad_value("tools must be a list of objects", "tools")
    kept, report = await draft.chat(messages, options, tools)
    return CompressedBody(body={**rest, "messages": kept}, reports=(report,))


async def compress_completion(
    body: Mapping[str, Any], default: PromptCompression | None, draft: DraftThread
) -> CompressedBody:
    """A body of /v1/completions: a text, or several. Token ids are another tokenizer's; they go on as they are."""
    options, rest = _options(body, default)
    if options is None:
        return CompressedBody(body=rest, reason="off")
    prompt = rest.get("prompt")
    if isinstance(prompt, str):
        text, report = await draft.text(prompt, options)
        return CompressedBody(body={**rest, "prompt": text}, reports=(report,))
    texts = _as_texts(prompt)
    if not texts:
        return CompressedBody(body=rest, reason="the prompt is not text")
    if len(texts) > MAX_TEXTS:
        raise bad_value(f"prompt holds {len(texts)} texts; the limit is {MAX_TEXTS}", "prompt")
    done = [await draft.text(text, options) for text in texts]
    return CompressedBody(
        body={**rest, "prompt": [text for text, _ in done]}, reports=tuple(report for _, report in done)
    )


def _options(
    body: Mapping[str, Any], default: PromptCompression | None
) -> tuple[PromptCompression | None, dict[str, Any]]:
    return parse_compression(body.get(FIELD), default), {name: value for name, value in body.items() if name != FIELD}


def _as_texts(prompt: Any) -> list[str]:
    """The texts of a list of texts; none for anything else."""
    return list(prompt) if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt) else []


# Passes a request on and its answer back, byte by byte: the proxy reads no stream and rewrites no answer.
#
# Invariant: whatever happens upstream, the client gets an answer in the shape of ``server/http/errors.py``, or, once a
# stream has begun, a frame that says so; and when the client leaves, the upstream request is closed at once.

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]  # as they were on the wire: what is in a value is no text of ours to decode

DECODINGS = 3  # of a path by servers further on, at most

# Of one connection only (RFC 9110, section 7.6.1), or set anew for the next one.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"proxy-connection".split()
)
_KEY_HEADERS = (b"authorization", b"x-api-key")
_OWN_REQUEST_HEADERS = frozenset((b"host", b"content-length", b"expect"))


def make_client(settings: ProxySettings) -> httpx.AsyncClient:
    """Connections to the upstream. Environment proxies are not used: the upstream was named on purpose."""
    timeout = httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s, pool=None)
    limits = httpx.Limits(max_connections=settings.max_requests, max_keepalive_connections=64)
    client = httpx.AsyncClient(
        timeout=timeout,
        limits=limits,
        trust_env=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # one client's cookies are not another's
    )
    client.headers.clear()  # an Accept-Encoding of ours would bring clients what they did not ask for
    return client


class Upstream:
    """The server behind the proxy."""

    def __init__(self, client: httpx.AsyncClient, settings: ProxySettings) -> None:
        self._client, self._settings = client, settings
        self._root = httpx.URL(settings.root)
        self._prefix = self._root.raw_path.rstrip(b"/")

    async def open(self, method: str, path: bytes, query: bytes, headers: Headers, body: bytes) -> httpx.Response:
        """Send a request; returns once the answer's status and headers are there. ApiError 502 or 504 otherwise.

        ``path`` and ``query`` go on as they stood in the request line. ApiError 400 for a path that leads upwards.
        """
        check_path(path)
        target = self._prefix + path + (b"?" + query if query else b"")
        request = self._client.build_request(
            method, self._root, headers=self._request_headers(headers), content=body, extensions={"target": target}
        )
        try:
            return await self._client.send(request, stream=True)
        except httpx.TimeoutException as error:
            raise _fault(504, f"the upstream server did not answer in time ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _fault(502, f"the upstream server cannot be reached ({type(error).__name__})") from None

    def _request_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        headers = list(headers)
        dropped = _OWN_REQUEST_HEADERS | _connection_only(headers)
        kept = [(name, value) for name, value in headers if name.lower() not in dropped]
        key = self._settings.upstream_key
        if self._settings.api_keys or key is not None:  # the client's key was for us
            kept = [(name, value) for name, value in kept if name.lower() not in _KEY_HEADERS]
        return kept if key is None else [*kept, (b"authorization", b"Bearer " + key.encode("ascii"))]


class PassedOn(Response):
    """An upstream answer on its way to the client, with ``extra`` headers."""

    def __init__(self, answer: httpx.Response, extra: Mapping[str, str], on_end: Callable[[int, str], None]) -> None:
        super().__init__(status_code=answer.status_code)
        self._answer, self._on_end = answer, on_end
        self._how = "left"
        pairs = [(name.lower(), value) for name, value in answer.headers.raw]
        own = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in extra.items()]
        dropped = _connection_only(pairs) | {name for name, _ in own}
        self.raw_headers = [*((name, value) for name, value in pairs if name not in dropped), *own]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(scope, send))
        except ClientGone:
            pass
        finally:
            try:
                await self._answer.aclose()
            finally:
                self._on_end(self.status_code, self._how)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        # In the task of the first piece, so that both leave in one write.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError as error:
            self._how = "upstream"
            log.warning("the upstream server broke off an answer: %s", type(error).__name__)
            kind = self._answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream") or "content-encoding" in self._answer.headers:
                await cut_off(scope)  # which the client sees: what came was not all
                raise
            fault = _fault(502, "the upstream server broke off its answer")
            api = api_of(scope)
            event = None if api is None or api.error_event is None else api.error_event(fault)
            last = frame(fault.body) + DONE if event is None else frame(event)
            # A blank line first: the stream may have stopped inside of a frame.
            await send({"type": "http.response.body", "body": b"\n\n" + last, "more_body": False})
            return
        self._how = ""
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_path(path: bytes) -> None:
    """ApiError 400 for a path with a segment ``.`` or ``..``, however it is written: it may leave /v1 with our key."""
    text = path.decode("latin-1")
    for _ in range(DECODINGS):
        text = unquote(text, "latin-1")
    # Some take a backslash for a slash, and some cut off what follows a semicolon.
    if any(segment.partition(";")[0] in (".", "..") for segment in re.split(r"[/\\]", text)):
        raise bad_value("the path has a segment '.' or '..'", None, "invalid_path")


def _connection_only(headers: Headers) -> frozenset[bytes]:
    """Names of headers that must not travel on: the fixed ones, and those that Connection names."""
    named = [
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    ]
    return _HOP_BY_HOP | frozenset(named)


def _fault(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="upstream_error", code="upstream_unavailable")


REPORT_HEADER = "x-snapstream-prompt-compression"
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
CompressBody = Callable[[Mapping[str, Any], PromptCompression | None, DraftThread], Awaitable[CompressedBody]]


def make_proxy(
    compressor: PromptCompressor, target: PreTrainedTokenizerBase | None, settings: ProxySettings
) -> FastAPI:
    """``target`` counts the tokens of the model upstream; None counts with the draft's tokenizer.

    ``app.state.proxy`` is the state; set its ``is_draining`` to refuse new work.
    """
    proxy = Proxy(compressor, target, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = FastAPI(title="snapstream proxy", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.proxy = proxy

    @app.get(LIVE_PATH)
    @app.head(LIVE_PATH, include_in_schema=False)
    async def live() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    @app.get("/health/ready")
    @app.head("/health", include_in_schema=False)
    @app.head("/health/ready", include_in_schema=False)
    async def health() -> Response:
        proxy.need_open()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    @app.head("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return PlainTextResponse(proxy.metrics.render(), media_type="text/plain; version=0.0.4")

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
    app.add_middleware(BearerAuth, keys=settings.api_keys, apis=APIS)
    if settings.allowed_hosts:  # a page on the web must not reach a proxy on its reader's machine
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(OneLength)
    app.add_middleware(SelectApi, apis=APIS)
    return app


class Proxy(Admission):
    """The state of one application."""

    def __init__(
        self, compressor: PromptCompressor, target: PreTrainedTokenizerBase | None, settings: ProxySettings
    ) -> None:
        super().__init__(settings, "proxy", PassedOn)
        self.settings = settings
        self.metrics = ProxyMetrics()
        self._client = make_client(settings)
        self._upstream = Upstream(self._client, settings)
        self._draft = DraftThread(
            compressor, target, max_waiting=settings.max_waiting, retry_after_s=settings.retry_after_s
        )

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for the draft, the one that it reads included."""
        return self._draft.num_waiting

    async def answer(self, request: Request, compress: CompressBody | None) -> Response:
        """Pass a request on, its prompt compressed by ``compress`` if it has one."""
        context = ProxyContext(self.open_requests, uuid4().hex, request, self.metrics)

        async def watched() -> Response:
            data = await self.read_object(request, context) if compress else None
            raw = b"" if compress else await self.read_bytes(request, context)
            return await until_gone(request.receive, self._pass(request, data, raw, compress, context))

        return await self.pass_through(context, watched)

    async def _pass(
        self,
        request: Request,
        data: dict[str, Any] | None,
        raw: bytes,
        compress: CompressBody | None,
        context: ProxyContext,
    ) -> Response:
        extra: dict[str, str] = {}
        if compress is not None and data is not None:
            compressed = await self._compress(compress, data, context)
            raw = to_json(compressed.body)
            extra[REPORT_HEADER] = json.dumps(summary(compressed))
        path, query = request.scope["raw_path"], request.scope["query_string"]
        answer = await self._upstream.open(request.method, path, query, request.headers.raw, raw)
        try:
            return PassedOn(answer, extra, context.end)
        except BaseException:
            await answer.aclose()
            raise

    async def _compress(self, compress: CompressBody, data: dict[str, Any], context: ProxyContext) -> CompressedBody:
        whole = {name: value for name, value in data.items() if name != FIELD}
        try:
            compressed = await compress(data, self.settings.compression, self._draft)
        except ApiError:
            raise
        except ValueError as error:  # e.g. a ceiling below what is protected
            if data.get(FIELD) is not None or self.settings.is_strict:
                raise bad_value(f"{FIELD}: {error}", FIELD) from None
            return CompressedBody(body=whole, reason=str(error))  # the client did not ask for it
        except Exception:
            if self.settings.is_strict:
                raise
            log.exception("request=%s the draft failed; the prompt goes on whole", context.request_id)
            return CompressedBody(body=whole, reason="the draft failed")
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
        self._draft.close()
        await self._client.aclose()


class ProxyContext(RequestContext):
    """One request, counted and logged once."""

    def __init__(self, open_requests: OpenRequests, own_id: str, request: Request, metrics: ProxyMetrics) -> None:
        super().__init__(open_requests, own_id, own_id, request.url.path, api_of(request.scope))
        self.tokens_before = self.tokens_after = 0
        self._metrics = metrics

    def enter(self) -> None:
        super().enter()
        self._metrics.open.set(self.open_requests.num_open)

    def end(self, status: int, how: str = "") -> None:
        super().end(status, how)
        self._metrics.open.set(self.open_requests.num_open)
        self._metrics.count_answer(status)

    def fields(self, status: int, how: str) -> dict[str, Any]:
        compressed = {"tokens_before": self.tokens_before, "tokens_after": self.tokens_after}
        return super().fields(status, how) | compressed


def summary(compressed: CompressedBody) -> dict[str, Any]:
    """What the header says: plain numbers, no text of the prompt."""
    reports = compressed.reports
    if not reports:
        return {"applied": False, "reason": compressed.reason}
    return CompressionSummary.total(reports).as_json()
