"""The two implementations of the seam ``view.attend``: staging (prefill) and rows (decode).

A layer hands over its heads and never knows which of the two it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, RowPlaces
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.kernels.sdpa import one_query_attention
from snapstream.layers.attention import LatentHeads
from snapstream.models.staging import StagingBuffers

_EXPANDED_AT_ONCE = 512  # latents; fewer than a long prompt's chunk, whose temporaries are counted
QueriesAt = Callable[[slice], Tensor]  # rotated queries [t, H, E] of these tokens of a chunk


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one prompt that lies in a chunk."""

    prompt: int  # index of the prompt in its pass
    chunk_start: int  # first token, counted in the chunk
    length: int
    prompt_start: int  # first token, counted in the prompt
    staging_start: int  # where the prompt begins in the staging buffers
    num_restored: int = 0  # tokens at the begin of the prompt that are in no chunk: others staged them

    @property
    def chunk_slice(self) -> slice:
        return slice(self.chunk_start, self.chunk_start + self.length)

    @property
    def num_keys(self) -> int:
        """Tokens of the prompt that are staged once this part is."""
        return self.prompt_start + self.length

    @property
    def staging_stop(self) -> int:
        """Where they end in the staging buffers."""
        return self.staging_start + self.num_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens of one unit, which may be parts of several prompts."""

    segments: Sequence[Segment]
    lens: PackedLens | None = None  # lengths on the device, where several prompts are attended in one call
    # Places in the chunk of the tokens that need an output, one per segment that ends its prompt; None: all do.
    outputs: Sequence[int] | None = None


class StagingView:
    """Attention of a chunk of packed prompts against the staging buffers of one layer, nothing of it padded.

    With ``lens`` several prompts are attended in one call, else one after the other. Their keys lie side by side in
    the buffers, because the prompts of a pass do and all but the last of a chunk end in it.
    """

    def __init__(
        self,
        buffers: StagingBuffers,
        chunk: Chunk,
        kernels: Kernels,
        attention: PrefillAttention,
        keep: Callable[[Sequence[Segment], QueriesAt], None],
    ) -> None:
        """``keep`` may ask for rotated queries of the chunk before they are attended with."""
        self._buffers, self._chunk, self._kernels, self._attention = buffers, chunk, kernels, attention
        self._keep = keep

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Stage the chunk, then causal attention per prompt: ``[T, H, E]``, or of the tokens that need an output."""
        if rope is None:
            raise ValueError("a layer of latents is prefilled through attend_latents")
        q = self._stage_heads(heads, norm, rope)
        self._keep(self._chunk.segments, q.__getitem__)
        if self._chunk.outputs is not None:
            attend, tokens = self._attention.attend, self._buffers.tokens
            parts = [attend(q[place], *tokens(*staged)) for place, staged in self._last_tokens(self._chunk.outputs)]
            return torch.cat(parts) if parts else q[:0]
        return self._attend_all(q, self._buffers.tokens)

    def attend_latents(self, layer: int, queries: Tensor, latents: Tensor, heads: LatentHeads) -> Tensor:
        """Stage and expand the chunk's latents, then attend as above: ``[T', H, U]``, see ``layers.attention``.

        A single query for the last token of a prompt meets the latents as they are: nothing is expanded for it.
        """
        self._keep(self._chunk.segments, lambda place: heads.absorbed(queries[place]))
        self._stage(latents, latents)
        if self._chunk.outputs is not None:
            parts = [
                one_query_attention(heads.absorbed(queries[place]), *self._buffers.tokens(*staged))
                for place, staged in self._last_tokens(self._chunk.outputs)
            ]
            return heads.values(torch.cat(parts)) if parts else queries[:0, :, : heads.value_dim]
        for segment in self._chunk.segments:
            self._expand(segment, heads)
        return self._attend_all(heads.expanded(queries), partial(self._expanded, heads))[..., : heads.value_dim]

    def _expanded(self, heads: LatentHeads, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Expanded keys and values of staged tokens; the zeros behind a value only for kernels that want them."""
        keys, values = self._buffers.expanded(start, stop)
        return keys, values[..., : heads.value_dim] if self._attention.takes_narrow_values else values

    def _expand(self, segment: Segment, heads: LatentHeads) -> None:
        """Expand what is staged and was not expanded yet: a segment, and with the first of a prompt what was restored.

        The latter may be long, so it goes piece by piece.
        """
        is_first = segment.prompt_start == segment.num_restored
        first = segment.staging_start + (0 if is_first else segment.prompt_start)
        for start in range(first, segment.staging_stop, _EXPANDED_AT_ONCE):
            stop = min(start + _EXPANDED_AT_ONCE, segment.staging_stop)
            keys, _ = self._buffers.tokens(start, stop)  # [1, n, E]
            heads.expand(keys[0], *self._buffers.expanded(start, stop))

    def _last_tokens(self, outputs: Sequence[int]) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Places in the chunk of the tokens that need an output, and where their prompts' tokens are staged."""
        ending = [segment for segment in self._chunk.segments if segment.chunk_slice.stop - 1 in outputs]
        for segment, place in zip(ending, outputs, strict=True):
            yield slice(place, place + 1), (segment.staging_start, segment.staging_stop)

    def _attend_all(self, q: Tensor, staged: Callable[[int, int], tuple[Tensor, Tensor]]) -> Tensor:
        """Causal attention of a chunk's queries over what is ``staged`` of their prompts."""
        segments, lens = self._chunk.segments, self._chunk.lens
        if lens is not None and self._attention.attend_packed is not None:
            return self._attention.attend_packed(q, *staged(segments[0].staging_start, segments[-1].staging_stop), lens)
        parts = [self._attention.attend(q[s.chunk_slice], *staged(s.staging_start, s.staging_stop)) for s in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stage_heads(self, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """Norm and rotate; store the chunk's keys and values. Returns the queries ``[T, H, E]``."""
        if self._attention.stage_heads is not None:
            runs = [(s.chunk_start, s.length, s.staging_start + s.prompt_start) for s in self._chunk.segments]
            return self._attention.stage_heads(heads, norm, rope, self._buffers.keys, self._buffers.values, runs)
        num_kv_heads = self._buffers.spec.num_kv_heads
        qk = self._kernels.norm_rope(heads, norm, rope, num_kv_heads)  # [T, H+G, E]
        self._stage(qk[:, -num_kv_heads:], heads[:, -num_kv_heads:])
        return qk[:, :-num_kv_heads]

    def _stage(self, k: Tensor, v: Tensor) -> None:
        """Store the chunk's keys and values ``[T, G, E]``."""
        for segment in self._chunk.segments:
            start = segment.staging_start + segment.prompt_start
            keys, values = self._buffers.tokens(start, start + segment.length)
            keys.copy_(k[segment.chunk_slice].transpose(0, 1))
            if not self._buffers.spec.values_are_keys:
                values.copy_(v[segment.chunk_slice].transpose(0, 1))


class QuerySink(Protocol):
    """Takes the rotated queries ``[B, H, E]`` of a decode step, layer by layer."""

    def put(self, layer: int, q: Tensor) -> None: ...


class RowsView:
    """Attention of one new token per row against the row's visible slots."""

    def __init__(self, cache: KVCache, places: RowPlaces, kernels: Kernels, queries: QuerySink | None = None) -> None:
        """``queries`` keeps what rows will be rescored with; None where they are not."""
        self._cache, self._places, self._kernels, self._queries = cache, places, kernels, queries

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Write a slot per row, then attend: ``heads [B, H+2G, E]`` -> ``[B, H, E]``."""
        sink = self._queries
        keep = None if sink is None else lambda q: sink.put(layer, q)
        return self._kernels.attend_rows(heads, norm, rope, self._cache.layer(layer), self._places, keep)
