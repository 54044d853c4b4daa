"""Compiled attention over rows of latents equals the reference."""

from __future__ import annotations

import pytest
import torch

from snapstream.kernels import fp8, reference
from snapstream.kernels.cpu import compiled, native  # noqa: F401 - registers the operators
from snapstream.kernels.rows import LayerRows

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [(4, 40, 32), (19, 24, 20), (3, 576, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_latents_equals_the_reference(num_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Also with more heads than one task takes, and rows that are no whole number of blocks."""
    torch.manual_seed(0)
    layers, num_rows, capacity = 2, 4, 77
    stored = torch.randn(layers, num_rows + 1, 1, capacity, key_dim).to(dtype)
    heads = (3 * torch.randn(6, num_heads + 1, key_dim)).to(dtype)
    q, latents = heads[:, :-1], heads[:, -1:]
    rows = torch.tensor([2, 0, 3, 1, 4, 4])  # the padding row twice
    lengths = torch.tensor([77, 1, 20, 64, 1, 1])
    slots = torch.tensor([5, 0, 19, 63, 0, 0])
    expected = stored.clone()
    own = LayerRows(expected, expected[..., :value_dim], 1, values_are_keys=True)
    reference.write_slots(latents, latents, own, rows, slots)
    want = reference.decode_attention(q, own, rows, lengths)
    got = torch.ops.snapstream.attend_latents_cpu(q, latents, stored, value_dim, 1, rows, slots, lengths)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert got.shape == want.shape == (6, num_heads, value_dim)
    torch.testing.assert_close(got[:4], want[:4], rtol=tolerance, atol=tolerance)
    assert torch.equal(stored[:, :num_rows], expected[:, :num_rows])  # nothing else is touched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_fp8(dtype: torch.dtype) -> None:
    """The same bytes as the reference writes, and attention over what they stand for."""
    torch.manual_seed(1)
    scales = 2.0 ** torch.randint(-6, -2, (2, 4, 1))
    stored = fp8.quantise(3 * torch.randn(2, 4, 1, 30, 24), scales[..., None, None])
    expected = stored.clone()
    heads = (3 * torch.randn(3, 6, 24)).to(dtype)
    rows, slots, lengths = torch.tensor([2, 0, 1]), torch.tensor([29, 0, 7]), torch.tensor([30, 1, 8])
    own = LayerRows(expected, expected[..., :16], 1, scales, scales, values_are_keys=True)
    reference.write_slots(heads[:, -1:], heads[:, -1:], own, rows, slots)
    want = reference.decode_attention(heads[:, :-1], own, rows, lengths)
    arguments = heads[:, :-1], heads[:, -1:], stored, 16, 1, rows, slots, lengths, scales
    got = torch.ops.snapstream.attend_latents_cpu(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 3e-2, atol=1e-5)
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


def test_slots_past_the_length_are_never_read() -> None:
    stored = torch.full((1, 2, 1, 40, 16), float("nan"))
    one, heads = torch.tensor([0]), torch.ones(1, 2, 16)
    out = torch.ops.snapstream.attend_latents_cpu(heads[:, :1], heads[:, 1:], stored, 8, 0, one, one, one + 1)
    torch.testing.assert_close(out, torch.ones(1, 1, 8))


def test_the_operator_says_truly_what_it_changes_and_returns() -> None:
    q, latents = torch.randn(3, 5, 24).split((4, 1), dim=1)
    index = torch.tensor([2, 0, 1])
    arguments = q, latents, torch.randn(2, 4, 1, 9, 24), 16, 1, index, index, index + 1
    torch.library.opcheck(torch.ops.snapstream.attend_latents_cpu.default, arguments)
