"""The tiny tokenizer under chat templates of other models, which thinks and calls tools by them, and an app with it."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from snapstream.server.app import make_app
from snapstream.server.options import ServerSettings
from tests.server.app_client import AppClient
from tests.server.fake_engine import FACTS, FakeEngine, tokenizer

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


def template_tokenizer(template: str = TELLING) -> Any:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return own


@asynccontextmanager
async def template_client(engine: FakeEngine, template: str = TELLING, **settings: Any) -> AsyncIterator[AppClient]:
    app = make_app(engine, template_tokenizer(template), ServerSettings(**settings), lambda: FACTS)
    async with AppClient(app) as http:
        try:
            yield http
        finally:
            http.server.close()


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
