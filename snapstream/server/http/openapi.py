"""Schemas of ``/openapi.json``.

Handlers read bodies and write answers themselves, so that errors keep their form; FastAPI derives nothing here.
Invariant: every route lists its answer and, as ``default``, the error; FastAPI's own 422 never appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from snapstream.server.http.middleware import MAX_SALT_CHARS
from snapstream.types import (
    COUNTS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    SEEDS,
)


def _range(least: float, most: float | None) -> dict[str, Any]:
    return {"minimum": least} if most is None else {"minimum": least, "maximum": most}


STRING = {"type": "string"}
STRING_OR_NULL = {"type": ["string", "null"]}
COUNT = {"type": "integer", "minimum": 0}


def object_of(members: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(members), "properties": {**members, **optional}}


ERROR = object_of(
    {"error": object_of({"message": STRING, "type": STRING, "param": STRING_OR_NULL, "code": STRING_OR_NULL})}
)

_TEXTS = {"type": "string", "minLength": 1}

# What the server enforces beyond types: keywords by the field and the type of value that they limit.
LIMITS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    **{name: {"integer": _range(least, most)} for name, least, most in COUNTS},
    **{name: {"number": _range(least, most)} for name, least, most in NUMBERS},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "seed": {"integer": _range(*SEEDS)},
    "max_completion_tokens": {"integer": _range(1, None)},
    "max_output_tokens": {"integer": _range(1, None)},
    "logprobs": {"integer": _range(0, MAX_LOGPROBS)},
    "top_logprobs": {"integer": _range(0, MAX_LOGPROBS)},
    "stop": {"string": {"minLength": 1}, "array": {"maxItems": MAX_STOP_STRINGS, "items": _TEXTS}},
    "stop_sequences": {"array": {"maxItems": MAX_STOP_STRINGS, "items": _TEXTS}},
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS, "items": COUNT}},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_LOGIT_BIAS,
            "additionalProperties": {"type": "number", **_range(-MAX_BIAS, MAX_BIAS)},
        }
    },
    "messages": {"array": {"minItems": 1}},
    "tokens": {"array": {"items": COUNT}},
    "cache_salt": {"string": {"minLength": 1, "maxLength": MAX_SALT_CHARS}},
    "budget": {"integer": _range(1, None)},
}


def answers(
    members: Mapping[str, Any], *, can_stream: bool = False, error: Mapping[str, Any] = ERROR
) -> dict[int | str, dict[str, Any]]:
    """The ``responses=`` of a route that answers with an object with at least ``members``."""
    content: dict[str, Any] = {"application/json": {"schema": object_of(members)}}
    if can_stream:
        content["text/event-stream"] = {}  # frames, in a form that depends on the API
    return {200: {"description": "The answer", "content": content}, **errors(error)}


def errors(error: Mapping[str, Any] = ERROR) -> dict[int | str, dict[str, Any]]:
    return {"default": {"description": "An error", "content": {"application/json": {"schema": dict(error)}}}}


@cache
def body_schema(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The body for the OpenAPI document; handlers read it themselves, so that errors keep their shape.

    Cached, so callers must not change it.
    """
    schemas = [kind.model_json_schema(ref_template="#/components/schemas/{model}") for kind in kinds]
    for schema in schemas:
        _inline(schema, schema.pop("$defs", {}))
        _limit(schema)
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> None:
    """Put definitions in the place of references to them: the body is not part of FastAPI's own components."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        if isinstance(child, dict) and "$ref" in child:
            child.update(definitions[child.pop("$ref").rsplit("/", 1)[1]])
        _inline(child, definitions)


def _limit(schema: dict[str, Any]) -> None:
    """Add what ``LIMITS`` says of fields, those of objects within included."""
    properties = schema.get("properties", {})
    for name, field in properties.items():
        for kind in field.get("anyOf", [field]):
            kind.update(LIMITS.get(name, {}).get(kind.get("type"), {}))
            _limit(kind)
    if "echo" in properties:  # a prompt may be echoed without an answer
        properties["max_tokens"]["anyOf"][0]["minimum"] = 0
