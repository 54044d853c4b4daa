"""The C++ kernels of a CPU equal the reference, and the folder they are loaded from is nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from snapstream.kernels import reference
from snapstream.kernels.compile_cache import VARIABLE, compile_folder
from snapstream.kernels.cpu import compiled, native  # noqa: F401 - registers the operators
from snapstream.kernels.cpu.linear import takes_native
from snapstream.kernels.rows import LayerRows

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (6, 2, 20), (3, 3, 64), (8, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_rows_equals_the_reference(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers, num_rows, capacity, batch = 2, 4, 37, 6
    caches = [torch.randn(layers, num_rows + 1, num_kv_heads, capacity, head_dim).to(dtype) for _ in "kv"]
    projected = torch.randn(batch, num_heads + 2 * num_kv_heads, head_dim).to(dtype)  # q, k and v are strided views
    q, k, v = projected.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows = torch.tensor([2, 0, 3, 1, 4, 4])  # the padding row twice
    lengths = torch.tensor([37, 1, 20, 36, 1, 1])
    slots = torch.tensor([5, 0, 19, 35, 0, 0])
    expected_k, expected_v = (cache.clone() for cache in caches)
    reference.write_slots(k, v, LayerRows(expected_k, expected_v, 1), rows, slots)
    expected = reference.decode_attention(q, LayerRows(expected_k, expected_v, 1), rows, lengths)
    got = torch.ops.snapstream.attend_rows_cpu(q, k, v, *caches, 1, rows, slots, lengths)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got[:4], expected[:4], rtol=tolerance, atol=tolerance)
    for cache, want in zip(caches, (expected_k, expected_v), strict=True):
        assert torch.equal(cache[:, :num_rows], want[:, :num_rows])  # nothing else is touched


def test_slots_past_the_length_are_never_read() -> None:
    caches = [torch.full((1, 2, 1, 8, 16), float("nan")) for _ in "kv"]
    q = torch.ones(1, 1, 16)
    one = torch.tensor([0])
    out = torch.ops.snapstream.attend_rows_cpu(q, q, 3 * q, *caches, 0, one, one, one + 1)
    assert torch.equal(out, 3 * q)


def test_operators_say_truly_what_they_change_and_return() -> None:
    caches = torch.randn(2, 2, 4, 2, 9, 16)
    q, k, v = torch.randn(3, 8, 16).split((4, 2, 2), dim=1)
    index = torch.tensor([2, 0, 1])
    scales = torch.rand(2, 2, 4, 2) + 0.5
    narrow = [cache.to(torch.float8_e4m3fn) for cache in caches]
    for operator, arguments in (
        (torch.ops.snapstream.attend_rows_cpu, (q, k, v, *caches, 1, index, index, index + 1)),
        (torch.ops.snapstream.attend_rows_cpu, (q, k, v, *narrow, 1, index, index, index + 1, *scales)),
        (torch.ops.snapstream.linear_cpu, (torch.randn(2, 16), torch.randn(32, 16), torch.randn(32))),
    ):
        is_fp8 = arguments[3].dtype == torch.float8_e4m3fn if len(arguments) > 3 else False
        # what compares before and after has no FP8 in torch; the schema is the same one
        torch.library.opcheck(operator.default, arguments, **({"test_utils": ("test_faketensor",)} if is_fp8 else {}))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("num_in", "num_out"), [(16, 16), (48, 80), (256, 4608)])
def test_linear_equals_torch(tokens: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(num_in, tokens).t(), torch.randn(num_out, num_in), torch.randn(num_out)
    assert takes_native(x, weight)
    for b in (None, bias):
        got = torch.ops.snapstream.linear_cpu(x, weight, b)
        torch.testing.assert_close(got, F.linear(x, weight, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [((3, 16), (16, 16)), ((40, 16), (16, 16)), ((1, 20), (16, 20)), ((1, 16), (20, 16))])
def test_other_products_are_left_to_torch(shape: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert not takes_native(torch.empty(shape[0]), torch.empty(shape[1]))
    assert not takes_native(torch.empty(1, 16, dtype=torch.bfloat16), torch.empty(16, 16, dtype=torch.bfloat16))


def test_code_is_kept_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    folder = compile_folder()
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        compile_folder()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=VARIABLE):
        compile_folder()
