"""What callers hand to ``LLM``, made plain or refused: prompts, sampling parameters, conversations.

Nothing is guessed: what is not clearly a text or a list of token ids is a ValueError that says what was given. Arrays
and tensors of ids count as lists. ``llm.py`` uses this; limits that depend on the model are checked in
``engine/validate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.config import as_count
from snapstream.request import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or several, as a list: texts, or lists of token ids."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if _is_list(prompts):
        items = [_plain(item) for item in prompts]
        if items and not any(isinstance(item, str) or _is_list(item) for item in items):
            return [_as_ids(items, "prompt")]
        return [item if isinstance(item, str) else _as_ids(item, f"prompt {i}") for i, item in enumerate(items)]
    raise ValueError(f"prompts is {_named(prompts)}; it must be a text, a list of token ids, or a list of these")


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``count`` prompts; None means the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params) or not all(isinstance(item, SamplingParams) for item in params):
        raise ValueError(f"params is {_named(params)}; it must be a SamplingParams, or a list with one per prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of lists of messages whose content is text."""
    if messages is None or not _is_list(messages) or not messages:
        raise ValueError(f"messages is {_named(messages)}; it must be a list of messages, each with role and content")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    return [[_as_message(message) for message in conversation] for conversation in conversations]


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {_named(message)}; it must have role and content")
    role: Any = message.get("role")
    content: Any = message.get("content")
    if role not in ROLES:
        raise ValueError(f"a message has the role {role!r}; known roles: {', '.join(ROLES)}")
    if _is_list(content) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of a {role} message is {_named(content)}; it must be text")
    return {**message, "content": content}


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _as_ids(value: Any, name: str) -> list[int]:
    if not _is_list(value):
        raise ValueError(f"{name} is {_named(value)}; it must be a text or a list of token ids")
    return [as_count(f"{name}: token id", token, 0) for token in value]


def _named(value: Any) -> str:
    """Type and the beginning of the value, for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
