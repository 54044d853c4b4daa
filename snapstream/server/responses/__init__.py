"""OpenAI's Responses, over the chat path of ``openai/``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from snapstream.server.http.api import Api
from snapstream.server.http.errors import ApiError


def _routes(server: Any) -> APIRouter:
    from snapstream.server.responses.routes import responses_routes

    return responses_routes(server)


def _error_event(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.body}


API = Api(prefix="/v1/responses", routes=_routes, error_body=lambda error: error.body, error_event=_error_event)
