"""Token ids to text, one token at a time: whole characters only, stop strings over token borders.

Two small machines, one behind the other:

- ``Detokenizer`` turns ids into pieces of text. A character may be spread over several tokens; until its last
  one has come nothing of it is shown.
- ``StopMatcher`` holds back the end of the text while it may still become a stop string.

Invariant: what was shown is never taken back, whatever comes next, and no part of the stop string that ends a
sample is shown (unless it was asked for). ``TextStream`` joins the two; ``live.py`` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) a character
# A character is 4 bytes at most, so honest text waits for 3 tokens. A longer run is broken output, or special
# tokens without text; giving up on it bounds both the silence and the cost of decoding the run again at each
# token.
MAX_HELD_TOKENS = 16
MOST_REMEMBERED = 2**14  # runs of tokens whose text an engine keeps: some megabytes


class Tokenizer(Protocol):
    """All that the engine needs of a tokenizer."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class RememberingTokenizer:
    """A tokenizer that is asked once for the text of a run of tokens, as long as the run is among the last ones.

    Most runs are of one token or two, and text repeats itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = lru_cache(MOST_REMEMBERED)(
            lambda ids, skips: tokenizer.decode(list(ids), skip_special_tokens=skips)
        )

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return self._texts(tuple(ids), skip_special_tokens)


class Detokenizer:
    """Incremental decode by the prefix-offset method.

    ``decode`` of a list is not the sum of ``decode`` of its parts (spaces, byte tokens), so each new piece is
    found as the difference between the text of the last few tokens with and without the new ones. These few
    always start with the tokens of the previous piece, which give the new ones their context.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # tokens of the previous piece, then those not shown yet
        self._num_shown = 0  # of these, tokens that were shown
        self._shown = ""  # their text

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        self._ids.append(token_id)
        text = self._decode()
        is_whole = len(text) > len(self._shown) and not text.endswith(REPLACEMENT)
        if not is_whole and len(self._ids) - self._num_shown < MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode()
        return piece

    def flush(self) -> str:
        """The whole characters among what is held; a character cut short is dropped."""
        text = self._decode() if self._num_shown < len(self._ids) else self._shown
        piece = text[len(self._shown) :].rstrip(REPLACEMENT)
        self._ids, self._num_shown, self._shown = [], 0, ""
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)


class StopMatcher:
    """Finds the stop string that is complete first; of two complete at the same character, the longer one.

    That choice does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""  # longest end of the text so far that begins a stop string

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], stop
        num_held = max(self._overlap(text, stop) for stop in self._stops)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown, None

    def flush(self) -> str:
        """What is held, now that it cannot become a stop string any more."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` with which ``stop`` begins."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class TextStream:
    """Text of one sample. It must not be used again after ``finish`` or after it returned a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str], include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop=include_stop)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """New text to show, and the stop string if this token completed one."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text. It may hold a stop string too, in a token that also began a character."""
        text, stop = self._matcher.push(self._detokenizer.flush())
        return text + self._matcher.flush(), stop
