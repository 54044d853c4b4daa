"""The body of a request as bytes or as a JSON object, read no further and no longer than the limits say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request as HttpRequest
from pydantic_core import from_json

from snapstream.server.http.errors import ApiError, bad_value

JSON_TYPE = "application/json"
BODY_TIMEOUT_S = 60.0


async def read_object(
    request: HttpRequest, limit: int, take: Callable[[int], None] = lambda _: None, timeout_s: float = BODY_TIMEOUT_S
) -> dict[str, Any]:
    """The body as a JSON object, read no further than the limit and no longer than ``timeout_s``.

    ``take`` hears of bytes before they are kept, and raises if all requests together hold too many.

    Only the content type of JSON passes, because a browser sends other types across origins without asking the server
    first: any page could use a server on its reader's machine.
    """
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != JSON_TYPE:
        raise bad_value(f"the content type is {given!r}; it must be {JSON_TYPE}", None, "invalid_content_type")
    body = await read_bytes(request, limit, take, timeout_s)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_value(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(data, dict):
        raise bad_value("the body must be a JSON object", None, "invalid_json")
    return data


async def read_bytes(request: HttpRequest, limit: int, take: Callable[[int], None], timeout_s: float) -> bytearray:
    """The body as it is, within the bounds of ``read_object``."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit, take)
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None


async def _read(request: HttpRequest, limit: int, take: Callable[[int], None]) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > limit:
            raise _too_large(limit)
        take(len(piece))
        body += piece
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="request_too_large")
