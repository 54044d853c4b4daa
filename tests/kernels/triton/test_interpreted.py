"""Every Triton kernel equals its reference, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton import checks, interpreter

REASON = interpreter.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy says where exp overflows; a GPU does not
]
if REASON is None:
    interpreter.mend()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_decode_attention_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_decode_attention(2, 1, head_dim, 150, [2, 0], [150, 1], dtype, "cpu")


@dtypes
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (20, 1)])
def test_decode_attention_groups(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    checks.check_decode_attention(num_heads, num_kv_heads, 64, 130, [1, 0], [129, 6], dtype, "cpu")


@pytest.mark.parametrize("capacity", [1, 7, 128, 129, 257, 700])
def test_decode_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, max(capacity - 1, 1), capacity // 2 + 1})
    checks.check_decode_attention(4, 1, 64, capacity, [*range(len(lengths))], lengths, torch.float32, "cpu")


def test_decode_attention_of_a_large_batch() -> None:
    lengths = [1 + (i * 7) % 20 for i in range(256)]
    checks.check_decode_attention(2, 1, 16, 20, [*range(256)], lengths, torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 80), (9, 3, 192)])
def test_norm_rope_write(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    checks.check_norm_rope_write(num_heads, num_kv_heads, head_dim, 12, has_norm, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("size", [64, 96, 1000, 4096])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    checks.check_rms_norm(3, size, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("size", [64, 1000, 1024, 2100])
def test_swiglu(size: int, dtype: torch.dtype) -> None:
    checks.check_swiglu(3, size, dtype, "cpu")


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("group_max", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "window", "num_keys", "span"),
    [
        (4, 2, 8, 200, (4, 168)),
        (4, 2, 32, 120, (4, 115)),  # candidates inside the window: some queries see a part of them
        (6, 2, 20, 130, (120, 130)),  # some queries see none
        (4, 4, 1, 70, (0, 69)),
        (8, 1, 70, 150, (10, 140)),  # more pairs than one program holds, and a window longer than a block
    ],
)
def test_snapkv_scores(
    num_heads: int,
    num_kv_heads: int,
    window: int,
    num_keys: int,
    span: tuple[int, int],
    over_row: bool,
    group_max: bool,
) -> None:
    checks.check_snapkv_scores(
        num_heads, num_kv_heads, 64, window, num_keys, span, over_row, group_max, torch.float32, "cpu"
    )


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_snapkv_scores_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_snapkv_scores(4, 2, head_dim, 16, 150, (4, 130), False, False, dtype, "cpu")


def test_snapkv_scores_over_several_splits() -> None:
    checks.check_snapkv_scores(2, 1, 16, 8, 4400, (4, 4300), False, False, torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize(("head_dim", "num_tokens", "num_kept"), [(64, 100, 70), (80, 60, 60), (192, 50, 1)])
def test_gather_rows(head_dim: int, num_tokens: int, num_kept: int, dtype: torch.dtype) -> None:
    checks.check_gather_rows(2, head_dim, num_tokens, num_kept, dtype, "cpu")
