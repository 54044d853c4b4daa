"""FP8 blocks of a weight: views, products of few and many tokens, bytes, shares, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snapstream.config import WeightForm
from snapstream.kernels.bound import KernelVersion, bind
from snapstream.models.blocks import Blocks
from snapstream.models.narrow import make_weight
from snapstream.models.row_major import FEW

SHAPE = (2, 300, 200)  # the last block of either direction is cut


def numbers() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SHAPE) * torch.logspace(-3, 3, SHAPE[1])[:, None]


def made() -> Blocks:
    weight = make_weight(WeightForm(width="fp8"), SHAPE, torch.float32, "cpu")
    assert isinstance(weight, Blocks)
    weight.fill(numbers())
    return weight


def test_stored_numbers_and_bytes() -> None:
    weight, wanted = made(), numbers()
    assert weight.num_bytes == WeightForm(width="fp8").num_bytes(SHAPE) == 2 * (300 * 200 + 4 * 3 * 2)
    largest = torch.stack([block.abs().amax() for block in wanted[0].split(128)])
    error = (weight.dense()[0] - wanted[0]).abs()
    for block, most in zip(error.split(128), largest, strict=True):
        assert block.max() <= most / 16  # three bits of mantissa
    out = torch.empty(SHAPE)
    weight.widen(out)
    assert torch.equal(out, weight.dense())


def test_whole_blocks_are_views() -> None:
    weight = made()
    part = weight[1, slice(128, 300)]
    assert part.shape == (172, 200) and part.scales.shape == (2, 2)
    assert torch.equal(part.dense(), weight.dense()[1, 128:])
    part.fill(torch.ones(172, 200))
    assert torch.equal(weight.dense()[1, 128:], torch.ones(172, 200))
    for rows in (slice(1, 128), slice(0, 100), slice(128, 299)):
        with pytest.raises(ValueError, match=f"rows {rows.start} to {rows.stop} .* are not whole blocks of 128"):
            weight[0, rows]


@pytest.mark.parametrize("version", ["cpu", "torch"])
@pytest.mark.parametrize("count", [1, 7, FEW, FEW + 1])
def test_products(version: KernelVersion, count: int) -> None:
    weight, x, bias, kernels = made(), torch.randn(count, 200), torch.randn(300), bind("cpu", version)
    wanted = x @ weight.dense()[1].t()
    scale = wanted.abs().max()
    for given in (None, bias):
        got = weight[1].multiply(x, given, kernels)
        torch.testing.assert_close(got / scale, (wanted + (0 if given is None else given)) / scale, rtol=0, atol=1e-6)


def test_no_table() -> None:
    with pytest.raises(TypeError, match="embeddings"):
        made()[0].lookup(torch.tensor([1]))
