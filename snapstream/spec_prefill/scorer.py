"""Scores of the chunks of a text, cached by content, and the choice of the chunks that stay.

The cache key is a hash of the text, its surroundings, the draft and every setting; the least recently used entry goes
first. One text is scored at a time, whatever the number of threads.

Chunks of one text compete by score, ties going to the earlier. Texts that were scored separately cannot be compared by
score, so a ceiling takes from every text in the same proportion, by a chunk's rank over the number of chunks.
Invariant: a choice that ``count`` finds above the ceiling is never returned.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

from snapstream.spec_prefill.draft import Draft, ReadText, chunk_means
from snapstream.spec_prefill.protection import Candidate, Cutter, Span, chunk_spans
from snapstream.spec_prefill.settings import ChunkSettings, ScoringSettings


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

    def __init__(self, draft: Draft, scoring: ScoringSettings, chunks: ChunkSettings, cache_size: int) -> None:
        self._draft, self._scoring, self._chunks = draft, scoring, chunks
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
        cutter = Cutter(ChunkSettings(chunk_len=chunk_len), "")
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

    def key(self, candidate: Candidate) -> bytes:
        """A digest of all that the scores depend on: 32 bytes."""
        parts = (
            self._draft.digest, repr(self._scoring), repr(self._chunks), str(candidate.as_chat),
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
