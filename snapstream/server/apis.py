"""The wire APIs of the server. To add one: a module with its routes, and an ``Api`` here."""

from __future__ import annotations

from typing import Any

from snapstream.server.http.errors import Api, ApiError, ContextLengthError


def _responses_event(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.body}


# Other statuses below 500 are the request's fault.
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _anthropic_error(error: ApiError) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``, with ``details`` where SDKs decide by them."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _anthropic_context(error) if isinstance(error, ContextLengthError) else error.message
    details = {} if error.details is None else {"details": dict(error.details)}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _anthropic_context(error: ContextLengthError) -> str:
    """The words by which clients know that they must shorten a conversation."""
    if error.prompt_tokens > error.limit:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens or 1} > "
        f"{error.limit}, decrease input length or `max_tokens` and try again"
    )


APIS = (  # in the order of /openapi.json
    Api(prefix="/v1", routes="snapstream.server.openai.routes:openai_routes", error_body=lambda error: error.body),
    Api(
        prefix="/v1/responses",
        routes="snapstream.server.responses.routes:responses_routes",
        error_body=lambda error: error.body,
        error_event=_responses_event,
    ),
    Api(
        prefix="/v1/messages",
        routes="snapstream.server.anthropic:anthropic_routes",
        error_body=_anthropic_error,
        error_event=_anthropic_error,
        key_header="x-api-key",
        id_header="request-id",
    ),
)
