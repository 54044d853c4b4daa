"""FP8: what a scale does at the edges, and attention over FP8 rows on a CPU against the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snapstream.config import KV_DTYPES, EngineOptions, KVBudget, KVDType, PrefixStoreConfig
from snapstream.kernels import reference
from snapstream.kernels.cpu import attention
from snapstream.kernels.formats import ENCODINGS, FP8, FP8_MAX, INT4, Encoding, hadamard
from snapstream.kernels.groups import (
    dequantize,
    largest_value,
    pack,
    quantize,
    quantize_inputs,
    quantize_uint4,
    round_inputs,
    unpack,
)
from snapstream.kernels.interface import KernelVersion, bind
from snapstream.kernels.rows import LayerRows
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import Full, KVSpec
from snapstream.llm import LLM
from snapstream.models.matrix import quantize as fp8_blocks
from snapstream.models.registry import read_model_config
from snapstream.plan.fit import engine_config
from snapstream.types import SamplingParams
from tests.kernels.layers import step_of
from tests.parity.checkpoints import make_model, save


def round_trip(tokens: torch.Tensor) -> torch.Tensor:
    scale = FP8.scale_of(tokens)[:, None, None]
    return FP8.decode(FP8.encode(tokens, scale), scale)


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
    scale = FP8.scale_of(tokens)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    stored = tokens[:, 0, 0] / scale
    assert (stored >= 64).all() and (stored < 128).all()
    assert (scale * FP8_MAX >= 3.5 * tokens[:, 0, 0]).all()


def test_scales_of_extremes_are_finite() -> None:
    huge = torch.finfo(torch.float32).max
    tokens = torch.tensor([0.0, 1e-45, huge, float("inf")])[:, None, None]
    scale = FP8.scale_of(tokens)
    assert scale[0] == 1.0 and scale.isfinite().all() and (scale > 0).all() and (1 / scale).isfinite().all()
    back = round_trip(tokens)[:, 0, 0]
    assert back.isfinite().all() and back[0] == 0.0
    assert abs(back[2] / huge - 1) <= 1 / 8 and back[3] == scale[3] * FP8_MAX


def test_what_is_too_large_saturates() -> None:
    scale = torch.tensor(2.0)
    x = torch.tensor([895.0, 896.0, 897.0, 1e30, -1e30, float("inf"), float("-inf")])
    assert FP8.decode(FP8.encode(x, scale), scale).tolist() == [896.0, 896.0, 896.0, 896.0, -896.0, 896.0, -896.0]


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
    scales = torch.stack([torch.stack([FP8.scale_of(x) for x in layer]) for layer in wide.flatten(0, 1)])
    scales = scales.view(2, 2, 5, 2)  # of K and V, [L, rows+1, G]
    stored = FP8.encode(wide, scales[..., None, None])
    return *stored, *scales, *FP8.decode(stored, scales[..., None, None]).to(dtype)


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


# Codes in groups: what they stand for, bit by bit, and how far that is from the numbers they were made of.


def by_loops(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The same numbers one at a time."""
    out = torch.empty(x.shape, dtype=torch.float32)
    for line, row in enumerate(x.tolist()):
        for start in range(0, len(row), group):
            own = row[start : start + group]
            largest = max(own, key=abs)
            scale = torch.tensor(abs(largest) / 127 if bits == 8 else largest / -8).to(torch.float16).item()
            for place, value in enumerate(own, start):
                code = 0 if scale == 0 else round(value / scale)
                out[line, place] = max(-127 if bits == 8 else -8, min(127 if bits == 8 else 7, code)) * scale
    return out


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stand_for_the_nearest_multiples(bits: int, group: int) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(x, bits, group)
    assert codes.dtype == torch.uint8 and codes.shape == (5, 256 * bits // 8)
    assert scales.dtype == torch.float16 and scales.shape == (5, 256 // group)
    wide = dequantize(codes, scales, bits)
    torch.testing.assert_close(wide, by_loops(x, bits, group), rtol=1e-6, atol=0)
    assert ((wide - x).abs() <= most_error(scales, bits, group, wide) + 2**-11 * x.abs()).all()


def most_error(scales: torch.Tensor, bits: int, group: int, wide: torch.Tensor) -> torch.Tensor:
    """Half a step; a step where a number of 4 bits was cut to 7."""
    step = scales.float().repeat_interleave(group, -1)
    is_last = (wide == 7 * step) if bits == 4 else torch.zeros_like(wide, dtype=torch.bool)
    return torch.where(is_last, 1.0, 0.5) * step.abs()


@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 4]), st.floats(-30, 15))
def test_numbers_of_any_size(seed: int, bits: int, exponent: float) -> None:
    """From far below the least scale to near the largest: half a step, or zero."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = quantize(x, bits, 32)
    wide = dequantize(codes, scales, bits)
    assert wide.isfinite().all()
    least = largest_value(bits) * 2.0**-25  # a scale is rounded to a multiple of 2 ** -24
    assert ((wide - x).abs() <= most_error(scales, bits, 32, wide) + 2**-11 * x.abs() + least).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_codes_are_the_same(bits: int) -> None:
    codes, scales = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), bits, 32)
    again, same = quantize(dequantize(codes, scales, bits), bits, 32)
    assert torch.equal(codes, again) and torch.equal(scales, same)


def test_layout_of_the_bytes() -> None:
    """The first of two codes of 4 bits lies in the low half."""
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8), 4).tolist() == [0x21, 0x0F]
    assert unpack(torch.tensor([0x21, 0x0F], dtype=torch.uint8), 4).tolist() == [1, 2, 15, 0]
    x = torch.zeros(1, 32)
    x[0, 1], x[0, 2] = -8.0, 3.0
    codes, scales = quantize(x, 4, 32)
    assert scales.tolist() == [[1.0]] and codes[0, :3].tolist() == [0x08, 0x8B, 0x88]
    codes, scales = quantize(-x, 4, 32)  # the same codes, and a scale of the other sign
    assert scales.tolist() == [[-1.0]] and codes[0, :3].tolist() == [0x08, 0x8B, 0x88]
    assert quantize(torch.zeros(1, 32), 8, 32)[0].tolist() == [[128] * 32]


def test_activations() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    x[1, :32] = 0.0
    seen = round_inputs(x, 32)
    step = x.unflatten(-1, (-1, 32)).abs().amax(-1).div(127).repeat_interleave(32, -1)
    assert ((seen - x).abs() <= 0.5001 * step).all()
    codes = seen / step.where(step > 0, 1.0)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)


class Divisors(TorchDispatchMode):
    """Collects the Python numbers by which tensors are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_) and not isinstance(args[1], Tensor):
            self.found.append(args[1])
        return func(*args, **kwargs or {})


def test_scales_are_the_same_on_every_device() -> None:
    """CUDA multiplies by the reciprocal of a Python number, which is exact for powers of two alone."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    with Divisors() as seen:
        scales, of_inputs = [own.scale_of(x) for own in OF_SLOTS], quantize_inputs(x, 32)[1]
        quantize(x, 8, 32), quantize(x, 4, 32), quantize_uint4(x, 32), fp8_blocks(x), INT4.encode(x, None)
    assert {*seen.found} == {-8}
    assert scales and all(torch.equal(own, x.abs().amax(-1) / 127) for own in scales)
    assert torch.equal(of_inputs, x.unflatten(-1, (-1, 32)).abs().amax(-1) / 127)


# Products with a matrix per expert: every version against the reference, and what a row may depend on.

VERSIONS: list[KernelVersion] = ["cpu", "torch"]
COUNTS = {"one row": [0, 0, 1, 0, 0], "gaps": [3, 0, 1, 7, 0], "one expert": [0, 0, 0, 0, 40], "none": [0, 0, 0, 0, 0],
          "few": [1, 2, 4, 5, 6]}  # fmt: skip


def problem(counts: list[int], num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, matrices and the ends of each expert's rows."""
    torch.manual_seed(num_out)
    x, weight = torch.randn(sum(counts), num_in), torch.randn(len(counts), num_out, num_in) / num_in**0.5
    return x.to(dtype), weight.to(dtype), torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 48), (30, 20)])
def test_equal_to_the_reference(
    version: KernelVersion, dtype: torch.dtype, counts: str, num_out: int, num_in: int
) -> None:
    x, weight, ends = problem(COUNTS[counts], num_out, num_in, dtype)
    wanted = reference.grouped_linear(x, weight, None, ends)
    got = bind("cpu", version).grouped_linear(x, weight, None, ends)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("version", VERSIONS)
def test_bf16_weights_of_fp32_tokens(version: KernelVersion) -> None:
    x, wide, ends = problem(COUNTS["few"], 64, 48, torch.float32)
    wanted = reference.grouped_linear(x, wide.bfloat16(), None, ends)
    got = bind("cpu", version).grouped_linear(x, wide.bfloat16(), None, ends)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("num_in", [200, 208, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_times_their_scales(version: KernelVersion, num_in: int, dtype: torch.dtype) -> None:
    x, wide, ends = problem(COUNTS["few"], 192, num_in, torch.float32)
    x, weight, scale = x.to(dtype), wide.to(torch.float8_e4m3fn), torch.rand(5, 2, 2) + 0.5
    wanted = reference.grouped_linear(x, weight, scale, ends)
    got = bind("cpu", version).grouped_linear(x, weight, scale, ends)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:  # of expert 0, whose second block of rows is looked at by hand
        by_hand = sum(float(weight[0, 150, i]) * float(scale[0, 1, i // 128]) * float(x[0, i]) for i in range(num_in))
        assert float(got[0, 150]) == pytest.approx(by_hand, abs=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_does_not_depend_on_its_neighbours(version: KernelVersion) -> None:
    x, weight, ends = problem([5, 3, 9], 64, 48, torch.float32)
    multiply = bind("cpu", version).grouped_linear
    together, experts = multiply(x, weight, None, ends), [0] * 5 + [1] * 3 + [2] * 9
    for row, expert in enumerate(experts):
        alone = multiply(x[row : row + 1], weight, None, (torch.arange(3) >= expert).to(torch.int32))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_behind_the_last_end_are_no_experts(version: KernelVersion) -> None:
    """A rank with some of the experts: other ranks' rows stand behind its own, and change nothing."""
    x, weight, ends = problem([5, 3, 9], 64, 48, torch.float32)
    behind = torch.cat((x, torch.full((4, 48), torch.nan)))
    got = bind("cpu", version).grouped_linear(behind, weight, None, ends)
    assert got.shape == (21, 64)
    torch.testing.assert_close(got[:17], reference.grouped_linear(x, weight, None, ends), rtol=1e-5, atol=1e-5)


def test_a_share_of_a_stack_is_read_where_it_lies() -> None:
    x, weight, ends = problem(COUNTS["few"], 64, 96, torch.float32)
    share = weight[..., 48:]
    got = bind("cpu").grouped_linear(x[:, :48], share, None, ends)
    torch.testing.assert_close(got, reference.grouped_linear(x[:, :48], share, None, ends), rtol=1e-5, atol=1e-5)


# Rows for a CPU: what the codes of slots stand for, and attention on a CPU over all of them against the reference.

NAN_BYTE = 255  # in a scale of fp16
KINDS = tuple(name for name in KV_DTYPES if name not in ("auto", "float32", "fp8"))
OF_SLOTS = [encoding for encoding in ENCODINGS.values() if encoding.format.scales == "slot"]


def cache_of(kv_dtype: KVDType, capacity: int) -> KVCache:
    spec = KVSpec(layers=(Full(num_kv_heads=2, key_dim=32, value_dim=32),) * 2, num_heads=6, kv_dtype=kv_dtype)
    return KVCache(spec, 3, capacity, "cpu")


def widened(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, (keys, values) = cache.layer(layer), cache.encodings
    k_scale, v_scale = rows.scales
    return keys.decode(rows.k, k_scale), values.decode(rows.v, v_scale)


@pytest.mark.parametrize("own", OF_SLOTS, ids=lambda own: own.format.name)
def test_a_slot_keeps_its_numbers_within_half_a_step(own: Encoding) -> None:
    x = torch.randn(50, 32) * 10.0 ** torch.randint(-30, 30, (50, 1))
    x[3] = 0.0
    scale = own.scale_of(x)
    back = own.decode(own.encode(x, scale), scale)
    torch.testing.assert_close(scale[:, None], step_of(own.format.name, x))
    assert ((back - x).abs() <= 0.5001 * scale[:, None]).all()
    assert torch.equal(back[3], x[3]) and (back - x).norm() > 0
    for wrong in (torch.nan, torch.inf):
        x[5, 7] = wrong
        scale = own.scale_of(x)
        assert own.decode(own.encode(x, scale), scale)[5].isnan().all()


@pytest.mark.parametrize("kv_dtype", KINDS)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_attention_over_what_was_written(kv_dtype: KVDType, lengths: list[int], seed: int) -> None:
    """A prompt written by ``store`` or ``gather_rows`` and a token by ``write_slots``: the CPU's attention equals the
    reference's, which equals attention over fp32 rows of the same numbers. NaN past the end disturbs nobody.
    """
    torch.manual_seed(seed)
    cache, wide, layer = cache_of(kv_dtype, 9), cache_of("auto", 9), 1
    keys, values = torch.randn(2, 2, 9, 32)
    index = torch.arange(9).expand(2, -1)
    handle = cache.layer(layer)
    for row, length in enumerate(lengths):
        if row % 2:
            cache.store(layer, row, slice(0, length), keys[:, :length], values[:, :length])
        else:
            cache.kernels.gather_rows(handle, [row], keys, values, index[:, :length])
    rows, ends = torch.arange(len(lengths)), torch.tensor(lengths)
    new = torch.randn(2, len(lengths), 2, 32)
    reference.write_slots(new[0], new[1], handle, rows, ends - 1)
    near, names = 2.0**-8 if kv_dtype == "bfloat16" else 0.0, [own.format.name for own in cache.encodings]
    for name, own, prompt, token in zip(names, widened(cache, layer), (keys, values), new, strict=True):
        for row, length in enumerate(lengths):
            want = torch.cat((prompt[:, : length - 1], token[row][:, None]), 1)
            if name == "int4":
                assert torch.equal(own[row, :, :length], INT4.decode(INT4.encode(want, None), None))
                continue
            assert ((own[row, :, :length] - want).abs() <= near * want.abs() + 0.501 * step_of(name, want)).all()
    for stored, own in zip((wide.k, wide.v), widened(cache, layer), strict=True):
        stored[layer] = own
    for tensor in (
        cache.k if cache.k_scale is None else cache.k_scale,
        cache.v if cache.v_scale is None else cache.v_scale,
    ):
        for row, length in enumerate(lengths):
            tensor[layer, row, :, length:] = NAN_BYTE if tensor.dtype == torch.uint8 else float("nan")
    q = torch.randn(len(lengths), 6, 32)
    want = reference.decode_attention(q, wide.layer(layer), rows, ends)
    torch.testing.assert_close(reference.decode_attention(q, handle, rows, ends), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attention.decode_attention(q, handle, rows, ends), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", *KINDS])
def test_tokens_are_gathered_whole_as_the_reference_does(kv_dtype: KVDType) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 30, 32)[:, :, 2:25]  # a range of staging
    index = torch.stack([torch.randperm(23)[:7] for _ in range(2)])
    native, plain = cache_of(kv_dtype, 9), cache_of(kv_dtype, 9)
    for cache, gather in ((native, native.kernels.gather_rows), (plain, reference.gather_rows)):
        cache.begin_rows(1, [0, 2], keys, values)
        gather(cache.layer(1), [0, 2], keys, values, index)
    assert native.kernels.gather_rows is not reference.gather_rows
    for own, want in ((native.k, plain.k), (native.v, plain.v), (native.k_scale, plain.k_scale)):
        assert (own is None and want is None) or torch.equal(own.float(), want.float())
    assert native.k[1, 2].float().abs().sum() > 0 and not native.k[1, 1].float().any()


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_an_engine_counts_them(kv_dtype: KVDType, tmp_path: Path) -> None:
    token_bytes = {"bfloat16": 4 * 32, "int8": 2 * (32 + 4), "int4": 2 * 18, "int8/int4": 32 + 4 + 18}[kv_dtype]
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    model = read_model_config(folder)
    with LLM(folder, budget=40, max_model_len=90, kv_dtype=kv_dtype, executor="eager", progress=False) as llm:
        (output,) = llm.generate([[5 + i for i in range(60)]], SamplingParams(max_tokens=5, temperature=0.0))
        cache = llm.engine.runner.cache  # type: ignore[attr-defined]
    assert output.compression is not None
    assert output.compression.row_bytes == 40 * model.num_layers * model.num_kv_heads * token_bytes
    assert cache.num_bytes == 9 * output.compression.row_bytes  # eight rows and the padding row


def rotated_by_matrix(x: Tensor) -> Tensor:
    """By the matrix of Sylvester's construction, in fp64."""
    size = x.shape[-1] & -x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.double().unflatten(-1, (-1, size)) @ (matrix / size**0.5)).flatten(-2)


@pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 256])
def test_a_rotation_is_its_own_inverse_and_keeps_products(size: int) -> None:
    torch.manual_seed(size)
    q, k = torch.randn(2, 7, size)
    torch.testing.assert_close(hadamard(k), rotated_by_matrix(k).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(k)), k, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)


def test_groups_equal_a_program_of_loops() -> None:
    torch.manual_seed(3)
    x = torch.randn(20, 96) * 10.0 ** torch.randint(-3, 4, (20, 1))
    x[4], x[5, :32], x[6, 3] = 0.0, torch.tensor([2.0, -2.0] * 16), -500.0
    packed = INT4.pack(x)
    assert packed.shape == (20, INT4.width(96)) == (20, 54) and packed.dtype == torch.uint8
    back = INT4.unpack(packed)
    for row, (numbers, found) in enumerate(zip(x.tolist(), back.tolist(), strict=True)):
        for first in range(0, 96, 32):
            own = numbers[first : first + 32]
            most = max(own, key=lambda number: (abs(number), number))
            codes = [max(-8, min(7, round(number / (most / -8)))) if most else 0 for number in own]
            above = sum(number * number * code * number for number, code in zip(own, codes, strict=True))
            below = sum((number * code) ** 2 for number, code in zip(own, codes, strict=True))
            scale = above / below if below else 0.0
            want = [code * scale for code in codes]
            assert found[first : first + 32] == pytest.approx(want, rel=2**-10, abs=1e-6), (row, first)
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = -8.0, 7.0, 2.5  # 2.5 is a tie: to even
    scale = (8**4 + 7**4 + 2.5**3 * 2) / (8**4 + 7**4 + 2.5**2 * 4)
    assert INT4.unpack(INT4.pack(x))[0, :3].tolist() == pytest.approx([-8 * scale, 7 * scale, 2 * scale], rel=2**-10)
    assert INT4.pack(x)[0, 2:5].tolist() == [0x78, 0x02, 0x00]


def test_numbers_that_no_group_holds() -> None:
    for wrong in (torch.nan, torch.inf):
        x = torch.ones(2, 64)
        x[0, 40] = wrong
        back = INT4.unpack(INT4.pack(x))
        assert back[0, 32:].isnan().all() and torch.equal(back[0, :32], x[0, :32]) and torch.equal(back[1], x[1])
    assert INT4.unpack(INT4.pack(torch.full((32,), 1e9))).tolist() == [-8.0 * -65504.0] * 32  # saturates


@pytest.mark.parametrize("head_dim", [64, 128])
def test_outlier_channels_need_the_rotation(head_dim: int) -> None:
    """Two channels of K times 20: the scores of the other channels are lost unless K is rotated."""
    torch.manual_seed(head_dim)
    q, k = torch.randn(64, head_dim), torch.randn(512, head_dim)
    k[:, [5, 40]] *= 20  # each takes the codes of its group
    q[:, [5, 40]] = 0.0  # scores depend on the others

    def error(keys: Tensor) -> float:
        """Of scores, relative to their size."""
        return float((q @ (keys - k).t()).norm() / (q @ k.t()).norm())

    assert error(INT4.decode(INT4.encode(k, None), None)) < 0.3
    assert error(INT4.unpack(INT4.pack(k))) > 0.4


def test_a_head_of_part_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int4 rows have groups of 32 numbers; a head of 80 is no multiple"):
        INT4.width(80)
    model = read_model_config(save(make_model("qwen3", head_dim=48), tmp_path))
    with pytest.raises(ValueError, match="'int4', and the heads of this model have 48 numbers; .* multiple of 32"):
        engine_config(model, EngineOptions(kv_dtype="int4"), KVBudget.full(64), 64, device="cpu")


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_selection_and_prefix_store_read_what_is_staged(kv_dtype: KVDType, tmp_path: Path) -> None:
    """Exact keys: the tokens that a row keeps are those of fp32 rows, and a hit answers as the cold prompt did."""
    folder, prompt = save(make_model("qwen3", head_dim=32), tmp_path), [5 + 7 * i % 60 for i in range(80)]
    params = SamplingParams(max_tokens=8, temperature=0.0, return_kept=True)
    store = PrefixStoreConfig(num_bytes=2**20, block_len=16, min_tokens=16)
    outputs = []
    for more in ({}, {"kv_dtype": kv_dtype, "prefix_store": store}):
        with LLM(folder, budget=40, max_model_len=90, chunk_len=16, progress=False, **more) as llm:
            outputs += [llm.generate([prompt], params)[0] for _ in range(1 + len(more) // 2)]
            prefix_stats = llm.engine.prefix_stats
    _, cold, hit = outputs
    positions = [output.compression and output.compression.kept_positions for output in outputs]
    assert positions[0] and positions == positions[:1] * 3
    assert cold.token_ids == hit.token_ids and prefix_stats is not None and prefix_stats.hits


@pytest.mark.parametrize(
    ("kv_dtype", "options", "words"),
    [
        ("bfloat16", {"dtype": "float16"}, "such rows are for a CPU that computes in float32: use 'fp8' or 'auto'"),
        ("bfloat16", {"device": "cuda"}, "device 'cuda' and dtype 'float32'; such rows are for a CPU"),
        *((kind, {"dtype": "bfloat16"}, "that computes in float32 or a GPU: use") for kind in KINDS[1:]),
    ],
)
def test_what_is_refused(kv_dtype: KVDType, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = read_model_config(save(make_model("qwen3"), tmp_path))
    own = EngineOptions(kv_dtype=kv_dtype, **options)
    with pytest.raises(ValueError, match=words):
        engine_config(model, own, KVBudget.full(64), 64, device=own.device)
