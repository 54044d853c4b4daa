"""Matrices in panels (``forms.h``): how rows get there and back, and the products outside of a step.

A panel is 32 rows. Columns follow each other, and of the columns of a unit the 32 rows: storage of floats is
``[..., panels, units, 32, columns of a unit]``, of codes ``[..., panels, groups, 64 bytes of scales, units of 128]``.
Rows and columns that a matrix does not have are zero.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import fp8
from snapstream.kernels.cpu import pages
from snapstream.kernels.cpu.looped.library import ALIGN_COLS, FORMATS, PANEL, Library, Stack, address

UNIT_COLS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1, fp8.DTYPE: 1}  # by the dtype of the storage


def panel_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Of the storage of matrices ``[..., out, in]``."""
    *stack, num_out, num_in = shape
    unit = UNIT_COLS[dtype]
    return (*stack, -(-num_out // PANEL), -(-num_in // ALIGN_COLS) * ALIGN_COLS // unit, PANEL, unit)


def empty_panels(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Storage for matrices ``[..., out, in]``, zeros, which must be there where something is filled up."""
    return pages.zeros(panel_shape(shape, dtype), dtype)


def fill_rows(panels: Tensor, first: int, numbers: Tensor) -> None:
    """Store ``numbers [n, in]`` as the rows from ``first`` on of a matrix in ``panels [P, units, 32, u]``."""
    units, unit = panels.shape[1], panels.shape[3]
    numbers = F.pad(numbers, (0, units * unit - numbers.shape[1]))
    done = 0
    while done < len(numbers):
        panel, lane = divmod(first + done, PANEL)
        if lane == 0 and len(numbers) - done >= PANEL:  # whole panels
            count = (len(numbers) - done) // PANEL
            own = numbers[done : done + count * PANEL].view(count, PANEL, units, unit)
            panels[panel : panel + count].copy_(own.transpose(1, 2))
            done += count * PANEL
            continue
        count = min(PANEL - lane, len(numbers) - done)
        own = numbers[done : done + count].view(count, units, unit)
        panels[panel, :, lane : lane + count].copy_(own.transpose(0, 1))
        done += count


def rows_of(panels: Tensor, num_out: int, num_in: int) -> Tensor:
    """The numbers ``[..., out, in]`` in ``panels [..., P, units, 32, u]``."""
    wide = panels.transpose(-3, -2).reshape(*panels.shape[:-4], -1, panels.shape[-3] * panels.shape[-1])
    return wide[..., :num_out, :num_in]


def stack_of(panels: Tensor, num_out: int, num_in: int) -> Stack:
    """The struct of matrices in ``panels [L, P, units, 32, u]``, or of one."""
    panel_bytes = panels.shape[-3] * panels.shape[-2] * panels.shape[-1] * panels.element_size()
    return Stack(
        data=address(panels), layer_bytes=panels.shape[-4] * panel_bytes, panel_bytes=panel_bytes, rows=num_out,
        cols=num_in, format=FORMATS[str(panels.dtype).removeprefix("torch.")],
    )  # fmt: skip


def linear(library: Library, stack: Stack, x: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, in]`` fp32 times one matrix transposed, plus ``bias [out]``: ``[T, out]`` fp32."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], stack.rows)
    buffer = library.scratch(x.shape[0] * (x.shape[1] + ALIGN_COLS - 1))
    library.linear(
        byref(stack),
        address(x),
        x.shape[0],
        address(bias),
        address(out),
        address(buffer),
        torch.get_num_threads(),
    )
    return out


def lookup(library: Library, stack: Stack, row_ids: Tensor) -> Tensor:
    """Rows ``row_ids [T]`` int64 of a matrix, ``[T, in]`` fp32; ValueError for one that it does not have."""
    if row_ids.numel() and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < stack.rows:
        raise ValueError(f"row ids reach from {int(row_ids.min())} to {int(row_ids.max())}; there are {stack.rows}")
    out = torch.empty(len(row_ids), stack.cols)
    library.copy_rows(byref(stack), address(row_ids.contiguous()), len(row_ids), address(out), torch.get_num_threads())
    return out
