"""What ``/openapi.json`` says about answers; bodies of requests come from the types of ``protocol.py``.

Handlers read bodies and write answers themselves, so that errors keep their one shape; FastAPI derives nothing here.
Invariant: every route lists its good answer and, as ``default``, the error; FastAPI's own 422 never appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_OBJECT = {"type": "object"}

ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
        }
    },
}
MODEL: Mapping[str, Any] = {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
}


def _object(members: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(members), "properties": dict(members)}


def completion(kind: str, **choice: Any) -> dict[str, Any]:
    """Members of an answer of that ``object``, whose choices have at least the members ``choice``."""
    members = {"index": _COUNT, "finish_reason": _TEXT, "logprobs": {"type": ["object", "null"]}, **choice}
    return {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "choices": {"type": "array", "items": _object(members)},
        "usage": _USAGE,
        "snapstream": _OBJECT,
    }


CHAT = completion("chat.completion", message=_OBJECT)
TEXT = completion("text_completion", text=_TEXT)
MODELS = {"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object", "properties": MODEL}}}
HEALTH = {"status": {"const": "ok"}}
VERSION = {"version": _TEXT}
IDS = {"type": "array", "items": _COUNT}
TOKENIZED = {"count": _COUNT, "max_model_len": _COUNT, "tokens": IDS}
DETOKENIZED = {"prompt": _TEXT}
TOKENIZER = {"tokenizer_class": _TEXT, "vocab_size": _COUNT, "eos_token": _TEXT_OR_NULL, "chat_template": {}}


def answers(members: Mapping[str, Any], *, can_stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route whose good answer is an object with at least ``members``."""
    content: dict[str, Any] = {"application/json": {"schema": _object(members)}}
    if can_stream:
        content["text/event-stream"] = {}  # frames `data: {chunk}`, the last `data: [DONE]`
    return {200: {"description": "The answer", "content": content}, **errors()}


def errors() -> dict[int | str, dict[str, Any]]:
    return {"default": {"description": "An error", "content": {"application/json": {"schema": ERROR}}}}
