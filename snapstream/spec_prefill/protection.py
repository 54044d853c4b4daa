"""Which parts of a conversation may be cut, and what the draft reads beside them.

Always verbatim: system and developer messages, tools and tool calls, roles and template, the last tool outputs, short
messages, and a trailing assistant message (an answer to be continued). The last user message is verbatim too unless it
is long; then its first paragraph (if short) and its last paragraphs stay, because that is where the request stands.

The draft reads a text with the request that it serves: the last user message's, or for a tool output the user message
before it, which does not change as the conversation grows, so that its scores can be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.spec_prefill.borders import grow
from snapstream.spec_prefill.settings import Protection

MAX_REQUEST = 2000  # characters of a request that the draft reads after another text: the last ones
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A text of which ``start .. end - 1`` may be cut; ``after`` is what the draft reads behind that."""

    text: str
    start: int
    end: int
    after: str = ""
    as_chat: bool = False
    message: int | None = None
    part: int | None = None

    @property
    def body(self) -> str:
        return self.text[self.start : self.end]


def candidates(messages: Sequence[Mapping[str, Any]], rules: Protection, count: Count) -> list[Candidate]:
    """Texts of a conversation that may be cut, in order. ``count`` counts draft tokens."""
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    tools = [i for i, message in enumerate(messages) if message.get("role") == "tool"]
    fresh = set(tools[len(tools) - rules.recent_tools :]) if rules.recent_tools else set()
    last_user = users[-1] if users else None
    request = _request(messages, last_user, rules, count)
    found: list[Candidate] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        is_last_user = index == last_user
        is_prefix = role == "assistant" and index == len(messages) - 1
        if is_prefix or index in fresh or (role not in rules.roles and not is_last_user):
            continue
        texts = _texts(message)
        for part, text in texts:
            if is_last_user:
                is_last_part = part == texts[-1][0]
                if "user" in rules.roles and count(text) > rules.last_user_limit:
                    found.append(_in_last_user(text, index, part, is_last_part, request, rules, count))
            elif count(text) >= max(rules.min_message, 1):
                before = [i for i in users if i < index]
                own = _request(messages, before[-1], rules, count) if role == "tool" and before else request
                after = f"\n\n{own}" if own else ""
                found.append(
                    Candidate(text=text, start=0, end=len(text), after=after, as_chat=True, message=index, part=part)
                )
    return [candidate for candidate in found if candidate.body.strip()]


def _texts(message: Mapping[str, Any]) -> list[tuple[int | None, str]]:
    """Texts of a message with the index of their part (None where the content is one text)."""
    content = message.get("content")
    if isinstance(content, str):
        return [(None, content)]
    if not isinstance(content, Sequence):
        return []
    return [
        (i, part["text"])
        for i, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]


def _in_last_user(
    text: str, index: int, part: int | None, is_last_part: bool, request: str, rules: Protection, count: Count
) -> Candidate:
    start = head_end(text, rules.head, count)
    end = tail_start(text, rules.tail, count) if is_last_part else len(text)
    after = text[end:] if is_last_part else f"\n\n{request}"
    return Candidate(text=text, start=min(start, end), end=end, after=after, as_chat=True, message=index, part=part)


def _request(messages: Sequence[Mapping[str, Any]], user: int | None, rules: Protection, count: Count) -> str:
    """What a user message asks: all of it, or the tail of a long one."""
    texts = _texts(messages[user]) if user is not None else []
    if not texts:
        return ""
    text = texts[-1][1]
    if count(text) > rules.last_user_limit:
        text = text[tail_start(text, rules.tail, count) :]
    return text[-MAX_REQUEST:].strip()


def head_end(text: str, most: int, count: Count) -> int:
    """End of the first paragraph if it has at most ``most`` tokens and something follows it, else 0."""
    begin = len(text) - len(text.lstrip())
    border = text.find("\n\n", begin)
    if most == 0 or border < 0 or count(text[:border]) > most:
        return 0
    return border + 2


def tail_start(text: str, most: int, count: Count) -> int:
    """Where the last paragraphs begin, as many as have ``most`` tokens together.

    If the last paragraph alone is longer, lines count instead; if the last line is, a place about ``most`` tokens
    before the end, at a word.
    """
    if most == 0:
        return len(text)
    for border in ("\n\n", "\n"):
        best, place = len(text), len(text.rstrip())
        while place > 0:
            found = text.rfind(border, 0, place)
            begin = found + len(border) if found >= 0 else 0
            if count(text[begin:]) > most:
                break
            best, place = begin, found
        if text[best:].strip():
            return best
    size = max(1, len(text) * most // max(count(text), 1))  # characters of so many tokens, on average
    return grow(text, len(text) - size, len(text), "word")[0]
