"""The meaning of ``versions.Attend``, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.rows import LayerRows


def attend(q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
    """``reference.decode_attention`` over ``latents [rows+1, 1, C, E]``."""
    stored = latents[None]
    own = LayerRows(stored, stored[..., :rank], 0, values_are_keys=True)
    return reference.decode_attention(q, own, rows, lengths)
