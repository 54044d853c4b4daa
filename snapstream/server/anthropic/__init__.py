"""Anthropic's Messages, over the chat path of ``openai/``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from snapstream.server.http.api import Api
from snapstream.server.http.errors import ApiError, ContextLengthError

# Other statuses below 500 are the request's fault.
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _routes(server: Any) -> APIRouter:
    from snapstream.server.anthropic.routes import anthropic_routes

    return anthropic_routes(server)


def error_body(error: ApiError) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``, with ``details`` where SDKs decide by them."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _context_message(error) if isinstance(error, ContextLengthError) else error.message
    details = {} if error.details is None else {"details": dict(error.details)}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _context_message(error: ContextLengthError) -> str:
    """The words by which clients know that they must shorten a conversation."""
    if error.prompt_tokens > error.limit:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens or 1} > "
        f"{error.limit}, decrease input length or `max_tokens` and try again"
    )


API = Api(
    prefix="/v1/messages",
    routes=_routes,
    error_body=error_body,
    error_event=error_body,
    key_header="x-api-key",
    id_header="request-id",
)
