"""Matrices in panels (``panels.h``): how rows get there and back.

A panel is 32 rows, whose columns follow each other in units of a few. Floats are ``[..., panels, units, 32, columns of
a unit]``; integers (reference: ``groups.py``) are uint8 ``[..., panels, blocks, bytes]``, of a block the scales of
32 rows in fp16, then units of 128 bytes, four for each row: int8 as four columns, int4 as eight, column b in the lower
half of byte b and column 4 + b in the upper. MXFP4 is int4 with scales of a byte; uint4 has 32 minimums after the
scales. K-quants and IQ types are in ``panels.h``. Rows and columns that a matrix does not have are zero.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import WeightFormat
from snapstream.kernels import groups, memory
from snapstream.kernels.cpu.looped.library import ALIGN_COLS, FORMATS, PANEL, Library, Stack, address
from snapstream.kernels.formats import FP8

UNIT_COLS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1, FP8.dtype: 1}  # by the dtype of the storage


def panel_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The storage of matrices ``[..., out, in]``."""
    *stack, num_out, num_in = shape
    unit = UNIT_COLS[dtype]
    return (*stack, -(-num_out // PANEL), -(-num_in // ALIGN_COLS) * ALIGN_COLS // unit, PANEL, unit)


def empty_panels(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Storage for matrices ``[..., out, in]``, zeros, as padding must be."""
    return memory.zeros(panel_shape(shape, dtype), dtype)


def fill_rows(panels: Tensor, first: int, numbers: Tensor) -> None:
    """Store ``numbers [n, in]`` as the rows from ``first`` on of a matrix in ``panels [P, units, 32, u]``."""
    missing = panels.shape[1] * panels.shape[3] - numbers.shape[1]
    numbers = numbers.to(panels.dtype)
    numbers = F.pad(numbers, (0, missing)) if missing else numbers.contiguous()
    if panels.dtype == torch.bfloat16:  # two at once: copied three times as fast
        panels, numbers = panels.view(torch.int32), numbers.view(torch.int32)
    units, unit = panels.shape[1], panels.shape[3]
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


def lookup(library: Library, stack: Stack, row_ids: Tensor) -> Tensor:
    """Rows ``row_ids [T]`` int64 of a matrix, ``[T, in]`` fp32; ValueError for one out of range."""
    if row_ids.numel() and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < stack.rows:
        raise ValueError(f"row ids reach from {int(row_ids.min())} to {int(row_ids.max())}; there are {stack.rows}")
    out, row_ids = torch.empty(len(row_ids), stack.cols), row_ids.contiguous()  # kept until the call returns
    library.copy_rows(byref(stack), address(row_ids), len(row_ids), address(out), torch.get_num_threads())
    return out


_ROW = 4  # bytes of a row in a unit


def code_panel_shape(shape: tuple[int, ...], form: WeightFormat) -> tuple[int, ...]:
    """The storage of matrices ``[..., out, in]``; ``in`` is whole blocks."""
    *stack, num_out, num_in = shape
    block_bytes = PANEL * (form.scale_bytes + form.block * form.bits // 8)
    return (*stack, -(-num_out // PANEL), num_in // form.block, block_bytes)


def _parts(panels: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``panels [P, blocks, bytes]``: scales of two bytes ``[P, blocks, n, 32, 2]``, of one ``[..., 1]``, and codes
    ``[P, blocks, units, 32, 4]``, of three bits ``[..., 6]``.
    """
    halves = _halves(form)
    parts = panels.split((PANEL * halves, PANEL * (form.scale_bytes - halves), form.block * form.bits // 8 * PANEL), 2)
    first, second, codes = (
        own.unflatten(2, (own.shape[2] // (PANEL * size), PANEL * size))
        for own, size in zip(parts, (2, 1, 6 if form.bits == 3 else _ROW), strict=True)
    )
    lines = [own.unflatten(-1, (PANEL, -1)) for own in codes.split(PANEL * _ROW, -1)]
    own_codes = lines[0] if len(lines) == 1 else torch.cat(lines, -1)
    return first.unflatten(-1, (PANEL, 2)), second.unflatten(-1, (PANEL, 1)), own_codes


def fill_codes(library: Library, panels: Tensor, first: int, codes: Tensor, scales: Tensor, form: WeightFormat) -> None:
    """Store rows from ``first`` on of a matrix in ``panels [P, blocks, bytes]``.

    ``codes [n, in * bits / 8]`` uint8 and ``scales [n, ...]``, as ``models.matrix.encode`` gives them.
    """
    codes, scales, num_bytes = codes.contiguous(), scales.contiguous(), panels[0].nbytes // PANEL
    if codes.nbytes + scales.nbytes != len(codes) * num_bytes or first + len(codes) > len(panels) * PANEL:
        raise ValueError(f"{len(codes)} rows from {first} on do not fit panels of shape {list(panels.shape)}")
    if len(codes):
        library.fill_codes(
            address(panels), *panels.shape[1:], first, len(codes), address(codes), address(scales), form.scale_bytes,
            _halves(form), form.bits, torch.get_num_threads(),
        )  # fmt: skip


def _halves(form: WeightFormat) -> int:
    """Bytes of the numbers of two among the scales of a block."""
    return form.factor_bytes if form.is_k_quant else form.scale_bytes & ~1


def codes_of(panels: Tensor, num_out: int, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """``codes [out, in * bits / 8]`` and ``scales [out, ...]`` of a matrix in ``panels [P, blocks, bytes]``."""
    first, second, lines = (
        own.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:num_out] for own in _parts(panels, form)
    )  # [out, blocks, bytes]
    scales = torch.cat((first, second), -1)
    if not form.is_k_quant:
        scales = scales.view(groups.scale_dtype(form)).squeeze(-1)
    if form.bits == 4:
        codes = lines.unflatten(2, (-1, _ROW))
        lines = groups.pack(torch.stack((codes & 15, codes >> 4), 3).flatten(2), 4)
    return lines.flatten(1), scales


def stack_of_codes(panels: Tensor, num_out: int, num_in: int, form: WeightFormat) -> Stack:
    """The struct of matrices in ``panels [L, P, blocks, bytes]``, or of one.

    If ``form`` rounds inputs, tokens are quantized to int8 before they are multiplied.
    """
    panel_bytes = panels.shape[-2] * panels.shape[-1]
    return Stack(
        data=address(panels), layer_bytes=panels.shape[-3] * panel_bytes, panel_bytes=panel_bytes, rows=num_out,
        cols=num_in, format=FORMATS[form.dtype], group=form.group,
        inputs=FORMATS["int8"] if form.rounds_inputs else FORMATS["float32"],
    )  # fmt: skip
