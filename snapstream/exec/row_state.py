"""The sampler's state of a row, as a table: name, type, size and value of each entry. No torch.

``sampling_state.py`` allocates and sets tensors by this table, ``plan/memory.py`` counts their bytes, ``sampling.py``
reads them by name: a new sampling parameter is a line here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from snapstream.step import splitmix64
from snapstream.types import MAX_LOGIT_BIAS, NUM_STOP_IDS, SamplingParams

UNIFORM_BITS = 53  # a float64 holds 53 bits exactly


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def stream_of(seed: int) -> int:
    """The random stream of a seed, as an int64. Mixed, so that neighboring seeds give unrelated streams."""
    return signed(splitmix64(seed))


Kind = Literal["bool", "int32", "int64", "float32", "float64"]
KIND_BYTES: dict[Kind, int] = {"bool": 1, "int32": 4, "int64": 8, "float32": 4, "float64": 8}
LOGPROB_SIZES = (0, 5, 20)  # top-n is rounded up to one of these, so that variants of the step stay few
Number = bool | int | float


class NewRow(NamedTuple):
    row: int
    sampling: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    stop_ids: Sequence[int]


PADDING = NewRow(-1, SamplingParams(temperature=0.0), 0, (), ())  # of the padding row: greedy and neutral


def uses_penalties(sampling: SamplingParams) -> bool:
    is_additive = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return is_additive or sampling.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class RowField:
    """One number per row; ``value`` takes the request and the size of the vocabulary."""

    name: str
    kind: Kind
    value: Callable[[NewRow, int], Number]


@dataclass(frozen=True, slots=True)
class RowList:
    """``width(vocab_size)`` numbers per row, initially ``fill``."""

    name: str
    kind: Kind
    width: Callable[[int], int]
    fill: Number
    is_reset: bool = False  # filled again for a new request


def _temperature(new: NewRow) -> float:
    # Kept a normal float, so that (logit - peak) / temperature is never 0 / 0.
    return 1.0 if new.sampling.is_greedy else max(new.sampling.temperature, sys.float_info.min)


# Float64 if a threshold must be exactly the caller's number.
FIELDS: tuple[RowField, ...] = (
    RowField("is_greedy", "bool", lambda new, vocab_size: new.sampling.is_greedy),
    RowField("temperature", "float64", lambda new, vocab_size: _temperature(new)),
    RowField("top_p", "float64", lambda new, vocab_size: new.sampling.top_p),
    RowField("top_k", "int64", lambda new, vocab_size: min(new.sampling.top_k or vocab_size, vocab_size)),
    RowField("min_p", "float64", lambda new, vocab_size: new.sampling.min_p),
    RowField("presence", "float32", lambda new, vocab_size: new.sampling.presence_penalty),
    RowField("frequency", "float32", lambda new, vocab_size: new.sampling.frequency_penalty),
    RowField("repetition", "float32", lambda new, vocab_size: new.sampling.repetition_penalty),
    RowField("min_tokens", "int64", lambda new, vocab_size: new.sampling.min_tokens if new.stop_ids else 0),
    RowField("stream", "int64", lambda new, vocab_size: stream_of(new.seed)),
    RowField("num_sampled", "int64", lambda new, vocab_size: 0),  # output tokens so far; counter of the random stream
)
LISTS: tuple[RowList, ...] = (
    RowList("stop_ids", "int64", lambda vocab_size: NUM_STOP_IDS, 0),
    # What penalties look at.
    RowList("prompt_seen", "bool", lambda vocab_size: vocab_size, False),
    RowList("output_counts", "int32", lambda vocab_size: vocab_size, 0),
    # Sparse. Entries with bias 0 are padding, whatever their token is.
    RowList("bias_ids", "int64", lambda vocab_size: MAX_LOGIT_BIAS, 0),
    RowList("bias_values", "float32", lambda vocab_size: MAX_LOGIT_BIAS, 0.0, is_reset=True),
    # Bit t % 32 of word t // 32 says whether token t may be sampled; -1 allows all.
    RowList("allowed", "int32", lambda vocab_size: -(-vocab_size // 32), -1, is_reset=True),
)


def row_state_bytes(vocab_size: int) -> int:
    """Bytes of one row's sampling parameters and counters."""
    lists = sum(KIND_BYTES[own.kind] * own.width(vocab_size) for own in LISTS)
    return lists + sum(KIND_BYTES[field.kind] for field in FIELDS)


def padded_stop_ids(stop_ids: Sequence[int]) -> list[int]:
    """``NUM_STOP_IDS`` ids, padded with one of them."""
    ids = sorted(set(stop_ids))
    return ids + (ids[:1] or [0]) * (NUM_STOP_IDS - len(ids))


@dataclass(frozen=True, kw_only=True)
class SamplingNeeds:
    """The parts of sampling that a batch needs. More than needed is correct but slower."""

    bias: bool = False
    min_tokens: bool = False
    penalties: bool = False
    grammar: bool = False  # some row has a grammar
    random: bool = False  # some row is not greedy
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    num_logprobs: int | None = None  # None: not of the sampled tokens either

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> SamplingNeeds:
        batch = tuple(rows)
        drawn = [sampling for sampling in batch if not sampling.is_greedy]
        tops = [sampling.logprobs for sampling in batch if sampling.logprobs is not None]
        return cls(
            bias=any(sampling.logit_bias for sampling in batch),
            min_tokens=any(sampling.min_tokens for sampling in batch),
            penalties=any(uses_penalties(sampling) for sampling in batch),
            grammar=any(sampling.grammar for sampling in batch),
            random=bool(drawn),
            top_k=any(sampling.top_k for sampling in drawn),
            top_p=any(sampling.top_p < 1.0 for sampling in drawn),
            min_p=any(sampling.min_p > 0.0 for sampling in drawn),
            num_logprobs=next(size for size in LOGPROB_SIZES if size >= max(tops)) if tops else None,
        )
