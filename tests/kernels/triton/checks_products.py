"""Checks of the Triton products of one token, with int8 and int4 weights and with a matrix per expert, as
``checks.py`` has them of other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from snapstream.kernels import groups, reference
from snapstream.kernels.interface import bind
from tests.kernels.triton.checks import NAN, assert_near


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


def check_one_linear(num_out: int, num_in: int, dtype: torch.dtype, device: str) -> None:
    """Products of one token equal the reference: with a norm, a bias, SwiGLU, each or all; what is added is added."""
    torch.manual_seed(num_out)
    kernels = bind(device, "triton")
    multiply, add = kernels.one_linear, kernels.add_one_linear
    assert multiply is not None and add is not None
    weight = (torch.randn(2 * num_out, num_in, device=device) / num_in**0.5).to(dtype)
    x = 3.0 * torch.randn(1, num_in, device=device).to(dtype)
    weight_of_norm = torch.randn(num_in, device=device).to(dtype)
    bias = torch.randn(2 * num_out, device=device).to(dtype)
    for norm, own_bias, gated in product((None, weight_of_norm), (None, bias), (False, True)):
        got = multiply(x, norm, 1e-5, weight, own_bias, gated)
        wide = [None if tensor is None else tensor.float() for tensor in (norm, own_bias)]
        want = reference.one_linear(x.float(), wide[0], 1e-5, weight.float(), wide[1], gated)
        assert got.dtype == dtype and got.shape == want.shape
        assert_near(got, want, dtype)
        residual = torch.randn(1, 2 * num_out, device=device).to(dtype)
        summed = residual.float()
        reference.add_one_linear(summed, x.float(), weight.float(), wide[1])
        add(residual, x, weight, own_bias)
        assert_near(residual, summed, dtype)
    with pytest.raises(ValueError, match="contiguous"):
        multiply(x, None, 0.0, weight.t().contiguous().t(), None, False)


def check_few_linear(num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype, device: str) -> None:
    """Products of few tokens, whole or in parts that the next norm adds up; a token's are the same among others."""
    from snapstream.kernels.triton import dense

    torch.manual_seed(num_out)
    weight = (torch.randn(num_out, num_in, device=device) / num_in**0.5).to(dtype)
    x = 3.0 * torch.randn(num_tokens, num_in + 16, device=device).to(dtype)[:, :num_in]
    bias, norm = torch.randn(num_out, device=device).to(dtype), torch.rand(num_out, device=device).to(dtype)
    for own_bias in (None, bias):
        want = reference.few_linear(x.float(), weight.float(), None if own_bias is None else own_bias.float(), False)
        got = dense.few_linear(x, weight, own_bias, False)
        assert got.dtype == dtype
        assert_near(got, want, dtype)
        parts = dense.few_linear(x, weight, own_bias, True)
        assert parts.dtype == torch.float32
        assert_near(parts.sum(0), want, torch.float32)
        alone = dense.few_linear(x[-1:], weight, own_bias, True)
        assert_near(alone[:, 0], parts[:, -1], torch.float32)
        residual = torch.randn(num_tokens, num_out, device=device).to(dtype)
        summed = residual.clone()
        expected = reference.add_rms_norm(summed, parts, norm, 1e-5)
        assert_near(bind(device, "triton").add_rms_norm(residual, parts, norm, 1e-5), expected, dtype)
        assert_near(residual, summed, dtype)
    for wrong in ((x, weight.t().contiguous().t()), (x.t().contiguous().t(), weight), (x[:1].expand(17, -1), weight)):
        with pytest.raises(ValueError, match="contiguous"):
            dense.few_linear(*wrong, None, False)


def check_code_refusals(device: str) -> None:
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


def check_grouped_linear(
    counts: Sequence[int], num_out: int, num_in: int, is_fp8: bool, dtype: torch.dtype, device: str
) -> None:
    """Equal to the reference; matrices of experts without rows are not read; a row does not depend on others."""
    torch.manual_seed(num_out)
    size = torch.tensor(counts, device=device)
    wide = torch.randn(len(counts), num_out, num_in, device=device) / num_in**0.5
    blocks = [-(-n // 128) for n in (num_out, num_in)]
    scale = torch.rand(len(counts), *blocks, device=device) + 0.5 if is_fp8 else None
    weight = wide.to(torch.float8_e4m3fn if is_fp8 else dtype)
    unread = weight.view(torch.uint8) if is_fp8 else weight
    x = torch.randn(sum(counts), num_in + 16, device=device).to(dtype)[:, :num_in]
    ends = size.cumsum(0).to(torch.int32)
    want = reference.grouped_linear(x.float(), weight if is_fp8 else weight.float(), scale, ends)
    unread[size == 0] = 0x7F if is_fp8 else NAN
    multiply = bind(device, "triton").grouped_linear
    got = multiply(x, weight, scale, ends)
    assert got.dtype == dtype and got.is_contiguous()
    assert_near(got, want, dtype)
    behind = torch.cat((x, x[:3]))  # of no expert here
    assert_near(multiply(behind, weight, scale, ends)[: len(x)], want, dtype)
    for row in {0, sum(counts) - 1}:
        expert = int((ends <= row).sum())
        one = (torch.arange(len(counts), device=device) >= expert).to(torch.int32)
        alone = multiply(x[row : row + 1], weight, scale, one)[0]
        assert_near(alone, got[row], dtype)
        assert device == "cpu" or torch.equal(alone, got[row])  # NumPy's products round by where a tile lies


def check_expert_refusals(device: str) -> None:
    x, weight = torch.randn(4, 32, device=device), torch.randn(2, 16, 32, device=device)
    ends, multiply = torch.tensor([2, 4], dtype=torch.int32, device=device), bind(device, "triton").grouped_linear
    for wrong in ((x.t()[:4, :4].t(), weight[..., ::8]), (x[:, ::2], weight[..., :16].contiguous())):
        with pytest.raises(ValueError, match="contiguous"):
            multiply(wrong[0], wrong[1], None, ends)
    assert multiply(x[:0], weight, None, torch.zeros_like(ends)).shape == (0, 16)
