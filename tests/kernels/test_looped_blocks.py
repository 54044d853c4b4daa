"""FP8 blocks in panels: products on every instruction set of this machine, and places for parts of a matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapstream.config import WeightForm
from snapstream.kernels import fp8
from snapstream.kernels.bound import bind
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load
from snapstream.kernels.reference import widen_blocks
from snapstream.models.block_panels import BlockPanels
from snapstream.models.panels import make_panels

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

KERNELS = bind("cpu")
FORM = WeightForm(width="fp8")


def blocks(num_out: int, num_in: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every byte but NaN, the numbers below the normal ones among them, and scales that differ much."""
    codes = torch.randint(0, 254, (num_out, num_in), generator=generator)
    codes += (codes >= 127).int()  # 127 and 255 are NaN
    scales = torch.exp2(torch.randn(-(-num_out // 128), -(-num_in // 128), generator=generator) * 6)
    return codes.to(torch.uint8).view(fp8.DTYPE), scales


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=25)
@given(num_out=st.integers(1, 300), num_in=st.integers(1, 600), tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_product(instructions: InstructionSet, num_out: int, num_in: int, tokens: int, seed: int) -> None:
    """As over the widened numbers, which it reads exactly; for a token the same bits alone and beside any others."""
    generator = torch.Generator().manual_seed(seed)
    codes, scales = blocks(num_out, num_in, generator)
    stack = BlockPanels.empty(load(instructions), (2, num_out, num_in))
    weight = stack[1]
    weight.fill_codes(codes, scales)
    wide = widen_blocks(codes, scales)
    assert torch.equal(weight.dense(), wide) and stack.num_bytes >= FORM.num_bytes(stack.shape)
    x = torch.randn(tokens, num_in, generator=generator)
    got = weight.multiply(x, None, KERNELS)
    want, size = x.double() @ wide.double().t(), x.abs().double() @ wide.abs().double().t()
    assert bool(((got - want).abs() <= 2e-6 * size).all())
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(weight.multiply(x[token : token + 1], None, KERNELS)[0], got[token])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_number_is_exact(instructions: InstructionSet) -> None:
    """A token that has one number picks a column of the matrix."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1).view(fp8.DTYPE)
    weight = BlockPanels.empty(load(instructions), (128, 256))
    weight.fill_codes(codes, torch.tensor([[0.75, 2.0**-20]]))
    columns = torch.tensor([column for column in range(256) if column % 128 != 127])
    picked = torch.nn.functional.one_hot(columns, 256).float()
    # NaN times zero is NaN, and is refused where it is loaded: without those columns
    weight.data.view(torch.uint8)[weight.data.view(torch.uint8) % 128 == 127] = 0
    for x in (picked, picked[:2], picked[5:6]):
        assert torch.equal(weight.multiply(x, None, KERNELS), (x @ weight.dense().t()))


def test_parts_of_a_stack_of_experts() -> None:
    """Gate and up of an expert come apart; parts that are no whole blocks are refused."""
    weight = make_panels(load())(FORM, (2, 3, 300, 200), torch.float32, "cpu")
    assert isinstance(weight, BlockPanels)
    assert weight.shape == (2, 3, 300, 200)
    whole_panels = make_panels(load())(FORM, (2, 3, 320, 200), torch.float32, "cpu")
    assert whole_panels.num_bytes == FORM.num_bytes((2, 3, 320, 200)) == 2 * 3 * (320 * 200 + 4 * 3 * 2)
    numbers = torch.randn(2, 3, 300, 200)
    weight.fill(numbers)
    whole = weight.dense()
    assert bool(((whole - numbers).abs() <= numbers.abs().amax() / 16).all())
    codes, scales = blocks(172, 200, torch.Generator().manual_seed(1))
    part = weight[1, 2, slice(128, 300)]
    part.fill_codes(codes, scales)
    assert torch.equal(weight[1, 2].dense()[128:], widen_blocks(codes, scales))
    changed = weight.dense()
    changed[1, 2, 128:] = whole[1, 2, 128:]
    assert torch.equal(changed, whole)
    for rows in (slice(1, 128), slice(0, 100), slice(128, 299)):
        with pytest.raises(ValueError, match=f"rows {rows.start} to {rows.stop} .* are not whole blocks of 128"):
            weight[0, 1, rows]
    with pytest.raises(TypeError, match="embeddings is not kept in FP8 blocks"):
        weight[0, 0].lookup(torch.tensor([0]))
