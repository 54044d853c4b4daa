"""A model's own prediction layer (MTP) as its draft model (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The layer follows the model's last: from the hidden state of a token and the embedding of the next one it predicts the
token after that. For further tokens it takes its own output as the hidden state. Embeddings are the model's, of output
in int4. ``registry.prediction_config`` is its model of one layer, which a ``DraftModel`` runs like any other; only its
inputs are made here, and token ids stand for their places in a table of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from snapstream.config import EngineConfig, WeightFormats
from snapstream.config.engine import Speculator
from snapstream.exec.draft_model import DraftModel, Wanted
from snapstream.exec.eager import DraftBatch, MakeDecode, ShowsHidden
from snapstream.exec.executors import executor_of, max_batch
from snapstream.models.checkpoint import LoadProgress, load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import Matrix
from snapstream.models.weights import DecoderWeights

KEPT = torch.bfloat16  # dtype of the hidden states that rows keep


class PredictionDecoder(Decoder):
    """A prediction layer; ``given [N, D]`` are the inputs that token ids stand for."""

    given: Tensor

    @classmethod
    def of(cls, draft: Speculator, config: EngineConfig, target: Decoder, progress: LoadProgress) -> PredictionDecoder:
        """That of ``target``; ``config``: of the steps of the draft model."""
        model, dtype = draft.model, target.dtype
        make = executor_of(config.executor).storage(config)
        weights = load_weights(Path(draft.folder), model, dtype, config.device, progress, config.weights, make)
        plain = WeightFormats.of(config.dtype).layers
        table = make(plain, (max_batch(config), model.hidden_size), dtype, config.device)
        matrices = {**weights.matrices, "embed": table}
        return cls(model, DecoderWeights(model, matrices, weights.vectors, dtype, weights.dequantized))

    def take(self, tokens: Tensor, hidden: Tensor) -> None:
        """Make inputs of the embeddings of tokens and the normed hidden states before them, ``[N, D]`` each."""
        pairs, eps = ((tokens, "token_norm"), (hidden, "hidden_norm")), self.config.rms_norm_eps
        normed = [self.kernels.rms_norm(given, self.weights.vectors[name][0], eps) for given, name in pairs]
        self.given = self._join.multiply(torch.cat(normed, 1), None, self.kernels)
        table = self.weights.embed
        if len(self.given) <= table.shape[0]:  # more are read by prefill alone
            table[: len(self.given)].fill(self.given)

    @cached_property
    def _join(self) -> Matrix:
        return self.weights.layer(0).matrix("join")

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self.given[token_ids]


@dataclass(slots=True)
class _Seen:
    """Hidden states of the tokens ``begin .. end - 1`` of a sequence, the last of which are kept."""

    begin: int
    end: int


class PredictionDrafter(DraftModel):
    """A ``speculation.Drafter`` that follows the hidden states of its target. Token j of a row is fed with the hidden
    state of token j - 1; the last ``num_read`` of a row are kept, so that what it holds can be read anew.
    """

    def __init__(
        self, decoder: PredictionDecoder, config: EngineConfig, make_decode: MakeDecode, target: Decoder
    ) -> None:
        super().__init__(decoder, config, make_decode)
        assert isinstance(self.decode, ShowsHidden)  # others are refused
        self.layer, self._target, self._show = decoder, target, self.decode
        self.num_hidden = self._read_len
        self._kept = torch.empty(config.max_rows, self._read_len, decoder.config.hidden_size, dtype=KEPT)
        self._seen: dict[int, _Seen] = {}
        self._after: dict[int, Tensor] = {}  # by row, what the layer gave its last token [D], normed

    def forget(self, row: int) -> None:
        super().forget(row)
        self._after.pop(row, None)

    def begin(self, rows: Sequence[int], first: int, hidden: Tensor) -> None:
        """See ``speculation.Follower``."""
        end, kept = first + len(hidden), self._of_target(hidden).to(KEPT) if len(hidden) else hidden.to(KEPT)
        for row in rows:
            self._seen[row] = _Seen(first, end)
            self._kept[row, torch.arange(first, end) % self._read_len] = kept

    def follow(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        """See ``speculation.Follower``."""
        places: list[tuple[int, int, int]] = []  # of what is kept: row, place, entry
        for row, start, count in zip(rows, starts, counts, strict=True):
            seen = self._seen[row]
            places += ((row, (seen.end + i) % self._read_len, start + i) for i in range(count))
            seen.end += count
        own, at, entries = torch.tensor(places).unbind(1)
        self._kept[own, at] = self._of_target(hidden[entries]).to(KEPT)

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """See ``DraftModel``; none for a row of which nothing is known but its last token."""
        can = [self._first_of(row) < history.num_tokens for row, history, _ in wanted]
        usable = [own for own, is_usable in zip(wanted, can, strict=True) if is_usable]
        found = iter(super().draft(usable) if usable else ())
        for row, _, _ in usable:
            self._held[row].drafted = []  # fed with other hidden states than the target's
        return [next(found) if is_usable else [] for is_usable in can]

    def _of_target(self, hidden: Tensor) -> Tensor:
        target = self._target
        return target.kernels.rms_norm(hidden, target.weights.vectors["final_norm"], target.config.rms_norm_eps)

    def _first_of(self, row: int) -> int:
        seen = self._seen[row]
        return max(seen.begin, seen.end - self._read_len) + 1

    def _inputs(self, fed: Sequence[tuple[int, int, list[int]]]) -> list[list[int]]:
        hidden = [
            self._kept[row, torch.arange(first - 1, first - 1 + len(tokens)) % self._read_len]
            for row, first, tokens in fed
        ]
        ids = torch.tensor([token for _, _, tokens in fed for token in tokens])
        self.layer.take(self._target.embed(ids), torch.cat(hidden).float())
        places = iter(range(len(ids)))
        return [[next(places) for _ in tokens] for _, _, tokens in fed]

    def _feed_drafted(self, active: Tensor, rows: Sequence[int], tokens: Tensor, depth: int) -> None:
        if depth == 1:
            hidden = torch.stack([self._after[row] for row in rows])
        else:
            hidden = self._normed(self._show.hidden(len(rows)))
        self.layer.take(self._target.embed(tokens[: len(rows)].clamp(min=0)), hidden)
        self._rows.feed(active, torch.arange(len(rows)))

    def _feed_batch(self, rows: Sequence[int], batch: DraftBatch) -> Tensor:
        logits = self.decode.feed(batch)
        self._after |= zip(rows, self._normed(self._show.hidden(len(rows))), strict=True)
        return logits

    def _read_logits(self, row: int, hidden: Tensor) -> Tensor:
        self._after[row] = self._normed(hidden)[0]
        return super()._read_logits(row, hidden)

    def _normed(self, hidden: Tensor) -> Tensor:
        return self.layer.kernels.rms_norm(
            hidden, self.layer.weights.vectors["final_norm"], self.layer.config.rms_norm_eps
        )
