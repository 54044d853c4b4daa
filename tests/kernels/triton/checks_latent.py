"""Checks of the Triton kernels over rows of latents, as ``checks.py`` has them over rows of heads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from snapstream.kernels import reference
from snapstream.kernels.formats import FP8
from snapstream.kernels.interface import HeadNorm, LayerRows, RowPlaces, bind
from tests.kernels.triton.checks import NAN, assert_near


def rows_of(stored: torch.Tensor, rank: int, scales: torch.Tensor | None = None) -> LayerRows:
    """Layer 1 of ``[L, rows+1, 1, C, E]``; ``scales [L, rows+1, 1]`` of FP8."""
    return LayerRows(stored, stored[..., :rank], 1, scales, scales, values_are_keys=True)


def check_latents_in_fp8(num_heads: int, rank: int, rope_dim: int, dtype: torch.dtype, device: str) -> None:
    """The bytes that the reference writes, and attention over the numbers that they stand for."""
    torch.manual_seed(rank)
    size, capacity, lengths = rank + rope_dim, 150, torch.tensor([150, 1, 77], device=device)
    wide = 3 * torch.randn(2, 4, 1, capacity, size, device=device)
    scales = 2.0 ** torch.randint(-7, -2, (2, 4, 1), device=device)
    stored = FP8.encode(wide, scales[..., None, None])
    expected = stored.clone()
    heads = torch.randn(3, num_heads + 1, size, device=device).to(dtype)
    places = RowPlaces(torch.tensor([2, 0, 3], device=device), lengths - 1, lengths)
    sinks = 2 * torch.randn(num_heads, device=device)
    norm = HeadNorm(None, 0.0, sinks)
    got = bind(device, "triton").attend_rows(heads, norm, None, rows_of(stored, rank, scales), places, None)
    own = rows_of(expected, rank, scales)
    reference.write_slots(heads[:, -1:], heads[:, -1:], own, places.rows, places.slots)
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    want = reference.decode_attention(heads[:, :-1].float(), own, places.rows, places.lengths, sinks)
    assert_near(got, want, dtype)


def check_latent_attention(
    num_heads: int, rank: int, rope_dim: int, capacity: int, rows: Sequence[int], lengths: Sequence[int],
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """The new latent is written and seen, nothing else touched or read; a row alone gives what it gives in a batch."""
    torch.manual_seed(capacity)
    size = rank + rope_dim
    stored = torch.full((2, max(rows) + 2, 1, capacity, size), NAN, dtype=dtype, device=device)
    for row, length in zip(rows, lengths, strict=True):
        stored[1, row, 0, :length] = torch.randn(length, size, device=device).to(dtype)
    heads = torch.randn(len(rows), num_heads + 1, size, device=device).to(dtype)
    length = torch.tensor(lengths, device=device)
    places = RowPlaces(torch.tensor(rows, device=device), length - 1, length)
    wide = stored.float().clone()
    kept: list[torch.Tensor] = []
    none = HeadNorm(None, 0.0)
    got = bind(device, "triton").attend_rows(heads, none, None, rows_of(stored, rank), places, kept.append)
    assert got.dtype == dtype and got.is_contiguous() and torch.equal(kept[0], heads[:, :-1])
    reference.write_slots(heads[:, -1:].float(), heads[:, -1:].float(), rows_of(wide, rank), places.rows, places.slots)
    assert torch.equal(stored.float().nan_to_num(), wide.nan_to_num()) and torch.equal(stored.isnan(), wide.isnan())
    seen = rows_of(wide.nan_to_num(), rank)
    want = reference.decode_attention(heads[:, :-1].float(), seen, places.rows, places.lengths)
    assert_near(got, want, dtype)
    sinks = 2 * torch.randn(num_heads, device=device)
    own = HeadNorm(None, 0.0, sinks)
    got_with = bind(device, "triton").attend_rows(heads, own, None, rows_of(stored, rank), places, None)
    want_with = reference.decode_attention(heads[:, :-1].float(), seen, places.rows, places.lengths, sinks)
    assert_near(got_with, want_with, dtype)
    for i in {0, len(rows) - 1}:
        one = RowPlaces(*(place[i : i + 1] for place in places))
        alone = bind(device, "triton").attend_rows(heads[i : i + 1], none, None, rows_of(stored, rank), one, None)
        assert torch.equal(alone, got[i : i + 1])


def check_gather_latents(num_tokens: int, num_kept: int, size: int, dtype: torch.dtype, device: str) -> None:
    """The first slots of each row are the chosen latents; nothing else is touched."""
    torch.manual_seed(size)
    stored = torch.full((2, 4, 1, num_kept + 3, size), NAN, dtype=dtype, device=device)
    latents = torch.randn(1, num_tokens + 5, size, device=device).to(dtype)[:, 5:]
    index = torch.randperm(num_tokens, device=device)[:num_kept].sort().values[None]
    bind(device, "triton").gather_rows(rows_of(stored, size - 8), [2, 0], latents, latents[..., : size - 8], index)
    for row in (0, 2):
        assert torch.equal(stored[1, row, :, :num_kept], latents[:, index[0]])
    assert stored.isnan().sum() == stored.numel() - 2 * num_kept * size


def check_latent_refusals(device: str) -> None:
    """Numbers that lie apart."""
    stored, heads = torch.zeros(2, 3, 1, 40, 24, device=device), torch.zeros(1, 3, 48, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    places, kernels = RowPlaces(place, place, place + 1), bind(device, "triton")
    with pytest.raises(ValueError, match="contiguous"):
        kernels.attend_rows(heads[..., ::2], HeadNorm(None, 0.0), None, rows_of(stored, 16), places, None)
