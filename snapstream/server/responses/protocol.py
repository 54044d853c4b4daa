"""Bodies and items of the Responses API, converted to those of chat completions, and stored responses.

    message, reasoning, function_call, custom_tool_call     those of one turn of the assistant are one message
    function_call_output, custom_tool_call_output           messages of the role tool

Invariants: items keep their order, and an unsupported one is a 400 that names its place. ``ResponseStore`` keeps
responses that later requests continue in memory, separate for each API key: never more than ``limit`` of one key, nor
``max_bytes`` of conversations of all keys; the oldest of a key are evicted first, for bytes those of the key that has
most. A response holds the whole conversation up to it, so it does not depend on earlier ones. Used on the event loop
only.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema
from pydantic_core import to_json

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import COUNT, STRING, object_of
from snapstream.server.openai.protocol import Body, ReasoningEffort, SamplingBody, bad_part, string_of

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

    refused = {
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
_USAGE = object_of(
    {
        "input_tokens": COUNT, "input_tokens_details": _OBJECT, "output_tokens": COUNT,
        "output_tokens_details": _OBJECT, "total_tokens": COUNT,
    }
) | {"type": ["object", "null"]}  # fmt: skip

RESPONSE = {
    "id": STRING,
    "object": {"const": "response"},
    "created_at": COUNT,
    "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
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

# Tools, converted to chat completions. Namespaces are flattened: a model sees ``crm__find``, clients see a call of
# ``find`` in the namespace ``crm``. Tools that OpenAI runs itself are dropped if there are others, else a 400.

KINDS = ("function", "custom")
FUNCTION = ("name", "description", "parameters", "strict")
CUSTOM = ("name", "description", "format")


# Prefixes of names with a date or "preview". Agents list these tools by default, and work without them.
_DROPPED = ("web_search", "image_generation", "code_interpreter")


def is_dropped(tool: Mapping[str, Any]) -> bool:
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
OUTPUTS = ("function_call_output", "custom_tool_call_output")


def read_input(given: Any) -> list[Item]:
    """The items of ``input``; 400 for malformed ones."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_part("input", "must be a string or a list of items, and not empty")
    for index, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise bad_part(f"input[{index}]", "must be an object")
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
            output = _text(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": string_of(item, "call_id", place), "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append(_message(item, place))
        elif kind == "message" or kind == "reasoning" or kind in CALLS:
            if turn is None or _starts_turn(turn, str(kind)):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, str(kind), item, place)
        else:
            raise bad_part(place, f"has the type {kind!r}; only text, function calls and reasoning are supported")
    return messages


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
        raise bad_part(f"{place}.role", f"is {role!r}; it must be one of {', '.join(ROLES)}")
    return {"role": role, "content": _text(item.get("content"), f"{place}.content")}


def _call(kind: str, item: Item, place: str) -> dict[str, Any]:
    if kind == "function_call":
        arguments = string_of(item, "arguments", place)
    else:
        arguments = json.dumps({"input": string_of(item, "input", place)}, ensure_ascii=False)
    string_of(item, "name", place)
    function = {"name": flat_name(item), "arguments": arguments}
    return {"id": string_of(item, "call_id", place), "type": "function", "function": function}


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning item; empty if another server encrypted it."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise bad_part(f"{place}.content", "must be a list of parts")
    texts = [_part(part, ("reasoning_text", "text"), f"{place}.content[{n}]") for n, part in enumerate(content)]
    return "\n".join(texts)


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_part(place, "must be a string or a list of parts")
    return "\n".join(_part(part, TEXT_PARTS, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, kinds: Sequence[str], place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "refusal":
        return string_of(part, "refusal", place)
    if not isinstance(part, Mapping) or kind not in kinds:
        raise bad_part(place, f"has the type {kind!r}; only text is supported, not images, files or audio")
    return string_of(part, "text", place)


@dataclass(frozen=True, slots=True)
class Stored:
    response: dict[str, Any]
    items: tuple[Item, ...]  # the conversation with its output
    num_bytes: int  # of the conversation, also what it shares with others


@dataclass(slots=True)
class _KeyStore:
    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    items: dict[str, Item] = field(default_factory=dict)  # by id, of all its conversations
    uses: Counter[str] = field(default_factory=Counter)  # how many conversations have an item of that id
    num_bytes: int = 0

    def put(self, response_id: str, stored: Stored) -> None:
        self.responses[response_id] = stored
        self.num_bytes += stored.num_bytes
        for name, item in _named(stored.items):
            self.items.setdefault(name, item)
            self.uses[name] += 1

    def drop(self, response_id: str) -> None:
        stored = self.responses.pop(response_id)
        self.num_bytes -= stored.num_bytes
        for name, _ in _named(stored.items):
            self.uses[name] -= 1
            if not self.uses[name]:
                del self.uses[name], self.items[name]


def _named(items: Sequence[Item]) -> list[tuple[str, Item]]:
    return [(item["id"], item) for item in items if isinstance(item.get("id"), str)]


class ResponseStore:
    """``limit`` 0: nothing is stored."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._by_key: defaultdict[bytes, _KeyStore] = defaultdict(_KeyStore)  # by digest of the key

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    @property
    def num_bytes(self) -> int:
        return sum(own.num_bytes for own in self._by_key.values())

    def __len__(self) -> int:
        return sum(len(own.responses) for own in self._by_key.values())

    def before(self, response_id: str | None, owner: bytes) -> Stored | None:
        """The response that a request continues; 400 if it is not stored."""
        if response_id is None:
            return None
        if not self.is_on:
            message = "previous_response_id needs stored responses, and this server stores none (--responses-store 0)"
            raise bad_value(message, "previous_response_id", "unsupported_parameter")
        found = self._own(response_id, owner)
        if found is None:
            message = f"Previous response with id {response_id!r} not found; the server keeps the last {self._limit}."
            raise bad_value(message, "previous_response_id", "previous_response_not_found")
        return found

    def resolve(self, items: Sequence[Item], owner: bytes) -> list[Item]:
        """Items, with references by id replaced by the stored items; 400 for one that is not stored."""
        return [self._referred(item, index, owner) if _is_reference(item) else item for index, item in enumerate(items)]

    def get(self, response_id: str, owner: bytes) -> dict[str, Any]:
        """404 for one that is unknown, or another key's."""
        return self._need(response_id, owner).response

    def keep(self, response: Mapping[str, Any], owner: bytes, before: Stored | None, own: Sequence[Item]) -> None:
        """Store a response that has ended; ``own``: the items of the request itself, ``before``: what it continues."""
        output = response["output"]
        size = (before.num_bytes if before else 0) + len(to_json([*own, *output]))
        if size > self._max_bytes:  # it would evict all others
            return
        stored = self._by_key[owner]
        items = (*(before.items if before else ()), *own, *output)
        stored.put(response["id"], Stored(dict(response), items, size))
        if len(stored.responses) > self._limit:
            self._drop(next(iter(stored.responses)), owner)
        while self.num_bytes > self._max_bytes:
            most = max(self._by_key, key=lambda name: self._by_key[name].num_bytes)
            self._drop(next(iter(self._by_key[most].responses)), most)

    def delete(self, response_id: str, owner: bytes) -> None:
        self._need(response_id, owner)
        self._drop(response_id, owner)

    def _own(self, response_id: str, owner: bytes) -> Stored | None:
        own = self._by_key.get(owner)
        return None if own is None else own.responses.get(response_id)

    def _need(self, response_id: str, owner: bytes) -> Stored:
        found = self._own(response_id, owner)
        if found is None:
            message = f"Response with id {response_id!r} not found."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    def _referred(self, item: Item, index: int, owner: bytes) -> Item:
        own, name = self._by_key.get(owner), item.get("id")
        found = own.items.get(name) if own is not None and isinstance(name, str) else None
        if found is None:
            kept = f"the server keeps the last {self._limit} responses" if self.is_on else "the server stores none"
            raise bad_value(f"input[{index}]: item with id {name!r} not found; {kept}", "input", "item_not_found")
        return found

    def _drop(self, response_id: str, owner: bytes) -> None:
        own = self._by_key[owner]
        own.drop(response_id)
        if not own.responses:
            del self._by_key[owner]


def _is_reference(item: Item) -> bool:
    """The type may be omitted."""
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) == {"id"})
