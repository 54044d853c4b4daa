"""Matrices of codes in panels (``forms.h``): int8 and int4 in groups along the input, the meaning is ``groups.py``'s.

Storage is ``[..., panels, groups, bytes]`` uint8: of a group the scales of 32 rows in fp16, then its units of 128
bytes. There each row has four bytes: int8 as four columns; int4 as eight, column b in the lower half of byte b and
column 4 + b in the upper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels import groups
from snapstream.kernels.cpu.looped.library import FORMATS, PANEL, Stack, address

_HEAD, _UNIT, _ROW = 2 * PANEL, 4 * PANEL, 4  # bytes: of a group's scales, of a unit, of a row in a unit


def code_panel_shape(shape: tuple[int, ...], bits: int, group: int) -> tuple[int, ...]:
    """Of the storage of matrices ``[..., out, in]``; ``in`` is whole groups."""
    *stack, num_out, num_in = shape
    return (*stack, -(-num_out // PANEL), num_in // group, _HEAD + group * bits // 8 * PANEL)


def fill_codes(panels: Tensor, first: int, codes: Tensor, scales: Tensor, bits: int) -> None:
    """Store rows from ``first`` on of a matrix in ``panels [P, groups, bytes]``.

    ``codes [n, in * bits / 8]`` uint8 and ``scales [n, groups]`` fp16, as ``groups.quantise`` gives them.
    """
    num_groups = panels.shape[1]
    units = (panels.shape[2] - _HEAD) // _UNIT
    if bits == 4:  # from neighbours in a byte to columns that lie four apart
        halves = groups.unpack(codes, 4).view(len(codes), num_groups, units, 2, _ROW)
        codes = halves[..., 0, :] | halves[..., 1, :] << 4
    lines = codes.reshape(len(codes), num_groups, units, _ROW).permute(1, 2, 0, 3)  # [groups, units, n, 4]
    heads = scales.t().flatten().view(torch.uint8).view(num_groups, len(scales), 2)  # [groups, n, 2]
    own_heads = panels[:, :, :_HEAD].unflatten(2, (PANEL, 2))  # [P, groups, 32, 2]
    own_lines = panels[:, :, _HEAD:].unflatten(2, (units, PANEL, _ROW))  # [P, groups, units, 32, 4]
    done = 0
    while done < len(codes):
        panel, lane = divmod(first + done, PANEL)
        count = min(PANEL - lane, len(codes) - done)
        own_heads[panel, :, lane : lane + count] = heads[:, done : done + count]
        own_lines[panel, :, :, lane : lane + count] = lines[:, :, done : done + count]
        done += count


def codes_of(panels: Tensor, num_out: int, bits: int) -> tuple[Tensor, Tensor]:
    """``codes [out, in * bits / 8]`` and ``scales [out, groups]`` of a matrix in ``panels [P, groups, bytes]``."""
    num_panels, num_groups = panels.shape[:2]
    units = (panels.shape[2] - _HEAD) // _UNIT
    heads = panels[:, :, :_HEAD].contiguous().view(torch.float16)  # [P, groups, 32]
    scales = heads.transpose(1, 2).reshape(-1, num_groups)[:num_out]
    lines = panels[:, :, _HEAD:].unflatten(2, (units, PANEL, _ROW)).permute(0, 3, 1, 2, 4)  # [P, 32, groups, units, 4]
    codes = lines.reshape(num_panels * PANEL, num_groups, units, _ROW)[:num_out]
    if bits == 4:
        codes = groups.pack(torch.stack((codes & 15, codes >> 4), 3).flatten(1), 4)
    return codes.flatten(1), scales


def stack_of_codes(panels: Tensor, num_out: int, num_in: int, bits: int, *, rounds_inputs: bool = False) -> Stack:
    """The struct of matrices in ``panels [L, P, groups, bytes]``, or of one.

    ``rounds_inputs``: tokens are rounded to codes too before they are multiplied.
    """
    panel_bytes = panels.shape[-2] * panels.shape[-1]
    return Stack(
        data=address(panels), layer_bytes=panels.shape[-3] * panel_bytes, panel_bytes=panel_bytes, rows=num_out,
        cols=num_in, format=FORMATS[f"int{bits}"], group=num_in // panels.shape[-2],
        inputs=FORMATS["int8"] if rounds_inputs else FORMATS["float32"],
    )  # fmt: skip
