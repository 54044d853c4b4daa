"""Messages as clients send them, made into what chat templates expect.

OpenAI's shapes differ from the templates': content in parts, tool arguments as a JSON string, the role ``developer``.
Invariant: a malformed message is a 400 that names it; what passes has a known role and string content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from snapstream.server.errors import ApiError, bad_value

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")


def normalise(messages: Sequence[Mapping[str, Any]], *, has_developer: bool) -> list[dict[str, Any]]:
    """``has_developer``: the template knows that role; otherwise it becomes ``system``, its older name."""
    if not messages:
        raise bad_value("messages is empty; it needs at least one message", "messages")
    return [_message(message, f"messages[{index}]", has_developer) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str, has_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise _fault(f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise _fault(f"{place}.tool_calls belongs to the assistant, not to {role!r}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise _fault(f"{place}.content is missing")
    result: dict[str, Any] = {
        "role": "system" if role == "developer" and not has_developer else role,
        "content": "" if content is None else _text(content, f"{place}.content"),
    }
    if calls:
        result["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    return result


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _fault(f"{place} must be a string or a list of text parts")
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        raise _fault(f"{place} has type {kind!r}; this model takes text only")
    if not isinstance(part.get("text"), str):
        raise _fault(f"{place}.text must be a string")
    return str(part["text"])


def _tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Templates want arguments as an object; the API has them as JSON text."""
    if not isinstance(calls, list):
        raise _fault(f"{place} must be a list")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _fault(f"{place}[{index}].function.name is missing")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments)
            except ValueError:
                raise _fault(f"{place}[{index}].function.arguments is not valid JSON") from None
        result.append(
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return result


def _fault(message: str) -> ApiError:
    return bad_value(message, "messages")
