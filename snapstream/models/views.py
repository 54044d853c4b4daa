"""The two implementations of ``layers.KVView``: staging buffers (prefill) and rows (decode)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from snapstream.kernels.backends.autotune import PrefillAttention
from snapstream.kernels.formats import Scales
from snapstream.kernels.interface import CosSin, HeadNorm, Kernels, RowPlaces
from snapstream.kernels.pytorch import one_query_attention
from snapstream.kernels.rows import PackedLens
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec, Window
from snapstream.models.layers import Recurrence, RowsRecurrence

if TYPE_CHECKING:
    from snapstream.models.latent import LatentHeads


class StagingBuffers:
    """One layer of K and V, and the hidden states, of ``num_tokens`` tokens in prefill; allocated once.

    Prefill is layer-wise, so all layers use the same buffers in turn; layers whose heads differ in size have one each,
    and so has a layer whose keys and values later ones share (``KVSpec.staging_places``). A pass owns a range of
    tokens, chosen by the caller, from its first unit to its last. With latents there are also the keys and values
    expanded from them.
    """

    def __init__(
        self, spec: KVSpec, hidden_size: int, num_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self._staged: dict[int, tuple[Tensor, Tensor]] = {}  # keys [G, P, E] and values [G, P, E'] by staging place
        for place in sorted(set(spec.staging_places) - {-1}):
            own = spec.slots_of(place)
            keys = torch.empty((own.num_kv_heads, num_tokens, own.key_dim), dtype=dtype, device=device)
            values = keys[..., : own.value_dim]
            if not spec.values_are_keys:
                values = torch.empty((own.num_kv_heads, num_tokens, own.value_dim), dtype=dtype, device=device)
            self._staged[place] = keys, values
        # Keys and values of every head expanded from latents [H, P, X], zero-padded to one size; empty without latents.
        expanded = (spec.num_heads if spec.expanded_dim else 0, num_tokens, spec.expanded_dim)
        self._expanded_keys = torch.zeros(expanded, dtype=dtype, device=device)
        self._expanded_values = torch.zeros(expanded, dtype=dtype, device=device)
        self.hidden = torch.empty((num_tokens, hidden_size), dtype=dtype, device=device)  # [P, D]

    @property
    def num_bytes(self) -> int:
        keys, values = (sum(own[side].nbytes for own in self._staged.values()) for side in range(2))
        expanded = self._expanded_keys.nbytes + self._expanded_values.nbytes
        return keys + (0 if self.spec.values_are_keys else values) + expanded + self.hidden.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys ``[G, P, E]`` and values ``[G, P, E']`` that a layer stages, or attends to; not of one with states."""
        return self._staged[self.spec.staging_places[layer]]

    def tokens(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Those of tokens ``start .. stop - 1`` of the buffers."""
        keys, values = self.layer(layer)
        return keys[:, start:stop], values[:, start:stop]

    def expanded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[H, n, X]`` expanded from the latents of these tokens."""
        return self._expanded_keys[:, start:stop], self._expanded_values[:, start:stop]


_EXPANDED_AT_ONCE = 512  # latents; fewer than a long prompt's chunk, so its counted temporaries cover it
QueriesAt = Callable[[slice], Tensor]  # rotated queries [t, H, E] of these tokens of a chunk


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one prompt in a chunk."""

    prompt: int  # index of the prompt in its pass
    chunk_start: int  # first token, index in the chunk
    length: int
    prompt_start: int  # first token, index in the prompt
    staging_start: int  # where the prompt begins in the staging buffers
    num_restored: int = 0  # first tokens of the prompt that are not computed but staged by the caller

    @property
    def chunk_slice(self) -> slice:
        return slice(self.chunk_start, self.chunk_start + self.length)

    @property
    def num_keys(self) -> int:
        """Tokens of the prompt that are staged after this part."""
        return self.prompt_start + self.length

    @property
    def staging_stop(self) -> int:
        """Their end in the staging buffers."""
        return self.staging_start + self.num_keys

    def pieces(self, size: int | None) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Its tokens in the chunk, and where the keys that they attend to are staged; both are cut where chunks of
        attention, of ``size`` tokens, end.
        """
        size, start, offset = size or self.num_keys, self.prompt_start, self.chunk_start - self.prompt_start
        while start < self.num_keys:
            first = start // size * size
            stop = min(first + size, self.num_keys)
            yield slice(offset + start, offset + stop), (self.staging_start + first, self.staging_start + stop)
            start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens of one unit, which may be parts of several prompts."""

    segments: Sequence[Segment]
    lens: PackedLens | None = None  # on the device, if several prompts are attended in one call
    # Indices in the chunk of the tokens that need an output, one per segment that ends its prompt; None: all.
    outputs: Sequence[int] | None = None


class PromptStates(Protocol):
    """Where recurrent layers keep the states of a pass's prompts."""

    def of(self, prompt: int, layer: int) -> Mapping[str, Tensor]:
        """The state of a prompt in a layer, updated in place from chunk to chunk."""
        ...

    def begin(self, prompt: int, layer: int) -> None:
        """Set the state to that before the first computed token: zeros, or a snapshot after restored tokens."""
        ...

    def ends(self, prompt: int) -> Sequence[int]:
        """Numbers of tokens of the prompt after which ``reached`` is called, ascending."""
        ...

    def reached(self, prompt: int, layer: int, num_tokens: int) -> None:
        """The state is that after ``num_tokens`` tokens."""
        ...

    def done(self, prompt: int, layer: int) -> None:
        """All tokens of the prompt have passed the layer."""
        ...


class StagingView:
    """Attention of a chunk of packed prompts against the staging buffers of one layer, without padding.

    With ``lens`` several prompts are attended in one call, else one after the other. Their keys are contiguous in the
    buffers, because a pass stages its prompts one after the other and all but the last of a chunk end in it.
    """

    def __init__(
        self,
        buffers: StagingBuffers,
        chunk: Chunk,
        kernels: Kernels,
        attention: PrefillAttention,
        keep: Callable[[Sequence[Segment], QueriesAt], None],
        states: PromptStates | None = None,
    ) -> None:
        """``keep`` may copy rotated queries of the chunk before attention; ``states``: for recurrent layers."""
        self._buffers, self._chunk, self._kernels, self._attention = buffers, chunk, kernels, attention
        self._keep, self._states, self._is_whole = keep, states, True

    def take_only(self, outputs: Sequence[int]) -> None:
        """Heads are those of the tokens ``outputs`` alone from now on, in a layer that stages nothing."""
        self._chunk, self._is_whole = replace(self._chunk, outputs=outputs), False

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        """A prompt's part is cut where its state is asked for."""
        if self._states is None:
            raise ValueError("this prefill keeps no recurrent states")
        parts = []
        for segment in self._chunk.segments:
            prompt, offset = segment.prompt, segment.chunk_start - segment.prompt_start
            if segment.prompt_start == segment.num_restored:
                self._states.begin(prompt, layer)
            states = {name: tensor[None] for name, tensor in self._states.of(prompt, layer).items()}
            ends = [end for end in self._states.ends(prompt) if segment.prompt_start < end <= segment.num_keys]
            start = segment.prompt_start
            for stop in (*ends, segment.num_keys):
                if start == stop:
                    continue
                parts.append(recurrence(inputs[None, offset + start : offset + stop], states)[0])
                if stop in ends:
                    self._states.reached(prompt, layer, stop)
                start = stop
        return self.outputs(parts[0] if len(parts) == 1 else torch.cat(parts))

    def outputs(self, x: Tensor) -> Tensor:
        return x if self._chunk.outputs is None else x[list(self._chunk.outputs)]

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Stage the chunk, then causal attention per prompt: ``[T, H, E]``, or of the tokens that need an output."""
        if rope is None:
            raise ValueError("a layer of latents is prefilled through attend_latents")
        spec = self._buffers.spec
        cache, tokens = spec.slots_of(layer), partial(self._buffers.tokens, layer)
        size, is_chunked = (cache.num_tokens, cache.is_chunked) if isinstance(cache, Window) else (None, False)
        window, span = (None, size) if is_chunked else (size, None)
        if spec.source(layer) != layer:
            q = self._kernels.norm_rope(heads, norm, rope, 0).contiguous()  # keys and values are staged already
        else:
            q = self._stage_heads(layer, heads, norm, rope)
            self._keep(self._chunk.segments, q.__getitem__)
        if self._chunk.outputs is not None:
            attend = partial(self._attention.attend, window=window, sinks=norm.sinks, cap=norm.cap)
            parts = [
                attend(q[place], *tokens(*staged)) for place, staged in self._last_tokens(self._chunk.outputs, span)
            ]
            return torch.cat(parts) if parts else q[:0]
        return self._attend_all(q, tokens, (norm.sinks, norm.cap), window, span)

    def attend_latents(
        self, layer: int, queries: Tensor, latents: Tensor, heads: LatentHeads, sinks: Tensor | None
    ) -> Tensor:
        """Stage and expand the chunk's latents, then attend as above: ``queries [T, H, N_o + P]`` and ``latents
        [T, 1, E]``, both rotated, to ``[T', H, U]``.

        A single query for the last token of a prompt attends to the latents themselves, without expansion.
        """
        self._keep(self._chunk.segments, lambda place: heads.absorbed(queries[place]))
        self._stage(layer, latents, latents)
        if self._chunk.outputs is not None:
            parts = [
                one_query_attention(heads.absorbed(queries[place]), *self._buffers.tokens(layer, *staged), sinks)
                for place, staged in self._last_tokens(self._chunk.outputs)
            ]
            return heads.values(torch.cat(parts)) if parts else queries[:0, :, : heads.value_dim]
        for segment in self._chunk.segments:
            self._expand(layer, segment, heads)
        expanded = partial(self._expanded, heads)
        return self._attend_all(heads.expanded(queries), expanded, (sinks, None))[..., : heads.value_dim]

    def _expanded(self, heads: LatentHeads, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Expanded keys and values of staged tokens; values keep their zero padding if the kernel needs it."""
        keys, values = self._buffers.expanded(start, stop)
        return keys, values[..., : heads.value_dim] if self._attention.takes_narrow_values else values

    def _expand(self, layer: int, segment: Segment, heads: LatentHeads) -> None:
        """Expand a segment, and before the first of a prompt its restored tokens, piece by piece."""
        is_first = segment.prompt_start == segment.num_restored
        first = segment.staging_start + (0 if is_first else segment.prompt_start)
        for start in range(first, segment.staging_stop, _EXPANDED_AT_ONCE):
            stop = min(start + _EXPANDED_AT_ONCE, segment.staging_stop)
            keys, _ = self._buffers.tokens(layer, start, stop)  # [1, n, E]
            heads.expand(keys[0], *self._buffers.expanded(start, stop))

    def _last_tokens(self, outputs: Sequence[int], span: int | None = None) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Slices of the chunk that need an output, and the staged range that they attend to."""
        ending = [segment for segment in self._chunk.segments if segment.chunk_slice.stop - 1 in outputs]
        for index, (segment, output) in enumerate(zip(ending, outputs, strict=True)):
            place = output if self._is_whole else index
            *_, (_, staged) = segment.pieces(span)
            yield slice(place, place + 1), staged

    def _attend_all(
        self, q: Tensor, staged: Callable[[int, int], tuple[Tensor, Tensor]],
        softmax: tuple[Tensor | None, float | None] = (None, None), window: int | None = None, span: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of a chunk's queries over ``staged`` tokens of their prompts, at most ``window`` each, or
        those of their own ``span`` tokens of the prompt. ``softmax``: sinks and cap.
        """
        segments, lens, attention, (sinks, cap) = self._chunk.segments, self._chunk.lens, self._attention, softmax
        if lens is not None and attention.attend_packed is not None and span is None:
            keys, values = staged(segments[0].staging_start, segments[-1].staging_stop)
            return attention.attend_packed(q, keys, values, lens, window=window, sinks=sinks, cap=cap)
        attend = partial(attention.attend, window=window, sinks=sinks, cap=cap)
        parts = [attend(q[own], *staged(*keys)) for segment in segments for own, keys in segment.pieces(span)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stage_heads(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """Norm and rotate; store the chunk's keys and values. Returns the queries ``[T, H, E]``."""
        if self._attention.stage_heads is not None:
            runs = [(s.chunk_start, s.length, s.staging_start + s.prompt_start) for s in self._chunk.segments]
            return self._attention.stage_heads(heads, norm, rope, *self._buffers.layer(layer), runs)
        num_kv_heads = self._buffers.spec.slots_of(layer).num_kv_heads
        qk = self._kernels.norm_rope(heads, norm, rope, num_kv_heads)  # [T, H+G, E]
        self._stage(layer, qk[:, -num_kv_heads:], heads[:, -num_kv_heads:])
        return qk[:, :-num_kv_heads]

    def _stage(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the chunk's keys and values ``[T, G, E]``."""
        for segment in self._chunk.segments:
            start = segment.staging_start + segment.prompt_start
            keys, values = self._buffers.tokens(layer, start, start + segment.length)
            keys.copy_(k[segment.chunk_slice].transpose(0, 1))
            if not self._buffers.spec.values_are_keys:
                values.copy_(v[segment.chunk_slice].transpose(0, 1))


class RowsView:
    """Attention of one new token per row against the row's visible slots.

    Without per-head budgets all heads of a layer are attended in one call, which also norms, rotates and writes. With
    them, heads are normed and rotated first; then every kv head is a batch entry of the kernel with its query heads,
    slot and length (``kv/cache.py``), and the kernel rotates by an angle of 0. Per-head scales, powers of two, are
    applied outside the kernel, which would look them up by the head's address.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Tensor,
        places: Sequence[RowPlaces],
        kernels: Kernels,
        keep: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """``rows [B]``; ``places`` by layer, ``[B]`` or with per-head budgets ``[B * G]``. ``keep`` takes the rotated
        queries ``[B, H, E]`` of each layer of a draft, which has no such budgets.
        """
        self._cache, self._rows, self._places, self._kernels = cache, rows, places, kernels
        self._keep = keep

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Write one slot per row and kv head, then attend: ``heads [B, H+2G, E]`` -> ``[B, H, E]``."""
        if self._cache.has_own_heads(layer):
            return self._attend_by_head(layer, heads, norm, rope)
        if self._cache.spec.source(layer) != layer:
            assert rope is not None, "latents are not shared"
            q, places = self._kernels.norm_rope(heads, norm, rope, 0), self._places[layer]
            rows = self._cache.layer(layer)
            return self._kernels.decode_attention(q, rows, places.rows, places.lengths, norm.sinks, norm.cap)
        keep = None if self._keep is None else partial(self._keep, layer)
        return self._kernels.attend_rows(heads, norm, rope, self._cache.layer(layer), self._places[layer], keep)

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        """One token per row."""
        stored = self._cache.state(layer)
        if of_rows is not None and self._kernels.conv_step is not None:
            return of_rows(inputs, stored, self._rows)
        states = {name: tensor[self._rows] for name, tensor in stored.items()}  # [B, ...], copies
        out = recurrence(inputs[:, None], states)[:, 0]
        for name, tensor in stored.items():
            tensor[self._rows] = states[name]
        return out

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def _attend_by_head(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        assert rope is not None, "per-head budgets are not for latents"
        batch, _, size = heads.shape
        groups = self._cache.spec.num_kv_heads
        qk = self._kernels.norm_rope(heads, norm, rope, groups)  # [B, H+G, E]
        q = qk[:, :-groups].reshape(batch, groups, -1, size)
        k, v = qk[:, -groups:, None], heads[:, -groups:, None]  # [B, G, 1, E]
        scales = self._head_scales(layer)
        if scales is not None:
            (k_scale, v_scale), (keys, values) = scales, self._cache.encodings
            q, k, v = q * k_scale, keys.scaled(k, k_scale), values.scaled(v, v_scale)
        entries = torch.cat([q, k, v], dim=2).flatten(0, 1).to(heads.dtype)  # [B * G, H/G + 2, E]
        cos = torch.ones_like(rope[0][:1]).expand(len(entries), 1, size)  # no rotation
        sinks = None if norm.sinks is None else norm.sinks.view(groups, -1).repeat(batch, 1)  # [B * G, H/G]
        out = self._kernels.attend_rows(
            entries, HeadNorm(None, norm.eps, sinks, norm.cap), (cos, torch.zeros_like(cos)), self._cache.layer(layer),
            self._places[layer], None,
        )  # fmt: skip
        if scales is not None:
            out = (out.view(batch, groups, -1, size) * scales[1]).to(heads.dtype)
        return out.reshape(batch, -1, size)

    def _head_scales(self, layer: int) -> Scales | None:
        """Per-head scales of K and V, ``[B, G, 1, 1]`` each; None for formats without."""
        k_scale, v_scale = self._cache.k_scale, self._cache.v_scale
        if self._cache.encodings[0].format.scales != "head" or k_scale is None or v_scale is None:
            return None
        return k_scale[layer][self._rows][..., None, None], v_scale[layer][self._rows][..., None, None]


class DraftsView:
    """Attention of several new tokens per row, turn by turn: each is written and attends as by ``RowsView``, before the
    next of its row overwrites a slot that it sees.

    States of recurrent layers go on by the first turn alone; the others run on copies, and what they were fed is kept
    until it is known which of them were right.
    """

    def __init__(self, cache: KVCache, kernels: Kernels, turns: Sequence[tuple[Tensor, Sequence[RowPlaces]]]) -> None:
        """``turns``: rows ``[n]``, the first of those of the turn before, and their places by layer."""
        self._cache, self._kernels = cache, kernels
        self._rows = [rows for rows, _ in turns]
        self._sizes = [len(rows) for rows in self._rows]
        self._turns = [RowsView(cache, rows, places, kernels) for rows, places in turns]
        self._fed: list[tuple[int, Sequence[Tensor], Recurrence, RowsRecurrence | None]] = []

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Turn after turn, ``heads [N, H+2G, E]`` -> ``[N, H, E]``."""
        angles: Sequence[CosSin | None] = [None] * len(self._sizes)
        if rope is not None:
            angles = list(zip(*(side.split(self._sizes) for side in rope), strict=True))
        turns = zip(self._turns, heads.split(self._sizes), angles, strict=True)
        return torch.cat([turn.attend(layer, own, norm, at) for turn, own, at in turns])

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        parts = [self._turns[0].recur(layer, inputs[: self._sizes[0]], recurrence, of_rows)]
        if len(self._sizes) == 1:
            return parts[0]
        fed = inputs[self._sizes[0] :].clone().split(self._sizes[1:])
        states = {name: tensor[self._rows[1]] for name, tensor in self._cache.state(layer).items()}  # copies
        for own in fed:
            parts.append(recurrence(own[:, None], {name: tensor[: len(own)] for name, tensor in states.items()})[:, 0])
        self._fed.append((layer, fed, recurrence, of_rows))
        return torch.cat(parts)

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def accept(self, turns: Sequence[Tensor]) -> None:
        """Go on with the states of ``turns[t] [n]``, the rows of turn t + 1, or the padding row in place of those whose
        tokens are rejected.
        """
        for layer, fed, recurrence, of_rows in self._fed:
            for rows, own in zip(turns, fed, strict=True):
                RowsView(self._cache, rows, (), self._kernels).recur(layer, own, recurrence, of_rows)
