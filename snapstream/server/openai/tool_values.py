"""Arguments that are not one JSON object (values between tags, Python's keyword arguments): as JSON, and as grammars.

Invariants: nothing is evaluated; a value that fits no type of the function's schema stays a string. In grammars,
parameters come in the order of the schema, each at most once, required ones always. With ``strict`` a part of the
schema that the notation cannot enforce is a ValueError; otherwise it is ignored.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from snapstream.grammar import resolve
from snapstream.server.openai.tool_format import CUSTOM_INPUT, Function, GrammarBuilder

MAX_DEPTH = 32  # of lists in lists
MAX_PARTS = 200  # of a schema that are searched for its types; a larger one allows any
_TYPED = {"type", "const", "enum", "$ref", "anyOf", "oneOf", "properties"}
_HALF = re.compile("[\ud800-\udfff]")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Names of the JSON types that ``schema`` allows; empty: any. ``root``: where references start."""
    kinds: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or len(seen) > MAX_PARTS:
            return frozenset()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts = _parts(one, root)
        if parts is None and "type" not in one and "enum" not in one and "const" not in one and "properties" not in one:
            return frozenset()
        waiting += parts or ()
        kinds |= _own_kinds(one) if parts is None else frozenset()
    return frozenset(kinds)


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(kind_of(value) for value in schema.get("enum", [schema.get("const")]))
    return frozenset({"object"})


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The schemas that decide the type; None if this one does."""
    if "type" in schema or "const" in schema or "enum" in schema:
        return None
    if isinstance(schema.get("$ref"), str):
        return [resolve(schema["$ref"], root)]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return list(schema[key])
    several = schema.get("allOf")
    if isinstance(several, list):
        return [one for one in several if isinstance(one, Mapping) and _TYPED & set(one)][:1] or [None]
    return None


def kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A raw text as a JSON value of one of ``kinds``; else as a JSON string."""
    if kinds == {"string"}:
        return dumps(text)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            value = read_literal(text) if kinds and "string" not in kinds else text
        except ValueError:
            value = text
    if not _fits(value, kinds) and ("string" in kinds or not kinds):
        value = text
    return _safe(value, text)


def tags_as_json(text: str, tag: re.Pattern[str], schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """A value with tags inside, of which ``tag`` finds a slash or nothing and the name: the items of a list, or the
    members of an object. Without any see ``as_json``.
    """
    kinds, schema = kinds_of(schema, root), schema if isinstance(schema, Mapping) else {}
    if isinstance(schema.get("$ref"), str) and isinstance(found := resolve(schema["$ref"], root), Mapping):
        schema = found
    properties = schema.get("properties")
    parts: list[tuple[str, str]] = []
    level = begin = 0
    for one in tag.finditer(text) if depth < MAX_DEPTH else ():
        level += -1 if one[1] else 1
        if not one[1] and level == 1:
            begin = one.end()
        elif one[1] and level == 0:
            inner = properties.get(one[2]) if isinstance(properties, Mapping) else None
            inner = schema.get("items") if one[2] == "item" and inner is None else inner
            parts.append((one[2], tags_as_json(text[begin : one.start()], tag, inner, root, depth + 1)))
    if not parts or kinds == {"string"}:
        return as_json(text, kinds)
    if all(name == "item" for name, _ in parts) and (not kinds or "array" in kinds):
        return f"[{', '.join(value for _, value in parts)}]"
    return "{" + ", ".join(f"{dumps(name)}: {value}" for name, value in dict(parts).items()) + "}"


def literal_as_json(text: str) -> str:
    """A Python value as JSON; as a string if it is not one."""
    try:
        return _safe(read_literal(text), text.strip())
    except ValueError:
        return dumps(text.strip())


def read_literal(text: str) -> Any:
    """A Python or JSON value: numbers, texts, lists, tuples, dictionaries. ValueError for anything else."""
    text = text.strip()
    if text.startswith('"'):
        with suppress(ValueError):
            return json.loads(text, strict=False)
    for source in (text, text.replace("\r", "\\r").replace("\n", "\\n")):  # a text may contain raw line breaks
        try:
            return _value(ast.parse(source, mode="eval").body, 0)
        except (SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError("no value")


def _value(node: ast.expr, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value) if value is None or isinstance(value, (bool, int, float, str)):
            return value
        case ast.Name(name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, ast.Constant(int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(items) | ast.Tuple(items):
            return [_value(item, depth + 1) for item in items]
        case ast.Dict(keys, items) if None not in keys:
            read = [_value(key, depth + 1) for key in keys if key is not None]
            names = [key if isinstance(key, str) else dumps(key) for key in read]
            return dict(zip(names, [_value(item, depth + 1) for item in items], strict=True))
    raise ValueError("no value")


def dumps(value: Any) -> str:
    """Readable JSON; half a surrogate pair, which no encoding can send, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _HALF.search(text) else json.dumps(value, allow_nan=False)


def _safe(value: Any, text: str) -> str:
    try:
        return dumps(value)
    except ValueError:  # infinity
        return dumps(text)


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    kind = kind_of(value)
    if not kinds:  # any type: a text that is JSON of another type is taken as that
        return kind != "string"
    return kind in kinds or (kind == "integer" and "number" in kinds) or (
        kind == "number" and "integer" in kinds and float(value).is_integer()
    )  # fmt: skip


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_OF_TEXT = ("pattern", "format", "minLength", "maxLength")  # not enforced in a raw text
_OF_OBJECTS = ("anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "minProperties", "maxProperties")
_PLACES = ("$defs", "definitions")  # where references lead


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    schema: Any
    is_required: bool


def each_property(rules: GrammarBuilder, function: Function, around: tuple[str, str]) -> str:
    """Arguments one after another, each in its tags: ``around`` a value, where ``{key}`` stands for its key."""
    parts = []
    for one in _parameters(function):
        before, after = (part.replace("{key}", one.name) for part in around)
        whole = f"{rules.text(before)} {_raw(rules, function, one, after)}"
        parts.append(whole if one.is_required else f"({whole})?")
    return " ".join(parts)


def keyword_arguments(rules: GrammarBuilder, function: Function) -> str:
    """``a=1, b="x"``"""
    items = [(f"{rules.text(f'{one.name}=')} {_literal(rules, function, one)}", one) for one in _parameters(function)]
    firsts: list[str] = []
    later = ""
    for item, one in reversed(items):
        with_rest = rules.add("arguments", f"{item} {later}".strip())
        firsts = [with_rest] if one.is_required else [with_rest, *firsts]
        more = f"{rules.text(', ')} {item}"
        later = rules.add("more", f"{more if one.is_required else f'({more})?'} {later}".strip())
    if not firsts:
        return ""
    return rules.choice(firsts) + ("" if any(one.is_required for _, one in items) else "?")


def _parameters(function: Function) -> Iterator[_Parameter]:
    properties: dict[str, Any] = {}
    required: set[str] = set()
    _gather(function, properties, required)
    for name in (*properties, *(name for name in sorted(required) if name not in properties)):
        yield _Parameter(name, properties.get(name, True), name in required)


def _gather(function: Function, properties: dict[str, Any], required: set[str]) -> None:
    """Collect what the function's schema names, also through ``$ref`` and ``allOf``; each part once."""
    waiting: list[Any] = [function.parameters]
    seen = set[int]()
    while waiting:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        for key in _OF_OBJECTS if function.is_strict else ():
            if key in schema:
                raise ValueError(
                    f"the function {function.name!r} is strict, and {key} cannot be enforced in this model's calls"
                )
        if isinstance(schema.get("properties"), Mapping):
            properties.update(schema["properties"])
        if isinstance(schema.get("required"), list):
            required.update(name for name in schema["required"] if isinstance(name, str))
        if isinstance(schema.get("$ref"), str):
            waiting.append(resolve(schema["$ref"], function.parameters))
        if isinstance(schema.get("allOf"), list):
            waiting += schema["allOf"]


def _raw(rules: GrammarBuilder, function: Function, one: _Parameter, after: str) -> str:
    """An unquoted value, and the text after it."""
    if one.name == CUSTOM_INPUT and (custom := rules.custom(function)):
        return f"{custom} {rules.text(after)}"
    choices = _choices(rules, function, one.schema, set())
    if not choices:
        return rules.add_until(after)
    return f"{rules.choice(choices)} {rules.text(after)}"


def _choices(rules: GrammarBuilder, function: Function, schema: Any, seen: set[int]) -> list[str] | None:
    """Allowed values; None: any text. ``seen``: schemas that are already included."""
    root = function.parameters
    if not isinstance(schema, Mapping) or len(seen) > MAX_PARTS:
        return None
    if id(schema) in seen:
        return []
    seen.add(id(schema))
    if isinstance(schema.get("$ref"), str) and isinstance(found := resolve(schema["$ref"], root), Mapping):
        return _choices(rules, function, found, seen)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema.get("enum", [schema.get("const")])
        return [rules.text(value if isinstance(value, str) else dumps(value)) or '""' for value in values]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and "type" not in schema:
            several = [_choices(rules, function, branch, seen) for branch in schema[key]]
            return None if any(one is None for one in several) else [text for one in several for text in one or ()]
    kinds = kinds_of(schema, root)
    if kinds and "string" not in kinds:
        return [_json(rules, function, schema)]
    if function.is_strict and (keys := [key for key in _OF_TEXT if key in schema]):
        raise ValueError(
            f"the function {function.name!r} is strict, and {keys[0]} cannot be enforced in this model's calls, which "
            "have texts without quotes"
        )
    return None


def _literal(rules: GrammarBuilder, function: Function, one: _Parameter) -> str:
    """A Python value; inside lists and dictionaries JSON's words stand for True, False and None."""
    if function.lark and one.name == CUSTOM_INPUT:
        raise ValueError(f"the tool {function.name!r} has a Lark grammar, and this model's calls have texts in quotes")
    kinds = kinds_of(one.schema, function.parameters)
    words = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}
    if kinds and kinds <= set(words) and isinstance(one.schema, Mapping) and not {"enum", "const"} & set(one.schema):
        return rules.choice([word for kind in sorted(kinds) for word in words[kind]])
    return _json(rules, function, one.schema)


def _json(rules: GrammarBuilder, function: Function, schema: Any) -> str:
    if isinstance(schema, Mapping) and '"$ref"' in dumps(schema):
        schema = {**{key: function.parameters[key] for key in _PLACES if key in function.parameters}, **schema}
    return rules.schema(schema, strict=function.is_strict)
