"""Layer-wise prefill: packed prompts pass the model layer by layer, each layer in chunks of tokens.

After the last chunk of a layer ``layer_done`` is called for every prompt with the exact keys and values of that layer
and the queries it asked for. Rows are written and a draft's importance summed there. Then the next layer overwrites the
buffers. Invariant: chunk length, packing and interleaving with other work never change what ``layer_done`` gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from snapstream.kernels.backends.autotune import PrefillAttention
from snapstream.kernels.interface import CosSin
from snapstream.kernels.memory import upload
from snapstream.kernels.rows import PackedLens
from snapstream.kv.spec import Shared, State
from snapstream.models.decoder import Decoder, Layer, added
from snapstream.models.layers import TokenInputs
from snapstream.models.views import Chunk, PromptStates, QueriesAt, Segment, StagingBuffers, StagingView

# Tokens whose output of the last layer is computed, because only logits read it. Trailing layers that share the keys
# and values of others compute these tokens only, too.
Outputs = Literal["all", "last", "none"]


class LayerDone(Protocol):
    """Called once per layer and prompt, when all of the prompt's tokens have passed the layer."""

    def __call__(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        """``prompt`` is the index in the pass; ``queries [w, H, E]`` its last queries, None if it asked for none, or
        of a layer that shares the keys and values of another; ``keys, values [G, N, E]`` those of all its tokens, after
        RoPE; the next layer overwrites them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTokens:
    """The N computed tokens of a pass, prompt after prompt, and where they are staged."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, of each token in its text
    seq_lens: Tensor  # [N] int64: length of the text when the token is fed; only dynamic RoPE reads it
    prompt_lens: Sequence[int]  # of whole prompts
    num_queries: Sequence[int]  # by prompt: how many of its last queries layer_done gets
    staging_start: int = 0  # first token in the buffers
    # By prompt: first tokens that are not computed; the caller stages their keys and values before a layer's first
    # unit. Empty: none.
    num_restored: Sequence[int] = ()
    adapters: Sequence[int] = ()  # LoRA adapters by prompt, 0: none; empty: none at all
    # So many last tokens of a prompt pass the last layer in any case; other outputs keep their bits.
    num_hidden: int = 0

    @property
    def num_computed(self) -> list[int]:
        """Computed tokens by prompt; they sum to N."""
        restored = self.num_restored or [0] * len(self.prompt_lens)
        return [length - given for length, given in zip(self.prompt_lens, restored, strict=True)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class LayerPass:
    """One pass. ``run_unit`` must be called for units 0, 1, 2, ... in order; unit ``u`` is a chunk of one layer."""

    def __init__(
        self,
        decoder: Decoder,
        buffers: StagingBuffers,
        tokens: PassTokens,
        chunk_len: int,
        attention: PrefillAttention,
        layer_done: LayerDone,
        outputs: Outputs = "last",
        states: PromptStates | None = None,
    ) -> None:
        """``states`` are needed by models with recurrent layers, for which ``layer_done`` is not called."""
        self._states = states
        self._decoder, self._buffers, self._tokens = decoder, buffers, tokens
        self._chunk_len, self._attention, self._layer_done, self._outputs = chunk_len, attention, layer_done, outputs
        self._num_chunks = -(-tokens.num_tokens // chunk_len)
        self._next_unit = 0
        self._computed = tokens.num_computed
        self._starts = list(accumulate(self._computed, initial=0))[:-1]  # first token of each prompt in the pass
        begins = list(accumulate(tokens.prompt_lens, initial=tokens.staging_start))[:-1]
        self._staged = [slice(a, a + n) for a, n in zip(begins, tokens.prompt_lens, strict=True)]  # in the buffers
        self._lens: dict[int, PackedLens] = {}  # by chunk; the same in every layer
        self._rope: CosSin | None = None  # of a pass of one chunk, the same in every layer
        spec, device = buffers.spec, buffers.hidden.device
        self._queries = [  # of the current layer [w, H, E], at the start of as many numbers as the widest heads take
            torch.empty(count * spec.num_heads * spec.key_dim, dtype=buffers.dtype, device=device) if count else None
            for count in tokens.num_queries
        ]

    @property
    def hidden(self) -> Tensor:
        """Hidden states ``[N, D]``, a view of the buffers."""
        start = self._tokens.staging_start
        return self._buffers.hidden[start : start + self._tokens.num_tokens]

    @property
    def num_units(self) -> int:
        return self._num_chunks * self._decoder.config.num_layers

    @property
    def next_unit(self) -> int:
        return self._next_unit

    @property
    def is_done(self) -> bool:
        return self._next_unit == self.num_units

    @property
    def new_layer(self) -> int | None:
        """The layer that the next unit starts; None within a layer."""
        layer, index = divmod(self._next_unit, self._num_chunks)
        return layer if index == 0 else None

    def staged(self, prompt: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[G, n, E]`` of a prompt in a layer's buffers, restored tokens first."""
        place = self._staged[prompt]
        return self._buffers.tokens(layer, place.start, place.stop)

    def _kept_queries(self, prompt: int, layer: int) -> Tensor | None:
        """The prompt's last queries ``[w, H, E]`` of the current layer; None if it asked for none."""
        kept, spec = self._queries[prompt], self._buffers.spec
        if kept is None:
            return None
        num_heads = self._decoder.shard.heads_of(layer).num_heads
        shape = self._tokens.num_queries[prompt], num_heads, spec.slots_of(layer).key_dim
        return kept[: prod(shape)].view(shape)

    def last_hidden(self) -> Tensor:
        """Hidden states ``[prompts, D]`` after the last layer, of the last token of each prompt."""
        ends = [start + length for start, length in zip(self._starts, self._computed, strict=True)]
        return torch.cat([self.hidden[end - 1 : end] for end in ends])

    def run(self) -> None:
        for unit in range(self._next_unit, self.num_units):
            self.run_unit(unit)

    def run_unit(self, unit: int) -> None:
        """One chunk through one layer. RuntimeError out of order."""
        if unit != self._next_unit:
            raise RuntimeError(f"unit {unit} was planned, unit {self._next_unit} is next")
        layer, index = divmod(unit, self._num_chunks)
        start = index * self._chunk_len
        tokens = slice(start, min(start + self._chunk_len, self._tokens.num_tokens))
        residual = self.hidden[tokens]  # [T, D]
        if layer == 0:
            residual.copy_(self._decoder.embed(self._tokens.token_ids[tokens]))
        self._run_layer(layer, residual, tokens, self._chunk(layer, index, tokens))
        if index == self._num_chunks - 1:
            self._end_layer(layer)
        self._next_unit += 1

    def _run_layer(self, layer: int, residual: Tensor, tokens: slice, chunk: Chunk) -> None:
        """Replace ``residual [T, D]`` by the output of the layer, for tokens that need one."""
        is_recurrent, tails = isinstance(self._buffers.spec.layers[layer], State), self._tails(chunk)
        attends_all = is_recurrent and bool(tails)  # states would change if the layer ran again
        view = self._view(replace(chunk, outputs=None) if attends_all else chunk, partial(self._keep_queries, layer))
        is_last = chunk.outputs is not None and layer >= self._buffers.spec.num_prefill_layers
        if is_last and not chunk.outputs:
            return
        block = self._decoder.prefill_layer(layer)
        rope = (residual[:0], residual[:0]) if is_recurrent else self._angles(tokens)  # there nothing is rotated
        self._adapt((part.prompt, part.length) for part in chunk.segments)
        attended = residual[:0] if is_last else block.attend(residual, None, rope, view)
        inputs = self._decoder.token_inputs(self._tokens.token_ids[tokens])
        if chunk.outputs is None:
            added(residual, self._decoder.finish_layer(layer, block, (residual, attended), inputs))
            return
        places = [place for own in tails for place in range(own.chunk_slice.start, own.chunk_slice.stop)]
        if tails:
            others = residual[places]
            self._adapt((own.prompt, own.length) for own in tails)
            heads = attended[places] if attends_all else self._attend_tails(block, tails, others, rope, places)
            given = None if inputs is None else TokenInputs(inputs.token_ids[places], inputs.embedded[places])
            added(others, self._decoder.finish_layer(layer, block, (others, heads), given))
            attended = attended[list(chunk.outputs)] if attends_all else attended
        # One prompt at a time unless batch-invariant, so that packing does not change the result.
        at_once = max(1, len(chunk.outputs)) if self._decoder.is_batch_invariant else 1
        for first in range(0, len(chunk.outputs), at_once):
            own = list(chunk.outputs[first : first + at_once])
            targets = [residual[place] for place in own]
            last = torch.stack(targets)  # [outputs, D]
            given = None if inputs is None else TokenInputs(inputs.token_ids[own], inputs.embedded[own])
            self._adapt(
                (part.prompt, 1)
                for place in own
                for part in chunk.segments
                if place - part.chunk_start in range(part.length)
            )
            heads = attended[first : first + at_once]
            if is_last:
                view.take_only(own)
                heads = block.attend(last, None, (rope[0][..., own, :, :], rope[1][..., own, :, :]), view)
            added(last, self._decoder.finish_layer(layer, block, (last, heads), given))
            for place, hidden in zip(targets, last, strict=True):
                place.copy_(hidden)
        if tails:
            kept = [index for index, place in enumerate(places) if place not in chunk.outputs]
            residual[[places[index] for index in kept]] = others[kept]

    def _view(self, chunk: Chunk, keep: Callable[[Sequence[Segment], QueriesAt], None]) -> StagingView:
        return StagingView(self._buffers, chunk, self._decoder.kernels, self._attention, keep, self._states)

    def _tails(self, chunk: Chunk) -> list[Segment]:
        """The chunk's share of the last ``num_hidden`` tokens of each prompt, where only few tokens need outputs."""
        found: list[Segment] = []
        for own in chunk.segments if self._tokens.num_hidden and chunk.outputs is not None else ():
            skip = max(self._tokens.prompt_lens[own.prompt] - self._tokens.num_hidden - own.prompt_start, 0)
            if skip < own.length:
                start = own.prompt_start + skip
                at, length = own.chunk_start + skip, own.length - skip
                # As if the tokens before it were restored: latents before it are not expanded yet.
                found.append(replace(own, chunk_start=at, length=length, prompt_start=start, num_restored=start))
        return found

    def _attend_tails(
        self, block: Layer, tails: Sequence[Segment], residual: Tensor, rope: CosSin, places: Sequence[int]
    ) -> Tensor:
        """Heads of the tokens at ``places`` of a chunk, whose ``residual`` is given; their keys are staged again."""
        starts = accumulate((own.length for own in tails), initial=0)
        packed = [replace(own, chunk_start=start) for own, start in zip(tails, starts, strict=False)]
        view = self._view(Chunk(segments=packed), lambda segments, queries_at: None)
        return block.attend(residual, None, (rope[0][..., places, :, :], rope[1][..., places, :, :]), view)

    def _adapt(self, runs: Iterable[tuple[int, int]]) -> None:
        """The next products are of these prompts, each with so many tokens."""
        if self._decoder.adapters is not None:
            given = self._tokens.adapters
            self._decoder.adapters.select((given[prompt] if given else 0, length) for prompt, length in runs)

    def _angles(self, tokens: slice) -> CosSin:
        if self._rope is not None:
            return self._rope
        rope = self._decoder.rope(self._tokens.positions[tokens], self._tokens.seq_lens[tokens])
        if self._num_chunks == 1:
            self._rope = rope
        return rope

    def _chunk(self, layer: int, index: int, tokens: slice) -> Chunk:
        segments = list(self._segments(tokens.start, tokens.stop))
        outputs: list[int] | None = None
        if self._outputs != "all" and layer >= self._buffers.spec.num_prefill_layers - 1:
            ends = [s.chunk_slice.stop - 1 for s in segments if s.num_keys == self._tokens.prompt_lens[s.prompt]]
            outputs = ends if self._outputs == "last" else []
        return Chunk(segments=segments, lens=self._packed_lens(index, segments), outputs=outputs)

    def _segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Parts of the prompts in tokens ``start .. stop - 1`` of the pass."""
        for index, (first, length) in enumerate(zip(self._starts, self._computed, strict=True)):
            low, high = max(start, first), min(stop, first + length)
            if low < high:
                restored = self._tokens.prompt_lens[index] - length
                begin = self._staged[index].start
                yield Segment(index, low - start, high - low, restored + low - first, begin, restored)

    def _packed_lens(self, chunk: int, segments: list[Segment]) -> PackedLens | None:
        """Lengths of a chunk's prompts, on the device; None if each is attended in a separate call."""
        if len(segments) == 1 or self._attention.attend_packed is None:
            return None
        if chunk not in self._lens:
            queries, keys = [part.length for part in segments], [part.num_keys for part in segments]
            ends = upload(
                [list(accumulate(queries, initial=0)), list(accumulate(keys, initial=0))],
                torch.int32,
                self.hidden.device,
            )
            self._lens[chunk] = PackedLens(ends[0], ends[1], max(queries), max(keys))
        return self._lens[chunk]

    def _keep_queries(self, layer: int, segments: Sequence[Segment], queries_at: QueriesAt) -> None:
        """Copy those of the prompts' last queries that are in this chunk."""
        for segment in segments:
            kept = self._kept_queries(segment.prompt, layer)
            if kept is None:
                continue
            first = self._tokens.prompt_lens[segment.prompt] - kept.shape[0]  # the first one that is kept
            offset = segment.prompt_start - first
            skip = max(0, -offset)
            if skip < segment.length:
                place = segment.chunk_slice
                kept[offset + skip : offset + segment.length] = queries_at(slice(place.start + skip, place.stop))

    def _end_layer(self, layer: int) -> None:
        own = self._buffers.spec.layers[layer]
        if isinstance(own, State) or self._buffers.spec.state_shapes(layer):
            for prompt in range(len(self._queries)):
                assert self._states is not None
                self._states.done(prompt, layer)
        if isinstance(own, State):
            return
        is_shared = isinstance(self._buffers.spec.layers[layer], Shared)
        for prompt in range(len(self._queries)):
            queries = None if is_shared else self._kept_queries(prompt, layer)
            self._layer_done(prompt, layer, queries, *self.staged(prompt, layer))
