"""The order in which a program reads its blocks of weights through a launch, as one stream over all stages and layers.

A place in the stream is ``(layer, role, tile, block)``: of a layer, one of its four matrices; of the matrix, a tile of
rows that is this program's own; of the tile, a block of columns - of gate and up first all blocks of gate, then those
of up. Behind the last layer stands the output embedding, behind that nothing. Scalars only, so that the ring of
``ring.py`` runs ahead of what is read by any number of blocks, past the end of a stage or of a layer, and so that
Triton's interpreter can walk it. ``sizes`` are ``(HIDDEN, QKV, WIDE, INNER, VOCAB)``.
"""

import triton
import triton.language as tl

O_ROLE, GATE_UP_ROLE, DOWN_ROLE, HEAD_ROLE, NO_ROLE = (tl.constexpr(role) for role in range(1, 6))  # and 0: QKV


@triton.jit
def rows_of(role, sizes):
    """Rows of a matrix, of gate and of up each; none behind the last matrix."""
    into_residual = (role == O_ROLE) | (role == DOWN_ROLE)
    rows = tl.where(into_residual, sizes[0], tl.where(role == GATE_UP_ROLE, sizes[3], sizes[1]))
    return tl.where(role == NO_ROLE, 0, tl.where(role == HEAD_ROLE, sizes[4], rows))


@triton.jit
def cols_of(role, sizes):
    """Columns of a matrix."""
    return tl.where(role == O_ROLE, sizes[2], tl.where(role == DOWN_ROLE, sizes[3], sizes[0]))


@triton.jit
def settled(layer, role, tile, program, last_layer, sizes, BLOCK_ROWS: tl.constexpr, ENDS: tl.constexpr):
    """``(layer, role, tile)`` itself, or behind the last tile of a matrix this program's first in one that has any."""
    while (role < NO_ROLE) & (tile * BLOCK_ROWS >= rows_of(role, sizes)):
        role += 1
        tile = program
        is_next = role == HEAD_ROLE
        layer = tl.where(is_next, layer + 1, layer)
        role = tl.where(is_next & (layer < last_layer), 0, role)
        if not ENDS:
            role = tl.where(role == HEAD_ROLE, NO_ROLE, role)
    return layer, role, tile


@triton.jit
def first_place(program, first_layer, last_layer, sizes, BLOCK_ROWS: tl.constexpr, ENDS: tl.constexpr):
    """Where this program's stream begins."""
    layer, role = tl.cast(first_layer, tl.int32), tl.cast(0, tl.int32)
    layer, role, tile = settled(layer, role, program, program, last_layer, sizes, BLOCK_ROWS, ENDS)
    return layer, role, tile, tl.cast(0, tl.int32)


@triton.jit
def following(
    place, program, last_layer, sizes,
    NUM_PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The place behind ``place``."""
    layer, role, tile, block = place
    parts = tl.where(role == GATE_UP_ROLE, 2, 1)
    block += 1
    is_whole = block == parts * tl.cdiv(cols_of(role, sizes), BLOCK_COLS)
    tile = tl.where(is_whole, tile + NUM_PROGRAMS, tile)
    block = tl.where(is_whole, 0, block)
    layer, role, tile = settled(layer, role, tile, program, last_layer, sizes, BLOCK_ROWS, ENDS)
    return layer, role, tile, block


@triton.jit
def part_offset(place, sizes, BLOCK_COLS: tl.constexpr):
    """Numbers, int64, from the beginning of the place's stack to the part that its rows and columns count from."""
    layer, role, _, block = place
    rows, cols = rows_of(role, sizes), cols_of(role, sizes)
    parts = tl.where(role == GATE_UP_ROLE, 2, 1)
    above = tl.where(role >= HEAD_ROLE, 0, layer) * parts + block // tl.cdiv(cols, BLOCK_COLS)
    return above.to(tl.int64) * rows * cols


@triton.jit
def first_col(place, sizes, BLOCK_COLS: tl.constexpr):
    """Of the place's block."""
    return place[3] % tl.cdiv(cols_of(place[1], sizes), BLOCK_COLS) * BLOCK_COLS
