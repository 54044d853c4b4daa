"""The looped kernel against its twin, buffer by buffer, under the interpreter: one program, so no barrier waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from snapstream.config import RopeConfig
from snapstream.kernels.rows import RowPlaces
from snapstream.models.rope import Rope
from tests.kernels.triton.checks import assert_near
from tests.kernels.triton.interpreter import interpreted

pytestmark = interpreted()
pytest.importorskip("triton")

from snapstream.kernels.triton.looped.launch import (  # noqa: E402
    Looped,
    LoopedLaunch,
    LoopedModel,  # noqa: E402
)
from tests.kernels.triton.looped import twin  # noqa: E402

LAYERS, VOCAB = 2, 50
LAUNCH = LoopedLaunch(num_programs=1, block_rows=16, block_cols=32, num_warps=4)
CAPACITY = 200  # two splits: the last one is not whole


def model_of(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, *, is_plain: bool,
    sizes: tuple[int, int] = (40, 56),
) -> LoopedModel:  # fmt: skip
    """Odd sizes, so that every tile has an end; ``is_plain``: no head norms and no biases; ``sizes``: hidden, inner."""
    hidden, inner = sizes
    wide = (num_heads + 2 * num_kv_heads) * head_dim

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size) * scale).to(dtype)

    embed = random(VOCAB, hidden)
    more = {} if is_plain else {
        "q_norm": 1 + random(LAYERS, head_dim, scale=0.1), "k_norm": 1 + random(LAYERS, head_dim, scale=0.1),
        "qkv_bias": random(LAYERS, wide), "o_bias": random(LAYERS, hidden),
        "gate_up_bias": random(LAYERS, 2 * inner), "down_bias": random(LAYERS, hidden),
    }  # fmt: skip
    return LoopedModel(
        num_layers=LAYERS, hidden_size=hidden, inner_size=inner, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, eps=1e-5, embed=embed, head=embed if is_plain else random(VOCAB, hidden),
        qkv=random(LAYERS, wide, hidden, scale=hidden**-0.5),
        o=random(LAYERS, hidden, num_heads * head_dim, scale=0.1),
        gate_up=random(LAYERS, 2 * inner, hidden, scale=hidden**-0.5), down=random(LAYERS, hidden, inner, scale=0.1),
        input_norm=1 + random(LAYERS, hidden, scale=0.1), post_norm=1 + random(LAYERS, hidden, scale=0.1),
        final_norm=1 + random(hidden, scale=0.1), **more,
    )  # fmt: skip


def rows_of(model: LoopedModel, lengths: dict[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """NaN but for the slots that each row shows before the step."""
    size = (LAYERS, max(lengths) + 2, model.num_kv_heads, CAPACITY, model.head_dim)
    keys, values = torch.full((2, *size), float("nan"), dtype=dtype)
    for row, length in lengths.items():
        for stored in (keys, values):
            stored[:, row, :, :length] = torch.randn(LAYERS, model.num_kv_heads, length, model.head_dim).to(dtype)
    return keys, values


def inputs_of(model: LoopedModel, visible: dict[int, int]) -> tuple[Tensor, RowPlaces, tuple[Tensor, Tensor]]:
    """A step that appends to the rows; one whose slots are all visible overwrites an old one."""
    rows = torch.tensor(list(visible))
    slots = torch.tensor([count if count < CAPACITY else 7 for count in visible.values()])
    lengths = torch.tensor([min(count + 1, CAPACITY) for count in visible.values()])
    positions = torch.tensor([1000 + 3 * row for row in visible])
    angles = Rope(RopeConfig(theta=10000.0), model.head_dim, "cpu").angles(positions, positions + 1)
    return torch.randint(0, VOCAB, (len(visible),)), RowPlaces(rows, slots, lengths), angles


VISIBLE = {2: CAPACITY, 0: 0, 3: 128}


@pytest.mark.parametrize(
    ("heads", "dtype", "is_plain", "batch", "max_batch", "loads_ahead"),
    [
        ((4, 2, 16), torch.float32, False, 3, 4, True),
        ((4, 2, 16), torch.float32, True, 3, 8, False),
        ((3, 1, 32), torch.bfloat16, False, 2, 5, True),
        ((2, 2, 24), torch.bfloat16, True, 1, 1, False),
    ],
)
def test_every_buffer_equals_the_twins(
    heads: tuple[int, int, int], dtype: torch.dtype, is_plain: bool, batch: int, max_batch: int, loads_ahead: bool
) -> None:
    torch.manual_seed(batch)
    model = model_of(dtype, *heads, is_plain=is_plain)
    visible = dict(list(VISIBLE.items())[:batch])
    keys, values = rows_of(model, visible, dtype)
    token_ids, places, rope = inputs_of(model, visible)
    factor = 4.0 if dtype == torch.bfloat16 else 2.0
    for num_layers in (1, None):
        own, plain = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        looped = Looped(model, *own, max_batch, replace(LAUNCH, loads_ahead=loads_ahead))
        want = twin.step(model, *plain, token_ids, places, rope, num_layers)
        for _ in range(2 if batch == 1 else 1):  # the second launch finds the counters as the first did
            if num_layers is None:
                looped.run(token_ids, places, rope)
            else:
                looped.run_part(token_ids, places, rope, range(num_layers), begins=True, ends=False)
        for name, expected in vars(want).items():
            if expected is not None:
                assert_near(getattr(looped, name)[:batch], expected, dtype, factor)
        for got, expected in zip(own, plain, strict=True):
            assert torch.equal(got.isnan(), expected.isnan())
            assert_near(got.nan_to_num(), expected.nan_to_num(), dtype, factor)


def test_a_call_per_layer_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model = model_of(torch.float32, 4, 2, 16, is_plain=False)
    visible = dict(list(VISIBLE.items())[:2])
    keys, values = rows_of(model, visible, torch.float32)
    step = inputs_of(model, visible)
    whole = Looped(model, keys.clone(), values.clone(), 4, LAUNCH).run(*step)
    by_layer = Looped(model, keys, values, 4, LAUNCH).run_layers(*step)
    assert torch.equal(whole, by_layer) and whole.isfinite().all()


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(1)
    model = model_of(torch.float32, 4, 2, 16, is_plain=True)
    keys, values = rows_of(model, VISIBLE, torch.float32)
    token_ids, places, (cos, sin) = inputs_of(model, VISIBLE)
    together = Looped(model, keys.clone(), values.clone(), 8, LAUNCH).run(token_ids, places, (cos, sin))
    for line in range(len(token_ids)):
        own = slice(line, line + 1)
        alone = Looped(model, keys.clone(), values.clone(), 8, LAUNCH).run(
            token_ids[own], RowPlaces(*(part[own] for part in places)), (cos[own], sin[own])
        )
        torch.testing.assert_close(alone, together[own], rtol=1e-5, atol=1e-5)


def test_wrong_rows_and_batches_are_refused() -> None:
    model = model_of(torch.float32, 2, 2, 16, is_plain=True)
    keys, values = rows_of(model, {0: 4}, torch.float32)
    with pytest.raises(ValueError, match="rows are torch.bfloat16; the looped kernel reads"):
        Looped(model, keys.bfloat16(), values.bfloat16(), 1, LAUNCH)
    with pytest.raises(ValueError, match="contiguous"):
        Looped(model, keys.transpose(2, 3), values.transpose(2, 3), 1, LAUNCH)
    token_ids, places, rope = inputs_of(model, {0: 4, 1: 4})
    with pytest.raises(ValueError, match="2 entries in a step; this one has buffers for 1 to 1"):
        Looped(model, keys, values, 1, LAUNCH).run(token_ids, places, rope)
