"""Tools and format of an answer: the grammar that it follows, and whether tool calls are parsed.

The format is set at most once, by one of

    response_format            {"type": "text" | "json_object" | "json_schema", ...}
    structured_outputs         one of json, regex, choice, grammar, json_object

and a chat with tools gets

response_format   tools                 grammar of the answer      calls are parsed
-                 none, auto            -                          auto: yes
-                 auto, some strict     any text, then calls       yes
-                 required, a name      calls                      yes
JSON              none                  the schema                 no
JSON              auto                  calls, or the schema       yes
JSON              required, a name      calls                      yes
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.openai.answer_reader import ToolCallParser
from snapstream.server.openai.protocol import ChatBody, GenerationBody, TemplateOptions, flag_of
from snapstream.server.openai.tool_format import CUSTOM_INPUT, CallFormat, Function, GrammarBuilder
from snapstream.types import Grammar

if TYPE_CHECKING:
    from snapstream.server.openai.prompts import TokenText

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # of functions; no character needs escaping


def read_tool(tool: Mapping[str, Any], place: str) -> Function:
    """One tool, at ``place`` (for errors). A custom tool takes free text, or text that follows a grammar: models see a
    function with one string, ``input``, and clients get that string."""
    kind = tool.get("type")
    inner = tool.get(kind) if kind in ("function", "custom") else None
    if not isinstance(inner, Mapping):
        raise bad_value(f"{place} must have the type 'function' and a function, or 'custom' and a custom tool", "tools")
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_value(f"{place}.{kind}.name is {name!r}; it must have 1 to 128 letters, digits and _.:/-", "tools")
    return _custom(name, inner, f"{place}.custom") if kind == "custom" else _function(name, inner, f"{place}.function")


def template_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """The tools as templates know them: custom ones as functions. None for no tools."""
    return [_as_function(tool) if tool.get("type") == "custom" else tool for tool in tools] if tools else None


def _function(name: str, function: Mapping[str, Any], place: str) -> Function:
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise bad_value(f"{place}.parameters must be a JSON schema of the type object", "tools")
    is_strict = flag_of(function, "strict", place)
    try:
        json.dumps(parameters)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_value(f"{place}.parameters is not plain JSON: {error}", "tools") from None
    return Function(name=name, parameters={"type": "object", **parameters}, is_strict=is_strict)


def _custom(name: str, custom: Mapping[str, Any], place: str) -> Function:
    syntax, definition = _format(custom, place)
    return Function(
        name=name,
        parameters=_input_schema(f"^(?:{definition})$" if syntax == "regex" else None),
        is_strict=bool(syntax),
        is_custom=True,
        lark=definition if syntax == "lark" else "",
        regex=definition if syntax == "regex" else "",
    )


def _format(custom: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Syntax and definition of the grammar; empty for free text."""
    given = custom.get("format")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return "", ""
    grammar = given.get("grammar") if isinstance(given, Mapping) and kind == "grammar" else None
    if not isinstance(grammar, Mapping):
        raise bad_value(f"{place}.format must have the type 'text', or 'grammar' and a grammar", "tools")
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in ("lark", "regex"):
        raise bad_value(f"{place}.format.grammar.syntax is {syntax!r}; it must be 'lark' or 'regex'", "tools")
    if not isinstance(definition, str) or not definition.strip():
        raise bad_value(f"{place}.format.grammar.definition is {definition!r}; it must be a string", "tools")
    return syntax, definition


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    custom = tool["custom"]
    description, (syntax, definition) = str(custom.get("description") or ""), _format(custom, "custom")
    if syntax:
        description += f"\nThe input must follow this grammar ({syntax}):\n{definition}"
    function = {"name": custom["name"], "description": description.strip(), "parameters": _input_schema(None)}
    return {"type": "function", "function": function}


def _input_schema(pattern: str | None) -> dict[str, Any]:
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT], "additionalProperties": False
    }  # fmt: skip


MAX_TOOLS = 128


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Which tools there are, and which of them must be called."""

    functions: tuple[Function, ...] = ()  # those that may be called
    forced: tuple[Function, ...] = ()  # one of these must be called; empty: none must
    is_single: bool = False  # one call at most
    is_off: bool = False  # tool_choice none: the prompt does not list them

    @property
    def callable(self) -> tuple[Function, ...]:
        """Those whose calls are parsed."""
        return self.forced or self.functions


def read_tools(body: TemplateOptions) -> ToolOptions:
    """400 for tools or a choice that are malformed."""
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_value(f"{len(tools)} tools given; the limit is {MAX_TOOLS}", "tools")
    functions = tuple(read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise bad_value("tools has two functions of the same name", "tools")
    is_single = body.parallel_tool_calls is False
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return ToolOptions(functions=functions, is_single=is_single)
    if choice == "none":
        return ToolOptions(functions=functions, is_off=True)
    if choice == "required":
        if not functions:
            raise _bad("tool_choice is 'required', and there are no tools")
        return ToolOptions(functions=functions, forced=functions, is_single=is_single)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice, functions, is_single)
    forced = (_chosen(choice, functions, "tool_choice"),)
    return ToolOptions(functions=functions, forced=forced, is_single=True)


def _allowed(choice: Mapping[str, Any], functions: Sequence[Function], is_single: bool) -> ToolOptions:
    """Some of the tools; the prompt lists all, so that its prefix stays the same."""
    inner = choice.get("allowed_tools")
    if not isinstance(inner, Mapping) or inner.get("mode") not in ("auto", "required"):
        raise _bad("tool_choice.allowed_tools must have a mode, 'auto' or 'required', and a list of tools")
    listed = inner.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _bad("tool_choice.allowed_tools.tools must be a list of tools, and not empty")
    chosen = {_chosen(one, functions, f"tool_choice.allowed_tools.tools[{i}]").name for i, one in enumerate(listed)}
    some = tuple(function for function in functions if function.name in chosen)
    return ToolOptions(functions=some, forced=some if inner["mode"] == "required" else (), is_single=is_single)


def _chosen(choice: Any, functions: Sequence[Function], place: str) -> Function:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    inner = choice.get(kind) if kind in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise _bad(
            f"{place} is {choice!r}; it must be 'none', 'auto', 'required', allowed_tools, or a tool's name, as "
            '{"type": "function", "function": {"name": ...}}'
        )
    found = next((one for one in functions if one.name == name and one.is_custom == (kind == "custom")), None)
    if found is None:
        raise _bad(f"{place} names the {kind} tool {name!r}, which is not among tools")
    return found


def _bad(message: str) -> ApiError:
    return bad_value(message, "tool_choice")


def forced_calls(
    call_format: CallFormat, functions: Sequence[Function], special: Mapping[str, int], *, is_single: bool
) -> Grammar:
    """One or more calls of ``functions``. ``special``: ids of special tokens, by their text."""
    rules = GrammarBuilder(special)
    return Grammar.lark(rules.grammar(_calls(rules, call_format, functions, is_single)))


def offered_calls(
    call_format: CallFormat, functions: Sequence[Function], special: Mapping[str, int], *, is_single: bool
) -> Grammar | None:
    """Any text, then calls or none; a function that the format cannot enforce fully is enforced in part.

    None where text could be mistaken for a call: unless calls start with a special token, which text cannot contain.
    """
    if call_format.is_whole or call_format.marks[0] not in special:
        return None
    rules = GrammarBuilder(special)
    rules.check_size(functions)
    calls = _calls(rules, call_format, [_enforceable(call_format, one) for one in functions], is_single)
    return Grammar.lark(rules.grammar(f"TEXT ({calls})?") + "\nTEXT: /(?s:.*)/")


def calls_or_answer(
    call_format: CallFormat,
    functions: Sequence[Function],
    special: Mapping[str, int],
    answer: Grammar,
    *,
    is_single: bool,
) -> Grammar:
    """Calls, or an answer that follows another grammar."""
    rules = GrammarBuilder(special)
    calls = rules.add("calls", _calls(rules, call_format, functions, is_single))
    head = rules.text(call_format.answer_head)
    return Grammar.lark(rules.grammar(f"{calls} | {head} {rules.add('answer', _answer(rules, answer))}"))


def _enforceable(call_format: CallFormat, function: Function) -> Function:
    try:
        call_format.write_call(GrammarBuilder({}), function)
    except ValueError:
        return replace(function, is_strict=False, lark="")
    return function


def _calls(rules: GrammarBuilder, call_format: CallFormat, functions: Sequence[Function], is_single: bool) -> str:
    call_format = call_format.in_vocabulary(rules.special)
    call = rules.add("call", " | ".join(call_format.write_call(rules, function) for function in functions))
    more = "" if is_single else f"({rules.text(call_format.between)} {call})*"
    return " ".join(
        part for part in (rules.text(call_format.before), call, more, rules.text(call_format.after)) if part
    )


def _answer(rules: GrammarBuilder, answer: Grammar) -> str:
    if answer.kind == "json_schema":
        return rules.schema(json.loads(answer.text), strict=answer.strict)
    if answer.kind == "regex":
        return rules.regex(answer.text)
    return f"%lark {{\n{answer.text}\n}}"


_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Other members of structured_outputs -> values that change nothing here.
_MEMBERS: Mapping[str, tuple[Any, ...]] = {
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False, True),  # JSON is compact anyhow
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}


def read_structured_output(
    body: GenerationBody, response_format: Mapping[str, Any] | None = None
) -> tuple[Grammar | None, str]:
    """The grammar of the answer (None: any text), and the field that set it, for errors."""
    grammar = read_response_format(response_format)
    if body.structured_outputs is None:
        return grammar, "response_format"
    own = _structured(body.structured_outputs)
    if grammar is not None:
        raise bad_value(
            "response_format and structured_outputs both set the format of the answer; send one of them",
            "structured_outputs",
        )
    return own, "structured_outputs"


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
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise _bad_format("json_schema.schema must be an object")
    is_strict = flag_of(inner, "strict", "response_format.json_schema")
    try:
        return Grammar.json_schema(schema, strict=is_strict)
    except ValueError as error:
        raise _bad_format(str(error)) from None


def _structured(given: Mapping[str, Any]) -> Grammar | None:
    field = "structured_outputs"
    for name, value in given.items():
        if name in _MAKERS or value is None:
            continue
        if not any(value is harmless for harmless in _MEMBERS.get(name, ())):
            raise bad_value(f"{field}.{name} {value!r} is not supported by this server", field, "unsupported_parameter")
    wanted = {
        name: value for name, value in given.items()
        if name in _MAKERS and value is not None and not (name == "json_object" and value is False)
    }  # fmt: skip
    if len(wanted) != 1:
        have = " and ".join(wanted) or "none"
        raise bad_value(f"{field} must have one of {', '.join(_MAKERS)}; it has {have}", field)
    ((kind, value),) = wanted.items()
    make, is_fit, needed = _MAKERS[kind]
    if not is_fit(value):
        raise bad_value(f"{field}.{kind} is {value!r:.200}; it must be {needed}", field)
    try:
        return make(value)
    except ValueError as error:
        raise bad_value(f"{field}.{kind}: {error}", field) from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


# As in vLLM, a schema may also be a JSON text, and is enforced as far as possible.
_MAKERS: Mapping[str, tuple[Callable[[Any], Grammar], Callable[[Any], bool], str]] = {
    "json": (
        lambda value: Grammar.json_schema(value, strict=False),
        lambda value: isinstance(value, (str, Mapping)),
        "a JSON schema",
    ),
    "regex": (Grammar.regex, _is_text, "a regular expression"),
    "choice": (Grammar.choice, _is_texts, "a list of strings, and not empty"),
    "grammar": (Grammar.lark, _is_text, "a grammar (Lark or GBNF)"),
    "json_object": (lambda _: Grammar.json_object(), lambda value: value is True, "true or false"),
}


def _bad_format(message: str) -> ApiError:
    return bad_value(f"response_format.{message}", "response_format")


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """How one request's answer is constrained and parsed."""

    grammar: Grammar | None = None
    grammar_param: str = "response_format"  # the field at fault if the grammar is refused
    make_parser: Callable[[], ToolCallParser] | None = None  # one for each choice
    shows_special: bool = False  # the tags of calls are special tokens, which text omits otherwise
    has_tools: bool = True  # the prompt lists the tools
    has_heads: bool = False  # the grammar includes the headers of calls, and of an answer


def tools_of(body: TemplateOptions, call_format: CallFormat | None, *, template_has_tools: bool) -> ToolOptions:
    """The tools of a conversation; 400 for those that this model does not support."""
    tools = read_tools(body)
    if not tools.functions or tools.is_off or call_format is not None:
        return tools
    if tools.forced:
        raise bad_value(
            "tool_choice requires a call, but the model's tool call format is unknown; "
            "start the server with --tool-parser",
            "tool_choice",
        )
    if not template_has_tools:  # the model would not see them
        raise bad_value(
            "tools are not supported: this model's chat template does not render them; "
            "leave them out, or send tool_choice 'none'",
            "tools",
        )
    return tools


def plan_answer(
    body: ChatBody, call_format: CallFormat | None, texts: TokenText, *, template_has_tools: bool = True
) -> AnswerPlan:
    """``call_format``: the model's call format; None if unknown. ``template_has_tools``: the chat template writes tools
    into the prompt."""
    tools, (answer, param) = (
        tools_of(body, call_format, template_has_tools=template_has_tools),
        read_structured_output(body, body.response_format),
    )
    symbols = texts.symbols
    if not tools.functions or tools.is_off:
        return AnswerPlan(grammar=answer, grammar_param=param, has_tools=not tools.is_off)
    if call_format is None:
        return AnswerPlan(grammar=answer, grammar_param=param)
    grammar = answer
    try:
        if tools.forced:
            grammar, param = forced_calls(call_format, tools.forced, symbols, is_single=tools.is_single), "tools"
        elif answer is not None:
            grammar = calls_or_answer(call_format, tools.functions, symbols, answer, is_single=tools.is_single)
        elif any(function.is_strict for function in tools.functions):
            grammar, param = offered_calls(call_format, tools.functions, symbols, is_single=tools.is_single), "tools"
    except ValueError as error:
        raise bad_value(str(error), "tools") from None
    return AnswerPlan(
        grammar=grammar,
        grammar_param=param,
        make_parser=lambda: ToolCallParser(call_format, tools.callable, max_calls=1 if tools.is_single else None),
        shows_special=bool(texts.special & set(call_format.tags)),
        has_heads=grammar is not answer,
    )
