"""RMSNorm against the formula in double precision."""

from __future__ import annotations

import pytest
import torch

from snapstream.layers.norm import RMSNorm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 6, 20)])
def test_formula(shape: tuple[int, ...], scale: float) -> None:
    """At the small scale eps decides; three-dimensional input has one weight per head."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    weight = torch.randn(shape[1:], generator=generator)
    norm, want = RMSNorm(weight, 1e-6), exact(x, weight, 1e-6)
    for form in (norm.fused, norm.composed):
        torch.testing.assert_close(form(x).double(), want, rtol=2e-6, atol=1e-6)


def test_input_is_left_alone_and_zeros_stay_zero() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    norm = RMSNorm(torch.ones(16), 1e-5)
    norm(x)
    assert torch.equal(x, before)
    assert torch.equal(norm(torch.zeros(2, 16)), torch.zeros(2, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_normed_in_fp32(dtype: torch.dtype) -> None:
    """Only the result is rounded: squares of these inputs overflow float16."""
    x = (300 * torch.randn(8, 512, generator=torch.Generator().manual_seed(2))).to(dtype)
    weight = torch.rand(512, generator=torch.Generator().manual_seed(3)).to(dtype)
    norm, want = RMSNorm(weight, 1e-6), exact(x, weight, 1e-6)
    rounding = torch.finfo(dtype).eps / 2
    for form, most in (
        (norm.composed, 1.01),
        (norm.fused, 2.02),
    ):  # fused may round before and after the weight
        assert form(x).dtype == dtype
        torch.testing.assert_close(form(x).double(), want, rtol=most * rounding, atol=1e-6)
