"""Every version of attention equals its reference, and the reference equals PyTorch's own attention."""

from __future__ import annotations

import gc
import mmap
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from snapstream.config import DType, ModelConfig
from snapstream.kernels import memory, pytorch, reference
from snapstream.kernels.cpu import attention as cpu
from snapstream.kernels.interface import HeadNorm, Kernels, KernelVersion, bind
from snapstream.kernels.rows import LayerRows
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec
from tests.kernels.layers import one_layer

HEADS = [(4, 4), (4, 2), (8, 1), (6, 2)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 50), (7, 7), (16, 80), (33, 34), (80, 80)])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_prefill_attention(num_heads: int, num_kv_heads: int, num_queries: int, num_keys: int, head_dim: int) -> None:
    torch.manual_seed(num_keys)
    q = torch.randn(num_queries, num_heads, head_dim)
    pool_k, pool_v = torch.randn(2, num_kv_heads, num_keys + 9, head_dim)
    k, v = pool_k[:, 5 : 5 + num_keys], pool_v[:, 5 : 5 + num_keys]  # a range of a larger pool, as in staging
    want = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(cpu.prefill_attention(q, k, v), want, atol=2e-6, rtol=2e-5)
    group = num_heads // num_kv_heads
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    known = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
    )
    torch.testing.assert_close(want, known.transpose(0, 1), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([0], [1]),
        ([2, 0, 1], [5, 9, 1]),
        ([0, 1, 2, 3], [12, 11, 10, 12]),
        ([0, 1, 2, 3], [12, 11, 2, 3]),
        ([0, 1, 2, 3], [12, 12, 12, 12]),
        ([1, 2, 4, 4], [7, 7, 1, 1]),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_decode_attention(
    num_heads: int, num_kv_heads: int, rows: list[int], lengths: list[int], head_dim: int
) -> None:
    torch.manual_seed(len(rows))
    q = torch.randn(len(rows), num_heads, head_dim)
    k, v = torch.full((2, 5, num_kv_heads, 12, head_dim), 1e30)  # slots past a row's length must not leak
    for row, length in zip(rows, lengths, strict=True):
        k[row, :, :length] = torch.randn(num_kv_heads, length, head_dim)
        v[row, :, :length] = torch.randn(num_kv_heads, length, head_dim)
    args = (q, one_layer(k, v), torch.tensor(rows), torch.tensor(lengths))
    want = reference.decode_attention(*args)
    assert want.isfinite().all()
    torch.testing.assert_close(cpu.decode_attention(*args), want, atol=2e-6, rtol=2e-5)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        alone = reference.prefill_attention(q[i : i + 1], k[row, :, :length], v[row, :, :length])
        torch.testing.assert_close(want[i : i + 1], alone, atol=2e-6, rtol=2e-5)


def test_decode_attention_in_half_precision_is_as_good_as_its_storage() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    rows, lengths = torch.tensor([0, 2]), torch.tensor([40, 13])
    want = reference.decode_attention(q, one_layer(k, v), rows, lengths)
    got = cpu.decode_attention(q.bfloat16(), one_layer(k.bfloat16(), v.bfloat16()), rows, lengths)
    error = (got.float() - want).norm() / want.norm()
    assert got.dtype == torch.bfloat16 and error < 2e-2


def test_write_slots_touches_one_slot_per_row() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 2, 6, 3)
    k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    reference.write_slots(k, v, one_layer(k_cache, v_cache), torch.tensor([2, 0]), torch.tensor([5, 1]))
    assert torch.equal(k_cache[2, :, 5], k[0]) and torch.equal(v_cache[0, :, 1], v[1])
    assert k_cache.count_nonzero() == k.numel() and v_cache.count_nonzero() == v.numel()


def test_rows_share_a_call_only_at_little_waste() -> None:
    def runs(rows: list[int], lengths: list[int]) -> list[tuple[int, int, int, bool]]:
        return [(run.row, run.num_rows, run.longest, run.is_even) for run in cpu.runs(rows, lengths)]

    assert runs([3, 4, 5], [8, 8, 8]) == [(3, 3, 8, True)]
    assert runs([3, 4, 5], [8, 7, 8]) == [(3, 3, 8, False)]
    assert runs([3, 5, 6], [8, 8, 8]) == [(3, 1, 8, True), (5, 2, 8, True)]
    assert runs([0, 1, 2], [100, 10, 10]) == [(0, 1, 100, True), (1, 2, 10, True)]
    assert runs([0, 1], [10, 100]) == [(0, 1, 10, True), (1, 1, 100, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_earlier_owner_left_past_a_rows_end_is_silent(dtype: torch.dtype) -> None:
    """NaN with weight 0 is NaN; the row whose own slots hold NaN keeps it."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, 4, 8, generator=generator).to(dtype)
    k, v = (torch.randn(5, 2, 20, 8, generator=generator).to(dtype) for _ in "kv")
    rows, lengths = torch.arange(4), torch.tensor([20, 17, 20, 18])
    cache = LayerRows(k[None], v[None], 0)
    want = cpu.decode_attention(q, cache, rows, lengths)
    for stored in (k, v):
        stored[1, :, 17:] = torch.nan
        stored[3, :, 18:] = torch.inf
    torch.testing.assert_close(cpu.decode_attention(q, cache, rows, lengths), want)
    v[2, :, 5] = torch.nan
    got = cpu.decode_attention(q, cache, rows, lengths)
    assert got[2].isnan().all()
    torch.testing.assert_close(got[[0, 1, 3]], want[[0, 1, 3]])
    assert want.isfinite().all()


def test_rows_begin_as_zeros_that_cost_nothing() -> None:
    model = ModelConfig(
        architecture="x", vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64,
        intermediate_size=8, max_position=8,
    )  # fmt: skip
    dtypes: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for name, dtype in dtypes.items():
        cache = KVCache(KVSpec.of(model, name), num_rows=3, capacity=50, device="cpu")
        assert cache.k.shape == (2, 4, 2, 50, 64) and cache.k.dtype == dtype and cache.k.is_contiguous()
        assert not cache.k.any() and not cache.v.any()
        cache.k[1, 2] = 1.0
        assert cache.k.sum() == 2 * 50 * 64


# Prefill attention through fused kernels equals the reference (on a CPU through the same calls, other kernels).


by_cudnn, by_efficient = (partial(pytorch.attend_by, kernel) for kernel in (pytorch.cudnn, pytorch.efficient))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (7, 7), (7, 40), (39, 40), (40, 40)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_both_ways_equal_the_reference(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, num_heads, 16)
    pool = torch.randn(2, num_kv_heads, num_keys + 9, 16)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging buffers
    expected = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(pytorch.prefill_attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cpu.prefill_attention(q, k, v), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 2), (1, 40), (7, 8), (7, 40), (40, 40)])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_cudnn_never_gets_a_single_key(
    num_queries: int, num_keys: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a prompt attends alone, and a chunk may begin at a prompt's second token."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, is_causal: bool) -> Any:
        assert with_lse and bias is None and k.shape[2] > 1
        out, lse = cpu.flash(q, k, v, is_causal)
        return out, lse[..., None]  # as cuDNN returns it

    monkeypatch.setattr(pytorch, "cudnn_operator", kernel)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(num_queries, num_heads, 16), torch.randn(2, 2, num_keys, 16)
    expected = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(by_cudnn(q, k, v), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (7, 40), (40, 40), (300, 700)])
@pytest.mark.parametrize("window", [1, 2, 13, 39, 40, 41, 260])
def test_a_sliding_window_equals_the_reference(num_queries: int, num_keys: int, window: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, 6, 16)
    pool = torch.randn(2, 2, num_keys + 9, 16)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging buffers
    expected = reference.prefill_attention(q, k, v, window=window)
    assert torch.equal(expected, reference.prefill_attention(q, k, v)) == (window >= num_keys)
    for attend in (cpu.prefill_attention, pytorch.prefill_attention):
        torch.testing.assert_close(attend(q, k, v, window=window), expected, rtol=1e-5, atol=1e-5)
    if window < num_keys:  # else those of a GPU attend without
        for attend in (by_cudnn, by_efficient):
            torch.testing.assert_close(attend(q, k, v, window=window), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_sliding_window_is_the_one_of_transformers(window: int) -> None:
    sees = masking_utils.sliding_window_causal_mask_function(window)
    q, k = torch.zeros(5, 1, 4), torch.zeros(1, 8, 4)
    got = reference.prefill_attention(q, k, torch.eye(8)[None], window=window)[:, 0] > 0
    expected = [[bool(sees(0, 0, torch.tensor(query), torch.tensor(key))) for key in range(8)] for query in range(3, 8)]
    assert got.tolist() == expected


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(("num_queries", "num_keys", "window"), [(1, 1, None), (1, 40, 7), (7, 40, None), (40, 40, 9),
                                                                 (300, 700, None), (300, 700, 128)])  # fmt: skip
def test_learned_sinks(monkeypatch: pytest.MonkeyPatch, num_queries: int, num_keys: int, window: int | None,
                       group: int) -> None:  # fmt: skip
    """A sink is one more key whose value is zero, in the reference too; every version agrees."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, is_causal: bool) -> Any:
        out, lse = cpu.flash(q, k, v, is_causal)
        return out, lse[..., None]

    monkeypatch.setattr(pytorch, "cudnn_operator", kernel)
    torch.manual_seed(num_keys)
    q, (k, v), sinks = torch.randn(num_queries, 2 * group, 16), torch.randn(2, 2, num_keys, 16), torch.randn(2 * group)
    expected = reference.prefill_attention(q, k, v, window=window, sinks=sinks)
    plain = reference.prefill_attention(q, k, v, window=window)
    scores = torch.einsum("he,ghne->hn", q[-1], k.repeat_interleave(group, 0)[None]) / 4
    seen = scores[:, -(window or num_keys) :]
    share = seen.logsumexp(-1).sub(sinks).sigmoid()  # of the last query, what the sink leaves
    torch.testing.assert_close(expected[-1], plain[-1] * share[:, None], rtol=1e-5, atol=1e-6)
    for attend in (cpu.prefill_attention, pytorch.prefill_attention, by_cudnn):
        torch.testing.assert_close(attend(q, k, v, window=window, sinks=sinks), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_sinks_in_decode(dtype: torch.dtype) -> None:
    """One vector for all rows, or one for each entry, as per-head budgets need them."""
    torch.manual_seed(0)
    q, (k, v), sinks = torch.randn(5, 6, 16).to(dtype), torch.randn(2, 7, 2, 30, 16).to(dtype), torch.randn(6)
    rows, lengths = torch.tensor([3, 4, 5, 0, 2]), torch.tensor([30, 29, 1, 17, 30])
    want = reference.decode_attention(q, one_layer(k, v), rows, lengths, sinks)
    exact = dtype == torch.float32
    assert not torch.allclose(want, reference.decode_attention(q, one_layer(k, v), rows, lengths), atol=0.1)
    for own in (sinks, sinks.expand(5, -1).contiguous()):
        got = cpu.decode_attention(q, one_layer(k, v), rows, lengths, own)
        torch.testing.assert_close(got, want, rtol=1e-5 if exact else 2e-2, atol=2e-6 if exact else 2e-2)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys", "window"), [(1, 1, None), (1, 40, 7), (7, 40, None), (40, 40, 9),
                                                                 (300, 700, None), (300, 700, 128)])  # fmt: skip
def test_capped_scores(monkeypatch: pytest.MonkeyPatch, num_queries: int, num_keys: int, window: int | None,
                       group: int, has_sinks: bool) -> None:  # fmt: skip
    """In the reference the last query's written out; every version agrees, in one piece and in many."""
    torch.manual_seed(num_keys)
    q, (k, v) = 4.0 * torch.randn(num_queries, 2 * group, 16), torch.randn(2, 2, num_keys, 16)
    options = {"window": window, "cap": 1.5, "sinks": torch.randn(2 * group) if has_sinks else None}
    expected = reference.prefill_attention(q, k, v, **options)
    scores = 1.5 * torch.tanh(torch.einsum("he,hne->hn", q[-1], k.repeat_interleave(group, 0)) / 4 / 1.5)
    scores = scores[:, -(window or num_keys) :]
    whole = torch.cat([scores, options["sinks"][:, None]], -1) if has_sinks else scores
    last = whole.softmax(-1)[:, None, : scores.shape[1]] @ v.repeat_interleave(group, 0)[:, -scores.shape[1] :]
    torch.testing.assert_close(expected[-1], last[:, 0], rtol=1e-5, atol=1e-6)
    for at_once in (pytorch.CAPPED_SCORES, 37 * 2 * group * num_keys):
        monkeypatch.setattr(pytorch, "CAPPED_SCORES", at_once)
        for attend in (cpu.prefill_attention, pytorch.prefill_attention, by_cudnn, by_efficient):
            torch.testing.assert_close(attend(q, k, v, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_scores_in_decode(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(5, 6, 16).to(dtype), torch.randn(2, 7, 2, 30, 16).to(dtype)
    rows, lengths = torch.tensor([3, 4, 5, 0, 2]), torch.tensor([30, 29, 1, 17, 30])
    exact = dtype == torch.float32
    for sinks in (None, torch.randn(6)):
        want = reference.decode_attention(q, one_layer(k, v), rows, lengths, sinks, 0.3)
        assert not torch.allclose(want, reference.decode_attention(q, one_layer(k, v), rows, lengths, sinks), atol=0.1)
        got = cpu.decode_attention(q, one_layer(k, v), rows, lengths, sinks, 0.3)
        torch.testing.assert_close(got, want, rtol=1e-5 if exact else 2e-2, atol=2e-6 if exact else 2e-2)


class Called(TorchDispatchMode):
    """Names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
def test_on_a_gpu_the_flash_kernel_is_called_by_name(num_queries: int, num_keys: int) -> None:
    """Left to choose, PyTorch may take cuDNN, which plans every new pair of lengths. The tensors have no values."""
    with FakeTensorMode(), Called() as called:
        q = torch.empty(num_queries, 8, 64, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, num_keys, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        out = pytorch.prefill_attention(q, k, v)
    assert out.shape == q.shape and out.is_contiguous()
    assert sum("attention" in name for name in called.names) == 1
    assert "_scaled_dot_product_flash_attention.default" in called.names


@pytest.mark.parametrize("num_queries", [1, 7, 40])
def test_the_flash_kernel_is_handed_the_window(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in takes tokens before heads, as the operator does, and how many keys are seen before a query's own."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, ends_q: None, ends_k: None, max_q: int, max_k: int, dropout: float,
        is_causal: bool, debugs: bool, *, window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        assert ends_q is ends_k is None and is_causal and not debugs and window_size_right == dropout == 0
        assert q.shape == (1, max_q, 6, 16) and k.shape == v.shape == (1, max_k, 2, 16)
        keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
        return (reference.prefill_attention(q[0], keys, values, window=window_size_left + 1)[None],)

    monkeypatch.setattr(pytorch, "window_operator", kernel)
    q, (k, v) = torch.randn(num_queries, 6, 16), torch.randn(2, 2, 40, 16)
    assert torch.equal(pytorch.flash_window(q, k, v, 5), reference.prefill_attention(q, k, v, window=5))


# RMSNorm of every version against the formula in double precision, of whole tokens and of heads.

VERSIONS: list[KernelVersion] = ["cpu", "torch"]
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


@pytest.mark.parametrize(("version", "most"), [("cpu", 1.01), ("torch", 2.02)])
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


# Large memory of a CPU: what it holds, where it begins, what it costs before it is used.

SHAPE = (3, memory.LEAST // 4 // 2, 2)  # of fp32: three times the least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(5, 7), (0, 4), SHAPE])
def test_zeros_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """They are zeros that can be written, contiguous, and begin with a cache line."""
    data = memory.zeros(shape, dtype)
    assert data.shape == shape and data.dtype == dtype and data.is_contiguous() and data.data_ptr() % 64 == 0
    assert data.untyped_storage().nbytes() == data.nbytes
    assert not data.view(torch.uint8).any()
    data.view(torch.uint8).fill_(1)
    assert data.view(torch.uint8).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_what_is_large_asks_for_huge_pages_and_costs_nothing_untouched() -> None:
    """The mapping has the flag, begins with a huge page, and is gone with the last tensor over it."""
    data = memory.zeros(SHAPE, torch.float32)
    start = data.data_ptr()
    assert start % memory.HUGE == 0
    assert _mapping(start)["Rss"] == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in str(_mapping(start)["VmFlags"]).split()
    part = data[1:]
    del data
    gc.collect()
    assert not part.any()
    del part
    gc.collect()
    assert not _mapping(start)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_what_the_system_does_not_give_is_told() -> None:
    with pytest.raises(OSError, match=r"the system gives no 1,152,921,504,606,846,976 bytes of memory: \w+"):
        memory.zeros((1 << 60,), torch.uint8)


def _mapping(address: int) -> dict[str, int | str]:
    """What the system says of the mapping with that address: sizes in kB, flags; nothing where there is none."""
    found: dict[str, int | str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if border := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(border[1], 16) <= address < int(border[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) if value.endswith(" kB") else value.strip()
    return found
