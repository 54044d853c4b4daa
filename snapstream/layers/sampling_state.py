"""Sampling parameters and progress of every row, in tensors that keep their address.

Invariant: one entry per row plus the padding row (the last, always greedy and neutral); ``set_rows`` writes
all of a row's entries and resets its counters, so nothing of an earlier request remains. Everything is made at the
start, 5 1/8 bytes per token of the vocabulary and row: a captured step may read it, and no request can run out of
memory later. ``SamplingNeeds`` is what the host knows of a batch: it chooses the variant of the static step. Next:
``sampler.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.layers.random import stream_of
from snapstream.layers.upload import upload
from snapstream.request import MAX_LOGIT_BIAS, NUM_STOP_IDS, SamplingParams

MAX_VOCAB = 2**20  # V x the weight of the likeliest token must fit an int64, see sampler.WEIGHT_ONE
LOGPROB_SIZES = (0, 5, 20)  # top-n is rounded up to one of these, so that variants of the step stay few


def _uses_penalties(sampling: SamplingParams) -> bool:
    is_additive = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return is_additive or sampling.repetition_penalty != 1.0


@dataclass(frozen=True, kw_only=True)
class SamplingNeeds:
    """Which parts of sampling a batch needs. More than needed is never wrong: neutral rows stay the same."""

    bias: bool = False
    min_tokens: bool = False
    penalties: bool = False
    grammar: bool = False  # some row may draw allowed tokens only
    random: bool = False  # some row is not greedy
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    num_logprobs: int | None = None  # None: not even those of the drawn tokens

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> SamplingNeeds:
        """Needs of a batch with these parameters. Depends on parameters only, not on how far the rows are."""
        batch = tuple(rows)
        drawn = [sampling for sampling in batch if not sampling.is_greedy]
        tops = [sampling.logprobs for sampling in batch if sampling.logprobs is not None]
        return cls(
            bias=any(sampling.logit_bias for sampling in batch),
            min_tokens=any(sampling.min_tokens for sampling in batch),
            penalties=any(_uses_penalties(sampling) for sampling in batch),
            grammar=any(sampling.grammar for sampling in batch),
            random=bool(drawn),
            top_k=any(sampling.top_k for sampling in drawn),
            top_p=any(sampling.top_p < 1.0 for sampling in drawn),
            min_p=any(sampling.min_p > 0.0 for sampling in drawn),
            num_logprobs=next(size for size in LOGPROB_SIZES if size >= max(tops)) if tops else None,
        )


class Occurrences(NamedTuple):
    """What penalties look at; V x 5 bytes per row."""

    prompt_seen: Tensor  # [rows + 1, V] bool
    output_counts: Tensor  # [rows + 1, V] int32


class LogitBias(NamedTuple):
    """Sparse bias. Entries with bias 0 are padding, whatever their token is."""

    ids: Tensor  # [rows + 1, MAX_LOGIT_BIAS] int64
    values: Tensor  # [rows + 1, MAX_LOGIT_BIAS] fp32


class NewRow(NamedTuple):
    """A row and the request that it goes to."""

    row: int
    sampling: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    stop_ids: Sequence[int]


def _real_numbers(sampling: SamplingParams) -> list[float]:
    """Temperature, top_p, min_p and the presence, frequency and repetition penalties."""
    # The temperature is kept a normal float, so that (logit - peak) / temperature is never 0 / 0.
    temperature = 1.0 if sampling.is_greedy else max(sampling.temperature, sys.float_info.min)
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    return [temperature, sampling.top_p, sampling.min_p, *penalties]


class SamplingState:
    """Per-row sampling tensors for ``num_rows`` rows and the padding row ``num_rows``."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}; sampling is exact for 1 to {MAX_VOCAB}")
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # All below [rows + 1]. Float64 where a threshold must be the number that the caller wrote.
        self.is_greedy = self._filled(True, torch.bool)
        self.temperature = self._filled(1.0, torch.float64)
        self.top_p = self._filled(1.0, torch.float64)
        self.top_k = self._filled(vocab_size, torch.int64)
        self.min_p = self._filled(0.0, torch.float64)
        self.presence = self._filled(0.0, torch.float32)
        self.frequency = self._filled(0.0, torch.float32)
        self.repetition = self._filled(1.0, torch.float32)
        self.min_tokens = self._filled(0, torch.int64)
        self.stream = self._filled(0, torch.int64)  # the seed, mixed
        self.num_sampled = self._filled(0, torch.int64)  # output tokens so far; counter of the random stream
        self.stop_ids = self._filled(0, torch.int64, NUM_STOP_IDS)
        self.occurrences = Occurrences(
            prompt_seen=self._filled(False, torch.bool, vocab_size),
            output_counts=self._filled(0, torch.int32, vocab_size),
        )
        self.logit_bias = LogitBias(
            ids=self._filled(0, torch.int64, MAX_LOGIT_BIAS),
            values=self._filled(0.0, torch.float32, MAX_LOGIT_BIAS),
        )
        # [rows + 1, ceil(V / 32)] int32: bit t % 32 of word t // 32 tells whether token t may be drawn; -1 allows all.
        self.allowed = self._filled(-1, torch.int32, -(-vocab_size // 32))

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows and of the padding row."""
        single = (value for value in vars(self).values() if isinstance(value, Tensor))
        return sum(tensor.nbytes for tensor in (*single, *self.occurrences, *self.logit_bias))

    def _filled(self, value: float, dtype: torch.dtype, *width: int) -> Tensor:
        return torch.full((self.num_rows + 1, *width), value, dtype=dtype, device=self.device)

    def set_row(
        self,
        row: int,
        sampling: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        """Give one row to a request; see ``set_rows``."""
        self.set_rows([NewRow(row, sampling, seed, prompt_ids, stop_ids)])

    def set_rows(self, new: Sequence[NewRow]) -> None:
        """Give rows to requests; ``stop_ids`` (end tokens too) are held back until ``min_tokens``.

        One upload for all rows; penalties and logit bias need more for the rows that use them.
        """
        for entry in new:
            self._check(entry.row, entry.sampling, entry.prompt_ids, entry.stop_ids)
        whole = torch.tensor([self._whole_numbers(entry) for entry in new], dtype=torch.int64)
        real = torch.tensor([_real_numbers(entry.sampling) for entry in new], dtype=torch.float64)
        split = whole.shape[1]
        table = upload(torch.cat((whole, real.view(torch.int64)), dim=1), torch.int64, self.device)
        rows, is_greedy, top_k, stream, min_tokens = table[:, :5].unbind(1)
        temperature, top_p, min_p, presence, frequency, repetition = table[:, split:].view(torch.float64).unbind(1)
        self.is_greedy[rows] = is_greedy.to(torch.bool)
        self.temperature[rows] = temperature
        self.top_p[rows] = top_p
        self.top_k[rows] = top_k
        self.min_p[rows] = min_p
        self.presence[rows] = presence.to(torch.float32)
        self.frequency[rows] = frequency.to(torch.float32)
        self.repetition[rows] = repetition.to(torch.float32)
        self.stream[rows] = stream
        self.num_sampled[rows] = torch.zeros_like(rows)
        self.min_tokens[rows] = min_tokens
        self.stop_ids[rows] = table[:, 5:split]
        self.logit_bias.values.index_fill_(0, rows, 0.0)
        self.allowed.index_fill_(0, rows, -1)
        for entry in new:
            self._set_occurrences(entry.row, _uses_penalties(entry.sampling), entry.prompt_ids)
            self._set_bias(entry.row, entry.sampling.logit_bias)

    def allow(self, rows: Sequence[int], words: Tensor) -> None:
        """Tokens that ``rows`` may draw next: ``words`` [len(rows), ceil(V / 32)] int32, on any device."""
        own = upload(list(rows), torch.int64, self.device)
        self.allowed[own] = upload(words, torch.int32, self.device)

    def _check(self, row: int, sampling: SamplingParams, prompt_ids: Sequence[int], stop_ids: Sequence[int]) -> None:
        """Refuse before anything is written."""
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row is {row}; it must be from 0 to {self.num_rows - 1}")
        if len(set(stop_ids)) > NUM_STOP_IDS:
            raise ValueError(f"{len(set(stop_ids))} stop ids given; the limit is {NUM_STOP_IDS}")
        groups = {"logit_bias token id": sampling.logit_bias or (), "stop id": stop_ids}
        if _uses_penalties(sampling):
            groups["prompt token id"] = prompt_ids
        for name, ids in groups.items():
            wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{name} is {wrong}; it must be from 0 to {self.vocab_size - 1}")

    def _whole_numbers(self, new: NewRow) -> list[int]:
        """Row, is_greedy, top_k, stream, min_tokens and the stop ids."""
        sampling, ids = new.sampling, sorted(set(new.stop_ids))
        top_k = min(sampling.top_k or self.vocab_size, self.vocab_size)
        # Padded with an id that is there anyway: duplicates then write the same value.
        padded = ids + (ids[:1] or [0]) * (NUM_STOP_IDS - len(ids))
        min_tokens = sampling.min_tokens if ids else 0
        return [new.row, int(sampling.is_greedy), top_k, stream_of(new.seed), min_tokens, *padded]

    def _set_occurrences(self, row: int, uses_penalties: bool, prompt_ids: Sequence[int]) -> None:
        if not uses_penalties:
            return  # what an earlier request left is multiplied by neutral penalties
        seen, counts = self.occurrences
        counts[row].zero_()
        ids = upload(list(prompt_ids), torch.int64, self.device)
        seen[row].zero_().index_fill_(0, ids, True)

    def _set_bias(self, row: int, bias: Mapping[int, float] | None) -> None:
        if not bias:
            return  # ids that an earlier request left have bias 0
        ids, values = self.logit_bias
        ids[row, : len(bias)] = upload(list(bias.keys()), torch.int64, self.device)
        values[row, : len(bias)] = upload(list(bias.values()), torch.float32, self.device)
