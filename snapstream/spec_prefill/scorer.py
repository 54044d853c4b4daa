"""Scores of the chunks of a text, remembered by content: in a long conversation most text was there before.

The key is a hash of the text, what stands around it, the draft and every setting, so an entry can never be stale; the
oldest unused entry goes first. One text is scored at a time, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

from snapstream.spec_prefill.draft import Draft, ReadText
from snapstream.spec_prefill.importance import chunk_means
from snapstream.spec_prefill.protection import Candidate
from snapstream.spec_prefill.settings import CutSettings, ScoringSettings
from snapstream.spec_prefill.spans import Cutter, Span, chunk_spans


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
    """A draft with a bounded memory of what it has scored."""

    def __init__(self, draft: Draft, scoring: ScoringSettings, cut: CutSettings, cache_size: int) -> None:
        self._draft, self._scoring, self._cut = draft, scoring, cut
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, ScoredText] = OrderedDict()
        self._lock = Lock()

    def score(self, candidate: Candidate) -> ScoredText:
        """Scores of a text's chunks; ``num_passages`` 0 and ``draft_ms`` 0 if they were remembered."""
        key = self.key(candidate)
        with self._lock:
            found = self._cache.get(key)
            if found is None:
                fresh = self._score(candidate)
                if self._cache_size:
                    self._cache[key] = _as_remembered(fresh)
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
                return fresh
            self._cache.move_to_end(key)
            return found

    def score_ids(self, ids: tuple[int, ...], ranges: list[Span], chunk_len: int) -> list[ScoredText]:
        """Chunks of each range of tokens, counted in tokens; not remembered. One reading for all ranges."""
        with self._lock:
            began = perf_counter()
            read = ReadText(ids=ids, first=0, stop=len(ids), starts=tuple(range(len(ids))))
            scores, num_passages = self._draft.score(read, self._scoring)
            elapsed = (perf_counter() - began) * 1e3
        cutter = Cutter(CutSettings(chunk_len=chunk_len), "")
        found = []
        for index, (start, stop) in enumerate(ranges):
            chunks = tuple((a + start, b + start) for a, b in chunk_spans(range(stop - start), stop - start, chunk_len))
            found.append(
                ScoredText(
                    chunks=chunks,
                    scores=tuple(chunk_means(scores[start:stop], chunk_len).tolist()),
                    chunk_tokens=tuple(b - a for a, b in chunks),
                    num_passages=num_passages,
                    draft_ms=0.0 if index else elapsed,
                    cutter=cutter,
                )
            )
        return found

    def _score(self, candidate: Candidate) -> ScoredText:
        began = perf_counter()
        body, cutter = candidate.body, Cutter(self._cut, candidate.text)
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

    def key(self, candidate: Candidate) -> bytes:
        """A digest of all that the scores depend on: 32 bytes."""
        parts = (
            self._draft.digest, repr(self._scoring), repr(self._cut), str(candidate.as_chat),
            str(candidate.start), str(candidate.end), candidate.text, candidate.after,
        )  # fmt: skip
        digest = hashlib.sha256()
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()


def _as_remembered(fresh: ScoredText) -> ScoredText:
    return ScoredText(
        chunks=fresh.chunks,
        scores=fresh.scores,
        chunk_tokens=fresh.chunk_tokens,
        num_passages=0,
        draft_ms=0.0,
        cutter=fresh.cutter,
    )
