"""Messages as clients send them, made into what chat templates expect, by the same rules as ``LLM.chat``.

Invariant: a malformed message is a 400 that names it; what passes has a known role, text as content, and only members
that templates know. ``snapstream/request/conversation.py`` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.request.conversation import as_conversation
from snapstream.server.http.errors import bad_value

PASSED_TEXTS = ("name", "tool_call_id", "reasoning_content")  # beside role, content and tool_calls


def normalise(messages: Sequence[Mapping[str, Any]], *, has_developer: bool) -> list[dict[str, Any]]:
    """``has_developer``: the template knows that role; otherwise it becomes ``system``, its older name."""
    if not messages:
        raise bad_value("messages is empty; it needs at least one message", "messages")
    try:
        conversation = as_conversation(messages, has_developer=has_developer)
    except ValueError as error:
        raise bad_value(str(error), "messages") from None
    return [{name: value for name, value in message.items() if _is_passed(name, value)} for message in conversation]


def _is_passed(name: str, value: Any) -> bool:
    return name in ("role", "content", "tool_calls") or (name in PASSED_TEXTS and isinstance(value, str))
