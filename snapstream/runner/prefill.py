"""A prefill job: a pass over packed prompts whose rows are written as each layer ends.

A prompt that begins with blocks of the prefix store is computed behind them: ``prefix.py`` puts them into staging
before each layer. Rows are written from the whole prompt in any case.
``models/layer_pass.py`` reads the prompts; ``row_writer.py`` writes the rows; ``model_runner.py`` owns the jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.layers.upload import upload
from snapstream.models.decoder import Decoder
from snapstream.models.layer_pass import LayerPass, PassTokens
from snapstream.models.staging import StagingBuffers
from snapstream.runner.prefix import PrefixMover
from snapstream.runner.row_writer import RowWriter
from snapstream.runner.stopwatch import Stopwatch
from snapstream.step import JobSpec, PrefillEntry


class PromptProgress:
    """What a job remembers of one prompt from unit to unit."""

    def __init__(self, entry: PrefillEntry, job_start: int, device: torch.device) -> None:
        self.entry = entry
        self.prompt_len = len(entry.token_ids)
        self.job_start = job_start  # first token, counted in the job
        self.compress_time = Stopwatch(device)
        self.kept: list[Tensor] = []  # per layer [G, C], if asked for


class PrefillJob:
    """One ``JobSpec`` on the device. ``run_unit`` must be called for units 0, 1, 2, ... in order."""

    def __init__(
        self,
        spec: JobSpec,
        decoder: Decoder,
        buffers: StagingBuffers,
        writer: RowWriter,
        chunk_len: int,
        attention: PrefillAttention,
        mover: PrefixMover | None = None,
        send: Callable[[int, PrefillEntry], None] = lambda layer, entry: None,
    ) -> None:
        """``mover`` is needed by prompts that have anything to do with the prefix store; ``send`` is called when a
        layer of a row that goes to another engine is written."""
        self.spec, self._writer, self._mover, self._send = spec, writer, mover, send
        device = buffers.hidden.device
        starts = accumulate((len(entry.token_ids) - entry.num_restored for entry in spec.entries), initial=0)
        self.prompts = [
            PromptProgress(entry, start, device) for entry, start in zip(spec.entries, starts, strict=False)
        ]
        tokens = PassTokens(
            token_ids=upload(
                [i for entry in spec.entries for i in entry.token_ids[entry.num_restored :]], torch.int64, device
            ),
            positions=torch.cat([_positions(entry, device) for entry in spec.entries]),
            seq_lens=torch.cat(
                [
                    torch.full((len(entry.token_ids) - entry.num_restored,), entry.next_position, device=device)
                    for entry in spec.entries
                ]
            ),
            prompt_lens=[prompt.prompt_len for prompt in self.prompts],
            num_queries=[writer.num_queries(entry) for entry in spec.entries],
            staging_start=spec.staging_start,
            num_restored=[entry.num_restored for entry in spec.entries],
        )
        self.token_ids = tokens.token_ids  # [N]
        wants_all = any(entry.sampling.prompt_logprobs is not None for entry in spec.entries)
        self._pass = LayerPass(
            decoder,
            buffers,
            tokens,
            spec.chunk_len or chunk_len,
            attention,
            self._layer_done,
            "all" if wants_all else "last",
        )

    @property
    def hidden(self) -> Tensor:
        """Hidden states ``[N, D]`` of the packed prompts."""
        return self._pass.hidden

    @property
    def is_done(self) -> bool:
        return self._pass.is_done

    def last_hidden(self) -> Tensor:
        """Hidden states ``[prompts, D]`` after the last layer, of the last token of each prompt."""
        return self._pass.last_hidden()

    def run_unit(self, unit: int) -> None:
        """One chunk through one layer; its last chunk writes that layer of the rows. RuntimeError out of order."""
        if unit != self._pass.next_unit:
            raise RuntimeError(f"job {self.spec.job_id}: unit {unit} was planned, unit {self._pass.next_unit} is next")
        if self._pass.new_layer is not None:
            self._restore(self._pass.new_layer)
        self._pass.run_unit(unit)

    def _restore(self, layer: int) -> None:
        for index, prompt in enumerate(self.prompts):
            if self._mover is not None:
                self._mover.place(self.spec, prompt.entry, layer, *self._pass.staged(index))

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        own = self.prompts[prompt]
        if self._mover is not None:
            self._mover.save(self.spec, own.entry, layer, keys, values)
        own.compress_time.start()
        kept = self._writer.write(layer, own.entry, queries, keys, values)
        if kept is not None and own.entry.sampling.return_kept:
            own.kept.append(kept)
        own.compress_time.stop()
        if own.entry.is_sent:
            self._send(layer, own.entry)


def _positions(entry: PrefillEntry, device: torch.device) -> Tensor:
    """Positions ``[n]`` of a prompt's computed tokens in their text."""
    if entry.positions is None:
        return torch.arange(entry.num_restored, len(entry.token_ids), device=device)
    return upload(entry.positions, torch.int64, device)
