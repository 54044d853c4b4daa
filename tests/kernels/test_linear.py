"""Every way to multiply a few tokens with a weight gives what F.linear gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from snapstream.kernels.cpu.linear import MAX_TOKENS, linear
from snapstream.kernels.dispatch import add_linear


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 32), (192, 512), (130, 512), (256, 640), (7, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_f_linear(num_tokens: int, num_out: int, num_in: int, has_bias: bool) -> None:
    torch.manual_seed(num_tokens)
    x, weight, residual = (
        torch.randn(num_tokens, num_in),
        torch.randn(num_out, num_in),
        torch.randn(num_tokens, num_out),
    )
    bias = torch.randn(num_out) if has_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    got = linear(x, weight, bias)
    assert got.is_contiguous() and got.shape == (num_tokens, num_out)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    before = residual.clone()
    torch.testing.assert_close(add_linear(residual, x, weight, bias), want + before, atol=1e-4, rtol=1e-5)
    assert torch.equal(residual, before)


def test_layers_of_a_stack_and_strided_tokens() -> None:
    """Weights are views of ``[L, out, in]``; tokens may be a slice of something wider."""
    stack, wide = torch.randn(3, 128, 512), torch.randn(8, 1024)
    for num_tokens in (1, 3, 8, 40):
        x = wide.repeat(5, 1)[:num_tokens, 256:768]
        torch.testing.assert_close(linear(x, stack[1]), F.linear(x, stack[1]), atol=1e-4, rtol=1e-5)


def test_half_precision_is_left_to_torch() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert MAX_TOKENS >= 4
