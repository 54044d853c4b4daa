"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, four aligned lists for completions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from snapstream.request import Logprob
from snapstream.server.openai.token_text import Offsets, TokenText

LEAST = -9999.0  # JSON has no minus infinity; OpenAI uses this


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def chat_entries(logprobs: Iterable[Logprob], texts: TokenText) -> list[dict[str, Any]]:
    return [
        {
            **_entry(one.token_id, one.logprob, texts),
            "top_logprobs": [_entry(token, value, texts) for token, value in one.top],
        }
        for one in logprobs
    ]


def _entry(token: int, value: float, texts: TokenText) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": finite(value), "bytes": list(texts.raw(token))}


class CompletionLogprobs:
    """Builds the lists of one choice piece by piece; offsets go on where the last piece ended."""

    def __init__(self, texts: TokenText, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skips_special = skip_special_tokens
        self._offsets = Offsets()
        self._lists = _empty()

    def add_prompt(self, ids: tuple[int, ...], logprobs: Iterable[Logprob | None], text: str) -> None:
        """Every prompt token; entry 0 is null, because nothing precedes it."""
        offsets, starts = Offsets(), []
        for token in ids:
            raw = self._texts.raw(token)
            if self._texts.is_special(token) and not text.startswith(raw.decode(), offsets.num_chars):
                raw = b""  # put there by the tokenizer, like a beginning-of-text token
            starts.append(offsets.push(raw))
        lead = max(0, offsets.num_chars - len(text))  # a space that the tokenizer put before the text
        for token, start, logprob in zip(ids, starts, logprobs, strict=True):
            self._add(token, max(0, start - lead), logprob)
        self._offsets = Offsets(len(text))

    def add(self, logprobs: Iterable[Logprob]) -> None:
        for one in logprobs:
            self._add(one.token_id, self._offsets.push(self._shown(one.token_id)), one)

    def take(self) -> dict[str, Any]:
        """What came since the last call."""
        lists, self._lists = self._lists, _empty()
        return lists

    def _add(self, token: int, offset: int, logprob: Logprob | None) -> None:
        self._lists["tokens"].append(self._texts.text(token))
        self._lists["text_offset"].append(offset)
        self._lists["token_logprobs"].append(None if logprob is None else finite(logprob.logprob))
        self._lists["top_logprobs"].append(None if logprob is None else self._top(logprob))

    def _top(self, logprob: Logprob) -> dict[str, float]:
        """The likeliest tokens and always the chosen one, as in OpenAI's completions."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._texts.text(token), finite(value))
        return top

    def _shown(self, token: int) -> bytes:
        return b"" if self._skips_special and self._texts.is_special(token) else self._texts.raw(token)


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
