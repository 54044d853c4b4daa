"""The rows of a decode step as an executor takes them: made when the batch changes, which most steps do not.

Invariant: what is returned depends on the rows and their sampling parameters alone, and nobody writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.layers.upload import upload
from snapstream.request import SamplingParams


class Batch(NamedTuple):
    """One step's."""

    rows: Tensor  # [B] int64, on the device
    params: list[SamplingParams]
    needs: SamplingNeeds


class DecodeBatches:
    """Makes them, and keeps the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: tuple[int, ...] | None = None
        self._last: Batch | None = None

    def of(self, rows: tuple[int, ...], params: Mapping[int, SamplingParams]) -> Batch:
        """The batch of ``rows``; ``params`` are those of all rows that are in use."""
        own = [params[row] for row in rows]
        if self._last is None or rows != self._rows or own != self._last.params:
            self._last = Batch(upload(rows, torch.int64, self._device), own, SamplingNeeds.of(own))
            self._rows = rows
        return self._last
