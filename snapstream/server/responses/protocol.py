"""Bodies and items of the Responses API, converted to those of chat completions.

    message, reasoning, function_call, custom_tool_call     those of one turn of the assistant are one message
    function_call_output, custom_tool_call_output           messages of the role tool

Invariant: items keep their order, and an unsupported one is a 400 that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import COUNT, STRING, STRING_OR_NULL
from snapstream.server.openai.protocol import Body, ReasoningEffort, SamplingBody

MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512

_INPUT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
                    "role": {"enum": ["user", "assistant", "system", "developer"]},
                    "content": {"type": "string"},
                },
                "required": ["role", "content"],
            },
        },
    ]
}

# Field -> values besides null that change nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "thread": (),  # of Messages
    "prompt": (),  # a template that is stored at OpenAI
    "context_management": ([],),
    "moderation": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "image": (),
    "access_programs": (),
    "n": (1,),
}


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None  # the default; models here have no other


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = None
    # Reasoning is returned whole, so there is nothing to summarize.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SamplingBody):
    """POST /v1/responses"""

    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, without effect.
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # of built-in tools; there are none
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


# What ``/openapi.json`` says about the answers of this API.

_OBJECT = {"type": "object"}
_USAGE = {
    "type": ["object", "null"],
    "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
    "properties": {
        "input_tokens": COUNT, "input_tokens_details": _OBJECT, "output_tokens": COUNT,
        "output_tokens_details": _OBJECT, "total_tokens": COUNT,
    },
}  # fmt: skip

RESPONSE = {
    "id": STRING,
    "object": {"const": "response"},
    "created_at": COUNT,
    "status": {"enum": ["completed", "incomplete", "cancelled", "failed", "in_progress"]},
    "model": STRING,
    "error": {"type": ["object", "null"]},
    "incomplete_details": {"type": ["object", "null"]},
    "output": {"type": "array", "items": _OBJECT},
    "usage": _USAGE,
    "metadata": _OBJECT,
    "parallel_tool_calls": {"type": "boolean"},
    "tools": {"type": "array", "items": _OBJECT},
}
DELETED = {"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}}
COUNTED = {"object": {"const": "response.input_tokens"}, "input_tokens": COUNT}
ITEMS = {
    "object": {"const": "list"},
    "data": {"type": "array", "items": _OBJECT},
    "first_id": STRING_OR_NULL,
    "last_id": STRING_OR_NULL,
    "has_more": {"type": "boolean"},
}


# Tools, converted to chat completions. Namespaces are flattened: a model sees ``crm__find``, clients see a call of
# ``find`` in the namespace ``crm``. Tools that OpenAI runs itself are dropped if there are others, else a 400.

KINDS = ("function", "custom")
FUNCTION = ("name", "description", "parameters", "strict")
CUSTOM = ("name", "description", "format")


# Prefixes of names with a date or "preview". Agents list these tools by default, and work without them.
_DROPPED = ("web_search", "image_generation", "code_interpreter")


def own_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without dropped ones; all of them if none would be left."""
    return [tool for tool in tools if not _is_dropped(tool)] or list(tools)


def _is_dropped(tool: Mapping[str, Any]) -> bool:
    kind = str(tool.get("type"))
    return kind.startswith(_DROPPED) or (kind == "tool_search" and tool.get("execution") != "client")


def flat_name(item: Mapping[str, Any]) -> Any:
    """The name that the model sees; ``item``: a call, a choice or a tool with a name and perhaps a namespace."""
    name, space = item.get("name"), item.get("namespace")
    return f"{space.removesuffix('__')}__{name}" if isinstance(space, str) and isinstance(name, str) else name


def names_in_spaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Name and namespace, as members of a call, by the name that the model sees."""
    named = (tool for tool, _ in _flat(tools) if "namespace" in tool)
    return {flat_name(tool): {"name": tool["name"], "namespace": tool["namespace"]} for tool in named}


def as_chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_tool(tool, place) for tool, place in _flat(tools)]


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Tools and their places, for errors; those of a namespace have it as a member."""
    for index, tool in enumerate(tools):
        place, inner, space = f"tools[{index}]", tool.get("tools"), tool.get("name")
        if tool.get("type") != "namespace":
            yield {name: tool[name] for name in tool if name != "namespace"}, place
            continue
        if not isinstance(space, str) or not isinstance(inner, list):
            raise bad_value(f"{place} is a namespace; it must have a name and a list of tools", "tools")
        for number, one in enumerate(inner):
            if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
                raise bad_value(f"{place}.tools[{number}] must be a tool with a name", "tools")
            yield {**one, "namespace": space}, f"{place}.tools[{number}]"


def chosen_names(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The name that the model sees, by the name in a choice, which may omit the namespace: then the first."""
    return {tool["name"]: flat_name(tool) for tool, _ in reversed([*_flat(tools)]) if isinstance(tool.get("name"), str)}


def as_chat_choice(choice: Any, names: Mapping[str, Any]) -> Any:
    """A named tool and ``allowed_tools`` have another form in chat completions; words are the same."""
    if not isinstance(choice, Mapping):
        return choice
    kind, name = choice.get("type"), choice.get("name")
    if kind in KINDS:
        if isinstance(name, str) and "namespace" not in choice:
            return {"type": kind, kind: {"name": names.get(name, name)}}
        return {"type": kind, kind: {"name": flat_name(choice)}}
    if kind == "allowed_tools":
        listed = choice.get("tools")
        if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
            raise bad_value("tool_choice.tools must be a list of tools", "tool_choice")
        allowed = {"mode": choice.get("mode"), "tools": [as_chat_choice(tool, names) for tool in listed]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise bad_value(f"tool_choice has the type {kind!r}; only functions and custom tools can be chosen", "tool_choice")


def as_response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format``: a schema is flat here, and nested in chat completions."""
    if given is None or given.get("type") != "json_schema":
        return None if given is None else dict(given)
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in KINDS:
        raise bad_value(
            f"{place} has the type {kind!r}; this server runs no tools itself: 'function', 'custom' and 'namespace' "
            "are taken",
            "tools",
        )
    members = FUNCTION if kind == "function" else CUSTOM
    inner = {name: tool[name] for name in members if tool.get(name) is not None}
    if "namespace" in tool:
        inner["name"] = flat_name(tool)
    form = inner.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":  # flat here, nested in chat completions
        grammar = {name: form.get(name) for name in ("syntax", "definition")}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: inner}


Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
CALLS = ("function_call", "custom_tool_call")
MAX_PAGE = 100  # items of one page of a list
OUTPUTS = ("function_call_output", "custom_tool_call_output")


def read_input(given: Any) -> list[Item]:
    """The items of ``input``; 400 for malformed ones."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _bad("input", "must be a string or a list of items, and not empty")
    for index, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise _bad(f"input[{index}]", "must be an object")
    return given


def as_messages(instructions: str | None, items: Sequence[Item], *, num_before: int = 0) -> list[dict[str, Any]]:
    """The conversation for ``ChatBody.messages``. ``num_before``: leading items that are not of the request itself."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: dict[str, Any] | None = None  # of the assistant, while its items are consecutive
    for index, item in enumerate(items):
        place = f"input[{index - num_before}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind in OUTPUTS:
            turn = None
            messages.append(
                {"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": _output(item, place)}
            )
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append(_message(item, place))
        elif kind == "message" or kind == "reasoning" or kind in CALLS:
            if turn is None or _starts_turn(turn, str(kind)):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, str(kind), item, place)
        else:
            raise _bad(place, f"has the type {kind!r}; only text, function calls and reasoning are supported")
    return messages


def named_items(response_id: str, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as listed: with an id and a type, and a message's text as parts."""
    named = []
    for index, item in enumerate(items):
        done = {"id": f"{response_id}_{index}", "type": "message", **item}
        if done["type"] == "message" and isinstance(done.get("content"), str):
            kind = "output_text" if done.get("role") == "assistant" else "input_text"
            done["content"] = [{"type": kind, "text": done["content"]}]
        named.append(done)
    return named


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list, by ``limit``, ``order`` and ``after``."""
    given, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= MAX_PAGE):
        raise bad_value(f"limit is {given!r}; it must be 1 to {MAX_PAGE}", "limit")
    if order not in ("asc", "desc"):
        raise bad_value(f"order is {order!r}; it must be asc or desc", "order")
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        start = next((place for place, item in enumerate(listed) if item["id"] == after), None)
        if start is None:
            raise bad_value(f"after is {after!r}; no item has that id", "after")
        listed = listed[start + 1 :]
    page, num_more = listed[: int(given)], len(listed) - int(given)
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": num_more > 0,
    }


def _starts_turn(turn: Mapping[str, Any], kind: str) -> bool:
    """A turn is reasoning, text, calls in this order: an item out of order starts another turn."""
    if kind == "reasoning":
        return bool(turn["content"] or turn.get("tool_calls") or turn.get("reasoning_content"))
    return kind == "message" and bool(turn["content"] or turn.get("tool_calls"))


def _add(turn: dict[str, Any], kind: str, item: Item, place: str) -> None:
    if kind == "message":
        turn["content"] = _text(item.get("content"), f"{place}.content")
    elif kind == "reasoning":
        reasoning = _reasoning(item, place)
        if reasoning:
            turn["reasoning_content"] = reasoning
    else:
        turn.setdefault("tool_calls", []).append(_call(kind, item, place))


def _message(item: Item, place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise _bad(f"{place}.role", f"is {role!r}; it must be one of {', '.join(ROLES)}")
    return {"role": role, "content": _text(item.get("content"), f"{place}.content")}


def _call(kind: str, item: Item, place: str) -> dict[str, Any]:
    if kind == "function_call":
        arguments = _string(item, "arguments", place)
    else:
        arguments = json.dumps({"input": _string(item, "input", place)}, ensure_ascii=False)
    _string(item, "name", place)
    function = {"name": flat_name(item), "arguments": arguments}
    return {"id": _string(item, "call_id", place), "type": "function", "function": function}


def _output(item: Item, place: str) -> str:
    return _text(item.get("output"), f"{place}.output")


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning item; empty if another server encrypted it."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise _bad(f"{place}.content", "must be a list of parts")
    texts = [_part(part, ("reasoning_text", "text"), f"{place}.content[{n}]") for n, part in enumerate(content)]
    return "\n".join(texts)


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(place, "must be a string or a list of parts")
    return "\n".join(_part(part, TEXT_PARTS, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, kinds: Sequence[str], place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "refusal":
        return _string(part, "refusal", place)
    if not isinstance(part, Mapping) or kind not in kinds:
        raise _bad(place, f"has the type {kind!r}; only text is supported, not images, files or audio")
    return _string(part, "text", place)


def _string(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _bad(f"{place}.{name}", "must be a text")
    return value


def _bad(place: str, message: str) -> ApiError:
    return bad_value(f"{place} {message}", "input")
