"""Moves keys and values between the prefix store and the staging buffers, one layer of a prompt at a time.

``place`` copies cached blocks into staging before a layer's first chunk; ``save`` fills new blocks once the layer is
complete. Invariant: after ``place`` staging holds, bit for bit, what the prefill that filled the blocks had staged.

On a CPU both are plain copies (``PrefixMover``). On a GPU the copies overlap the computation (``DeviceMover``):

            host blocks --side stream--> bounce buffer --compute stream--> staging       layer l + 1 while l computes
            host blocks <--side stream-- bounce buffer <--compute stream-- staging       layer l while l + 1 computes

The bounce buffer has a place for every block of the staging pool, so every block of a job keeps its own place as long
as the job's tokens are staged. The compute stream waits for a copy only where the link is slower than the computation;
the scheduler plans no chunk of such a job until ``is_ready``, so that other jobs need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from snapstream.kv.cache import KVCache
from snapstream.kv.prefix_store import PrefixBlocks
from snapstream.kv.spec import Full
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves, SavedRow

Mark = Any  # a point in a stream


class SideStream(Protocol):
    """An in-order queue of copies that overlaps the compute stream; tests replace it to delay copies."""

    def now(self) -> Mark:
        """What the compute stream has been given so far."""
        ...

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        """Queue work after a mark of the compute stream; a mark of its end."""
        ...

    def hold(self, mark: Mark) -> None:
        """Let the compute stream wait for a mark."""
        ...

    def is_done(self, mark: Mark) -> bool: ...

    def wait(self, mark: Mark) -> None:
        """Let the host wait for a mark."""
        ...


class CudaSideStream:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def now(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            work()
            return self.now()

    def hold(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def is_done(self, mark: Mark) -> bool:
        return bool(mark.query())

    def wait(self, mark: Mark) -> None:
        mark.synchronize()


class PrefixMover:
    """Copies on the host; ``keys, values [G, n, E]`` are a prompt's range of the staging buffers."""

    def __init__(self, blocks: PrefixBlocks) -> None:
        self.blocks = blocks

    def open(self, job: JobSpec) -> None:
        """A job is about to begin."""

    def is_ready(self, job_id: int) -> bool:
        """Whether the cached blocks of a job's next layer have been copied."""
        return True

    def close(self, job_id: int, *, is_done: bool) -> None:
        """A job has ended or was dropped, perhaps before it was opened here."""

    def place(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy the cached blocks of a layer of a prompt into staging."""
        moves = entry.prefix
        # States: ``exec/prefill.py``. Shared keys and values are those that the source's layer has restored.
        if moves is None or not isinstance(self.blocks.spec.layers[layer], Full):
            return
        for own, block in zip(_pieces(moves, 0, len(moves.restored)), moves.restored, strict=True):
            stored_keys, stored_values = self.blocks.layer(block, layer)
            keys[:, own].copy_(stored_keys)
            if stored_values is not None:
                values[:, own].copy_(stored_values)

    def save(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the prompt's blocks of a layer."""
        moves = entry.prefix
        if moves is None:
            return
        for own, block in zip(_pieces(moves, moves.first_saved, len(moves.saved)), moves.saved, strict=True):
            stored_keys, stored_values = self.blocks.layer(block, layer)
            stored_keys.copy_(keys[:, own])
            if stored_values is not None:
                stored_values.copy_(values[:, own])


def save_row(blocks: PrefixBlocks, cache: KVCache, saved: SavedRow) -> None:
    """Fill blocks from a row in the staging dtype that has evicted nothing: token ``p`` is in slot ``p``."""
    moves, (row,) = saved.moves, cache.local_rows((saved.row,))
    for layer in cache.spec.slot_layer_indices:
        stored = cache.whole_slots(layer, row)  # [G, C, E]
        for own, block in zip(_pieces(moves, moves.first_saved, len(moves.saved)), moves.saved, strict=True):
            for filled, slots in zip(blocks.layer(block, layer), stored, strict=True):
                if filled is not None:
                    filled.copy_(slots[:, own])


def _pieces(moves: PrefixMoves, first: int, count: int) -> Iterator[slice]:
    """Token ranges of ``count`` blocks of a prompt."""
    for index in range(first, first + count):
        yield slice(index * moves.block_len, (index + 1) * moves.block_len)


@dataclass(slots=True)
class _Copies:
    first_place: int  # of its first block in the bounce buffer
    loaded: Mark = None  # of the next layer's cached blocks
    saved: Mark = None  # of the last layer's new blocks


class DeviceMover(PrefixMover):
    """A mover with a bounce buffer for ``pool_tokens`` staged tokens."""

    def __init__(self, blocks: PrefixBlocks, pool_tokens: int, device: torch.device | str, side: SideStream) -> None:
        super().__init__(blocks)
        spec, size = blocks.spec, blocks.block_len
        self._side = side
        self.bounce = torch.empty(  # [blocks, numbers of a block in a layer]
            (num_places(pool_tokens, size), size * spec.token_size), dtype=getattr(torch, spec.dtype), device=device
        )
        self._copies: dict[int, dict[str, _Copies]] = {}  # by job and request

    def open(self, job: JobSpec) -> None:
        """Start to load the first layer of a job's prompts."""
        start = job.staging_start
        for entry in job.entries:
            if entry.prefix is not None:
                copies = _Copies(-(-start // self.blocks.block_len))
                self._copies.setdefault(job.job_id, {})[entry.request_id] = copies  # recorded before any copy starts
                if entry.prefix.restored:
                    copies.loaded = self._load(entry.prefix, copies, 0)
            start += entry.prompt_len

    def is_ready(self, job_id: int) -> bool:
        """Whether the copies that the job's next layer needs are done; False before ``open``."""
        marks = [m for one in self._copies.get(job_id, {}).values() for m in (one.loaded, one.saved) if m is not None]
        return job_id in self._copies and all(self._side.is_done(mark) for mark in marks)

    def place(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        moves = entry.prefix
        if moves is None or not moves.restored:
            return
        copies = self._copies[job.job_id][entry.request_id]
        self._side.hold(copies.loaded)
        for staged, bounced in self._pairs(keys, values, copies.first_place, 0, len(moves.restored)):
            staged.copy_(bounced)
        if layer + 1 < self.blocks.spec.num_layers:
            copies.loaded = self._load(moves, copies, layer + 1)

    def save(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        moves = entry.prefix
        if moves is None or not moves.saved:
            return
        copies = self._copies[job.job_id][entry.request_id]
        if copies.saved is not None:
            self._side.hold(copies.saved)  # the layer before has left the bounce buffer
        for staged, bounced in self._pairs(keys, values, copies.first_place, moves.first_saved, len(moves.saved)):
            bounced.copy_(staged)
        first = copies.first_place + moves.first_saved

        def copy_out() -> None:
            for place, block in enumerate(moves.saved, start=first):
                self.blocks.piece(block, layer).copy_(self.bounce[place], non_blocking=True)

        copies.saved = self._side.run(copy_out, self._side.now())

    def close(self, job_id: int, *, is_done: bool) -> None:
        """Wait for the job's copies: on the compute stream, or on the host if the job was dropped and its blocks may be
        reused at once.
        """
        for copies in self._copies.pop(job_id, {}).values():
            for mark in (copies.loaded, copies.saved):
                if mark is not None:
                    self._side.hold(mark) if is_done else self._side.wait(mark)

    def _load(self, moves: PrefixMoves, copies: _Copies, layer: int) -> Mark:
        def copy_in() -> None:
            for place, block in enumerate(moves.restored, start=copies.first_place):
                self.bounce[place].copy_(self.blocks.piece(block, layer), non_blocking=True)

        return self._side.run(copy_in, self._side.now())

    def _pairs(self, keys: Tensor, values: Tensor, place: int, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """``count`` blocks of a prompt, from its block ``first`` on: views ``[n, G, block_len, E]`` of staging and of
        the bounce buffer; keys, and values unless they are part of the keys.
        """
        spec, size = self.blocks.spec, self.blocks.block_len
        own = self.bounce[place + first : place + first + count]  # [n, numbers]
        tokens = slice(first * size, (first + count) * size)
        num_keys = size * spec.key_size
        shape = (spec.num_kv_heads, size, spec.key_dim)
        pairs = [(keys[:, tokens].unflatten(1, (count, size)).transpose(0, 1), own[:, :num_keys].unflatten(1, shape))]
        if not spec.values_are_keys:
            shape = (spec.num_kv_heads, size, spec.value_dim)
            pairs.append(
                (values[:, tokens].unflatten(1, (count, size)).transpose(0, 1), own[:, num_keys:].unflatten(1, shape))
            )
        return pairs


def make_mover(blocks: PrefixBlocks, pool_tokens: int, device: torch.device) -> PrefixMover:
    if device.type != "cuda":
        return PrefixMover(blocks)
    return DeviceMover(blocks, pool_tokens, device, CudaSideStream())


def num_places(pool_tokens: int, block_len: int) -> int:
    """Blocks of the bounce buffer of a staging pool; a job's first token is rounded up to a block."""
    return -(-pool_tokens // block_len)
