"""The C++ of looped steps: products in panels on every instruction set of this machine, its threads, its build."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int64, c_void_p, sizeof
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import bounds
from snapstream.config import WeightFormat
from snapstream.config.weights import K_GROUPS, WeightDType
from snapstream.kernels import groups
from snapstream.kernels.cpu.looped import build, panels, prompt
from snapstream.kernels.cpu.looped.build import (
    VARIABLE,
    InstructionSet,
    compile_folder,
    compiled,
    find_compiler,
    instruction_sets,
    library_name,
    open_library,
    write_libraries,
)
from snapstream.kernels.cpu.looped.library import (
    FORMATS,
    STRUCTS,
    ThreadPool,
    load,
    num_cores,
    struct_problem,
)
from snapstream.kernels.formats import FP8
from snapstream.kernels.interface import bind
from snapstream.kernels.reference import dequantize_blocks
from snapstream.models.matrix import decode, encode
from snapstream.models.panels import make_panels
from tests.kernels.layers import multiplies_bf16

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="these instructions do not multiply bf16")
needs_cores = pytest.mark.skipif(num_cores() < 2, reason="one core")


CODES = ("int8", "int4", "uint4", "mxfp4", *K_GROUPS)


def form_of(width: WeightDType, group: int) -> WeightFormat:
    """With ``group``, unless the format has one of its own."""
    return WeightFormat(dtype=width, group=K_GROUPS.get(width, 32 if width == "mxfp4" else group))


def multiply_codes(x: Tensor, codes: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    """``x [T, in]``, rounded to int8 per token and group, times the matrix of ``codes [out, in * bits / 8]`` and
    ``scales [out, in / group]``, transposed: ``[T, out]`` fp32. The definition of products of whole numbers.

    The sum of a group is a whole number, so it is exact in any order; groups are added from first to last.
    """
    num_groups, minimums = x.shape[1] // form.group, None
    inputs, input_scales = groups.quantize_inputs(x, form.group)
    inputs = inputs.unflatten(-1, (num_groups, -1))
    numbers = groups.unpack(codes, form.bits).double().unflatten(-1, (num_groups, -1))  # [out, groups, g]
    if form.is_mxfp4:
        numbers = 2.0 * decode(codes, torch.full_like(scales, 127), form).double().unflatten(-1, (num_groups, -1))
        scales = 2.0 ** (scales.float() - 128)
    elif form.is_uint4:
        scales, minimums = scales.view(torch.float16).unflatten(-1, (-1, 2)).unbind(-1)
    elif form.is_k_quant:
        scales, minimums = (*groups.k_scales(scales, form), None)[:2]
        numbers = groups.k_numbers(codes, form).double().unflatten(-1, (num_groups, -1))
    else:
        numbers.sub_(2 ** (form.bits - 1))
    sums = torch.einsum("tgi,ogi->gto", inputs.double(), numbers).float()
    total = x.new_zeros(x.shape[0], codes.shape[0], dtype=torch.float32)
    for index, own in enumerate(sums):
        total += own * (scales[:, index].float() * input_scales[:, index, None])
        if minimums is not None:
            total += minimums[:, index].float() * (input_scales[:, index] * inputs[:, index].sum(-1))[:, None]
    return total


def test_structs_are_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    """Fields, offsets, sizes, and whether a field is a pointer, an integer, a float or a struct."""
    kinds = {c_void_p: "is_pointer_v", c_int64: "is_integral_v", c_float: "is_floating_point_v"}
    lines = ['#include "abi.h"', "#include <cstddef>", "#include <type_traits>", "using namespace looped;"]
    for struct in STRUCTS:
        name = struct.__name__
        lines.append(f"static_assert(sizeof({name}) == {sizeof(struct)});")
        for field, kind, *_ in struct._fields_:
            placed = getattr(struct, field)
            lines.append(f"static_assert(offsetof({name}, {field}) == {placed.offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {placed.size});")
            lines.append(f"static_assert(std::{kinds.get(kind, 'is_class_v')}<decltype({name}::{field})>);")
    assert len(lines) == 4 + 20 + 3 * 363  # no field was skipped
    source = tmp_path / "structs.cpp"
    source.write_text("\n".join(lines))
    command = [str(find_compiler()), "-std=c++20", "-fsyntax-only", "-I", str(build.SOURCES), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_library_with_other_structs_is_refused() -> None:
    own = [sizeof(struct) for struct in STRUCTS]
    assert len(own) == 20 and struct_problem(own) is None
    assert struct_problem([*own[:14], 136, *own[15:]]) == "its Prompt has 136 bytes where this package has 152"
    with pytest.raises(ValueError, match="shorter"):
        struct_problem(own[:-1])


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=25)
@given(
    num_out=st.integers(1, 130), num_in=st.integers(1, 600), dtype=st.sampled_from(DTYPES), tokens=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_in_panels(
    instructions: InstructionSet, num_out: int, num_in: int, dtype: torch.dtype, tokens: int, seed: int
) -> None:
    """Equal to the plain one, and for a token the same bits alone and beside any others."""
    library, generator = load(instructions), torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    x, bias = torch.randn(tokens, num_in, generator=generator), torch.randn(num_out, generator=generator)
    stored = panels.empty_panels((num_out, num_in), dtype)
    cut = seed % num_out
    panels.fill_rows(stored, 0, weight[:cut])
    panels.fill_rows(stored, cut, weight[cut:])
    assert torch.equal(panels.rows_of(stored, num_out, num_in), weight)
    stack = panels.stack_of(stored, num_out, num_in)
    got = prompt.linear(library, stack, x, bias)
    want = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * num_in**0.5)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(prompt.linear(library, stack, x[token : token + 1], bias)[0], got[token])
    ids = torch.arange(num_out).flip(0).repeat_interleave(2)[::2]  # not contiguous
    assert torch.equal(panels.lookup(library, stack, ids), weight.float().flip(0))
    with pytest.raises(ValueError, match=f"there are {num_out}"):
        panels.lookup(library, stack, torch.tensor([num_out]))


@pytest.mark.parametrize("width", CODES)
@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=12)
@given(
    num_out=st.integers(1, 130), num_blocks=st.integers(1, 7), group=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_codes(
    instructions: InstructionSet, num_out: int, num_blocks: int, group: int, width: WeightDType, tokens: int, seed: int
) -> None:
    """As over the widened numbers, which it reads exactly."""
    form = form_of(width, group)
    library, generator, num_in = load(instructions), torch.Generator().manual_seed(seed), num_blocks * form.block
    codes, scales = encode(torch.randn(num_out, num_in, generator=generator), form)
    stored = torch.zeros(panels.code_panel_shape((num_out, num_in), form), dtype=torch.uint8)
    cut = seed % num_out
    panels.fill_codes(library, stored, 0, codes[:cut], scales[:cut], form)
    panels.fill_codes(library, stored, cut, codes[cut:], scales[cut:], form)
    for own, want in zip(panels.codes_of(stored, num_out, form), (codes, scales), strict=True):
        assert torch.equal(own, want)
    stack, wide = panels.stack_of_codes(stored, num_out, num_in, form), decode(codes, scales, form)
    assert torch.equal(panels.lookup(library, stack, torch.arange(num_out)), wide)
    x = torch.randn(tokens, num_in, generator=generator)
    got = prompt.linear(library, stack, x, None)
    torch.testing.assert_close(got.double(), x.double() @ wide.double().t(), rtol=1e-5, atol=1e-5 * num_in**0.5)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(prompt.linear(library, stack, x[token : token + 1], None)[0], got[token])


def test_codes_that_do_not_fit_are_refused() -> None:
    form = form_of("q4_k", 32)
    codes, scales = encode(torch.randn(40, 256), form)
    stored = torch.zeros(panels.code_panel_shape((40, 256), form), dtype=torch.uint8)
    for first, own in (30, codes), (0, codes[:, 4:]), (0, codes[1:]):
        with pytest.raises(ValueError, match=rf"rows from {first} on do not fit panels of shape \[2, 1, 4736\]"):
            panels.fill_codes(load(), stored, first, own, scales, form)


@pytest.mark.parametrize("width", CODES)
@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=12)
@given(
    num_out=st.integers(1, 130), num_blocks=st.integers(1, 20), group=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 40),
    exponent=st.sampled_from([0, -20, 20, -126]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_whole_numbers(
    instructions: InstructionSet, num_out: int, num_blocks: int, group: int, width: WeightDType, tokens: int,
    exponent: int, seed: int,
) -> None:  # fmt: skip
    """Equal to its definition but for the rounding of a sum over groups; a token has the same bits in any batch, by any
    instructions.
    """
    form = replace(form_of(width, group), rounds_inputs=True)
    library, generator, num_in = load(instructions), torch.Generator().manual_seed(seed), num_blocks * form.block
    codes, scales = encode(torch.randn(num_out, num_in, generator=generator), form)
    stored = torch.zeros(panels.code_panel_shape((num_out, num_in), form), dtype=torch.uint8)
    panels.fill_codes(library, stored, 0, codes, scales, form)
    stack = panels.stack_of_codes(stored, num_out, num_in, form)
    x = torch.randn(tokens, num_in, generator=generator) * 2.0**exponent
    x[0, : form.group] = 0.0
    got, want = prompt.linear(library, stack, x, None), multiply_codes(x, codes, scales, form)
    limit = 1e-6 * (num_in / form.group) ** 0.5 * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    seen = groups.round_inputs(x, form.group).double() @ decode(codes, scales, form).double().t()
    torch.testing.assert_close(got.double(), seen, rtol=0, atol=limit)
    chosen = library.way(-1)
    try:
        for token, way in zip((0, tokens // 2, tokens - 1), (0, 1, 0), strict=True):
            library.way(way)
            assert torch.equal(prompt.linear(library, stack, x[token : token + 1], None)[0], got[token])
    finally:
        library.way(chosen)


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_code_and_scale_of_mxfp4(instructions: InstructionSet) -> None:
    """Each of the 16 numbers times each power of two but NaN, to the bit; 2^-127 is below the normal numbers."""
    form, library = WeightFormat(dtype="mxfp4", group=32), load(instructions)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(magnitudes + [-own for own in magnitudes])
    codes = groups.pack(torch.arange(32).repeat(255, 1).to(torch.uint8) % 16, 4)  # [255, 16]
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    want = (numbers.double().repeat(2) * 2.0 ** (scales.double() - 127)).float()
    assert torch.equal(decode(codes, scales, form), want)
    stored = torch.zeros(panels.code_panel_shape((255, 32), form), dtype=torch.uint8)
    panels.fill_codes(library, stored, 0, codes, scales, form)
    assert torch.equal(panels.lookup(library, panels.stack_of_codes(stored, 255, 32, form), torch.arange(255)), want)
    fits = (scales[:, 0] > 0) & (scales[:, 0] < 253)  # others round or overflow
    again = encode(want[fits], form)
    assert torch.equal(decode(*again, form), want[fits]) and torch.equal(again[1], scales[fits])


@needs_bf16
@settings(max_examples=30)
@given(
    num_out=st.integers(1, 130), num_groups=st.integers(1, 40), width=st.sampled_from(["bfloat16", "int8", "int4"]),
    group=st.sampled_from([32, 64, 128]), extra=st.integers(0, 31), tokens=st.integers(1, 60),
    exponent=st.sampled_from([0, -20, 20]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_tokens_in_bf16(
    num_out: int, num_groups: int, width: str, group: int, extra: int, tokens: int, exponent: int, seed: int
) -> None:
    """Of what the tokens are in bf16, ties to even, with the very numbers of the matrix; a token has the same bits in
    any batch.
    """
    library, generator = load(), torch.Generator().manual_seed(seed)
    if width == "bfloat16":
        num_in = num_groups * 16 + extra
        wide = torch.randn(num_out, num_in, generator=generator).bfloat16().float()
        stored = panels.empty_panels(tuple(wide.shape), torch.bfloat16)
        panels.fill_rows(stored, 0, wide)
        stack = panels.stack_of(stored, num_out, num_in)
    else:
        bits = int(width[3:])
        num_in = num_groups * group
        form = WeightFormat(dtype="int8" if bits == 8 else "int4", group=group)
        codes, scales = groups.quantize(torch.randn(num_out, num_in, generator=generator), bits, group)
        stored = torch.zeros(panels.code_panel_shape((num_out, num_in), form), dtype=torch.uint8)
        panels.fill_codes(library, stored, 0, codes, scales, form)
        wide, stack = groups.dequantize(codes, scales, bits), panels.stack_of_codes(stored, num_out, num_in, form)
    stack.inputs = FORMATS["bfloat16"]
    x = torch.randn(tokens, num_in, generator=generator) * 2.0**exponent
    x[0, 0] = 2.0**exponent * (1 + 2.0**-8)  # half-way between two numbers of bf16
    bias = torch.randn(num_out, generator=generator)
    got = prompt.linear(library, stack, x, bias)
    want = x.bfloat16().double() @ wide.double().t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * num_in**0.5 * 2.0**exponent)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(prompt.linear(library, stack, x[token : token + 1], bias)[0], got[token])


@needs_bf16
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_product_of_tokens_in_bf16_loses_nothing_that_is_not_finite(wrong: float) -> None:
    stored = panels.empty_panels((40, 64), torch.bfloat16)
    panels.fill_rows(stored, 0, torch.ones(40, 64))
    stack = panels.stack_of(stored, 40, 64)
    stack.inputs = FORMATS["bfloat16"]
    x = torch.ones(3, 64)
    x[1, 40] = wrong
    got = prompt.linear(load(), stack, x, None)
    torch.testing.assert_close(got, x.bfloat16().float().sum(1, keepdim=True).expand(-1, 40), equal_nan=True)


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("width", ["int8", "uint4", "q4_k", "q6_k"])
def test_a_product_of_whole_numbers_loses_nothing_that_is_not_finite(
    instructions: InstructionSet, wrong: float, width: WeightDType
) -> None:
    form = replace(form_of(width, 32), rounds_inputs=True)
    codes, scales = encode(torch.randn(40, 256, generator=torch.Generator().manual_seed(0)), form)
    stored = torch.zeros(panels.code_panel_shape((40, 256), form), dtype=torch.uint8)
    panels.fill_codes(load(instructions), stored, 0, codes, scales, form)
    x = torch.ones(3, 256)
    x[1, 40:44] = wrong  # a sum of several
    stack = panels.stack_of_codes(stored, 40, 256, form)
    got = prompt.linear(load(instructions), stack, x, None)
    assert got[[0, 2]].isfinite().all() and not got[1].isfinite().any()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@needs_cores
def test_no_thread_is_left() -> None:
    before = num_threads()
    pools = [ThreadPool(load(), 2) for _ in range(3)]
    assert num_threads() == before + 3
    for pool in pools[:2]:
        pool.close()
        pool.close()
    del pools, pool
    assert num_threads() == before
    for count in (0, num_cores() + 1):
        with pytest.raises(ValueError, match=f"{count} threads were asked for; this process may use {num_cores()}"):
            ThreadPool(load(), count)


@needs_cores
def test_a_team_works_for_any_thread_and_after_it_slept() -> None:
    pool, data = ThreadPool(load(), 2), torch.ones(2**14)
    sums: list[float] = []

    def read() -> None:
        sums.extend(bounds.run(pool, "read", data.data_ptr(), data.nbytes) for _ in range(50))

    threads = [Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read()
    assert sums == [2.0**14] * 200
    pool.close()


@needs_cores
def test_a_child_of_a_fork_has_workers_of_its_own() -> None:
    program = (
        "import os, torch\n"
        "from benchmarks import bounds\n"
        "from snapstream.kernels.cpu.looped.library import ThreadPool, load\n"
        "pool, data = ThreadPool(load(), 2), torch.ones(2**14)\n"
        "read = lambda: bounds.run(pool, 'read', data.data_ptr(), data.nbytes)\n"
        "assert read() == 2.0**14\n"
        "child = os.fork()\n"
        "assert [read() for _ in range(50)] == [2.0**14] * 50\n"
        "if child == 0:\n"
        "    pool.close()\n"
        "    assert len(os.listdir('/proc/self/task')) == 1\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "os._exit(0 if read() == 2.0**14 else 1)\n"
    )
    compiled(instruction_sets()[0])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    broken = tmp_path / "compiler"
    broken.write_text(
        "#!/bin/sh\necho 'file.cpp: in function f'\necho 'file.cpp:3: error: no such thing' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ValueError, match=r"failed: file.cpp:3: error: no such thing"):
        compiled("portable")
    assert caplog.messages == [f"compiling the portable kernels with {broken}; this happens once"]
    assert not list((tmp_path / "cache").rglob("*.so"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        compiled("portable")


def test_two_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    lines = ['[ "$1" = --version ] && exit', f'case "$*" in *-shared*) echo >> {calls};; esac']
    compiler.write_text("\n".join(["#!/bin/sh", *lines, 'for last; do :; done; : > "$last"']))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(compiled, ["portable"] * 4))
    assert len(found) == 1 and found.pop().is_file() and calls.read_text() == "\n"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_takes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    folder = build.compile_folder()
    folder.chmod(0o500)
    with pytest.raises(ValueError, match=f"{folder.name} cannot take compiled code"):
        compiled("portable")


def test_instructions_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "instruction_sets", lambda: ("portable",))
    with pytest.raises(ValueError, match="no avx512; it has portable"):
        build.check_instructions("avx512")


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


# FP8 blocks in panels: products on every instruction set of this machine, and places for parts of a matrix.

KERNELS = bind("cpu")
FORM = WeightFormat(dtype="fp8")


def blocks(num_out: int, num_in: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every byte but NaN, the numbers below the normal ones among them, and scales that differ much."""
    codes = torch.randint(0, 254, (num_out, num_in), generator=generator)
    codes += (codes >= 127).int()  # 127 and 255 are NaN
    scales = torch.exp2(torch.randn(-(-num_out // 128), -(-num_in // 128), generator=generator) * 6)
    return codes.to(torch.uint8).view(FP8.dtype), scales


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=25)
@given(num_out=st.integers(1, 300), num_in=st.integers(1, 600), tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_product(instructions: InstructionSet, num_out: int, num_in: int, tokens: int, seed: int) -> None:
    """As over the widened numbers, which it reads exactly; for a token the same bits alone and beside any others."""
    generator = torch.Generator().manual_seed(seed)
    codes, scales = blocks(num_out, num_in, generator)
    stack = make_panels(load(instructions))(FORM, (2, num_out, num_in), torch.float32, "cpu")
    weight = stack[1]
    weight.fill_quantized(codes, scales)
    wide = dequantize_blocks(codes, scales)
    assert torch.equal(weight.dense(), wide) and stack.num_bytes >= FORM.num_bytes(stack.shape)
    x = torch.randn(tokens, num_in, generator=generator)
    got = weight.multiply(x, None, KERNELS)
    want, size = x.double() @ wide.double().t(), x.abs().double() @ wide.abs().double().t()
    assert bool(((got - want).abs() <= 2e-6 * size).all())
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(weight.multiply(x[token : token + 1], None, KERNELS)[0], got[token])


@pytest.mark.parametrize("instructions", instruction_sets())
def test_every_number_is_exact(instructions: InstructionSet) -> None:
    """A token that has one number picks a column of the matrix."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1).view(FP8.dtype)
    weight = make_panels(load(instructions))(FORM, (128, 256), torch.float32, "cpu")
    weight.fill_quantized(codes, torch.tensor([[0.75, 2.0**-20]]))
    columns = torch.tensor([column for column in range(256) if column % 128 != 127])
    picked = torch.nn.functional.one_hot(columns, 256).float()
    # NaN times zero is NaN, and is refused where it is loaded: without those columns
    weight.data.view(torch.uint8)[weight.data.view(torch.uint8) % 128 == 127] = 0
    for x in (picked, picked[:2], picked[5:6]):
        assert torch.equal(weight.multiply(x, None, KERNELS), (x @ weight.dense().t()))


def test_parts_of_a_stack_of_experts() -> None:
    """Gate and up of an expert come apart; parts that are no whole blocks are refused."""
    weight = make_panels(load())(FORM, (2, 3, 300, 200), torch.float32, "cpu")
    assert weight.form == FORM and weight.scales is not None
    assert weight.shape == (2, 3, 300, 200)
    whole_panels = make_panels(load())(FORM, (2, 3, 320, 200), torch.float32, "cpu")
    assert whole_panels.num_bytes == FORM.num_bytes((2, 3, 320, 200)) == 2 * 3 * (320 * 200 + 4 * 3 * 2)
    numbers = torch.randn(2, 3, 300, 200)
    weight.fill(numbers)
    whole = weight.dense()
    assert bool(((whole - numbers).abs() <= numbers.abs().amax() / 16).all())
    codes, scales = blocks(172, 200, torch.Generator().manual_seed(1))
    part = weight[1, 2, slice(128, 300)]
    part.fill_quantized(codes, scales)
    assert torch.equal(weight[1, 2].dense()[128:], dequantize_blocks(codes, scales))
    changed = weight.dense()
    changed[1, 2, 128:] = whole[1, 2, 128:]
    assert torch.equal(changed, whole)
    for rows in (slice(1, 128), slice(0, 100), slice(128, 299)):
        with pytest.raises(ValueError, match=f"rows {rows.start} to {rows.stop} .* are not whole blocks of 128"):
            weight[0, 1, rows]
    with pytest.raises(TypeError, match="embedding tables are not stored in FP8 blocks"):
        weight[0, 0].lookup(torch.tensor([0]))


def test_the_best_instructions_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own they would be read once."""
    monkeypatch.delenv("SNAPSTREAM_INSTRUCTIONS", raising=False)
    every = instruction_sets.__wrapped__()
    for number, name in enumerate(every):
        monkeypatch.setenv("SNAPSTREAM_INSTRUCTIONS", name)
        assert instruction_sets.__wrapped__() == every[number:]
    monkeypatch.setenv("SNAPSTREAM_INSTRUCTIONS", "sse9")
    with pytest.raises(ValueError, match=rf"SNAPSTREAM_INSTRUCTIONS is 'sse9'; this processor has {', '.join(every)}"):
        instruction_sets.__wrapped__()


# Libraries that came with the package: used where they are what today's sources would give, and no others.

BEST = instruction_sets()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (written,) = write_libraries(tmp_path / "prebuilt", [BEST])
    assert written.name == library_name(BEST)
    return written.parent


@pytest.fixture
def bare(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on a machine that has no compiler and has compiled nothing yet."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return folder


def test_no_compiler_is_needed(bare: Path, tmp_path: Path) -> None:
    assert open_library(BEST, bare).looped_pool is not None
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        open_library(BEST, tmp_path / "absent")


@pytest.mark.parametrize("changed", ["source", "flag"])
def test_a_library_of_other_sources_or_flags_is_not_opened(
    changed: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is another one, so nobody opens it."""
    if changed == "flag":
        monkeypatch.setitem(build.FLAGS_OF_SET, BEST, ("-DISA=0", "-O1"))
    else:
        sources = tmp_path / "sources"
        sources.mkdir()
        for source in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
            (sources / source.name).write_bytes(source.read_bytes() + b" " * (source.name == "abi.h"))
        monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        open_library(BEST, bare)


def test_what_the_system_refuses_is_told_and_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / library_name(BEST)).write_bytes(b"made for another system")
    with caplog.at_level(logging.WARNING):
        assert open_library(BEST, folder).looped_pool is not None
    assert "came with the package cannot be loaded" in caplog.text and "it is compiled instead" in caplog.text
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="came with the package cannot be loaded .*; no C\\+\\+ compiler"):
        open_library(BEST, folder)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "sets_of_compiler", lambda: (BEST,))
    monkeypatch.setattr("sys.argv", ["prebuilt", str(tmp_path / "out")])
    assert build.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / library_name(BEST)}\n"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 1
    assert "error: no C++ compiler" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["prebuilt"])
    assert build.main() == 2
