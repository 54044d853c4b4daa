"""Every Triton kernel equals its reference on the device, at real sizes; skipped where torch sees no GPU.

The checks are those of ``tests/kernels/triton``, which run small under Triton's interpreter. Needs torch, Triton and
pytest, and runs from the source tree:

    python -m pytest tests/gpu/test_triton_kernels.py
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from snapstream.kernels import reference
from snapstream.kernels.interface import HeadNorm, RowPlaces, bind
from tests.kernels.layers import one_layer
from tests.kernels.triton import checks, checks_latent, checks_products, checks_recurrence

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """The references are fp32 products; tf32 would round them to 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (8, 8), (14, 2), (20, 1)])
def test_decode_attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    lengths = [4100, 1, 2049, 4099, 128, 129, 127]
    checks.check_decode_attention(num_heads, num_kv_heads, head_dim, 4100, [*range(7)], lengths, dtype, "cuda")


@pytest.mark.parametrize("capacity", [1, 7, 127, 128, 129, 1000, 8192, 40000])
def test_decode_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, max(capacity - 1, 1), capacity // 2 + 1})
    checks.check_decode_attention(8, 2, 128, capacity, [*range(len(lengths))], lengths, torch.bfloat16, "cuda")


@dtypes
@pytest.mark.parametrize("capacity", [100, 4100])
def test_decode_attention_with_sinks(capacity: int, dtype: torch.dtype) -> None:
    checks.check_sinks(64, 8, capacity, dtype, "cuda")


@dtypes
@pytest.mark.parametrize(("num_heads", "rank", "rope_dim"), [(128, 512, 64), (16, 512, 64), (20, 96, 16)])
def test_latent_attention(num_heads: int, rank: int, rope_dim: int, dtype: torch.dtype) -> None:
    lengths = [4100, 1, 2049, 128, 129]
    checks_latent.check_latent_attention(num_heads, rank, rope_dim, 4100, [*range(5)], lengths, dtype, "cuda")
    checks_latent.check_gather_latents(5000, 4000, rank + rope_dim, dtype, "cuda")


@dtypes
def test_latents_in_fp8(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 (e4m3)")
    checks_latent.check_latents_in_fp8(128, 512, 64, dtype, "cuda")
    checks_latent.check_latents_in_fp8(16, 512, 64, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("counts", [[0, 1] * 64, [i * 7 % 50 for i in range(128)]])
def test_experts(counts: list[int], is_fp8: bool, dtype: torch.dtype) -> None:
    if is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 (e4m3)")
    checks_products.check_grouped_linear(counts, 1536, 2048, is_fp8, dtype, "cuda")
    checks_products.check_grouped_linear(counts, 200, 304, is_fp8, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 700), (300, 300), (256, 4000)])
def test_prefill_attention(num_queries: int, num_keys: int, head_dim: int, dtype: torch.dtype) -> None:
    checks.check_prefill_attention(num_queries, num_keys, (8, 2), head_dim, dtype, "cuda")


@dtypes
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(1024, 2048), (3072, 1024), (4096, 14336), (1000, 4096), (33, 300), (151936, 1024)]
)
def test_one_token(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    checks_products.check_one_linear(num_out, num_in, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [2, 7, 16])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(1024, 2048), (1024, 3072), (4096, 14336), (1000, 4096), (33, 300), (151936, 1024)]
)
def test_few_tokens(num_out: int, num_in: int, num_tokens: int, dtype: torch.dtype) -> None:
    checks_products.check_few_linear(num_tokens, num_out, num_in, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 100])
def test_products_with_codes(num_tokens: int, bits: int, group: int, dtype: torch.dtype) -> None:
    for num_out, num_in in ((2048, 8192), (4096, 14336), (200, 384)):
        checks_products.check_code_linear(num_tokens, num_out, num_in, bits, group, dtype, "cuda")


@pytest.mark.parametrize("batch", [2, 8, 33, 255, 256])
def test_decode_attention_batches(batch: int) -> None:
    lengths = [1 + (i * 37) % 600 for i in range(batch)]
    checks.check_decode_attention(8, 2, 128, 600, [*range(batch)], lengths, torch.bfloat16, "cuda")


def test_decode_attention_of_a_padded_batch() -> None:
    checks.check_decode_attention(8, 2, 128, 600, [2, 0, 3, 3, 3], [600, 7, 1, 1, 1], torch.bfloat16, "cuda")


def test_strides_and_refusals() -> None:
    checks.check_decode_attention_strides(14, 2, 128, torch.bfloat16, "cuda")
    checks.check_refusals("cuda")


def test_decode_attention_beyond_two_to_the_31_elements() -> None:
    """The last row begins after element 2^31 of the cache: 32-bit offsets would wrap. Takes 10 GiB."""
    rows, groups, capacity, head_dim = 20, 8, 131072, 128
    k, v = (torch.zeros(rows, groups, capacity, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert (rows - 1) * groups * capacity * head_dim > 2**31
    k[-1, :, :500] = torch.randn(groups, 500, head_dim, device="cuda")
    v[-1, :, :500] = torch.randn(groups, 500, head_dim, device="cuda")
    q = torch.randn(1, 32, head_dim, device="cuda").bfloat16()
    zero, length = torch.tensor([0], device="cuda"), torch.tensor([500], device="cuda")
    got = checks.decode_attention(q, one_layer(k, v), zero + rows - 1, length)
    last = one_layer(k[-1:, :, :500].float(), v[-1:, :, :500].float())
    want = reference.decode_attention(q.float(), last, zero, length)
    checks.assert_near(got, want, torch.bfloat16)


@dtypes
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (32, 8, 64), (9, 3, 80), (8, 1, 256)]
)
def test_norm_rope_write(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    checks.check_norm_rope_write(num_heads, num_kv_heads, head_dim, 300, has_norm, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("size", [64, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize("num_rows", [1, 700])
def test_rms_norm(size: int, num_rows: int, dtype: torch.dtype) -> None:
    checks.check_rms_norm(num_rows, size, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("size", [1000, 14336])
@pytest.mark.parametrize("num_tokens", [1, 700])
def test_swiglu(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    checks.check_swiglu(num_tokens, size, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("group_max", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_snapkv_scores(head_dim: int, group_max: bool, over_row: bool, dtype: torch.dtype) -> None:
    checks.check_snapkv_scores(8, 2, head_dim, 32, 5000, (4, 4500), over_row, group_max, dtype, "cuda")


@pytest.mark.parametrize(
    ("num_queries", "span"), [(1, (0, 8000)), (100, (4, 7990)), (512, (4, 7000)), (16, (7990, 8000))]
)
def test_snapkv_scores_of_queries(num_queries: int, span: tuple[int, int]) -> None:
    checks.check_snapkv_scores(32, 8, 128, num_queries, 8000, span, False, False, torch.bfloat16, "cuda")


def test_snapkv_scores_hold_no_probabilities() -> None:
    checks.check_snapkv_memory(32, 8, 128, 32, 20_000, "cuda")


@dtypes
@pytest.mark.parametrize(("head_dim", "num_tokens", "num_kept"), [(64, 9000, 4097), (80, 60, 60), (192, 5000, 1)])
def test_gather_rows(head_dim: int, num_tokens: int, num_kept: int, dtype: torch.dtype) -> None:
    checks.check_gather_rows(8, head_dim, num_tokens, num_kept, dtype, "cuda")


def test_a_captured_step_follows_its_inputs() -> None:
    """Rows, slots and lengths change between replays; the graph sees them, and no host synchronisation is captured."""
    torch.manual_seed(0)
    heads = torch.randn(4, 48, 128, device="cuda").bfloat16()
    rope, kernels = torch.randn(2, 4, 1, 128, device="cuda").unbind(), bind("cuda", "triton")
    caches = torch.randn(2, 6, 8, 1000, 128, device="cuda").bfloat16()
    rows, slots = torch.tensor([0, 1, 2, 3], device="cuda"), torch.tensor([9, 99, 999, 0], device="cuda")

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = RowPlaces(rows, slots, slots + 1)
        return kernels.attend_rows(heads, HeadNorm(None, 0.0), (rope[0], rope[1]), one_layer(k, v), places, None)

    captured = caches.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*captured)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step(*captured)
    torch.cuda.synchronize()
    captured.copy_(caches)
    for shift in range(3):
        rows.copy_((rows + shift) % 6)
        slots.copy_((slots + 17 * shift) % 1000)
        graph.replay()
        want = step(*caches)
        assert torch.equal(out, want) and torch.equal(captured, caches)


@dtypes
@pytest.mark.parametrize("batch", [1, 16, 17])
@pytest.mark.parametrize("taps", [3, 4, 5])
def test_conv_step(taps: int, batch: int, dtype: torch.dtype) -> None:
    checks_recurrence.check_conv_step(8192, taps, batch, silu=taps != 3, dtype=dtype, device="cuda")


@dtypes
@pytest.mark.parametrize("kind", ["delta", "kda", "mamba"])
@pytest.mark.parametrize("batch", [1, 16, 17])
@pytest.mark.parametrize(("heads", "sizes"), [((16, 32), (128, 128)), ((1, 48), (128, 64)), ((3, 6), (100, 40))])
def test_memory_step(kind: str, heads: tuple[int, int], sizes: tuple[int, int], batch: int, dtype: torch.dtype) -> None:
    """Sizes of Qwen3-Next, of Granite 4.0 H, and odd ones."""
    checks_recurrence.check_memory_step(kind, heads, sizes, batch, dtype, "cuda")
