"""Moves keys and values between the prefix store and the staging buffers, a layer of a prompt at a time.

``place`` puts what a prompt restores where its prefill would have staged it, before a layer's first unit; ``save``
copies what it fills, when the layer is whole. On a CPU both are plain copies; ``prefix_device.py`` has a GPU's. The
invariant: after ``place`` staging holds what the prefill that filled the blocks had staged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from snapstream.cache.prefix_blocks import PrefixBlocks
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves


class PrefixMover:
    """Copies on the host; ``keys, values [G, n, E]`` are a prompt's range of the staging buffers."""

    def __init__(self, blocks: PrefixBlocks) -> None:
        self.blocks = blocks

    def open(self, job: JobSpec) -> None:
        """A job is about to begin."""

    def is_ready(self, job_id: int) -> bool:
        """Whether the next layer of a job has all that it restores."""
        return True

    def close(self, job_id: int, *, is_done: bool) -> None:
        """A job has run its last unit, or was given up, perhaps before it was opened here."""

    def place(self, job: JobSpec, entry: PrefillEntry, layer: int, keys: Tensor, values: Tensor) -> None:
        """Restore what a layer of a prompt of the job begins with."""
        moves = entry.prefix
        if moves is None:
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


def _pieces(moves: PrefixMoves, first: int, count: int) -> Iterator[slice]:
    """Tokens of ``count`` blocks of a prompt."""
    for index in range(first, first + count):
        yield slice(index * moves.block_len, (index + 1) * moves.block_len)
