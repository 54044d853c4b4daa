"""Every Triton kernel equals its reference, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton import checks, interpreter

pytestmark = interpreter.interpreted()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

# The interpreter takes milliseconds per program: shapes and dtypes are paired here, tests/gpu crosses them.
GROUPS = list(zip([(3, 3), (6, 2), (10, 2), (14, 2), (8, 1), (20, 1)], DTYPES * 2, strict=True))
HEADS = [(4, 2, 64), (3, 3, 80), (7, 1, 96), (10, 2, 128), (9, 3, 192), (8, 1, 256)]
NORMS = [(heads, norm, DTYPES[(place + norm) % 3]) for place, heads in enumerate(HEADS) for norm in (False, True)]


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_decode_attention_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_decode_attention(2, 1, head_dim, 150, [2, 0], [150, 1], dtype, "cpu")


@pytest.mark.parametrize(("heads", "dtype"), GROUPS)
def test_decode_attention_groups(heads: tuple[int, int], dtype: torch.dtype) -> None:
    checks.check_decode_attention(*heads, 64, 130, [1, 0], [129, 6], dtype, "cpu")


@pytest.mark.parametrize("capacity", [1, 7, 128, 129, 257, 700])
def test_decode_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, max(capacity - 1, 1), capacity // 2 + 1})
    checks.check_decode_attention(4, 1, 64, capacity, [*range(len(lengths))], lengths, torch.float32, "cpu")


@pytest.mark.parametrize("batch", [33, 256])
def test_decode_attention_batches(batch: int) -> None:
    lengths = [1 + (i * 7) % 20 for i in range(batch)]
    checks.check_decode_attention(2, 1, 16, 20, [*range(batch)], lengths, torch.float32, "cpu")


@pytest.mark.parametrize("capacity", [20, 300])  # one split, several
def test_decode_attention_of_a_padded_batch(capacity: int) -> None:
    """The padding row, one token long, stands in every unused entry of a batch."""
    rows, lengths = [2, 0, 3, 3, 3], [capacity, 7, 1, 1, 1]
    checks.check_decode_attention(4, 2, 16, capacity, rows, lengths, torch.float32, "cpu")


def test_decode_attention_of_any_strides() -> None:
    """q as a slice of wider heads; rows whose slots, not heads, lie next to each other."""
    checks.check_decode_attention_strides(6, 2, 24, torch.float32, "cpu")


def test_a_head_dimension_in_pieces_is_refused() -> None:
    checks.check_refusals("cpu")


@pytest.mark.parametrize(("heads", "has_norm", "dtype"), NORMS)
def test_norm_rope_write(heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    checks.check_norm_rope_write(*heads, 12, has_norm, dtype, "cpu")


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
        (5, 1, 9, 90, (3, 80)),
        (14, 2, 9, 90, (3, 80)),
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


@pytest.mark.parametrize("group_max", [False, True])
def test_snapkv_scores_of_many_pairs(group_max: bool) -> None:
    """More pairs of query and head than one program holds, and a window longer than a block."""
    checks.check_snapkv_scores(8, 1, 64, 70, 150, (10, 140), group_max, group_max, torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_snapkv_scores_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_snapkv_scores(4, 2, head_dim, 16, 150, (4, 130), False, False, dtype, "cpu")


def test_snapkv_scores_over_several_splits() -> None:
    checks.check_snapkv_scores(2, 1, 16, 8, 4400, (4, 4300), False, False, torch.float32, "cpu")


def test_snapkv_scores_hold_no_probabilities() -> None:
    checks.check_snapkv_memory(8, 2, 16, 16, 400, "cpu")


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "num_kept"),
    [(64, 100, 70), (80, 60, 60), (96, 70, 33), (128, 40, 39), (192, 50, 1), (256, 40, 17)],
)
def test_gather_rows(head_dim: int, num_tokens: int, num_kept: int, dtype: torch.dtype) -> None:
    checks.check_gather_rows(2, head_dim, num_tokens, num_kept, dtype, "cpu")
