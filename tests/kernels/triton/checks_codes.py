"""A check of the Triton product with int8 and int4 weights, as ``checks.py`` has them of other kernels."""

from __future__ import annotations

import pytest
import torch

from snapstream.kernels import groups, reference
from snapstream.kernels.interface import bind
from tests.kernels.triton.checks import assert_near


def check_code_linear(
    num_tokens: int, num_out: int, num_in: int, bits: int, group: int, dtype: torch.dtype, device: str
) -> None:
    """Equal to the reference, with a bias and without; a token's row is the same bits alone and beside others."""
    torch.manual_seed(num_out)
    numbers = torch.randn(num_out, num_in, device=device) / num_in**0.5
    codes, scales = groups.quantize(numbers, bits, group)
    scales[0, 0] = 0.0
    x = torch.randn(num_tokens, num_in + 16, device=device).to(dtype)[:, :num_in]
    bias = torch.randn(num_out, device=device).to(dtype)
    multiply = bind(device, "triton").code_linear
    assert multiply is not None
    for own_bias in (None, bias):
        got = multiply(x, codes, scales, own_bias)
        want = reference.code_linear(x.float(), codes, scales, None if own_bias is None else own_bias.float())
        assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
        assert_near(got, want, dtype)
    for token in {0, num_tokens - 1}:
        alone = multiply(x[token : token + 1], codes, scales, bias)[0]
        assert_near(alone, got[token], dtype)
        assert device == "cpu" or torch.equal(alone, got[token])  # NumPy's products round by where a tile lies


def check_refusals(device: str) -> None:
    codes, scales = groups.quantize(torch.randn(8, 64, device=device), 8, 32)
    x, multiply = torch.randn(4, 64, device=device), bind(device, "triton").code_linear
    assert multiply is not None
    for wrong in (
        (torch.randn(64, 4, device=device).t(), codes, scales),
        (x, codes.t(), scales),
        (x, codes, scales.t()),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            multiply(*wrong, None)
    assert multiply(x[:0], codes, scales, None).shape == (0, 8)
