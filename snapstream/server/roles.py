"""``serve --role``: options of disaggregated serving, and the routes of a prefill server.

Invariants: options that a role does not use are refused by name before anything is loaded. A request without the
transfer secret is refused before its body is read; a decode server that disconnects aborts its request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.config import EngineOptions
from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import (
    HEADER,
    TransferSettings,
    digest_of,
    has_digest,
    prefill_request_id,
    read_secret,
    request_from_bytes,
)
from snapstream.server.engine.api import AsyncEngine, ModelMetadata
from snapstream.server.engine.process import EngineProcess
from snapstream.server.engine.remote_prefill import (
    CHECK_PATH,
    PREFILL_PATH,
    PrefillBackend,
    PrefillServers,
    check_urls,
    compatibility_info,
    transfer_error,
)
from snapstream.server.http.errors import ApiError, api_of, bad_value
from snapstream.server.http.middleware import log_refusal
from snapstream.server.http.requests import Admission, RequestContext, run_until_disconnect
from snapstream.server.options import ServeOptions
from snapstream.types import Request


def transfer_settings(options: ServeOptions) -> TransferSettings | None:
    """ValueError for addresses where prompts or rows would be sent unencrypted to another machine."""
    if options.role == "both":
        return None
    check_urls(options.prefill)
    if options.role == "prefill" and not is_loopback(options.host) and options.tls_cert is None:
        raise ValueError(
            f"--host is {options.host}, which other machines reach, and prompts arrive there: --role prefill needs "
            "--tls-cert and --tls-key, or a loopback address"
        )
    is_receiver = options.role == "decode"
    return TransferSettings(
        secret=read_secret(options.transfer_secret_file),
        host=(options.transfer_host or "127.0.0.1") if is_receiver else None,
        port=options.transfer_port,
        cert=options.tls_cert if is_receiver else None,
        key=options.tls_key if is_receiver else None,
        ca=options.transfer_ca,
    )


def engine_options(options: ServeOptions, engine: EngineOptions) -> EngineOptions:
    """The engine's options, without those that the role does not use."""
    if options.role == "prefill" and options.draft is not None:
        raise ValueError(
            "--draft compresses prompts where clients send them; give it to the servers with --role decode"
        )
    if options.role != "decode":
        return engine
    if engine.prefix_dir is not None or engine.prefix_store not in (None, "auto"):
        raise ValueError("--prefix-store and --prefix-dir are for prefill servers: --role prefill")
    return replace(engine, prefix_store=None)


def make_prefill(
    options: ServeOptions, transfer: TransferSettings | None
) -> Callable[[EngineProcess], PrefillBackend] | None:
    """Remote prefill for an engine with the role decode."""
    if options.role != "decode" or transfer is None:
        return None
    return lambda engine: PrefillServers(options.prefill, transfer, lambda: engine.metadata)


log = logging.getLogger(__name__)


def _bad_proof(http: HttpRequest) -> ApiError:
    log_refusal("a request without the transfer secret was refused", http.scope)
    return ApiError(401, "This route is for servers that know the transfer secret.", code="invalid_proof")


@dataclass(eq=False)
class PrefillRequests:
    """Prompts that this server prefills for decode servers."""

    admission: Admission
    engine: AsyncEngine
    secret: bytes
    num_tokens: int = 0

    async def answer(self, http: HttpRequest) -> Response:
        digest = digest_of(self.secret, PREFILL_PATH, http.headers.get(HEADER, ""))
        if digest is None:
            raise _bad_proof(http)
        context = RequestContext(
            self.admission.open_requests, http.state.own_id, http.state.request_id, http.url.path, api_of(http.scope)
        )

        async def work() -> Response:
            body = await self.admission.read_bytes(http, context)
            if not has_digest(body, digest):
                raise bad_value("the body is not the one that the proof is for", None, "invalid_proof")
            return await run_until_disconnect(http.receive, self._prefill(request_from_bytes(body)))

        return await self.admission.handle(context, work)

    async def _prefill(self, request: Request) -> Response:
        assert request.ticket is not None
        own = replace(request, request_id=prefill_request_id(request.ticket))
        num_tokens = len(request.prompt_token_ids)
        self.num_tokens += num_tokens
        try:
            problem = await transfer_error(self.engine.generate(own))
        finally:
            self.num_tokens -= num_tokens
        if problem:
            log.warning("a row was not sent: %s", problem)
            raise ApiError(502, f"the row was not sent: {problem}", kind="api_error", code="row_not_sent")
        return JSONResponse({"queued_tokens": self.num_tokens})


def peer_routes(
    admission: Admission,
    engine: AsyncEngine,
    secret: bytes,
    require_ready: Callable[[], None],
    metadata: Callable[[], ModelMetadata],
) -> APIRouter:
    """Routes for other servers; they are not in /openapi.json."""
    router, prefills = APIRouter(), PrefillRequests(admission, engine, secret)

    @router.post(PREFILL_PATH, include_in_schema=False)
    async def prefill(request: HttpRequest) -> Response:
        return await prefills.answer(request)

    @router.get(CHECK_PATH, include_in_schema=False)
    async def check(request: HttpRequest) -> Response:
        digest = digest_of(secret, CHECK_PATH, request.headers.get(HEADER, ""))
        if digest is None or not has_digest(b"", digest):
            raise _bad_proof(request)
        require_ready()
        return JSONResponse(compatibility_info(metadata()))

    return router
