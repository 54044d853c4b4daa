"""RMSNorm of every version against the formula in double precision, of whole tokens and of heads."""

from __future__ import annotations

import gc

import pytest
import torch

from snapstream.kernels.bound import HeadNorm, Kernels, KernelVersion, bind

VERSIONS: list[KernelVersion] = ["cpu", "compiled_cpu", "torch"]
STILL = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)  # a rotation by nothing


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def normed(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Tokens ``[T, D]`` with one weight, or heads ``[T, H+G, E]`` with one each."""
    if x.dim() == 2:
        return kernels.rms_norm(x, weight, eps)
    return kernels.norm_rope(x, HeadNorm(weight, eps), STILL, 0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 6, 20)])
def test_formula(shape: tuple[int, ...], scale: float, version: KernelVersion) -> None:
    """At the small scale eps decides; three-dimensional input has one weight per head."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    weight = torch.randn(shape[1:], generator=generator)
    got, want = normed(bind("cpu", version), x, weight, 1e-6), exact(x, weight, 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sum_is_made_in_place_and_normed(version: KernelVersion) -> None:
    residual, x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(4))
    weight, total, before = torch.rand(32), residual + x, x.clone()
    got = bind("cpu", version).add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(residual, total) and torch.equal(x, before)
    torch.testing.assert_close(got.double(), exact(total, weight, 1e-5), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_input_is_left_alone_and_zeros_stay_zero(version: KernelVersion) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    before, norm = x.clone(), bind("cpu", version).rms_norm
    norm(x, torch.ones(16), 1e-5)
    assert torch.equal(x, before)
    assert torch.equal(norm(torch.zeros(2, 16), torch.ones(16), 1e-5), torch.zeros(2, 16))


@pytest.mark.parametrize(("version", "most"), [("cpu", 1.01), ("compiled_cpu", 1.01), ("torch", 2.02)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_normed_in_fp32(dtype: torch.dtype, version: KernelVersion, most: float) -> None:
    """Only the result is rounded (``torch`` may round before and after the weight): squares here overflow float16."""
    x = (300 * torch.randn(8, 512, generator=torch.Generator().manual_seed(2))).to(dtype)
    weight = torch.rand(512, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = bind("cpu", version).rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), exact(x, weight, 1e-6), rtol=most * rounding, atol=1e-6)


def test_what_is_remembered_of_a_weight_is_never_given_to_another() -> None:
    """Weights that come and go may lie where others lay; eps counts too."""
    norm, x = bind("cpu", "cpu").rms_norm, torch.randn(2, 8, generator=torch.Generator().manual_seed(5))
    for step in range(50):
        weight = torch.full((8,), float(step))
        for eps in (1e-6, 1.0):
            for _ in range(2):
                torch.testing.assert_close(norm(x, weight, eps).double(), exact(x, weight, eps), rtol=2e-6, atol=1e-5)
        del weight
        gc.collect()
