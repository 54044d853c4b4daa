"""Moves blocks between the prefix store and a GPU, beside the computation.

            host blocks --side stream--> bounce buffer --compute stream--> staging       layer l + 1 while l computes
            host blocks <--side stream-- bounce buffer <--compute stream-- staging       layer l while l + 1 computes

The bounce buffer has a place for every block of the staging pool, so the blocks of a job have places of their own for
as long as its tokens do; restored and saved blocks of a prompt are different ones. The compute stream waits for a copy
only where the link is slower than the computation; the scheduler then plans no unit of the job before ``is_ready`` says
so, so that others need not wait with it. Invariant: what ``place`` and ``save`` leave behind is what ``PrefixMover``'s
plain copies would. ``side_stream.py`` is the one that knows CUDA. Not run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache.prefix_blocks import PrefixBlocks
from snapstream.runner.prefix import PrefixMover
from snapstream.runner.side_stream import CudaSideStream, Mark, SideStream
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves


@dataclass(slots=True)
class _Traffic:
    """Of one prompt."""

    first_place: int  # of its first block in the bounce buffer
    loaded: Mark = None  # the next layer's restored blocks have come
    saved: Mark = None  # the last layer's saved blocks have gone


class DeviceMover(PrefixMover):
    """A mover with a bounce buffer for ``pool_tokens`` staged tokens."""

    def __init__(self, blocks: PrefixBlocks, pool_tokens: int, device: torch.device | str, side: SideStream) -> None:
        super().__init__(blocks)
        spec, size = blocks.spec, blocks.block_len
        self._side = side
        self.bounce = torch.empty(  # [blocks, numbers of a block in a layer]
            (num_places(pool_tokens, size), size * spec.token_size), dtype=getattr(torch, spec.dtype), device=device
        )
        self._traffic: dict[int, dict[str, _Traffic]] = {}  # by job and request

    def open(self, job: JobSpec) -> None:
        """Begin to load the first layer of a job's prompts."""
        start = job.staging_start
        for entry in job.entries:
            if entry.prefix is not None:
                traffic = _Traffic(-(-start // self.blocks.block_len))
                self._traffic.setdefault(job.job_id, {})[entry.request_id] = traffic  # noted before anything is copied
                if entry.prefix.restored:
                    traffic.loaded = self._load(entry.prefix, traffic, 0)
            start += len(entry.token_ids)

    def is_ready(self, job_id: int) -> bool:
        """Whether no copy that the job's next layer needs is under way; a job that is not open yet is not."""
        marks = [m for one in self._traffic.get(job_id, {}).values() for m in (one.loaded, one.saved) if m is not None]
        return job_id in self._traffic and all(self._side.is_done(mark) for mark in marks)

    def place(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        moves = entry.prefix
        if moves is None or not moves.restored:
            return
        traffic = self._traffic[job.job_id][entry.request_id]
        self._side.hold(traffic.loaded)
        for staged, bounced in self._pairs(keys, values, traffic.first_place, 0, len(moves.restored)):
            staged.copy_(bounced)
        if layer + 1 < self.blocks.spec.num_layers:
            traffic.loaded = self._load(moves, traffic, layer + 1)

    def save(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        moves = entry.prefix
        if moves is None or not moves.saved:
            return
        traffic = self._traffic[job.job_id][entry.request_id]
        if traffic.saved is not None:
            self._side.hold(traffic.saved)  # the layer before has left the bounce buffer
        for staged, bounced in self._pairs(keys, values, traffic.first_place, moves.first_saved, len(moves.saved)):
            bounced.copy_(staged)
        first = traffic.first_place + moves.first_saved

        def copy_out() -> None:
            for place, block in enumerate(moves.saved, start=first):
                self.blocks.whole(block)[layer].copy_(self.bounce[place], non_blocking=True)

        traffic.saved = self._side.run(copy_out, self._side.now())

    def close(self, job_id: int, *, is_done: bool) -> None:
        """The job, if it is known here, has run its last unit or was given up: nothing of it is under way afterwards,
        for the compute stream or, where its blocks may go to somebody else at once, for the host.
        """
        for traffic in self._traffic.pop(job_id, {}).values():
            for mark in (traffic.loaded, traffic.saved):
                if mark is not None:
                    self._side.hold(mark) if is_done else self._side.wait(mark)

    def _load(self, moves: PrefixMoves, traffic: _Traffic, layer: int) -> Mark:
        def copy_in() -> None:
            for place, block in enumerate(moves.restored, start=traffic.first_place):
                self.bounce[place].copy_(self.blocks.whole(block)[layer], non_blocking=True)

        return self._side.run(copy_in, self._side.now())

    def _pairs(self, keys: Tensor, values: Tensor, place: int, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """``count`` blocks of a prompt, from its block ``first`` on: views ``[n, G, block_len, E]`` of staging and of
        the bounce buffer; keys, and values unless keys hold them.
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
    """The mover of a device."""
    if device.type != "cuda":
        return PrefixMover(blocks)
    return DeviceMover(blocks, pool_tokens, device, CudaSideStream())


def num_places(pool_tokens: int, block_len: int) -> int:
    """Blocks of a bounce buffer beside a staging pool: a job's blocks begin at the next border behind its tokens."""
    return -(-pool_tokens // block_len)
