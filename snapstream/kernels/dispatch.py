"""Which version of a kernel runs for which tensors. Callers import from here and never name a version."""

from __future__ import annotations

from torch import Tensor

from snapstream.kernels import reference, scores
from snapstream.kernels.cpu import attention as cpu_attention

write_slots = reference.write_slots
snapkv_scores = scores.snapkv_scores


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``."""
    version = cpu_attention if q.device.type == "cpu" else reference
    return version.prefill_attention(q, k, v)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """See ``reference.decode_attention``."""
    version = cpu_attention if q.device.type == "cpu" else reference
    return version.decode_attention(q, k, v, rows, lengths)
