"""The route by which a server that answers has a prompt read here (``serve --role prefill``).

Invariant: nobody is listened to who does not know the transfer secret, not even for a body; an asker that leaves gives
its request up, and with it row and ticket.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.request import Request
from snapstream.server.engine.api import AsyncEngine
from snapstream.server.engine.elsewhere import why_not_sent
from snapstream.server.engine.prefill_servers import READ_PATH
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.gate import Gate
from snapstream.server.http.request_id import log_refusal
from snapstream.server.http.sse import until_gone
from snapstream.server.http.visits import Visit
from snapstream.transfer.asking import read_name, request_from_bytes
from snapstream.transfer.proof import HEADER, digest_of, has_digest

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reading:
    """Prompts that are being read for others."""

    gate: Gate
    engine: AsyncEngine
    secret: bytes
    num_tokens: int = 0

    async def answer(self, http: HttpRequest) -> Response:
        digest = digest_of(self.secret, READ_PATH, http.headers.get(HEADER, ""))
        if digest is None:
            log_refusal("a request without the transfer secret was refused", http.scope)
            raise ApiError(401, "This route is for servers that know the transfer secret.", code="invalid_proof")
        visit = Visit(self.gate.visits, http.state.own_id, http.state.request_id, http.url.path)

        async def work() -> Response:
            body = await self.gate.read_bytes(http, visit)
            if not has_digest(body, digest):
                raise bad_value("the body is not the one that the proof is for", None, "invalid_proof")
            return await until_gone(http.receive, self._read(request_from_bytes(body)))

        return await self.gate.pass_through(visit, work)

    async def _read(self, request: Request) -> Response:
        assert request.ticket is not None
        own = replace(request, request_id=read_name(request.ticket))
        num_tokens = len(request.prompt_token_ids)
        self.num_tokens += num_tokens
        try:
            problem = await why_not_sent(self.engine.generate(own))
        finally:
            self.num_tokens -= num_tokens
        if problem:
            log.warning("a row was not sent: %s", problem)
            raise ApiError(502, f"the row was not sent: {problem}", kind="api_error", code="row_not_sent")
        return JSONResponse({"queued_tokens": self.num_tokens})


def peer_routes(gate: Gate, engine: AsyncEngine, secret: bytes) -> APIRouter:
    """One route, which the OpenAPI document does not show."""
    router, reading = APIRouter(), Reading(gate, engine, secret)

    @router.post(READ_PATH, include_in_schema=False)
    async def read_prompt(request: HttpRequest) -> Response:
        return await reading.answer(request)

    return router
