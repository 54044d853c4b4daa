"""``TokenCounter``: a conversation costs what the target's own template makes of it."""

from __future__ import annotations

from snapstream.spec_prefill.counting import TokenCounter
from tests.unit.spec_prefill.tokenizers import byte_tokenizer


def test_developer_is_counted_by_the_name_that_the_template_knows() -> None:
    developer = [{"role": "developer", "content": "abc"}]
    body = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert TokenCounter(byte_tokenizer(body)).messages(developer) == len("system")
    assert TokenCounter(byte_tokenizer(body + "{# developer #}")).messages(developer) == len("developer")


def test_counts_are_those_of_the_template() -> None:
    template = "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{% for m in messages %}{{ m.content }};{% endfor %}"
    counter = TokenCounter(byte_tokenizer(template))
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": None}]
    assert counter.messages(messages) == len("abc;;")
    assert counter.messages(messages, [{"name": "search"}]) == len("<search>abc;;")
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    assert counter.messages(parts) == len("ab\nc;")  # as the engine joins them
    parts[0]["content"][1]["type"] = "input_text"  # type: ignore[index]
    assert counter.messages(parts) == len("ab\nc;")
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert counter.messages(picture) > 0  # an upstream's template may know it
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    bare = TokenCounter(byte_tokenizer(None)).messages([*messages, {"role": "assistant", "tool_calls": calls}])
    assert bare > len("abc") + len(str(calls)) / 2
