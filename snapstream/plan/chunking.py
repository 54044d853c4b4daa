"""How prefill is cut: tokens of a unit, and how much of it a step may hold while rows decode. No torch.

On a CPU a unit is 512 tokens and a step holds as many units as the model has layers. On a GPU both follow from the
model. The work of a unit is counted in query-key pairs, ``T (A + N)``: T tokens attend to N keys, and their matrix
products weigh as ``A = P / (2 H E)`` keys (P parameters of a layer; a pair costs ``4 H E`` flop, a token ``2 P``).

* ``chunk_len``: the largest power of two whose temporaries stay within ``MOST_TRANSIENT_BYTES``, from 512 to 4096. That
  is enough for the products to be bound by arithmetic: T flop per byte of weights, where a GPU has about 150.
* ``step_work``: what takes ``STEP_SHARE`` of the time in which a decode step reads the weights, so that a step with
  prefill lasts less than two without. ``FLOP_PER_BYTE`` turns one into the other.
* Prompts so long that one such unit would exceed ``step_work`` are cut shorter (``engine/pace.py``), down to
  ``LEAST_CHUNK_LEN``.

The constants are those of an H200 and predictions; ``docs/gpu.md`` has the arithmetic for an 8B model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapstream.config import DTYPE_BYTES, ModelConfig, as_count
from snapstream.models.shapes import layer_parameters
from snapstream.plan.memory import chunk_bytes, decode_weight_bytes

ChunkLen = int | Literal["auto"]

CPU_CHUNK_LEN = 512
LEAST_CHUNK_LEN, MOST_CHUNK_LEN = 512, 4096  # at most what is reserved for short prompts
MOST_TRANSIENT_BYTES = 256 * 2**20
FLOP_PER_BYTE = 140  # 55 % of 989 TFLOP/s of products over 80 % of 4.8 TB/s of reads
STEP_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """The fields of ``EngineConfig`` that say how prefill is cut."""

    chunk_len: int
    least_chunk_len: int
    step_work: int
    token_keys: int


def resolve_chunking(
    model: ModelConfig, *, dtype: str, device: str, chunk_len: ChunkLen = "auto", prefill_quantum: int = 0
) -> Chunking:
    """Defaults of the device; a number given as ``chunk_len`` holds for every prompt, as ``prefill_quantum`` for every
    step. ValueError for anything else.
    """
    if chunk_len != "auto":
        as_count("chunk_len", chunk_len, 1)
    if not device.startswith("cuda"):
        size = CPU_CHUNK_LEN if chunk_len == "auto" else chunk_len
        return Chunking(chunk_len=size, least_chunk_len=0, step_work=0, token_keys=0)
    pair_flop = 4 * model.num_heads * model.head_dim
    weight_bytes = decode_weight_bytes(model, DTYPE_BYTES[dtype])
    return Chunking(
        chunk_len=_largest_chunk(model, dtype) if chunk_len == "auto" else chunk_len,
        least_chunk_len=LEAST_CHUNK_LEN if chunk_len == "auto" else 0,
        step_work=0 if prefill_quantum else int(STEP_SHARE * FLOP_PER_BYTE * weight_bytes / pair_flop),
        token_keys=2 * layer_parameters(model) // pair_flop,
    )


def _largest_chunk(model: ModelConfig, dtype: str) -> int:
    size = MOST_CHUNK_LEN
    while size > LEAST_CHUNK_LEN and chunk_bytes(model, size, DTYPE_BYTES[dtype]) > MOST_TRANSIENT_BYTES:
        size //= 2
    return size
