"""The two implementations of the seam ``view.attend``: staging (prefill) and rows (decode).

A layer hands over q, k, v and never knows which of the two it talks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels import dispatch
from snapstream.kernels.cpu import ops  # noqa: F401 - registers the operator below
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.layers.attention import FusingView
from snapstream.layers.rope import CosSin


class QuerySink(Protocol):
    """Takes the rotated queries ``[B, H, E]`` of a decode step, layer by layer."""

    def put(self, layer: int, q: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one prompt that lies in a chunk."""

    entry: int  # index of the prompt in its job
    chunk_start: int  # first token, counted in the chunk
    length: int
    prompt_start: int  # first token, counted in the prompt
    staging_start: int  # where the prompt begins in the staging pool

    @property
    def chunk_slice(self) -> slice:
        return slice(self.chunk_start, self.chunk_start + self.length)

    @property
    def num_keys(self) -> int:
        """Tokens of the prompt that are staged once this part is."""
        return self.prompt_start + self.length

    @property
    def staging_stop(self) -> int:
        """Where they end in the staging pool."""
        return self.staging_start + self.num_keys


class StagingView:
    """Attention of a chunk of packed prompts against the staging buffer of one layer, nothing of it padded.

    With ``lens`` several prompts are attended in one call, else one after the other. Their keys lie side by side in
    the pool, because the prompts of a job do and all but the last of a chunk end in it.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        segments: Sequence[Segment],
        attention: PrefillAttention,
        lens: PackedLens | None = None,
    ) -> None:
        self._k, self._v = k, v  # [G, P, E], P tokens of pool
        self._segments, self._attention, self._lens = segments, attention, lens

    def stage(self, k: Tensor, v: Tensor) -> None:
        """Store the chunk's keys and values ``[T, G, E]``."""
        for segment in self._segments:
            start = segment.staging_start + segment.prompt_start
            place = slice(start, start + segment.length)
            self._k[:, place] = k[segment.chunk_slice].transpose(0, 1)
            self._v[:, place] = v[segment.chunk_slice].transpose(0, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stage the chunk, then causal attention per prompt: ``q [T, H, E]`` -> ``[T, H, E]``."""
        self.stage(k, v)
        if self._lens is not None and self._attention.attend_packed is not None:
            seen = slice(self._segments[0].staging_start, self._segments[-1].staging_stop)
            return self._attention.attend_packed(q, self._k[:, seen], self._v[:, seen], self._lens)
        parts = [self.attend_last(segment, q[segment.chunk_slice]) for segment in self._segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_last(self, segment: Segment, q: Tensor) -> Tensor:
        """Attention of the last ``q.shape[0]`` staged tokens of a segment."""
        seen = slice(segment.staging_start, segment.staging_stop)
        return self._attention.attend(q, self._k[:, seen], self._v[:, seen])


class RowsView(FusingView):
    """Attention of one new token per row against the row's visible slots."""

    def __init__(
        self, cache: KVCache, rows: Tensor, slots: Tensor, lengths: Tensor, queries: QuerySink | None = None
    ) -> None:
        """``queries`` keeps what rows will be rescored with; None where they are not."""
        self._cache, self._queries = cache, queries
        self._rows, self._slots, self._lengths = rows, slots, lengths  # [B]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the token's slot, then attend: ``q [B, H, E]``, ``k, v [B, G, E]`` -> ``[B, H, E]``."""
        self._keep(layer, q)
        keys, values, scales = self._cache.k[layer], self._cache.v[layer], self._cache.scales(layer)
        dispatch.write_slots(keys, values, k, v, self._rows, self._slots, scales)
        return dispatch.decode_attention(q, keys, values, self._rows, self._lengths, scales)

    def attend_heads(self, layer: int, heads: Tensor, head_norm: Tensor | None, eps: float, rope: CosSin) -> Tensor:
        """The same from ``heads [B, H+2G, E]`` as projected: norm, rotation and write are one launch."""
        keys, values, scales = self._cache.k[layer], self._cache.v[layer], self._cache.scales(layer)
        q = dispatch.norm_rope_write(
            heads, head_norm, eps, *rope, keys, values, self._rows, self._slots, scales
        )  # [B, H, E]
        self._keep(layer, q)
        return dispatch.decode_attention(q, keys, values, self._rows, self._lengths, scales)

    def _keep(self, layer: int, q: Tensor) -> None:
        if self._queries is not None:
            self._queries.put(layer, q)


class CompiledRowsView(RowsView):
    """The same as one operator per layer, which a compiled graph can hold (CPU)."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``RowsView.attend``."""
        self._keep(layer, q)
        out: Tensor = torch.ops.snapstream.attend_rows_cpu(
            q, k, v, self._cache.k, self._cache.v, layer, self._rows, self._slots, self._lengths,
            self._cache.k_scale, self._cache.v_scale,
        )  # fmt: skip
        return out
