"""For tests of kernels: a layer of rows out of tensors of one layer, the precision of rows, what a processor can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from snapstream.config import ROW_FORMATS
from snapstream.kernels.cpu.looped.build import instruction_sets
from snapstream.kernels.rows import LayerRows


def one_layer(k: Tensor, v: Tensor, scales: Sequence[Tensor] = ()) -> LayerRows:
    """``k, v [rows+1, G, C, E]``; for rows in FP8 the scales of both, ``[rows+1, G]``."""
    return LayerRows(k[None], v[None], 0, *(scale[None] for scale in scales))


def step_of(kv_dtype: str, numbers: Tensor) -> Tensor:
    """From a code of such rows to the next, by slot of ``numbers [..., E]``; 0 where rows have no codes."""
    form = ROW_FORMATS.get(kv_dtype)
    has_codes = form is not None and (form.scales == "slot" or form.group > 1)
    levels = 2 ** (int(form.bits) - 1) - 1 if form is not None and has_codes else torch.inf
    return numbers.abs().amax(-1, keepdim=True) / levels


def multiplies_bf16() -> bool:
    """Whether the library of this process does, which is not loaded for it."""
    return instruction_sets()[0] == "avx512" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
