"""Every way to multiply a few tokens with a weight gives what F.linear gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from snapstream.kernels.cpu.linear import BUCKETS, WAYS, ChosenLinear, bucket, ways_for


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 32), (192, 512), (130, 512), (256, 640), (7, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_f_linear(num_tokens: int, num_out: int, num_in: int, has_bias: bool) -> None:
    torch.manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, num_in), torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if has_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    for way in ways_for(num_out, num_in, num_tokens):
        choice = {(num_out, num_in, size): way for size in BUCKETS}
        got = ChosenLinear(choice)(x, weight, bias)
        assert got.is_contiguous() and got.shape == (num_tokens, num_out)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_layers_of_a_stack_and_strided_tokens() -> None:
    """Weights are views of ``[L, out, in]``; tokens may be a slice of something wider."""
    stack, wide = torch.randn(3, 128, 512), torch.randn(8, 1024)
    for num_tokens in (1, 3, 8, 40):
        x = wide.repeat(5, 1)[:num_tokens, 256:768]
        for way in ways_for(128, 512, num_tokens):
            torch.testing.assert_close(WAYS[way](x, stack[1], None), F.linear(x, stack[1]), atol=1e-4, rtol=1e-5)


def test_half_precision_and_what_was_not_chosen_are_left_to_torch() -> None:
    linear = ChosenLinear({(64, 64, 4): "left"})
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))
    other = torch.randn(2, 64)
    assert torch.equal(linear(other, weight.float(), None), F.linear(other, weight.float()))


def test_tokens_between_are_those_of_the_next_bucket() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 33, 64)] == [1, 2, 4, 4, 8, 8, 16, 64, 64]
    assert tuple(bucket(n) for n in BUCKETS) == BUCKETS
