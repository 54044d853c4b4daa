"""Products with a matrix per expert: every version against the reference, and what a row may depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.bound import KernelVersion, bind
from snapstream.kernels.cpu.experts import GroupedLinear, by_native, takes_native
from snapstream.kernels.cpu.linear import ChosenLinear
from snapstream.kernels.cpu.native import find_compiler

VERSIONS: list[KernelVersion] = ["cpu", "torch", "compiled_cpu"]
COUNTS = {"one row": [0, 0, 1, 0, 0], "gaps": [3, 0, 1, 7, 0], "one expert": [0, 0, 0, 0, 40], "none": [0, 0, 0, 0, 0],
          "few": [1, 2, 4, 5, 6]}  # fmt: skip
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


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


@needs_compiler
def test_every_byte_of_fp8_is_widened_to_its_number() -> None:
    bytes_of = torch.arange(256, dtype=torch.uint8)
    bytes_of[bytes_of % 128 == 127] = 0  # NaN, which the loader refuses
    weight = bytes_of.view(torch.float8_e4m3fn).view(1, 16, 16)
    out = torch.empty(16, 16)
    by_native(torch.eye(16), weight, torch.ones(1, 1, 1), [(0, 0, 16)], out)
    assert torch.equal(out.T, weight[0].float())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_does_not_depend_on_its_neighbours(version: KernelVersion) -> None:
    x, weight, ends = problem([5, 3, 9], 64, 48, torch.float32)
    multiply = bind("cpu", version).grouped_linear
    together, experts = multiply(x, weight, None, ends), [0] * 5 + [1] * 3 + [2] * 9
    for row, expert in enumerate(experts):
        alone = multiply(x[row : row + 1], weight, None, (torch.arange(3) >= expert).to(torch.int32))
        if version != "torch" and find_compiler() is not None:
            assert torch.equal(alone[0], together[row])
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


class Counting(ChosenLinear):
    """Notes the tokens of the products that it is asked for."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.asked = [*getattr(self, "asked", []), len(x)]
        return super().__call__(x, weight, bias)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "left_to_the_library"), [("torch", [1, 3, 20, 70]), ("native", [3, 70]), ("left", [1, 3, 20, 70])]
)
def test_what_was_measured_decides(way: str, left_to_the_library: list[int]) -> None:
    """Per expert and its number of tokens; with 70 nobody looked, and the library is better at them."""
    x, weight, ends = problem([1, 0, 3, 20, 70], 64, 48, torch.float32)
    assert takes_native(x, weight)
    measured = Counting({(64, 48, 1): way, (64, 48, 4): "torch", (64, 48, 32): way})
    got = GroupedLinear(measured)(x, weight, None, ends)
    torch.testing.assert_close(got, reference.grouped_linear(x, weight, None, ends), rtol=1e-5, atol=1e-5)
    assert measured.asked == left_to_the_library
