"""From the bytes of a request to a checked body: size, JSON, types, fields that we refuse, fields that we ignore.

The rule: a field that we do not know is ignored and logged once; one that we know, that would change the result and
that is not built is refused with its name. Silence would be worse than refusal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import ValidationError
from pydantic_core import from_json

from snapstream.server.errors import ApiError, bad_value
from snapstream.server.protocol import Body, StreamOptions

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

MAX_LOGGED_FIELDS = 256  # names come from clients: neither the log nor the memory may grow with them

# Field -> values besides null that change nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),  # of vLLM; ours come with echo
    "prompt_embeds": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
CHAT_ONLY_REFUSED: Mapping[str, tuple[Any, ...]] = {"echo": (False,), "best_of": (1,)}
COMPLETION_ONLY_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),  # here logprobs is their number
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
JSON_TYPE = "application/json"
BODY_TIMEOUT_S = 60.0


class IgnoredFields:
    """Logs each unknown field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        for name in sorted(names - self._seen):
            if len(self._seen) < MAX_LOGGED_FIELDS:
                self._seen.add(name)
                log.info("ignoring unknown request field %.64r (logged once)", name)


async def read_object(
    request: HttpRequest, limit: int, take: Callable[[int], None] = lambda _: None, timeout_s: float = BODY_TIMEOUT_S
) -> dict[str, Any]:
    """The body as a JSON object, read no further than the limit and no longer than ``timeout_s``.

    ``take`` is told of bytes before they are kept, and raises if there are too many of all requests together.

    The content type is insisted upon because a browser sends other types across origins without asking the server
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


def check_fields(data: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what would change the result and is not built."""
    for name in refused.keys() & data.keys():
        value, harmless = data[name], refused[name]
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise bad_value(f"{name} {value!r} is not supported by this server", name, "unsupported_parameter")


def parse(kind: type[B], data: Mapping[str, Any]) -> B:
    """Check types; the first error is told, with the field it is about."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        raise bad_value(f"{'.'.join(place)}: {first['msg']}", place[0] if place else None) from None


def unknown_fields(kind: type[Body], data: Mapping[str, Any]) -> set[str]:
    """Names of fields that will be ignored, also of those within ``stream_options``."""
    known = {*kind.model_fields, *REFUSED, *CHAT_ONLY_REFUSED, *COMPLETION_ONLY_REFUSED}
    inner = data.get("stream_options")
    inside = set(inner) - set(StreamOptions.model_fields) if isinstance(inner, Mapping) else set()
    return set(data) - known | {f"stream_options.{name}" for name in inside}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="request_too_large")
