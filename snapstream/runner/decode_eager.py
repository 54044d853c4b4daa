"""The decode step as plain calls: the definition of every other executor.

One token for each row of a batch: embed, layers against the rows view, logits, sample, advance. Everything between the
row indices and the sampled ids stays on the device. ``decode_graph.py`` compiles or captures the same two halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.layers.sampler import Sampled, sample
from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.runner.decode_step import StepParts
from snapstream.runner.forward import RowsForward


class EagerDecode:
    """Decode step over ``rows [B]`` of the persistent state; a ``DecodeStep``."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._forward = RowsForward(parts.decoder, parts.cache, parts.rows, parts.queries)

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Where kernels are compiled at their first launch, launch them: a step of the padding row for each kind of
        batch."""
        kernels = self._parts.decoder.kernels
        if kernels.version == "triton":
            for size in kernels.batch_tiles:
                if size <= self._parts.config.max_rows:
                    self.logits(torch.full((size,), self._parts.padding_row, device=self._parts.decoder.device))

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each row its last token and draw the next one; ``rows [B]`` int64."""
        return self.draw(self.logits(rows), rows, needs)

    def logits(self, rows: Tensor) -> Tensor:
        """First half: feed each of ``rows [B]`` its last token; scores of the next ``[B, V]`` fp32."""
        return self._forward.logits(rows)

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Second half: draw a token per row from ``logits [B, V]`` and advance the rows."""
        sampled = sample(logits, self._parts.sampling, rows, needs)
        self._parts.rows.advance(rows, sampled.token_ids)
        return sampled
