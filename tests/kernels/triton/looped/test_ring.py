"""The looped kernel's ring, in Gluon, as far as it can be seen without a GPU: its order, its ring, its sums.

The kernel itself runs under the interpreter with a stand-in for Gluon (``stand_in.py``), one program alone; its stream
of blocks is walked for many programs. What layouts make of it the compiler says (``test_compiled.py``), and a GPU.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.checks import assert_near
from tests.kernels.triton.interpreter import interpreted

pytestmark = interpreted()
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from snapstream.kernels.triton.looped import ring  # noqa: E402
from snapstream.kernels.triton.looped.launch import (  # noqa: E402
    Looped,
    LoopedLaunch,
    LoopedModel,  # noqa: E402
    default_launch,
    ring_variants,
)
from tests.kernels.triton.looped import twin  # noqa: E402
from tests.kernels.triton.looped.stand_in import stand_in  # noqa: E402
from tests.kernels.triton.looped.test_interpreted import VISIBLE, inputs_of, model_of, rows_of  # noqa: E402

LAYERS, STAGES = 2, 3


def cut(batch: int, dtype: torch.dtype, stages: int = STAGES) -> LoopedLaunch:
    """Tiles with an end in rows and in columns."""
    is_dot = batch > 4 and dtype != torch.float32
    return LoopedLaunch(num_programs=1, block_rows=16, block_cols=128 if is_dot else 32, num_warps=8, stages=stages)


@pytest.mark.parametrize(
    ("heads", "dtype", "is_plain", "batch", "max_batch", "stages"),
    [
        ((4, 2, 16), torch.float32, False, 2, 4, 2),
        ((4, 2, 16), torch.bfloat16, False, 3, 4, 3),
        ((3, 1, 32), torch.bfloat16, True, 2, 8, 5),
    ],
)
def test_every_buffer_equals_the_twins(
    heads: tuple[int, int, int], dtype: torch.dtype, is_plain: bool, batch: int, max_batch: int, stages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(batch)
    model = model_of(dtype, *heads, is_plain=is_plain)
    visible = dict(list(VISIBLE.items())[:batch])
    keys, values = rows_of(model, visible, dtype)
    token_ids, places, rope = inputs_of(model, visible)
    own, plain = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    launch = cut(max_batch, dtype, stages)
    looped = Looped(model, *own, max_batch, launch)
    want = twin.step(model, *plain, token_ids, places, rope)
    machine = stand_in(monkeypatch, [ring])
    looped.run(token_ids, places, rope)
    factor = 4.0 if dtype == torch.bfloat16 else 2.0
    for name, expected in vars(want).items():
        assert_near(getattr(looped, name)[:batch], expected, dtype, factor)
    for got, expected in zip(own, plain, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert_near(got.nan_to_num(), expected.nan_to_num(), dtype, factor)
    assert machine.num_copies == sum(blocks_of(model, launch))  # every block is copied once
    assert len(machine.at_barriers) == 1 + 5 * LAYERS
    for states in machine.at_barriers:  # at every barrier all slots hold blocks that are still to be read
        assert set(states) <= {"flying", "arrived", "visible"}, states
    assert not looped.counters.any()


def blocks_of(model: LoopedModel, launch: LoopedLaunch) -> list[int]:
    """Blocks of every matrix of a step."""

    def count(matrix: Tensor, parts: int = 1) -> int:
        rows, cols = matrix.shape[-2] // parts, matrix.shape[-1]
        return parts * -(-rows // launch.block_rows) * -(-cols // launch.block_cols)

    layer = [count(model.qkv), count(model.o), count(model.gate_up, 2), count(model.down)]
    return LAYERS * layer + [count(model.head)]


def test_calls_per_layer_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = model_of(torch.float32, 2, 1, 16, is_plain=True)
    keys, values = rows_of(model, {0: 3}, torch.float32)
    step, launch = inputs_of(model, {0: 3}), cut(1, torch.float32)
    stand_in(monkeypatch, [ring])
    whole = Looped(model, keys.clone(), values.clone(), 1, launch).run(*step)
    assert torch.equal(Looped(model, keys, values, 1, launch).run_layers(*step), whole) and whole.isfinite().all()


@triton.jit
def walk_kernel(
    out_ptr, first_layer, last_layer,
    HIDDEN: tl.constexpr, QKV: tl.constexpr, WIDE: tl.constexpr, INNER: tl.constexpr, VOCAB: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ENDS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Six numbers for each place of a program's stream: role, layer, tile, offset of its part, column; and 1."""
    program = tl.program_id(0)
    sizes = (HIDDEN, QKV, WIDE, INNER, VOCAB)
    place = ring.first_place(program, first_layer, last_layer, sizes, BLOCK_ROWS, ENDS)
    at = program.to(tl.int64) * MOST * 6
    while place[1] < ring.NO_ROLE:
        tl.store(out_ptr + at, place[1])
        tl.store(out_ptr + at + 1, place[0])
        tl.store(out_ptr + at + 2, place[2])
        tl.store(out_ptr + at + 3, ring.part_offset(place, sizes, BLOCK_COLS))
        tl.store(out_ptr + at + 4, ring.first_col(place, sizes, BLOCK_COLS))
        tl.store(out_ptr + at + 5, 1)
        at += 6
        place = ring.following(place, program, last_layer, sizes, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)


@pytest.mark.parametrize(("programs", "ends"), [(1, True), (3, False), (7, True)])
def test_programs_share_every_block_in_the_order_of_the_stages(programs: int, ends: bool) -> None:
    """The last programs have no tile of the narrow matrices: their streams go on in a later stage or layer."""
    hidden, qkv, wide, inner, vocab = 40, 72, 24, 100, 90
    rows, cols, layers = 16, 32, range(1, 3)
    out = torch.zeros(programs, 200, 6, dtype=torch.int64)
    walk_kernel[(programs,)](out, layers.start, layers.stop, hidden, qkv, wide, inner, vocab, programs, rows, cols,
                             ends, 200)  # fmt: skip
    shapes = [(qkv, hidden), (hidden, wide), (inner, hidden), (hidden, inner)]
    for program in range(programs):
        want = []
        order = [(role, layer) for layer in layers for role in range(4)] + ([(4, layers.stop)] if ends else [])
        for role, layer in order:
            height, length = (vocab, hidden) if role == 4 else shapes[role]
            parts = 2 if role == 2 else 1
            for tile in range(program, -(-height // rows), programs):
                for part, begin in product(range(parts), range(0, length, cols)):
                    above = (0 if role == 4 else layer) * parts + part
                    want.append([role, layer, tile, above * height * length, begin, 1])
        found = [line for line in out[program].tolist() if line[5]]
        assert found == want
    taken = Counter(tuple(line[:5]) for line in out.flatten(0, 1).tolist() if line[5])
    assert set(taken.values()) == {1}


def test_what_the_ring_cannot_copy_is_refused() -> None:
    model = model_of(torch.float32, 2, 2, 16, is_plain=True)
    keys, values = rows_of(model, {0: 4}, torch.float32)
    with pytest.raises(ValueError, match="a ring of 1 blocks; it takes 2 or more"):
        Looped(model, keys, values, 1, cut(1, torch.float32, stages=1))
    with pytest.raises(ValueError, match="always loads ahead"):
        Looped(model, keys, values, 1, cut(1, torch.float32)).without_loads_ahead()
    odd = model_of(torch.bfloat16, 3, 1, 12, is_plain=True)
    keys, values = rows_of(odd, {0: 4}, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[36, 40, 56\] columns; the ring copies 8 numbers at a time"):
        Looped(odd, keys, values, 1, cut(1, torch.bfloat16))
    assert not default_launch(odd, 1, 1).stages  # such weights are loaded through registers


def test_the_cut_gives_every_program_a_tile_and_fits_shared_memory() -> None:
    for dtype, max_batch in product((torch.float32, torch.bfloat16), (1, 4, 16)):
        model = model_of(dtype, 4, 2, 16, is_plain=True)
        launch = default_launch(model, 132, max_batch)
        assert launch == ring_variants(model, 132, max_batch)["ring"]
        size = launch.stages * launch.block_rows * launch.block_cols * model.qkv.element_size()
        assert size <= 96 * 1024 and launch.block_cols >= 128
