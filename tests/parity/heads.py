"""For views that tests write: one whole layer, and the heads that it hands over, made into what attention takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snapstream.kernels.interface import CosSin, HeadNorm, bind
from snapstream.kv.spec import Full
from snapstream.models.decoder import Decoder, added
from snapstream.models.layers import TokenInputs

_KERNELS = bind("cpu", "torch")


def queries(heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
    """Normed and rotated q ``[T, H, E]`` of a layer that shares the keys and values of another."""
    assert rope is not None
    return _KERNELS.norm_rope(heads, norm, rope, 0)


def split(heads: Tensor, norm: HeadNorm, rope: CosSin | None, spec: Full) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated q ``[T, H, E]`` and k ``[T, G, E]``, and v ``[T, G, E']``, of ``heads [T, H+2G, E]``.

    Where values are keys: of ``heads [T, H+G, E]``, which come rotated.
    """
    num_kv_heads = spec.num_kv_heads
    if rope is None:
        return heads[:, :-num_kv_heads], heads[:, -num_kv_heads:], heads[:, -num_kv_heads:, : spec.value_dim]
    qk = _KERNELS.norm_rope(heads, norm, rope, num_kv_heads)  # [T, H+G, E]
    return qk[:, :-num_kv_heads], qk[:, -num_kv_heads:], heads[:, -num_kv_heads:]


def whole_layer(
    decoder: Decoder, index: int, hidden: Tensor, rope: CosSin, view: Any, tokens: TokenInputs | None = None
) -> Tensor:
    """``[T, D]`` to ``[T, D]``; ``hidden`` is overwritten with the result."""
    layer = decoder.layers[index]
    attended = layer.attend(hidden, None, rope, view)
    return added(hidden, decoder.finish_layer(index, layer, (hidden, attended), tokens))
