"""The Triton kernels over rows in FP8 equal their references, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton import checks_fp8, interpreter

pytestmark = interpreter.interpreted()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
# Paired, not crossed: see test_interpreted.py.
DIMS = list(zip([64, 80, 96, 128, 192, 256], DTYPES * 2, strict=True))
NORMS = [((4, 2, 64), True), ((4, 2, 64), False), ((9, 3, 80), True)]


@pytest.mark.parametrize(("head_dim", "dtype"), [*DIMS, (128, torch.bfloat16)])
def test_decode_attention(head_dim: int, dtype: torch.dtype) -> None:
    checks_fp8.check_decode_attention(6, 2, head_dim, 150, [150, 1], dtype, "cpu")


def test_decode_attention_over_several_splits() -> None:
    checks_fp8.check_decode_attention(4, 1, 64, 700, [700, 130, 5], torch.float32, "cpu")


@dtypes
@pytest.mark.parametrize(("heads", "has_norm"), NORMS)
def test_norm_rope_write(heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    checks_fp8.check_norm_rope_write(*heads, has_norm, dtype, "cpu")


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_gather_rows(head_dim: int, dtype: torch.dtype) -> None:
    checks_fp8.check_gather_rows(2, head_dim, 90, dtype, "cpu")
