"""Bodies and content blocks of the Messages API, converted to those of chat completions.

    text -> text    tool_use -> a call    tool_result -> a message of the role tool    thinking -> reasoning_content

Invariant: everything keeps its order, also system messages inside the list, so that a growing conversation keeps its
prefix; an unsupported block is a 400 that names its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import COUNT, STRING, STRING_OR_NULL
from snapstream.server.openai.protocol import STATE, Body, KVCacheOptions, ReasoningEffort, is_harmless

# Field -> values besides null that change nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **STATE,
    "compaction": (),  # requests a summary instead of an answer
    "container": (),
    "fallbacks": ([], "default"),  # models to try after a refusal; by default there are none
    "mcp_servers": ([],),  # tools that Anthropic would run itself
}

THREAD = "thread"  # a conversation that the server stores

# Known, without effect: for Anthropic's storage, billing and routing, and hints that only shorten prompts.
WITHOUT_EFFECT = frozenset(
    "billing_policy cache_control context_management diagnostics fallback_credit_token inference_geo metadata "
    "service_tier speed user_profile_id workspace_id".split()
)


def check_thread(data: Mapping[str, Any]) -> None:
    """400 for a conversation stored on the server. By the error's details SDKs know to send the whole conversation
    again, without ``thread``."""
    if data.get(THREAD) is None:
        return
    unsupported = [name for name in REFUSED if not is_harmless(data.get(name), REFUSED[name])]
    raise ApiError(
        400,
        "this server keeps no conversations: send the whole conversation without `thread`",
        param=THREAD,
        code="unsupported_parameter",
        details={"error_code": "thread_unsupported_request", "unsupported": unsupported},
    )


class ThinkingOptions(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # not enforced


class OutputOptions(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    # An extension of ours and other engines.
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def effort(self) -> ReasoningEffort | None:
        """As in chat completions; None: the template's default."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        return None if self.thinking is None else "medium"


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Ours.
    kv_cache: KVCacheOptions | None = None
    prompt_compression: Any = None
    cache_salt: str | None = None


# What ``/openapi.json`` says about the answers of this API.

ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": STRING, "message": STRING, "details": {"type": "object"}},
        },
    },
}

_OBJECT = {"type": "object"}
_USAGE = {
    "type": "object",
    "required": ["input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"],
    "properties": {
        "input_tokens": COUNT, "output_tokens": COUNT, "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
    },
}  # fmt: skip

MESSAGE = {
    "id": STRING,
    "type": {"const": "message"},
    "role": {"const": "assistant"},
    "model": STRING,
    "content": {"type": "array", "items": _OBJECT},
    "stop_reason": STRING,
    "stop_sequence": STRING_OR_NULL,
    "usage": _USAGE,
}
COUNTED = {"input_tokens": COUNT}


# Tools, tool choice and answer format, converted to chat completions. Only tools with an input schema are accepted.

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# Tools that Anthropic runs itself; a date follows.
_DROPPED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")


def own_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without dropped ones; all of them if none would be left."""
    return [tool for tool in tools if not str(tool.get("type")).startswith(_DROPPED)] or list(tools)


def as_chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def as_chat_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_value(f"tool_choice.type is {kind!r}; it must be auto, any, tool or none", "tool_choice")
    return _CHOICES[kind]


def is_parallel(choice: Mapping[str, Any] | None) -> bool:
    """Whether there may be several calls."""
    given = None if choice is None else choice.get("disable_parallel_tool_use")
    if given not in (None, True, False):
        raise bad_value(f"tool_choice.disable_parallel_tool_use is {given!r}; it must be true or false", "tool_choice")
    return not given


def as_response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``output_config.format``, a schema without a name."""
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise bad_value(
            f"output_config.format.type is {given.get('type')!r}; it must be 'json_schema'", "output_config"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema"), "strict": False}}


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad_value(
            f"{place} has the type {kind!r}; this server runs no tools itself, so only tools with an input_schema "
            "are taken",
            "tools",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise bad_value(f"{place}.input_schema must be a JSON schema of the type object", "tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


ROLES = ("user", "assistant", "system")

# Coding agents start the system prompt with a line for Anthropic's accounting. It differs between requests, so prompts
# would share no prefix.
_ACCOUNTING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")


def as_messages(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for ``ChatBody.messages``."""
    if not messages:
        raise bad_value("messages is empty; it needs at least one message", "messages")
    done = _system(system)
    for index, message in enumerate(messages):
        place, role = f"messages[{index}]", message.get("role")
        if role not in ROLES:
            raise bad_value(f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}", "messages")
        blocks = _blocks(message.get("content"), f"{place}.content")
        if role == "assistant":
            done.append(_assistant(blocks, f"{place}.content"))
        elif role == "user":
            done += _user(blocks, f"{place}.content")
        else:
            done.append({"role": "system", "content": _texts(blocks, f"{place}.content")})
    return done


def _system(system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(_blocks(system, "system"))]
    kept = [text for text in (_ACCOUNTING.sub("", text) for text in texts) if text]
    return [{"role": "system", "content": "\n".join(kept)}] if kept else []


def _user(blocks: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Messages of tools and of the user, in the order of the blocks."""
    done: list[dict[str, Any]] = []
    said: list[str] = []

    def flush() -> None:
        if said:
            done.append({"role": "user", "content": "\n".join(said)})
            said.clear()

    for index, block in enumerate(blocks):
        if _kind(block) == "tool_result":
            flush()
            done.append(_tool_result(block, f"{place}[{index}]"))
        else:
            said.append(_text(block, f"{place}[{index}]"))
    flush()
    return done or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    said: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where, kind = f"{place}[{index}]", _kind(block)
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            reasoning.append(_string(block, "thinking", where))
        elif kind != "redacted_thinking":  # somebody else's, and sealed
            said.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise bad_value(f"{place}.input must be an object", "messages")
    function = {"name": _string(block, "name", place), "arguments": dict(arguments)}
    return {"id": _string(block, "id", place), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    content, is_error = block.get("content"), block.get("is_error")
    if is_error not in (None, True, False):
        raise bad_value(f"{place}.is_error is {is_error!r}; it must be true or false", "messages")
    text = "" if content is None else _texts(_blocks(content, f"{place}.content"), f"{place}.content")
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", place),
        "content": f"Error: {text}" if is_error else text,  # chat messages have no field for it
    }


def _blocks(content: Any, place: str) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _bad(place, "must be a string or a list of blocks")
    return content


def _texts(blocks: Sequence[Any], place: str) -> str:
    return "\n".join(_text(block, f"{place}[{index}]") for index, block in enumerate(blocks))


def _text(block: Any, place: str) -> str:
    if _kind(block) != "text":
        raise _bad(
            place, f"has the type {_kind(block)!r}, which is not supported here; images and documents are not supported"
        )
    return _string(block, "text", place)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{place}.{name}", "must be a text")
    return value


def _bad(place: str, message: str) -> ApiError:
    return bad_value(f"{place} {message}", "system" if place.startswith("system") else "messages")
