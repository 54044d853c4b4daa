"""Grammars that make a model write tool calls in its own format, and nothing else (or a structured answer instead).

Each function's parameters are a schema of their own in the grammar, so that references inside them stay valid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from snapstream.grammar import schema_options
from snapstream.request import Grammar
from snapstream.server.openai.tools.formats import CallFormat
from snapstream.server.openai.tools.request import Function


def forced_calls(
    form: CallFormat, functions: Sequence[Function], special: frozenset[str], *, is_single: bool
) -> Grammar:
    """One call of one of ``functions``, or several. ``special``: the tokenizer's special tokens, spelled out."""
    lines = ["start: call" if is_single else f"start: call ({_text(form.between)} call)*"]
    return Grammar.lark("\n".join([*lines, *_call_rules(form, functions, special)]))


def calls_or_answer(
    form: CallFormat, functions: Sequence[Function], special: frozenset[str], answer: Grammar, *, is_single: bool
) -> Grammar:
    """Calls, or an answer that follows a JSON schema."""
    calls = "call" if is_single else f"call ({_text(form.between)} call)*"
    lines = [f"start: {calls} | answer", f"answer: {_schema(json.loads(answer.text), answer.strict)}"]
    return Grammar.lark("\n".join([*lines, *_call_rules(form, functions, special)]))


def _call_rules(form: CallFormat, functions: Sequence[Function], special: frozenset[str]) -> list[str]:
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
        parts = [_text(head), f"arguments_{index}", _text("}")]
        if form.opening:
            parts = [_tag(form.opening, special), _text("\n"), *parts, _text("\n"), _tag(form.closing, special)]
        rules.append(f"call_{index}: {' '.join(parts)}")
        rules.append(f"arguments_{index}: {_schema(function.parameters, function.is_strict)}")
    return rules


def _tag(tag: str, special: frozenset[str]) -> str:
    """A special token is one symbol of the grammar; anything else is text."""
    return tag if tag in special else _text(tag)


def _schema(schema: dict[str, Any], is_strict: bool) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': schema_options(strict=is_strict)})}"


def _text(text: str) -> str:
    return json.dumps(text)
