"""Speculative prefill: a long text or conversation in, a shorter one and a report out.

    compressor = PromptCompressor("Qwen3-0.6B/")
    result = compressor.compress(messages, target_tokenizer="Llama-3.1-8B-Instruct/", max_tokens=8192)

Nothing here needs the engine: the result is text for any model behind any API, made of verbatim pieces of its source;
messages that are passed in are never changed. ``protection.py`` says what may be dropped, ``draft.py`` scores tokens.

Scores of chunks are cached by a hash of the text and its surroundings; the least recently used entry goes first.
Threads may share a compressor: one text is scored at a time. Chunks of one text compete by score, ties going to the
earlier. Texts that were scored separately cannot be compared by score, so a ceiling takes from every text in the same
proportion, by a chunk's rank over the number of chunks. Invariant: a choice that ``count`` finds above the ceiling is
never returned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from snapstream.config import DType, as_count, as_kind
from snapstream.models.chat_template import render_chat
from snapstream.models.tokenizer import load_tokenizer
from snapstream.spec_prefill.draft import Draft, chunk_means
from snapstream.spec_prefill.protection import Candidate, Cutter, Span, candidates, chunk_spans
from snapstream.spec_prefill.settings import (
    ChunkSettings,
    PromptCompression,
    Protection,
    ScoringSettings,
    check_amount,
    why_uncompressed,
)
from snapstream.types import CompressionSummary, as_conversation, as_text, check_texts, is_list, named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """Some draft tokens of a text: characters ``start .. end - 1``, their mean score, and whether they were chosen."""

    start: int
    end: int
    score: float
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """One text that was cut: the whole prompt, or the content of a message."""

    message: int | None  # index of the message; None for a plain text
    part: int | None  # index of the content part, where the content is a list
    spans: tuple[tuple[int, int], ...]  # characters that are still there, ascending and disjoint
    chunks: tuple[ScoredChunk, ...]  # the candidates; what lies outside them was protected
    num_draft_tokens: int  # of the candidates
    num_passages: int  # in which the draft read them; 0: from the cache
    is_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionReport(CompressionSummary):
    """The summary, the draft's own counts, and the scores of every text."""

    counted_with: str  # "target", or "draft" where the target's tokenizer is not known
    draft_tokens_before: int
    draft_tokens_after: int
    texts: tuple[TextReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"is_applied": self.is_applied, "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedText:
    """A shorter prompt and how it came about: a ``text`` if a text was given, else ``messages``.

    Roles, order and everything but the contents of messages are as they were.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    report: CompressionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """A candidate's chunks, as character spans of its whole text, with their scores."""

    chunks: tuple[Span, ...]
    scores: tuple[float, ...]
    chunk_tokens: tuple[int, ...]  # draft tokens of each chunk
    num_passages: int  # 0: from the cache
    draft_ms: float
    cutter: Cutter

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_tokens)


class Scorer:
    """A draft with an LRU cache of scores."""

    def __init__(self, draft: Draft, scoring: ScoringSettings, chunks: ChunkSettings, cache_size: int) -> None:
        self._draft, self._scoring, self._chunks = draft, scoring, chunks
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, ScoredText] = OrderedDict()
        self._lock = Lock()

    def score(self, candidate: Candidate) -> ScoredText:
        """Scores of a text's chunks; ``num_passages`` 0 and ``draft_ms`` 0 if they were cached."""
        key = self._key(candidate)
        with self._lock:
            found = self._cache.get(key)
            if found is None:
                fresh = self._score(candidate)
                if self._cache_size:
                    self._cache[key] = replace(fresh, num_passages=0, draft_ms=0.0)
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
                return fresh
            self._cache.move_to_end(key)
            return found

    def _score(self, candidate: Candidate) -> ScoredText:
        began = perf_counter()
        body, cutter = candidate.body, Cutter(self._chunks, candidate.text)
        before = candidate.text[: candidate.start]
        read = self._draft.read(body, before=before, after=candidate.after, as_chat=candidate.as_chat)
        if read.num_tokens == 0:
            return ScoredText(chunks=(), scores=(), chunk_tokens=(), num_passages=1, draft_ms=0.0, cutter=cutter)
        scores, num_passages = self._draft.score(read, self._scoring)
        size, shift = cutter.chunk_len, candidate.start
        spans = chunk_spans(read.starts, len(body), size)
        return ScoredText(
            chunks=tuple((a + shift, b + shift) for a, b in spans),
            scores=tuple(chunk_means(scores, size).tolist()),
            chunk_tokens=tuple(min(size, read.num_tokens - first) for first in range(0, read.num_tokens, size)),
            num_passages=num_passages,
            draft_ms=(perf_counter() - began) * 1e3,
            cutter=cutter,
        )

    @staticmethod
    def _key(candidate: Candidate) -> bytes:
        """A digest of what the scores of a text depend on, besides the draft and the settings."""
        parts = candidate.text, candidate.start, candidate.end, candidate.after, candidate.as_chat
        return hashlib.sha256(repr(parts).encode()).digest()


Choice = list[set[int]]  # per text: indices of the chunks that stay


def ranked(scores: Sequence[float]) -> list[int]:
    """Indices, best first; ties go to the earlier."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def num_kept(num_chunks: int, keep: float) -> int:
    """``ceil(n * keep)``, not fooled by 0.1 * 30 being 3.0000000000000004."""
    return min(num_chunks, math.ceil(num_chunks * keep - 1e-9))


def keep_share(scores: Sequence[Sequence[float]], keep: float) -> Choice:
    """The best ``ceil(n * keep)`` chunks of every text (SpecPrefill, arXiv 2502.02789)."""
    return [set(ranked(own)[: num_kept(len(own), keep)]) for own in scores]


def keep_ceiling(scores: Sequence[Sequence[float]], max_tokens: int, count: Callable[[Choice], int]) -> Choice:
    """As many chunks as fit: the worst are taken away until ``count`` finds at most ``max_tokens``.

    ValueError if even nothing but the protected text is more.
    """
    turns = sorted(
        (rank / len(own), text, chunk) for text, own in enumerate(scores) for rank, chunk in enumerate(ranked(own))
    )

    def first(size: int) -> Choice:
        chosen: Choice = [set() for _ in scores]
        for _, text, chunk in turns[:size]:
            chosen[text].add(chunk)
        return chosen

    least = count(first(0))
    if least > max_tokens:
        raise ValueError(f"max_tokens is {max_tokens}; what must stay takes {least} tokens on its own")
    low, high = 0, len(turns)  # the counts grow with the size but for a delimiter now and then: low always fits
    while low < high:
        middle = (low + high + 1) // 2
        if count(first(middle)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return first(low)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A share of the chunks of every text, or a ceiling in target tokens; one of them is None."""

    keep: float | None
    max_tokens: int | None
    threshold: int  # prompts of fewer tokens stay uncompressed
    counted_with: str  # as in ``CompressionReport``

    def why_not(self, before: int, has_candidates: bool) -> str:
        """Why a prompt of ``before`` tokens stays uncompressed, or nothing."""
        if self.max_tokens is not None and before <= self.max_tokens:
            return f"{before:,} tokens fit the ceiling of {self.max_tokens:,}"
        if self.keep is not None and before < self.threshold:
            return f"{before:,} tokens are below the threshold of {self.threshold:,}"
        if self.keep == 1:
            return "keep is 1"
        if not has_candidates and self.max_tokens is None:
            return "everything is protected"
        return ""

    def choose(self, scored: Sequence[ScoredText], count: Callable[[Choice], int]) -> Choice:
        """The chunks that stay; ``count``: target tokens of a choice."""
        scores = [own.scores for own in scored]
        if self.max_tokens is not None:
            return keep_ceiling(scores, self.max_tokens, count)
        assert self.keep is not None
        return keep_share(scores, self.keep)


MESSAGE_TOKENS = 8  # role marks of a message where the template is not known


class TokenCounter:
    """Counts with one tokenizer, as ``LLM.generate`` and ``LLM.chat`` would feed the prompt: template, tools and
    generation prompt included. Where there is no template, or it refuses the conversation, ``MESSAGE_TOKENS`` stand for
    its marks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> int:
        """Tokens of a plain prompt, special tokens included."""
        return len(self._tokenizer(text, verbose=False)["input_ids"])

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Tokens of a conversation, ready for the answer."""
        rendered = self._render(messages, tools)
        if rendered is not None:
            return self._plain(rendered)
        total = self._plain(json.dumps(tools)) if tools else 0
        for message in messages:
            content = message.get("content")
            words = content if isinstance(content, str) else json.dumps(content) if content else ""
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            total += self._plain(words) + self._plain(calls) + MESSAGE_TOKENS
        return total

    def _plain(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        if self._tokenizer.chat_template is None:
            return None
        conversation = _as_fed(messages, has_developer="developer" in str(self._tokenizer.chat_template))
        try:
            return render_chat(self._tokenizer, conversation, tools=list(tools) if tools else None)
        except ValueError:
            return None


def _as_fed(messages: Sequence[Mapping[str, Any]], *, has_developer: bool) -> list[dict[str, Any]]:
    """The messages as the engine's template gets them. An upstream may take messages that those rules refuse."""
    try:
        return as_conversation(messages, has_developer=has_developer)
    except ValueError:
        return [
            {**message, "content": "" if message.get("content") is None else message["content"]} for message in messages
        ]


def kept_tokens(scored: Sequence[ScoredText], choice: Choice) -> list[int]:
    """Draft tokens of the chosen chunks of each text."""
    return [sum(own.chunk_tokens[i] for i in chosen) for own, chosen in zip(scored, choice, strict=True)]


def kept_spans(candidate: Candidate, own: ScoredText, kept: set[int]) -> list[Span]:
    """Characters of the candidate's text that stay: kept chunks, and what was never a candidate."""
    always = [(0, candidate.start), (candidate.end, len(candidate.text))]
    return own.cutter.spans(candidate.text, [own.chunks[i] for i in kept], always)


def shorter_text(candidate: Candidate, own: ScoredText, kept: set[int]) -> str:
    spans = kept_spans(candidate, own, kept)
    if not spans and candidate.message is not None:
        return own.cutter.delimiter.strip()  # a message may not be empty
    return own.cutter.join([candidate.text[a:b] for a, b in spans])


def with_texts(
    messages: list[dict[str, Any]], found: Sequence[Candidate], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The conversation with new texts in the places of the candidates; the messages given are not changed."""
    out = list(messages)
    for candidate, text in zip(found, texts, strict=True):
        assert candidate.message is not None
        message = out[candidate.message]
        content: Any = text
        if candidate.part is not None:
            content = list(message["content"])
            content[candidate.part] = {**content[candidate.part], "text": text}
        out[candidate.message] = {**message, "content": content}
    return out


def text_report(candidate: Candidate, own: ScoredText, kept: set[int]) -> TextReport:
    return TextReport(
        message=candidate.message,
        part=candidate.part,
        spans=tuple(kept_spans(candidate, own, kept)),
        chunks=tuple(
            ScoredChunk(start=a, end=b, score=score, is_kept=i in kept)
            for i, ((a, b), score) in enumerate(zip(own.chunks, own.scores, strict=True))
        ),
        num_draft_tokens=own.num_tokens,
        num_passages=own.num_passages,
        is_code=own.cutter.is_code,
    )


def make_report(
    reason: str,
    counted_with: str,
    before: int,
    after: int,
    scored: Sequence[ScoredText] = (),
    choice: Choice | None = None,
    texts: tuple[TextReport, ...] = (),
) -> CompressionReport:
    return CompressionReport(
        reason=reason,
        counted_with=counted_with,
        tokens_before=before,
        tokens_after=after,
        draft_tokens_before=sum(own.num_tokens for own in scored),
        draft_tokens_after=sum(kept_tokens(scored, choice or [])),
        draft_ms=sum(own.draft_ms for own in scored),
        num_cached=sum(own.num_passages == 0 for own in scored),
        texts=texts,
    )


P = TypeVar("P")


class PromptCompressor:
    """A draft that shortens prompts.

    ``draft``: a Hugging Face checkpoint folder, or a loaded ``Draft``. ``scoring``, ``chunks`` and ``protection``
    default to the published method. ``cache_size``: texts whose scores are cached.
    """

    def __init__(
        self,
        draft: Draft | str | Path,
        *,
        scoring: ScoringSettings | None = None,
        chunks: ChunkSettings | None = None,
        protection: Protection | None = None,
        dtype: DType = "float32",
        device: str = "cpu",
        cache_size: int = 256,
    ) -> None:
        self.draft = draft if isinstance(draft, Draft) else Draft.load(draft, dtype=dtype, device=device)
        self.scoring = as_kind("scoring", ScoringSettings() if scoring is None else scoring, ScoringSettings)
        self.chunks = as_kind("chunks", ChunkSettings() if chunks is None else chunks, ChunkSettings)
        self.protection = as_kind("protection", Protection() if protection is None else protection, Protection)
        self.draft.context_of(self.scoring)  # ValueError for settings that would fail for every text
        self._scorer = Scorer(self.draft, self.scoring, self.chunks, as_count("cache_size", cache_size, 0))
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}  # of targets that were given as folders
        self._lock = Lock()

    def compress(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        keep: float | None = None,
        max_tokens: int | None = None,
        target_tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        query: str | None = None,
        threshold: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> CompressedText:
        """Shorten a text, or the contents of OpenAI messages.

        ``keep``: share of the chunks of each text that stays, in (0, 1]; or ``max_tokens``: a ceiling in target tokens
        for the whole prompt - delimiters, protected text, template and ``tools`` included - that the result never
        exceeds. Exactly one of them. ``target_tokenizer``: the target's, or its folder; without it the draft's own
        tokens are counted. ``query``: what will be asked about a plain text, or overrides what the conversation asks;
        the draft reads it, the result does not contain it. ``threshold`` overrides
        ``Protection.threshold``.

        Raises ValueError for wrong arguments, for a ceiling that the protected text alone exceeds, and for a text
        beyond the draft's context if such texts are refused.
        """
        amount = self._amount(keep, max_tokens, threshold, target_tokenizer)
        if query is not None:
            as_text("query", query)
        counter = TokenCounter(self._target(target_tokenizer))
        _check_prompt(prompt)
        if isinstance(prompt, str):
            after = f"\n\n{query}" if query else ""
            whole = Candidate(text=prompt, start=0, end=len(prompt), after=after, as_chat=bool(query))
            text, report = self._shorten(prompt, [whole], lambda texts: texts[0], counter.text, amount)
            return CompressedText(text=text, report=report)
        messages = [dict(message) for message in prompt]
        found = candidates(messages, self.protection, self.draft.count_tokens)
        if query:
            found = [replace(candidate, after=f"\n\n{query}") for candidate in found]
        return self._shorten_messages(messages, messages, found, counter, tools, amount)

    def compress_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        done: Sequence[Mapping[str, Any]],
        *,
        keep: float | None = None,
        max_tokens: int | None = None,
        target_tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        threshold: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> CompressedText:
        """Shorten a conversation that goes on from one that was shortened before: ``done``, the first messages now.

        They stay as they are, but for tool outputs that were uncompressed because they were recent. Otherwise as
        ``compress``; a ceiling that ``done`` leaves no room for is a ValueError.
        """
        amount = self._amount(keep, max_tokens, threshold, target_tokenizer)
        _check_prompt(messages)
        counter = TokenCounter(self._target(target_tokenizer))
        whole, begun = [dict(message) for message in messages], [dict(message) for message in done]
        built = begun + whole[len(begun) :]
        found = [
            one
            for one in candidates(whole, self.protection, self.draft.count_tokens)
            if (index := one.message or 0) >= len(begun)
            or (whole[index].get("role") == "tool" and begun[index] == whole[index])
        ]
        before, num_now = counter.messages(whole, tools), counter.messages(built, tools)
        if not found and (max_tokens is None or num_now <= max_tokens):
            return CompressedText(messages=tuple(built), report=make_report("", amount.counted_with, before, num_now))
        return self._shorten_messages(whole, built, found, counter, tools, amount)

    def _amount(self, keep: float | None, max_tokens: int | None, threshold: int | None, target: Any) -> Amount:
        """ValueError for wrong arguments. ``target``: a tokenizer, or None to count draft tokens."""
        check_amount(keep, max_tokens)
        least = self.protection.threshold if threshold is None else as_count("threshold", threshold, 0)
        counted_with = "draft" if target is None else "target"
        return Amount(keep=keep, max_tokens=max_tokens, threshold=least, counted_with=counted_with)

    def _shorten_messages(
        self,
        given: list[dict[str, Any]],
        built: list[dict[str, Any]],
        found: list[Candidate],
        counter: TokenCounter,
        tools: Sequence[Mapping[str, Any]] | None,
        amount: Amount,
    ) -> CompressedText:
        """``built``: the conversation into which the new texts of the candidates go."""
        shorter, report = self._shorten(
            given,
            found,
            lambda texts: with_texts(built, found, texts),
            lambda some: counter.messages(some, tools),
            amount,
        )
        return CompressedText(messages=tuple(shorter), report=report)

    def _shorten(
        self,
        prompt: P,
        found: list[Candidate],
        build: Callable[[list[str]], P],
        count: Callable[[P], int],
        amount: Amount,
    ) -> tuple[P, CompressionReport]:
        """``build`` makes a prompt of new texts, one per candidate; ``count`` counts its tokens."""
        before = count(prompt)
        reason = amount.why_not(before, bool(found))
        if reason:
            return prompt, make_report(reason, amount.counted_with, before, before)
        scored = [self._scorer.score(candidate) for candidate in found]

        def texts(choice: Choice) -> list[str]:
            return [shorter_text(*one) for one in zip(found, scored, choice, strict=True)]

        choice = amount.choose(scored, lambda some: count(build(texts(some))))
        shorter = build(texts(choice))
        after = count(shorter)
        if after >= before:
            reason = f"what would be kept takes {after:,} tokens, no fewer than the {before:,} of the prompt"
            return prompt, make_report(reason, amount.counted_with, before, before)
        reports = tuple(text_report(*one) for one in zip(found, scored, choice, strict=True))
        return shorter, make_report("", amount.counted_with, before, after, scored, choice, reports)

    def _target(self, target: PreTrainedTokenizerBase | str | Path | None) -> PreTrainedTokenizerBase:
        if target is None:
            return self.draft.tokenizer
        if not isinstance(target, (str, Path)):
            if not callable(target):
                raise TypeError(f"target_tokenizer is {named(target)}; it must be a tokenizer, or a folder with one")
            return target
        with self._lock:
            if str(target) not in self._tokenizers:
                self._tokenizers[str(target)] = load_tokenizer(Path(target))
            return self._tokenizers[str(target)]


def _check_prompt(prompt: Any) -> None:
    """TypeError for what is neither a text nor a list of messages; ValueError for texts that are no Unicode."""
    if isinstance(prompt, str):
        as_text("prompt", prompt)
        return
    if not is_list(prompt) or not all(isinstance(message, Mapping) for message in prompt):
        raise TypeError(f"prompt is {named(prompt)}; it must be a string, or a list of messages with role and content")
    check_texts("messages", prompt)


# Prompts of engine requests. Invariant: the result is the prompt that the same call without a draft would have fed the
# engine, less the parts left out; its report counts both.

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
        options = how.arguments() | {"target_tokenizer": target_tokenizer, "tools": tools}
        result = None
        if done := self._find(digests):
            with suppress(ValueError):  # no room for them below the ceiling; whatever else is wrong is wrong below, too
                result = self._compressor.compress_turn(messages, done, **options)
        result = result or self._compressor.compress(messages, **options)
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
        num_stored: Callable[[tuple[int, ...], str], int],
    ) -> None:
        """``num_stored``: tokens of a prompt that the engine's prefix store would give back, for an adapter or ""."""
        self.compressor, self._tokenizer, self._num_stored = compressor, tokenizer, num_stored
        self._sticky = StickyCompressor(compressor)

    def prompt(self, prompt: str | Sequence[int], how: PromptCompression, lora: str = "") -> CompressedPrompt:
        """A plain prompt, which must be a text, for an adapter or ""."""
        if how.sticky:
            raise ValueError("sticky is for conversations; this prompt is none")
        if not isinstance(prompt, str):
            raise ValueError("the prompt is token ids; prompt compression needs its text")
        if (whole := self._stored(self._tokenizer(prompt)["input_ids"], how, lora, prompt)) is not None:
            return whole
        result = self._as_text(prompt, how)
        assert result.text is not None
        ids = self._tokenizer(result.text)["input_ids"]
        return CompressedPrompt(token_ids=tuple(ids), report=result.report.summary(), text=result.text)

    def chat(self, messages: Messages, how: PromptCompression, render: Render, lora: str = "") -> CompressedPrompt:
        """A conversation; ``render`` applies the target's chat template."""
        text = render(messages)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if (whole := self._stored(ids, how, lora)) is not None:
            return whole
        result = self._sticky.compress(messages, how, self._tokenizer) if how.sticky else self._as_text(messages, how)
        assert result.messages is not None
        ids = self._tokenizer(render(result.messages), add_special_tokens=False)["input_ids"]
        return CompressedPrompt(token_ids=tuple(ids), report=result.report.summary())

    def _stored(
        self, ids: Sequence[int], how: PromptCompression, lora: str, text: str | None = None
    ) -> CompressedPrompt | None:
        """A prompt as it is, where ``why_uncompressed`` says so."""
        if how.keep is None:
            return None
        num_stored, threshold = self._num_stored(tuple(ids), lora), self.compressor.protection.threshold
        reason = why_uncompressed(len(ids), num_stored, how, threshold)
        if not reason:
            return None
        report = CompressionSummary(tokens_before=len(ids), tokens_after=len(ids), reason=reason)
        return CompressedPrompt(token_ids=tuple(ids), report=report, text=text)

    def _as_text(self, prompt: str | Messages, how: PromptCompression) -> CompressedText:
        return self.compressor.compress(prompt, target_tokenizer=self._tokenizer, query=how.query, **how.arguments())
