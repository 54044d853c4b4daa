"""The plain form of a weight: views, products, bytes, and shares of several devices."""

from __future__ import annotations

import pytest
import torch

from snapstream.kernels.bound import bind
from snapstream.models.weight import Dense


@pytest.fixture
def weight() -> Dense:
    made = Dense.empty((3, 8, 6), torch.float32, "cpu")
    made.fill(torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)).to(torch.float64))
    return made


def test_a_layer_and_a_slice_are_views(weight: Dense) -> None:
    part = weight[1, slice(2, 5)]
    part.fill(torch.ones(3, 6))
    assert torch.equal(weight.dense()[1, 2:5], torch.ones(3, 6))
    assert weight[1].dense().data_ptr() == weight.dense()[1].data_ptr()
    assert weight.num_bytes == 3 * 8 * 6 * 4 and weight[0].shape == (8, 6)


def test_product_and_lookup(weight: Dense) -> None:
    x, bias, kernels = torch.randn(5, 6), torch.randn(8), bind("cpu")
    torch.testing.assert_close(weight[2].multiply(x, bias, kernels), x @ weight.dense()[2].t() + bias)
    torch.testing.assert_close(weight[2].multiply(x, None, kernels), x @ weight.dense()[2].t())
    assert torch.equal(weight[0].lookup(torch.tensor([7, 0])), weight.dense()[0, [7, 0]])
