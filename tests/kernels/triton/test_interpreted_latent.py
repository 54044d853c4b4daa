"""The Triton kernels over rows of latents equal their reference, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton import checks_latent, interpreter

pytestmark = interpreter.interpreted()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    list(zip([(4, 24, 8), (20, 64, 16), (128, 32, 64)], DTYPES, strict=True)),
    ids=lambda value: str(value),
)
def test_latent_attention_sizes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Fewer heads than a program holds, more than one holds, many; sizes that are no powers of two."""
    checks_latent.check_latent_attention(*sizes, 150, [2, 0, 3], [150, 1, 77], dtype, "cpu")


@pytest.mark.parametrize("capacity", [1, 128, 129, 700])
def test_latent_attention_capacities(capacity: int) -> None:
    lengths = sorted({1, capacity, capacity // 2 + 1})
    checks_latent.check_latent_attention(3, 32, 16, capacity, [*range(len(lengths))], lengths, torch.float32, "cpu")


def test_latent_attention_in_the_sizes_of_deepseek() -> None:
    checks_latent.check_latent_attention(16, 512, 64, 200, [1, 0], [200, 33], torch.bfloat16, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_in_fp8(dtype: torch.dtype) -> None:
    checks_latent.check_latents_in_fp8(5, 24, 8, dtype, "cpu")


@pytest.mark.parametrize(("num_tokens", "num_kept", "size"), [(50, 17, 40), (9, 9, 576)])
def test_gather(num_tokens: int, num_kept: int, size: int) -> None:
    checks_latent.check_gather_latents(num_tokens, num_kept, size, torch.float32, "cpu")


def test_refusals() -> None:
    checks_latent.check_latent_refusals("cpu")
