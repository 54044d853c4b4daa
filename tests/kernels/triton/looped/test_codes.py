"""The looped kernel over int8 and int4 weights, under the interpreter: its products alone, then every buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from snapstream.kernels import groups
from snapstream.kernels.rows import RowPlaces
from tests.kernels.triton.checks import assert_near
from tests.kernels.triton.interpreter import interpreted

pytestmark = interpreted()
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from snapstream.kernels.triton.looped.blocks import opened, opened_pair, product, product_pair  # noqa: E402
from snapstream.kernels.triton.looped.launch import (  # noqa: E402  # noqa: E402
    Codes,
    Form,
    Looped,
    LoopedLaunch,
    LoopedModel,
    Stored,
    default_launch,
    ring_launch,
)
from tests.kernels.triton.looped import twin  # noqa: E402
from tests.kernels.triton.looped.test_interpreted import VISIBLE, inputs_of, model_of, rows_of  # noqa: E402

DENSE = Form(0, 0)
STARTS = (Form(8, 32), Form(4, 32), Form(8, 32))  # what weights of int4 are: attention, MLP, tables


def in_codes(model: LoopedModel, attention: Form, mlp: Form, tables: Form) -> LoopedModel:
    def rounded(role: str, form: Form) -> Stored:
        numbers = getattr(model, role)
        if form == DENSE:
            return numbers
        return Codes(*groups.quantize(numbers, form.bits, form.group), form.bits)

    forms = {"qkv": attention, "o": attention, "gate_up": mlp, "down": mlp, "embed": tables, "head": tables}
    return replace(model, **{role: rounded(role, form) for role, form in forms.items()})


def cut(group: int, *, loads_ahead: bool = True) -> LoopedLaunch:
    cols = max(group, 64)
    return LoopedLaunch(num_programs=1, block_rows=16, block_cols=cols, num_warps=4, loads_ahead=loads_ahead)


@triton.jit
def product_kernel(
    numbers_ptr, scales_ptr, x_ptr, norm_ptr, out_ptr,
    BATCH: tl.constexpr, BATCH_PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, USES_DOT: tl.constexpr,
):  # fmt: skip
    """A stage without its barriers: ``out [PARTS * ROWS, B]``."""
    program = tl.program_id(0)
    line, entry = tl.arange(0, BLOCK_ROWS), tl.arange(0, BATCH_PAD)
    matrix = (numbers_ptr, scales_ptr)
    inverse = tl.full([BATCH_PAD], 1.0, tl.float32)
    if PARTS == 2:
        queue = opened_pair(matrix, program, line, ROWS, COLS, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS, USES_DOT)
    else:
        queue = opened(matrix, program, line, ROWS, COLS, 1, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS, USES_DOT)
    for tile in range(program, tl.cdiv(ROWS, BLOCK_ROWS), NUM_PROGRAMS):
        if PARTS == 2:
            left, right, queue = product_pair(queue, matrix, line, x_ptr, norm_ptr, inverse, entry,
                                              BATCH, ROWS, COLS, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS,
                                              USES_DOT, ".cg")  # fmt: skip
        else:
            left, right, queue = product(queue, matrix, line, x_ptr, norm_ptr, inverse, entry,
                                         BATCH, ROWS, COLS, 1, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS,
                                         True, USES_DOT, ".cg")  # fmt: skip
        row = tile * BLOCK_ROWS + line
        at = out_ptr + row[:, None] * BATCH + entry[None, :]
        mask = (row < ROWS)[:, None] & (entry < BATCH)[None, :]
        tl.store(at, left, mask=mask)
        if PARTS == 2:
            tl.store(at + ROWS * BATCH, right, mask=mask)


@pytest.mark.parametrize(
    ("form", "parts", "programs", "batch", "uses_dot"),
    [
        (DENSE, 2, 3, 2, False),
        (Form(8, 32), 1, 3, 2, False),
        (Form(4, 32), 2, 3, 2, False),
        (Form(8, 64), 2, 2, 3, True),
        (Form(4, 64), 1, 7, 3, True),  # the last programs have no tile
        (Form(4, 128), 2, 1, 1, True),
    ],
)
def test_programs_share_the_rows_of_a_matrix(form: Form, parts: int, programs: int, batch: int, uses_dot: bool) -> None:
    """Tiles with an end in rows and in columns, a queue that runs on into the next tile and past the last."""
    torch.manual_seed(programs)
    rows, cols = 41, 192 if form.group <= 64 else 256
    numbers, x = torch.randn(parts * rows, cols), torch.randn(batch, cols)
    weight = numbers if form == DENSE else Codes(*groups.quantize(numbers, *form), form.bits)
    stored = (weight.words, weight.scales.view(torch.int16)) if isinstance(weight, Codes) else (weight, weight)
    out = torch.full((parts * rows, batch), float("nan"))
    product_kernel[(programs,)](*stored, x, torch.ones(cols), out, batch, 16 if uses_dot else 2, rows, cols, parts,
                                *form, 16, 128, programs, uses_dot)  # fmt: skip
    wide = weight.wide() if isinstance(weight, Codes) else weight
    torch.testing.assert_close(out, wide @ x.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("forms", "dtype", "batch", "max_batch", "loads_ahead"),
    [
        (STARTS, torch.float32, 2, 2, True),
        ((Form(8, 64),) * 3, torch.bfloat16, 2, 8, True),
        ((Form(4, 128), Form(4, 128), DENSE), torch.bfloat16, 3, 5, True),
        ((Form(4, 64), Form(8, 64), Form(4, 64)), torch.bfloat16, 1, 1, False),
    ],
)
def test_every_buffer_equals_the_twins(
    forms: tuple[Form, Form, Form], dtype: torch.dtype, batch: int, max_batch: int, loads_ahead: bool
) -> None:
    torch.manual_seed(batch)
    group = forms[0].group
    sizes = (64, 96) if group == 32 else (192, 128) if group == 64 else (128, 256)
    model = in_codes(model_of(dtype, 4, 2, 32, is_plain=batch == 1, sizes=sizes), *forms)
    visible = dict(list(VISIBLE.items())[:batch])
    keys, values = rows_of(model, visible, dtype)
    step = inputs_of(model, visible)
    own, plain = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    looped = Looped(model, *own, max_batch, cut(group, loads_ahead=loads_ahead))
    looped.run(*step)
    factor = 4.0 if dtype == torch.bfloat16 else 2.0
    for name, expected in vars(twin.step(model, *plain, *step)).items():
        assert_near(getattr(looped, name)[:batch], expected, dtype, factor)
    for got, expected in zip(own, plain, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert_near(got.nan_to_num(), expected.nan_to_num(), dtype, factor)


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(1)
    model = in_codes(model_of(torch.float32, 4, 2, 16, is_plain=True, sizes=(64, 96)), *STARTS)
    keys, values = rows_of(model, VISIBLE, torch.float32)
    token_ids, places, (cos, sin) = inputs_of(model, VISIBLE)
    together = Looped(model, keys.clone(), values.clone(), 8, cut(32)).run(token_ids, places, (cos, sin))
    own = slice(1, 2)
    alone = Looped(model, keys.clone(), values.clone(), 8, cut(32)).run(
        token_ids[own], RowPlaces(*(part[own] for part in places)), (cos[own], sin[own])
    )
    torch.testing.assert_close(alone, together[own], rtol=1e-5, atol=1e-5)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    dense = model_of(torch.float32, 4, 2, 16, is_plain=True, sizes=(64, 128))
    model = in_codes(dense, *(Form(8, 64),) * 3)
    keys, values = rows_of(model, {0: 4}, torch.float32)
    with pytest.raises(ValueError, match="blocks have 32 columns; groups of codes must not be cut"):
        Looped(model, keys, values, 1, replace(cut(64), block_cols=32))
    with pytest.raises(ValueError, match="the ring copies dense weights"):
        Looped(model, keys, values, 1, ring_launch(model, 1, 1))
    with pytest.raises(ValueError, match="qkv and o are stored as"):
        replace(model, o=dense.o)
    assert isinstance(model.down, Codes)
    spread = model.down.scales.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match="contiguous"):
        Looped(replace(model, down=replace(model.down, scales=spread)), keys, values, 1, cut(64))


def test_blocks_hold_whole_groups_whatever_the_sizes() -> None:
    model = in_codes(model_of(torch.bfloat16, 4, 2, 32, is_plain=True, sizes=(128, 256)), *(Form(4, 128),) * 3)
    for max_batch in (1, 16):
        launch = default_launch(model, 1, max_batch)
        assert launch.block_cols % 128 == 0 and not launch.stages
