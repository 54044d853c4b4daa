"""Prompts of engine requests, compressed by a draft as text that is tokenized again.

Invariant: the result is the prompt that the same call without a draft would have fed the engine, less the parts left
out; its report counts both.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from snapstream.spec_prefill.compressor import CompressedText, PromptCompressor
from snapstream.spec_prefill.settings import PromptCompression, why_uncompressed
from snapstream.types import CompressionSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Messages = Sequence[Mapping[str, Any]]
MAX_CONVERSATIONS = 256  # the least recently used goes first


class StickyCompressor:
    """Compresses each message of a conversation once, so that a later turn is found in a prefix store.

    Results are remembered by the messages of a conversation; one that goes on from there keeps them, and only new
    messages are compressed. What a later question would have needed of an older message stays lost. A result depends on
    the conversation, the settings and earlier turns within the same scope (callers of one key) only. Threads may share
    it.
    """

    def __init__(self, compressor: PromptCompressor, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._compressor, self._most = compressor, max_conversations
        self._compressed: OrderedDict[bytes, tuple[Mapping[str, Any], ...]] = OrderedDict()  # by digest
        self._lock = Lock()

    def compress(
        self,
        messages: Messages,
        how: PromptCompression,
        target_tokenizer: PreTrainedTokenizerBase | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        scope: str = "",
    ) -> CompressedText:
        """As ``PromptCompressor.compress`` of a conversation; earlier messages stay compressed as they were.

        With a ceiling that leaves no room for them, all messages are compressed again.
        """
        digests = _digests(messages, f"{scope}\0{how.keep} {how.max_tokens} {how.threshold}")
        done = self._find(digests)
        result = None
        if done:
            try:
                result = self._compressor.compress_turn(
                    messages, done, keep=how.keep, max_tokens=how.max_tokens, target_tokenizer=target_tokenizer,
                    threshold=how.threshold, tools=tools,
                )  # fmt: skip
            except ValueError:  # no room for them below the ceiling; whatever else is wrong is wrong below, too
                result = None
        if result is None:
            result = self._compressor.compress(
                messages, keep=how.keep, max_tokens=how.max_tokens, target_tokenizer=target_tokenizer,
                threshold=how.threshold, tools=tools,
            )  # fmt: skip
        if result.report.is_applied:
            assert result.messages is not None
            self._put(digests[-1], result.messages)
        return result

    def _find(self, digests: Sequence[bytes]) -> tuple[Mapping[str, Any], ...]:
        """The result for the longest known prefix of a conversation; empty where none is known."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._compressed:
                    self._compressed.move_to_end(digest)
                    return self._compressed[digest]
        return ()

    def _put(self, digest: bytes, messages: Messages) -> None:
        with self._lock:
            self._compressed[digest] = tuple(messages)
            self._compressed.move_to_end(digest)
            while len(self._compressed) > self._most:
                self._compressed.popitem(last=False)


def _digests(messages: Messages, settings: str) -> list[bytes]:
    """Digests of every prefix of a conversation, shortest first."""
    digest = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).digest()
    found = []
    for message in messages:
        text = json.dumps(message, sort_keys=True, default=repr)
        digest = hashlib.sha256(digest + text.encode()).digest()
        found.append(digest)
    return found


Render = Callable[[Messages], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPrompt:
    """Token ids for the engine, and what was left out."""

    token_ids: tuple[int, ...]
    report: CompressionSummary
    text: str | None = None


class RequestCompressor:
    """A ``PromptCompressor`` and the tokenizer of the model that answers."""

    def __init__(
        self,
        compressor: PromptCompressor,
        tokenizer: PreTrainedTokenizerBase,
        num_stored: Callable[[tuple[int, ...]], int] = lambda ids: 0,
    ) -> None:
        """``num_stored``: tokens of a prompt that the engine's prefix store would give back."""
        self.compressor, self._tokenizer, self._num_stored = compressor, tokenizer, num_stored
        self._sticky = StickyCompressor(compressor)

    def prompt(self, prompt: str | Sequence[int], how: PromptCompression) -> CompressedPrompt:
        """A plain prompt, which must be a text."""
        if how.sticky:
            raise ValueError("sticky is for conversations; this prompt is none")
        if not isinstance(prompt, str):
            raise ValueError("the prompt is token ids; prompt compression needs its text")
        if (whole := self._stored(self._tokenizer(prompt)["input_ids"], how, prompt)) is not None:
            return whole
        result = self._as_text(prompt, how)
        assert result.text is not None
        ids = self._tokenizer(result.text)["input_ids"]
        return CompressedPrompt(token_ids=tuple(ids), report=result.report.summary(), text=result.text)

    def chat(self, messages: Messages, how: PromptCompression, render: Render) -> CompressedPrompt:
        """A conversation; ``render`` applies the target's chat template."""
        text = render(messages)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if (whole := self._stored(ids, how)) is not None:
            return whole
        result = self._sticky.compress(messages, how, self._tokenizer) if how.sticky else self._as_text(messages, how)
        assert result.messages is not None
        ids = self._tokenizer(render(result.messages), add_special_tokens=False)["input_ids"]
        return CompressedPrompt(token_ids=tuple(ids), report=result.report.summary())

    def _stored(self, ids: Sequence[int], how: PromptCompression, text: str | None = None) -> CompressedPrompt | None:
        """A prompt as it is, where ``why_uncompressed`` says so."""
        if how.keep is None:
            return None
        num_stored, threshold = self._num_stored(tuple(ids)), self.compressor.protection.threshold
        reason = why_uncompressed(len(ids), num_stored, how, threshold)
        if not reason:
            return None
        report = CompressionSummary(tokens_before=len(ids), tokens_after=len(ids), reason=reason)
        return CompressedPrompt(token_ids=tuple(ids), report=report, text=text)

    def _as_text(self, prompt: str | Messages, how: PromptCompression) -> CompressedText:
        return self.compressor.compress(
            prompt,
            keep=how.keep,
            max_tokens=how.max_tokens,
            target_tokenizer=self._tokenizer,
            query=how.query,
            threshold=how.threshold,
        )
