"""Sampling parameters and progress of every row, in tensors that keep their addresses.

Invariant: one entry per row plus the padding row (the last, always greedy and neutral); ``set_rows`` writes all of a
row's entries and resets its counters, so nothing of an earlier request remains. Everything is allocated at the start, 5
1/8 bytes per token of the vocabulary and row, so captured steps may read it and no request runs out of memory. The
entries are those of ``row_state.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from snapstream.exec.row_state import (
    FIELDS,
    LISTS,
    PADDING,
    NewRow,
    Number,
    padded_stop_ids,
    uses_penalties,
)
from snapstream.kernels.memory import upload
from snapstream.types import NUM_STOP_IDS, SamplingParams

MAX_VOCAB = 2**20  # V x the weight of the likeliest token must fit an int64, see sampling.WEIGHT_ONE
_WHOLE = tuple(field for field in FIELDS if not field.kind.startswith("float"))
_REAL = tuple(field for field in FIELDS if field.kind.startswith("float"))


class SamplingState:
    """Per-row sampling tensors for ``num_rows`` rows and the padding row ``num_rows``.

    Each ``RowField`` is an attribute ``[rows + 1]``, each ``RowList`` one of ``[rows + 1, width]``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}; sampling is exact for 1 to {MAX_VOCAB}")
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        for field in FIELDS:
            setattr(self, field.name, self._filled(field.value(PADDING, vocab_size), field.kind))
        for own in LISTS:
            setattr(self, own.name, self._filled(own.fill, own.kind, own.width(vocab_size)))

    def tensors(self) -> dict[str, Tensor]:
        names = [field.name for field in FIELDS] + [own.name for own in LISTS]
        return {name: getattr(self, name) for name in names}

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows and of the padding row."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _filled(self, value: Number, kind: str, *width: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, kind)
        return torch.full((self.num_rows + 1, *width), value, dtype=dtype, device=self.device)

    def set_rows(self, new: Sequence[NewRow]) -> None:
        """Give rows to requests; ``stop_ids`` (end tokens too) are masked until ``min_tokens``.

        One upload for all rows, and more for penalties and logit bias.
        """
        for entry in new:
            self._check(entry.row, entry.sampling, entry.prompt_ids, entry.stop_ids)
        whole = [
            [
                entry.row,
                *(int(field.value(entry, self.vocab_size)) for field in _WHOLE),
                *padded_stop_ids(entry.stop_ids),
            ]
            for entry in new
        ]
        real = [[float(field.value(entry, self.vocab_size)) for field in _REAL] for entry in new]
        both = torch.tensor(whole), torch.tensor(real, dtype=torch.float64).view(torch.int64)
        table = upload(torch.cat(both, dim=1), torch.int64, self.device)  # [new, 1 + whole + stop ids + real]
        first_stop, first_real = 1 + len(_WHOLE), 1 + len(_WHOLE) + NUM_STOP_IDS
        rows = table[:, 0]
        columns = (*table[:, 1:first_stop].unbind(1), *table[:, first_real:].view(torch.float64).unbind(1))
        for field, column in zip((*_WHOLE, *_REAL), columns, strict=True):
            tensor: Tensor = getattr(self, field.name)
            tensor[rows] = column.to(tensor.dtype)
        self.stop_ids[rows] = table[:, first_stop:first_real]
        for own in LISTS:
            if own.is_reset:
                getattr(self, own.name).index_fill_(0, rows, own.fill)
        for entry in new:
            self._set_occurrences(entry.row, uses_penalties(entry.sampling), entry.prompt_ids)
            self._set_bias(entry.row, entry.sampling.logit_bias)

    def allow(self, rows: Sequence[int], words: Tensor) -> None:
        """Tokens that ``rows`` may sample next: ``words`` [len(rows), ceil(V / 32)] int32, on any device."""
        own = upload(list(rows), torch.int64, self.device)
        self.allowed[own] = upload(words, torch.int32, self.device)

    def _check(self, row: int, sampling: SamplingParams, prompt_ids: Sequence[int], stop_ids: Sequence[int]) -> None:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row is {row}; it must be from 0 to {self.num_rows - 1}")
        if len(set(stop_ids)) > NUM_STOP_IDS:
            raise ValueError(f"{len(set(stop_ids))} stop ids given; the limit is {NUM_STOP_IDS}")
        groups = {"logit_bias token id": sampling.logit_bias or (), "stop id": stop_ids}
        if uses_penalties(sampling):
            groups["prompt token id"] = prompt_ids
        for name, ids in groups.items():
            wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{name} is {wrong}; it must be from 0 to {self.vocab_size - 1}")

    def _set_occurrences(self, row: int, has_penalties: bool, prompt_ids: Sequence[int]) -> None:
        if not has_penalties:
            return  # neutral penalties ignore the entries of an earlier request
        self.output_counts[row].zero_()
        ids = upload(list(prompt_ids), torch.int64, self.device)
        self.prompt_seen[row].zero_().index_fill_(0, ids, True)

    def _set_bias(self, row: int, bias: Mapping[int, float] | None) -> None:
        if not bias:
            return  # ids that an earlier request left have bias 0
        self.bias_ids[row, : len(bias)] = upload(list(bias.keys()), torch.int64, self.device)
        self.bias_values[row, : len(bias)] = upload(list(bias.values()), torch.float32, self.device)
