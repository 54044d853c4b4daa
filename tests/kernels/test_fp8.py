"""FP8: what a scale does at the edges, and attention over FP8 rows on a CPU against the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from snapstream.kernels import fp8, reference
from snapstream.kernels.cpu import attention, compiled, native  # noqa: F401 - registers the operators
from snapstream.kernels.rows import LayerRows

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")


def round_trip(tokens: torch.Tensor) -> torch.Tensor:
    scale = fp8.scale_of(tokens)[:, None, None]
    return fp8.dequantise(fp8.quantise(tokens, scale), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_numbers_come_back_within_a_sixteenth(dtype: torch.dtype, size: float) -> None:
    """Three bits of mantissa: half a step is 1/16 at most, until 2^-12 of the largest."""
    torch.manual_seed(0)
    tokens = (torch.randn(3, 200, 32) * size).to(dtype)
    got, tokens = round_trip(tokens), tokens.float()
    largest = tokens.abs().amax((1, 2), keepdim=True)
    assert ((got - tokens).abs() <= tokens.abs() / 16 + largest * 2**-16).all()
    error = (got - tokens).norm() / tokens.norm()
    assert 0.01 < error < 0.04  # about 2^-5.2; none at all would mean that nothing was rounded


def test_scales_are_powers_of_two_with_headroom() -> None:
    tokens = torch.tensor([1e-9, 0.7, 1.0, 63.9, 64.0, 448.0, 3e5])[:, None, None]
    scale = fp8.scale_of(tokens)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    stored = tokens[:, 0, 0] / scale
    assert (stored >= 64).all() and (stored < 128).all()
    assert (scale * fp8.MAX >= 3.5 * tokens[:, 0, 0]).all()


def test_scales_of_extremes_are_finite() -> None:
    huge = torch.finfo(torch.float32).max
    tokens = torch.tensor([0.0, 1e-45, huge, float("inf")])[:, None, None]
    scale = fp8.scale_of(tokens)
    assert scale[0] == 1.0 and scale.isfinite().all() and (scale > 0).all() and (1 / scale).isfinite().all()
    back = round_trip(tokens)[:, 0, 0]
    assert back.isfinite().all() and back[0] == 0.0
    assert abs(back[2] / huge - 1) <= 1 / 8 and back[3] == scale[3] * fp8.MAX


def test_what_is_too_large_saturates() -> None:
    scale = torch.tensor(2.0)
    x = torch.tensor([895.0, 896.0, 897.0, 1e30, -1e30, float("inf"), float("-inf")])
    assert fp8.dequantise(fp8.quantise(x, scale), scale).tolist() == [896.0, 896.0, 896.0, 896.0, -896.0, 896.0, -896.0]


def test_an_outlier_costs_the_others_precision_but_not_their_being() -> None:
    tokens = torch.full((1, 50, 8), 0.01)
    tokens[0, 3, 2] = 100.0
    back = round_trip(tokens)
    assert abs(back[0, 3, 2] - 100.0) <= 100 / 16
    assert ((back - tokens).abs() <= 100 * 2**-16)[tokens == 0.01].all() and (back > 0).all()


def rows_in_fp8(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two layers of five rows, their scales, and the numbers that they stand for."""
    torch.manual_seed(1)
    wide = torch.randn(2, 2, 5, 2, 37, 32) * torch.tensor([0.1, 40.0]).view(2, 1, 1, 1, 1, 1)
    scales = torch.stack([torch.stack([fp8.scale_of(x) for x in layer]) for layer in wide.flatten(0, 1)])
    scales = scales.view(2, 2, 5, 2)  # of K and V, [L, rows+1, G]
    stored = fp8.quantise(wide, scales[..., None, None])
    return *stored, *scales, *fp8.dequantise(stored, scales[..., None, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_that_of_the_numbers_meant(dtype: torch.dtype) -> None:
    k, v, k_scale, v_scale, wide_k, wide_v = rows_in_fp8(torch.float32)
    q = torch.randn(4, 6, 32).to(dtype)
    rows, lengths = torch.tensor([0, 1, 2, 4]), torch.tensor([37, 36, 5, 1])
    want = reference.decode_attention(q.float(), LayerRows(wide_k, wide_v, 1), rows, lengths)
    cache = LayerRows(k, v, 1, k_scale, v_scale)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for version in (reference, attention):
        got = version.decode_attention(q, cache, rows, lengths)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * 40)
    if dtype != torch.float16:
        written = k.clone(), v.clone()
        one = torch.zeros(4, 2, 32, dtype=dtype)
        torch.ops.snapstream.attend_rows_cpu(q, one, one, *written, 1, rows, lengths - 1, lengths, k_scale, v_scale)


@needs_compiler
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (6, 2, 20), (8, 1, 128)])
def test_the_compiled_kernel_equals_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    caches = [torch.randn(2, 5, num_kv_heads, 37, head_dim).to(fp8.DTYPE) for _ in "kv"]
    scales = [torch.randint(-6, 6, (2, 5, num_kv_heads)).float().exp2() for _ in "kv"]
    projected = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim)  # q, k and v are strided views
    projected[:, :, ::5] *= 1000.0
    q, k, v = projected.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows, lengths, slots = (torch.tensor(x) for x in ([2, 0, 3, 1], [37, 1, 20, 36], [5, 0, 19, 35]))
    q, k, v = (x[:4] * 0.05 for x in (q, k, v))
    want_k, want_v = (cache.clone() for cache in caches)
    cache = LayerRows(want_k, want_v, 1, *scales)
    reference.write_slots(k, v, cache, rows, slots)
    want = reference.decode_attention(q, cache, rows, lengths)
    got = torch.ops.snapstream.attend_rows_cpu(q, k, v, *caches, 1, rows, slots, lengths, *scales)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-4)
    for cache, expected in zip(caches, (want_k, want_v), strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@needs_compiler
def test_the_compiled_kernel_reads_and_rounds_every_number_as_torch_does() -> None:
    """All 254 numbers as values, and as many halves between them, powers of two and giants as new values."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8.DTYPE).float()
    numbers = numbers[numbers.isfinite()]
    ordered = numbers.unique()
    between = (ordered[1:] + ordered[:-1]) / 2  # ties
    edges = torch.tensor([-1e30, -460.0, -448.0, 2**-10, 2**-10 * 1.01, 448.0, 449.0, 1e30])
    x = torch.cat((numbers, between, between * (1 + 2**-20), between * (1 - 2**-20), edges))
    x = torch.cat((x, torch.zeros(-len(x) % 16))).view(-1, 1, 16)  # [B, G, E]
    batch = len(x)
    caches = [torch.zeros(1, batch, 1, 1, 16).to(fp8.DTYPE) for _ in "kv"]
    ones = torch.ones(1, batch, 1)
    rows, zero = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    out = torch.ops.snapstream.attend_rows_cpu(0 * x, 0 * x, x, *caches, 0, rows, zero, zero + 1, ones, ones)
    want = fp8.quantise(x, torch.tensor(1.0)).float()
    assert torch.equal(out, want)  # one visible slot: attention gives its value back


@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_one_scale_fits_both_parts_of_a_latent(size: float) -> None:
    """Numbers float, so rotated parts of a hundredth or 300 times the size of the others lose nothing by sharing."""
    torch.manual_seed(0)
    c, r = torch.randn(1, 600, 64), size * torch.randn(1, 600, 16)
    q = torch.cat((torch.randn(4, 64) / 4, torch.randn(4, 16) / 2 / size), 1)

    def attended(c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return (q @ torch.cat((c, r), -1)[0].t()).softmax(-1) @ c[0]

    want, both = attended(c, r), round_trip(torch.cat((c, r), -1))
    one, two = attended(both[..., :64], both[..., 64:]), attended(round_trip(c), round_trip(r))
    assert 0.01 < (one - want).norm() / want.norm() < 1.05 * (two - want).norm() / want.norm() < 0.1
