"""``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format`` of a request, checked.

Invariant: a malformed field is a 400 that names it. ``plan.py`` makes a grammar and a parser of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapstream.request import Grammar
from snapstream.server.http.errors import bad_value
from snapstream.server.openai.protocol import TemplateOptions

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # of functions; nothing in them needs escaping
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Function:
    """One tool. All tools are functions."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool  # refuse a schema that cannot be enforced whole


@dataclass(frozen=True, kw_only=True)
class ToolWish:
    """Which tools there are, and which of them must be called."""

    functions: tuple[Function, ...] = ()
    forced: tuple[Function, ...] = ()  # one of these must be called; empty: none must
    is_single: bool = False  # one call at most
    is_off: bool = False  # tool_choice none: the model is not told of them

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.forced or self.functions)


def read_tools(body: TemplateOptions) -> ToolWish:
    """400 for tools or a choice that are malformed."""
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_value(f"{len(tools)} tools given; the limit is {MAX_TOOLS}", "tools")
    functions = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise bad_value("tools has two functions of one name", "tools")
    is_single = body.parallel_tool_calls is False
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return ToolWish(functions=functions, is_single=is_single)
    if choice == "none":
        return ToolWish(functions=functions, is_off=True)
    if choice == "required":
        if not functions:
            raise bad_value("tool_choice is 'required', and there are no tools", "tool_choice")
        return ToolWish(functions=functions, forced=functions, is_single=is_single)
    name = _chosen_name(choice)
    forced = tuple(function for function in functions if function.name == name)
    if not forced:
        raise bad_value(f"tool_choice names the function {name!r}, which is not among tools", "tool_choice")
    return ToolWish(functions=functions, forced=forced, is_single=True)


def read_response_format(given: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of a ``response_format``; None for text."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        raise _bad_format(f"type is {kind!r}; it must be 'text', 'json_object' or 'json_schema'")
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping):
        raise _bad_format("json_schema is missing")
    name = inner.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise _bad_format(f"json_schema.name is {name!r}; it must have 1 to 64 letters, digits, _ and -")
    schema, strict = inner.get("schema"), inner.get("strict")
    if not isinstance(schema, Mapping):
        raise _bad_format("json_schema.schema must be an object")
    if strict is not None and not isinstance(strict, bool):
        raise _bad_format(f"json_schema.strict is {strict!r}; it must be true or false")
    try:
        return Grammar.json_schema(schema, strict=bool(strict))
    except ValueError as error:
        raise _bad_format(str(error)) from None


def _function(tool: Mapping[str, Any], place: str) -> Function:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise bad_value(f"{place} must have the type 'function' and a function", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_value(f"{place}.function.name is {name!r}; it must have 1 to 128 letters, digits and _.:/-", "tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise bad_value(f"{place}.function.parameters must be a JSON schema of the type object", "tools")
    return Function(name=name, parameters={"type": "object", **parameters}, is_strict=function.get("strict") is True)


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_value(
            f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required' or a function's name, as "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return name


def _bad_format(message: str) -> Exception:
    return bad_value(f"response_format.{message}", "response_format")
