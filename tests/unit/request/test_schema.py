"""Schemas closed: what a model may write is what the schema names; by what the compiler then accepts."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from snapstream.assets import TINY_MODEL
from snapstream.grammar import GrammarCompiler, closed, resolve
from snapstream.types import Grammar

END = 2
INT = {"type": "integer"}


@cache
def parts() -> tuple[Tokenizer, GrammarCompiler]:
    text = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    core = Tokenizer.from_str(text)
    return core, GrammarCompiler(lambda: text, core.get_vocab_size(), (END,))


def accepts(schema: dict[str, Any], text: str, *, strict: bool = False) -> bool:
    core, compiler = parts()
    matcher = compiler.matcher(Grammar.json_schema(schema, strict=strict))
    words = np.zeros(compiler.num_words, dtype=np.int32)
    for token in core.encode(text, add_special_tokens=False).ids:
        words[:] = 0
        if not matcher.fill(words) or not words[token // 32] >> (token % 32) & 1:
            return False
        matcher.take(token)
    words[:] = 0
    return not matcher.fill(words) or bool(words[END // 32] >> (END % 32) & 1)


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


NODE = {"$ref": "#/$defs/node", "$defs": {"node": obj(value=INT, next={"$ref": "#/$defs/node"})}}
BASE = {"allOf": [{"$ref": "#/$defs/base"}, obj(b=INT)], "$defs": {"base": obj(a=obj(x=INT))}}
EITHER = {"anyOf": [obj(a=INT), obj(b=INT)]}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (obj(a=INT), ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}', '{"a": 1}', '{ "a":1}']),
    (obj(), ["{}"], ['{"a":1}']),
    (obj(a=obj(b=INT)), ['{"a":{"b":1}}'], ['{"a":{"c":1}}']),
    ({"type": "array", "items": obj(a=INT)}, ['[{"a":1},{}]'], ['[{"b":1}]', '[{"a":1}, {}]']),
    ({"type": "object"}, ["{}", '{"x":{"y":[1]}}'], ["[]"]),
    ({**obj(a=INT), "additionalProperties": True}, ['{"a":1,"b":[2]}'], []),
    ({**obj(a=INT), "additionalProperties": obj(c=INT)}, ['{"a":1,"b":{"c":2}}'], ['{"a":1,"b":{"d":2}}']),
    ({**obj(a=INT), "patternProperties": {"^x": INT}}, ['{"a":1,"xy":2}'], ['{"a":1,"y":2}']),
    (NODE, ['{"value":1,"next":{"value":2}}'], ['{"value":1,"next":{"other":2}}']),
    # Several parts of one object: by the standard.
    (BASE, ['{"a":{"x":1},"b":2}', '{"b":2}', '{"a":{"x":1},"b":2,"c":3}'], ['{"b":"x"}']),
    ({**BASE, "required": ["a", "b"]}, ['{"a":{"x":1},"b":2}'], ['{"b":2}']),
    (EITHER, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
    ({**obj(k=INT), **EITHER}, ['{"k":1,"a":1}', '{"k":1,"b":1}'], ['{"k":"x"}']),
    ({**obj(a=INT, b=INT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ['{"c":1}']),
    ({"allOf": [obj(a=INT), {**obj(b=INT), "additionalProperties": True}]}, ['{"a":1,"b":2,"c":3}'], []),
    ({"allOf": [obj(a=INT)]}, ['{"a":1}'], ['{"c":1}']),
    ({**obj(a=INT), "required": ["a", "z"]}, ['{"a":1,"z":[]}'], ['{"a":1}', '{"a":1,"z":1,"y":1}']),
    ({"anyOf": [obj(a=INT), {"type": "null"}]}, ['{"a":1}', "null"], ['{"b":1}']),
]


@pytest.mark.parametrize(("schema", "possible", "impossible"), CASES)
def test_only_named_properties(schema: dict[str, Any], possible: list[str], impossible: list[str]) -> None:
    before = copy.deepcopy(schema)
    assert [text for text in possible if not accepts(schema, text)] == []
    assert [text for text in impossible if accepts(schema, text)] == []
    assert schema == before


def test_a_strict_schema_is_closed_as_well() -> None:
    assert accepts(obj(a=INT), '{"a":1}', strict=True) and not accepts(obj(a=INT), '{"a":1,"b":2}', strict=True)


def test_data_in_a_schema_is_no_schema() -> None:
    data = {"properties": {"x": {}}}
    schema = {"const": data, "default": data, "examples": [data], "enum": [data], "not": data}
    assert closed(schema) == schema
    inner = closed(obj(a={"enum": [data]}, properties=INT))
    assert inner == {**obj(a={"enum": [data]}, properties=INT), "additionalProperties": False}


def test_deep_schemas_and_those_that_refer_to_themselves_end() -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, obj(y=INT)]}}}
    assert closed(loop) == loop
    deep: dict[str, Any] = obj(a=INT)
    for _ in range(200):
        deep = obj(a=deep)
    assert json.dumps(closed(deep)).count("additionalProperties") > 50


ODD: list[Any] = [
    True, [], {"properties": []}, {"allOf": 3, "$ref": 4}, {"required": {}, "items": 1},
    {"properties": {"a": 1}, "required": [1], "$defs": 3, "patternProperties": []},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_schemas_are_the_compilers_business(odd: Any) -> None:
    closed(odd)


def test_references() -> None:
    root = {"$defs": {"a/b": {"x": [1, {"y": 2}]}, "ü": 3}}
    assert resolve("#/$defs/a~1b/x/1/y", root) == 2
    assert resolve("#/$defs/%C3%BC", root) == 3
    assert resolve("#", root) is root
    assert resolve("#/nothing/here", root) is resolve("http://x", root) is resolve("#/$defs/ü/z", root) is None
