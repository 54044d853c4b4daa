"""Draws the first token of every row whose prompt has been read, here or by another engine, and hands it to decode.

Invariant: it depends on the prompt's last hidden state and on nothing else of the engine that read it: sampling,
grammars and seeds are those of the engine that answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.layers.sampler import sample
from snapstream.layers.sampling_state import NewRow, SamplingNeeds, SamplingState
from snapstream.layers.upload import upload
from snapstream.models.decoder import Decoder
from snapstream.request import SamplingParams
from snapstream.runner.decode_step import DecodeStep, OwnSampler
from snapstream.runner.grammars import RowGrammars
from snapstream.runner.results import Finished, SubmittedStep
from snapstream.runner.row_writer import RowWriter
from snapstream.runner.rows import Rows


class FirstTokens:
    """The last step of a prefill."""

    def __init__(
        self, decoder: Decoder, rows: Rows, sampling: SamplingState, grammars: RowGrammars, writer: RowWriter
    ) -> None:
        self._decoder, self._rows, self._sampling = decoder, rows, sampling
        self._grammars, self._writer = grammars, writer
        model = decoder.config
        # Some checkpoints name end tokens that their vocabulary does not have; they can never be drawn.
        self._end_ids = tuple(token for token in model.eos_token_ids if 0 <= token < model.vocab_size)
        self.params: dict[int, SamplingParams] = {}  # by row: which variant of the sampler a batch needs
        self._sampler: OwnSampler | None = None

    def use_decode(self, decode: DecodeStep) -> None:
        """Draw as ``decode`` does from now on; both ways draw the same tokens."""
        self._sampler = decode if isinstance(decode, OwnSampler) else None

    def draw(self, prompts: Sequence[Finished], hidden: Tensor, step: SubmittedStep) -> None:
        """``hidden [P, D]``: of the last token of each prompt, whose rows are written; none may be missing."""
        table: list[tuple[int, ...]] = []  # per row: itself, index of its prompt, counters
        new: list[NewRow] = []
        for index, prompt in enumerate(prompts):
            entry = prompt.entry
            ends = () if entry.sampling.ignore_eos else self._end_ids
            stop_ids = (*ends, *entry.sampling.stop_token_ids)
            for row, seed, counters in zip(entry.rows, entry.seeds, self._writer.counters(entry), strict=True):
                self.params[row] = entry.sampling
                table.append((row, index, *counters))
                new.append(NewRow(row, entry.sampling, seed, entry.token_ids, stop_ids))
        uploaded = upload(table, torch.int64, self._decoder.device)  # [rows, 6]
        rows, source = uploaded[:, 0], uploaded[:, 1]
        self._rows.admit(rows, uploaded[:, 2:])
        self._sampling.set_rows(new)
        for prompt in prompts:
            self._grammars.admit(prompt.entry)
            self._writer.admit(prompt.entry)
        params = [entry.sampling for entry in new]
        logits, needs = self._decoder.logits(hidden)[source], SamplingNeeds.of(params)  # [rows, V]
        if self._sampler is not None:
            sampled = self._sampler.sample(logits, rows, needs)
        else:
            sampled = sample(logits, self._sampling, rows, needs)
        self._rows.feed(rows, sampled.token_ids)
        self._grammars.follow([entry.row for entry in new], step.add_prefilled(sampled, params, prompts), step)
