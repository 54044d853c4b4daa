"""What each arm of ``evals.prompt_compression`` leaves of a document, at equal target tokens.

A draft reads a document once: its scores do not depend on the ceiling, so the compressor's memory serves the others.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random

from snapstream.assets.documents import Document
from snapstream.llm import LLM
from snapstream.spec_prefill.compressor import PromptCompressor, keep_ceiling
from snapstream.spec_prefill.protection import Cutter, Span, chunk_spans
from snapstream.spec_prefill.settings import ChunkSettings, Protection, ScoringSettings

ARMS = ("full", "truncation", "random", "same_family", "cross_family")
PROTECTION = Protection(last_user_limit=0, head=0, tail=64)  # the document may be cut, the question never


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What an arm leaves of a document, the draft's milliseconds, and the characters that are still there."""

    content: str
    spans: tuple[Span, ...]
    draft_ms: float = 0.0


class Cutters:
    """The arms, as functions from a document and a ceiling to a ``Cut``."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        assert llm.tokenizer is not None
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._scoring = ScoringSettings(look_ahead=args.look_ahead, context_len=args.context_len, overlap=64)
        self._chunks = ChunkSettings(snap=args.snap, chunk_len=args.chunk_len, delimiter=args.delimiter)
        self._drafts: dict[Path, PromptCompressor] = {}
        self._draft_ms: dict[tuple[Path, str], float] = {}  # of the one reading of a text
        self._cache_size = args.num_prompts
        self._folders = {"same_family": args.same_draft, "cross_family": args.cross_draft}

    def count(self, content: str) -> int:
        """Tokens of the prompt with this user message."""
        return len(self._llm.chat_token_ids([{"role": "user", "content": content}]))

    def apply(self, arm: str, document: Document, seed: str, max_tokens: int) -> Cut:
        """One prompt, at most ``max_tokens`` target tokens."""
        text, tail = document.text, f"\n\n{document.questions[0].text}"
        if arm == "full":
            return Cut(content=text + tail, spans=((0, len(text)),))
        if arm == "truncation":
            return self._truncate(text, tail, max_tokens)
        if arm == "random":
            return self._random(text, tail, seed, max_tokens)
        return self._by_draft(self._folders[arm], text, tail, max_tokens)

    def _truncate(self, text: str, tail: str, max_tokens: int) -> Cut:
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        size = max_tokens - self.count(tail)
        while True:  # tokens of the two ends may join differently than in the whole
            head = size // 2
            spans = ((0, offsets[head - 1][1]), (offsets[len(offsets) - (size - head)][0], len(text)))
            content = "".join(text[a:b] for a, b in spans) + tail
            if self.count(content) <= max_tokens:
                return Cut(content=content, spans=spans)
            size -= 1

    def _random(self, text: str, tail: str, seed: str, max_tokens: int) -> Cut:
        cutter, rng = Cutter(self._chunks, text), Random(seed)
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        chunks = chunk_spans([a for a, _ in offsets], len(text), cutter.chunk_len)

        def spans_of(chosen: set[int]) -> list[Span]:
            return cutter.spans(text, [chunks[i] for i in chosen])

        def content_of(chosen: set[int]) -> str:
            return cutter.join([*(text[a:b] for a, b in spans_of(chosen)), tail])

        scores = [rng.random() for _ in chunks]
        (chosen,) = keep_ceiling([scores], max_tokens, lambda choice: self.count(content_of(choice[0])))
        return Cut(content=content_of(chosen), spans=tuple(spans_of(chosen)))

    def _by_draft(self, folder: Path, text: str, tail: str, max_tokens: int) -> Cut:
        if folder not in self._drafts:
            self._drafts[folder] = PromptCompressor(
                folder, scoring=self._scoring, chunks=self._chunks, protection=PROTECTION, cache_size=self._cache_size
            )
        result = self._drafts[folder].compress(
            [{"role": "user", "content": text + tail}], max_tokens=max_tokens, target_tokenizer=self._tokenizer
        )
        if result.report.num_cached == 0:
            self._draft_ms[folder, text] = result.report.draft_ms
        assert result.messages is not None
        spans = result.report.texts[0].spans if result.report.is_applied else ((0, len(text)),)
        return Cut(content=result.messages[0]["content"], spans=spans, draft_ms=self._draft_ms[folder, text])
