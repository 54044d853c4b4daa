"""Native calls around the attention of prompts: near the plain ones they replace, and the same bits for a token
whatever is beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from snapstream.config.weights import WeightForm, WeightForms
from snapstream.kernels.bound import HeadNorm, Pairs, SumNorm, bind
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load
from snapstream.kernels.cpu.looped.prompt import attend, packed_attention, prefill_attention
from snapstream.kernels.cpu.looped.prompt_layer import stage_heads
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.kernels.prefill.versions import VERSIONS
from snapstream.models.panels import make_panels
from snapstream.models.weight import Weight

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
INFO = Path("/proc/cpuinfo")
needs_bf16 = pytest.mark.skipif(
    not INFO.exists() or "avx512_bf16" not in INFO.read_text(), reason="this processor does not multiply bf16"
)
FORMS = [WeightForms.of(width).layers for width in ("float32", "bfloat16", "int8", "int4")]


def matrix_of(form: WeightForm, rows: int, cols: int, rounds: bool, instructions: InstructionSet | None) -> Weight:
    make = make_panels(load(instructions), rounds_prefill=rounds)
    stack = make(form, (1, rows, cols), torch.float32, "cpu")
    stack.fill(torch.randn(1, rows, cols) / cols**0.5)
    return stack[0]


def given_of(tokens: int, size: int, adds: bool) -> SumNorm:
    return SumNorm(torch.randn(tokens, size), torch.randn(tokens, size) if adds else None, torch.rand(size) + 0.5, 1e-5)


def copy_of(given: SumNorm, own: slice = slice(None)) -> SumNorm:
    return given._replace(residual=given.residual[own].clone(), x=None if given.x is None else given.x[own].clone())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.width))
@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=needs_bf16)])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 96), (31, 96), (31, 88)])
def test_norm_and_mlp_are_those_of_plain_calls(form: WeightForm, rounds: bool, tokens: int, inner: int) -> None:
    torch.manual_seed(tokens)
    kernels, inner = bind("cpu"), inner if not form.is_codes else 96
    gate_up = matrix_of(form, 2 * inner, 64, rounds, None)
    down = matrix_of(form, 64, inner, rounds, None)
    given = given_of(tokens, 64, adds=tokens > 1)
    biases = torch.randn(2 * inner), torch.randn(64)
    plain, native = copy_of(given), copy_of(given)
    want = Weight.multiply_normed(gate_up, plain, biases[0], kernels)
    got = gate_up.multiply_normed(native, biases[0], kernels)
    assert torch.equal(native.residual, plain.residual)  # the sum is made
    # An input that rounding takes to the next number of bf16 is off by its 256th.
    limit = 0.05 if rounds else 1e-4
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    want = Weight.swiglu(gate_up, down, copy_of(given), biases, kernels)
    got = gate_up.swiglu(down, copy_of(given), biases, kernels)
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    for token in range(0, tokens, 7):  # alone
        own = slice(token, token + 1)
        assert torch.equal(gate_up.swiglu(down, copy_of(given, own), biases, kernels)[0], got[token])


@needs_bf16
def test_tokens_that_go_in_ranges_have_the_same_bits() -> None:
    torch.manual_seed(0)
    form, kernels = WeightForms.of("bfloat16").layers, bind("cpu")
    gate_up, down = matrix_of(form, 2048, 1024, True, None), matrix_of(form, 64, 1024, True, None)
    given = given_of(500, 1024, adds=True)  # a near cache holds 384
    got = gate_up.swiglu(down, copy_of(given), (None, None), kernels)
    for own in (slice(0, 1), slice(370, 397), slice(499, 500)):
        assert torch.equal(gate_up.swiglu(down, copy_of(given, own), (None, None), kernels), got[own])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_instruction_set_passes_tokens(instructions: InstructionSet) -> None:
    torch.manual_seed(1)
    gate_up = matrix_of(WeightForms.of("float32").layers, 64, 20, False, instructions)
    down = matrix_of(WeightForms.of("float32").layers, 20, 32, False, instructions)
    given = given_of(5, 20, adds=True)
    want = Weight.swiglu(gate_up, down, copy_of(given), (None, None), bind("cpu"))
    got = gate_up.swiglu(down, copy_of(given), (None, None), bind("cpu"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "has_norm"), [(64, True), (20, True), (32, False), (2, True)])
def test_heads_are_staged_as_by_plain_calls(size: int, has_norm: bool) -> None:
    torch.manual_seed(size)
    heads = torch.randn(9, 4 + 2 * 2, size)
    angle = torch.rand(9, 1, size // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    norm = HeadNorm(torch.rand(6, size) + 0.5 if has_norm else None, 1e-6)
    keys, values = torch.zeros(2, 30, size), torch.zeros(2, 30, size)
    queries = stage_heads(heads, norm, (cos, sin), keys, values, [(0, 4, 20), (4, 5, 3)])
    rotated = bind("cpu", "torch").norm_rope(heads, norm, (cos, sin), 2)  # [T, H+G, E]
    want_keys, want_values = torch.zeros_like(keys), torch.zeros_like(values)
    for tokens, places in ((slice(0, 4), slice(20, 24)), (slice(4, 9), slice(3, 8))):
        want_keys[:, places] = rotated[tokens, 4:].transpose(0, 1)
        want_values[:, places] = heads[tokens, 6:].transpose(0, 1)
    torch.testing.assert_close(queries, rotated[:, :4])
    torch.testing.assert_close(keys, want_keys)
    assert torch.equal(values, want_values)


def pairs_of(tokens: int, top_k: int, stored: int, elsewhere: int) -> Pairs:
    """Random choices of ``stored + elsewhere`` experts; the first ones are stored, and nobody chooses expert 1."""
    choices = torch.rand(tokens, stored + elsewhere)
    choices[:, 1] = -1.0
    flat = choices.topk(top_k).indices.flatten().clamp(max=stored)
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(stored), right=True, out_int32=True)
    return Pairs(order, ends, torch.rand(tokens, top_k), flat == stored if elsewhere else None)


def of_tokens(pairs: Pairs, tokens: slice) -> Pairs:
    """The choices of some tokens alone."""
    top_k = pairs.weights.shape[1]
    flat = torch.empty_like(pairs.order)
    flat[pairs.order] = torch.searchsorted(pairs.ends, torch.arange(len(flat)), right=True)  # X' for others' experts
    own = flat.view(-1, top_k)[tokens].flatten()
    order, stored = own.argsort(stable=True), len(pairs.ends)
    ends = torch.searchsorted(own[order], torch.arange(stored), right=True, out_int32=True)
    return Pairs(order, ends, pairs.weights[tokens], own == stored if pairs.are_elsewhere is not None else None)


def experts_of(form: WeightForm, rows: int, cols: int, rounds: bool, instructions: InstructionSet | None) -> Weight:
    stack = make_panels(load(instructions), rounds_prefill=rounds)(form, (1, 5, rows, cols), torch.float32, "cpu")
    stack.fill(torch.randn(1, 5, rows, cols) / cols**0.5)
    return stack[0]


@pytest.mark.parametrize("form", [*FORMS, WeightForm(width="fp8")], ids=lambda form: str(form.width))
@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=needs_bf16)])
@pytest.mark.parametrize(("tokens", "inner", "elsewhere"), [(1, 64, 0), (50, 96, 0), (31, 64, 3), (9, 48, 0)])
def test_experts_are_those_of_plain_calls(
    form: WeightForm, rounds: bool, tokens: int, inner: int, elsewhere: int
) -> None:
    torch.manual_seed(tokens)
    kernels, inner = bind("cpu"), inner if not form.is_codes or inner % 32 == 0 else 64
    gate_up, down = experts_of(form, 2 * inner, 64, rounds, None), experts_of(form, 64, inner, rounds, None)
    x, pairs = torch.randn(tokens, 64), pairs_of(tokens, 3, 5, elsewhere)
    want = Weight.swiglu_grouped(gate_up, down, x, pairs, kernels)
    got = gate_up.swiglu_grouped(down, x, pairs, kernels)
    torch.testing.assert_close(got, want, rtol=0, atol=0.05 if rounds else 1e-4)
    for token in range(0, tokens, 7):  # alone
        own = slice(token, token + 1)
        assert torch.equal(gate_up.swiglu_grouped(down, x[own], of_tokens(pairs, own), kernels)[0], got[token])


@needs_bf16
def test_tokens_of_an_expert_that_go_in_ranges_have_the_same_bits() -> None:
    torch.manual_seed(0)
    form, kernels = WeightForms.of("bfloat16").layers, bind("cpu")
    gate_up, down = experts_of(form, 128, 1024, True, None), experts_of(form, 32, 64, True, None)
    x, pairs = torch.randn(1000, 1024), pairs_of(1000, 3, 5, 0)  # a near cache holds 384 tokens
    assert int(pairs.ends[0]) > 384
    got = gate_up.swiglu_grouped(down, x, pairs, kernels)
    for own in (slice(0, 1), slice(500, 533), slice(999, 1000)):
        assert torch.equal(gate_up.swiglu_grouped(down, x[own], of_tokens(pairs, own), kernels), got[own])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_instruction_set_passes_experts(instructions: InstructionSet) -> None:
    torch.manual_seed(1)
    form = WeightForms.of("float32").layers
    gate_up, down = experts_of(form, 64, 20, False, instructions), experts_of(form, 20, 32, False, instructions)
    x, pairs = torch.randn(9, 20), pairs_of(9, 2, 5, 2)
    want = Weight.swiglu_grouped(gate_up, down, x, pairs, bind("cpu"))
    torch.testing.assert_close(gate_up.swiglu_grouped(down, x, pairs, bind("cpu")), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cpu_fp32", pytest.param("cpu_bf16", marks=needs_bf16)])
def test_values_without_the_zeros_behind_them_are_attended_alike(name: str) -> None:
    """Of expanded latents, whose values are shorter than their keys."""
    torch.manual_seed(0)
    version = VERSIONS[name]
    assert version.takes_narrow_values and version.attend_packed is not None
    q, k, v = torch.randn(46, 3, 24), torch.randn(3, 352, 24), torch.randn(3, 352, 24)
    v[..., 20:] = 0.0
    assert torch.equal(version.attend(q, k, v[..., :20]), version.attend(q, k, v)[..., :20])
    ends = [torch.tensor([0, *part]).cumsum(0).int() for part in ([5, 1, 40], [5, 300, 47])]
    lens = PackedLens(ends[0], ends[1], 40, 300)
    assert torch.equal(version.attend_packed(q, k, v[..., :20], lens), version.attend_packed(q, k, v, lens)[..., :20])


@needs_bf16
def test_prompts_in_one_call_are_attended_as_in_a_call_each() -> None:
    torch.manual_seed(0)
    queries, keys = [5, 1, 40], [5, 300, 47]
    q, k, v = torch.randn(46, 6, 20), torch.randn(2, 400, 20)[:, :352], torch.randn(2, 400, 20)[:, :352]
    ends = [torch.tensor([0, *part]).cumsum(0).int() for part in (queries, keys)]
    got = packed_attention(q, k, v, PackedLens(ends[0], ends[1], 40, 300))
    parts: list[Tensor] = []
    for i in range(3):
        own = slice(int(ends[1][i]), int(ends[1][i + 1]))
        parts.append(prefill_attention(q[ends[0][i] : ends[0][i + 1]], k[:, own], v[:, own]))
    assert torch.equal(got, torch.cat(parts))
    assert torch.equal(got[:5], attend(load(), q, k, v, (0, 5), (0, 5))[:5])
