"""Conversations that are trimmed once per message: a later turn begins like the turn before it.

Without this every request cuts the older messages anew, for its own question, and hardly any of its prompt is found in
a prefix store. With it, what a conversation was cut to is remembered by its messages so far; a conversation that goes
on from there keeps those cuts, and only what is new may be cut. The price: what a later question would have wanted from
an older message stays lost.

Invariant: a result depends on the conversation, the settings and earlier turns of the same conversation within the same
scope (callers of one key), and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from snapstream.spec_prefill.report import TrimmedText
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.spec_prefill.text_trimmer import TextTrimmer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
MAX_CONVERSATIONS = 256  # the least recently used goes first


class StickyTrimmer:
    """A ``TextTrimmer`` that remembers what conversations were cut to. Threads may share it."""

    def __init__(self, trimmer: TextTrimmer, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._trimmer, self._most = trimmer, max_conversations
        self._cut: OrderedDict[bytes, tuple[Mapping[str, Any], ...]] = OrderedDict()  # by digest of the conversation
        self._lock = Lock()

    def trim(
        self,
        messages: Messages,
        how: PromptCompression,
        target_tokenizer: PreTrainedTokenizerBase | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
    ) -> TrimmedText:
        """As ``TextTrimmer.trim`` of a conversation; its earlier cuts stay where they were.

        A ceiling that they do not leave room for cuts all messages anew. Raises what ``TextTrimmer.trim`` does.
        """
        digests = _digests(messages, f"{scope}\0{how.keep} {how.max_tokens} {how.threshold}")
        done = self._find(digests)
        result = None
        if done:
            try:
                result = self._trimmer.trim_later(
                    messages, done, keep=how.keep, max_tokens=how.max_tokens, target_tokenizer=target_tokenizer,
                    threshold=how.threshold, tools=tools,
                )  # fmt: skip
            except ValueError:  # no room for them below the ceiling; whatever else is wrong is wrong below, too
                result = None
        if result is None:
            result = self._trimmer.trim(
                messages, keep=how.keep, max_tokens=how.max_tokens, target_tokenizer=target_tokenizer,
                threshold=how.threshold, tools=tools,
            )  # fmt: skip
        if result.report.is_applied:
            assert result.messages is not None
            self._put(digests[-1], result.messages)
        return result

    def _find(self, digests: Sequence[bytes]) -> tuple[Mapping[str, Any], ...]:
        """What the longest known beginning of a conversation was cut to; empty where none is known."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._cut:
                    self._cut.move_to_end(digest)
                    return self._cut[digest]
        return ()

    def _put(self, digest: bytes, messages: Messages) -> None:
        with self._lock:
            self._cut[digest] = tuple(messages)
            self._cut.move_to_end(digest)
            while len(self._cut) > self._most:
                self._cut.popitem(last=False)


def _digests(messages: Messages, settings: str) -> list[bytes]:
    """Of every beginning of a conversation, the whole last."""
    digest = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).digest()
    found = []
    for message in messages:
        text = json.dumps(message, sort_keys=True, default=repr)
        digest = hashlib.sha256(digest + text.encode()).digest()
        found.append(digest)
    return found
