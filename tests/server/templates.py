"""A chat template that shows everything it gets, answers in its form, and what a test reads of both."""

from __future__ import annotations

import json
from typing import Any

from tests.server.fake_engine import FakeEngine, tokenizer

# All that a template can show, a line for each message; calls in the form of Hermes, thoughts in that of Qwen 3.
TELLING = r"""
{%- if tools %}tools:{% for tool in tools %}{{ ' ' ~ tool.function.name }}{% endfor %} <tool_call>{{ '\n' }}{% endif -%}
{%- for message in messages -%}
{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{ ' ' ~ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor -%}
{%- if message.tool_call_id %}{{ ' for ' ~ message.tool_call_id }}{% endif %}{{ '\n' }}
{%- endfor -%}
assistant:{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"""
THOUGHT = "<think>\nLet me see.\n</think>\n\nHello."
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "wörld"}}\n</tool_call>'


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    """What the model was fed."""
    return str(tokenizer().decode(list(engine.requests[index].prompt_token_ids)))


def named_events(text: str, *, end: str = "data: [DONE]") -> list[dict[str, Any]]:
    """The events of a whole stream; the form is checked to the byte."""
    parts = text.split("\n\n")
    assert parts[-1] == ""
    frames = parts[:-1]
    if end:
        assert frames.pop() == end
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
