"""The C++ of looped steps: products in panels on every instruction set of this machine, its threads, its build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.kernels import groups
from snapstream.kernels.compile_cache import VARIABLE
from snapstream.kernels.cpu.looped import build, code_panels, panels
from snapstream.kernels.cpu.looped.build import InstructionSet, compiled, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import FORMATS, Team, load, num_cores

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_bf16 = pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "avx512_bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="this processor does not multiply bf16",
)
needs_cores = pytest.mark.skipif(num_cores() < 2, reason="one core")


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
    got = panels.linear(library, stack, x, bias)
    want = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * num_in**0.5)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(panels.linear(library, stack, x[token : token + 1], bias)[0], got[token])
    ids = torch.arange(num_out).flip(0)
    assert torch.equal(panels.lookup(library, stack, ids), weight.float().flip(0))
    with pytest.raises(ValueError, match=f"there are {num_out}"):
        panels.lookup(library, stack, torch.tensor([num_out]))


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=20)
@given(
    num_out=st.integers(1, 130), num_groups=st.integers(1, 7), group=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([8, 4]), tokens=st.integers(1, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_codes(
    instructions: InstructionSet, num_out: int, num_groups: int, group: int, bits: int, tokens: int, seed: int
) -> None:
    """As over the widened numbers, which it reads exactly."""
    library, generator, num_in = load(instructions), torch.Generator().manual_seed(seed), num_groups * group
    codes, scales = groups.quantise(torch.randn(num_out, num_in, generator=generator), bits, group)
    stored = torch.zeros(code_panels.code_panel_shape((num_out, num_in), bits, group), dtype=torch.uint8)
    cut = seed % num_out
    code_panels.fill_codes(stored, 0, codes[:cut], scales[:cut], bits)
    code_panels.fill_codes(stored, cut, codes[cut:], scales[cut:], bits)
    for own, want in zip(code_panels.codes_of(stored, num_out, bits), (codes, scales), strict=True):
        assert torch.equal(own, want)
    stack, wide = code_panels.stack_of_codes(stored, num_out, num_in, bits), groups.widen(codes, scales, bits)
    assert torch.equal(panels.lookup(library, stack, torch.arange(num_out)), wide)
    x = torch.randn(tokens, num_in, generator=generator)
    got = panels.linear(library, stack, x, None)
    torch.testing.assert_close(got.double(), x.double() @ wide.double().t(), rtol=1e-5, atol=1e-5 * num_in**0.5)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(panels.linear(library, stack, x[token : token + 1], None)[0], got[token])


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=20)
@given(
    num_out=st.integers(1, 130), num_groups=st.integers(1, 20), group=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([8, 4]), tokens=st.integers(1, 40), exponent=st.sampled_from([0, -20, 20, -126]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_of_whole_numbers(
    instructions: InstructionSet, num_out: int, num_groups: int, group: int, bits: int, tokens: int, exponent: int,
    seed: int,
) -> None:  # fmt: skip
    """Equal to its definition but for the rounding of a sum over groups; a token has the same bits in any batch, by any
    instructions.
    """
    library, generator, num_in = load(instructions), torch.Generator().manual_seed(seed), num_groups * group
    codes, scales = groups.quantise(torch.randn(num_out, num_in, generator=generator), bits, group)
    stored = torch.zeros(code_panels.code_panel_shape((num_out, num_in), bits, group), dtype=torch.uint8)
    code_panels.fill_codes(stored, 0, codes, scales, bits)
    stack = code_panels.stack_of_codes(stored, num_out, num_in, bits, rounds_inputs=True)
    x = torch.randn(tokens, num_in, generator=generator) * 2.0**exponent
    x[0, :group] = 0.0
    got, want = panels.linear(library, stack, x, None), groups.multiply_codes(x, codes, scales, bits)
    limit = 1e-6 * num_groups**0.5 * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=limit)
    seen = groups.quantise_activations(x, group).double() @ groups.widen(codes, scales, bits).double().t()
    torch.testing.assert_close(got.double(), seen, rtol=0, atol=limit)
    chosen = library.way(-1)
    try:
        for token, way in zip((0, tokens // 2, tokens - 1), (0, 1, 0), strict=True):
            library.way(way)
            assert torch.equal(panels.linear(library, stack, x[token : token + 1], None)[0], got[token])
    finally:
        library.way(chosen)


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
        num_in, bits = num_groups * group, int(width[3:])
        codes, scales = groups.quantise(torch.randn(num_out, num_in, generator=generator), bits, group)
        stored = torch.zeros(code_panels.code_panel_shape((num_out, num_in), bits, group), dtype=torch.uint8)
        code_panels.fill_codes(stored, 0, codes, scales, bits)
        wide, stack = groups.widen(codes, scales, bits), code_panels.stack_of_codes(stored, num_out, num_in, bits)
    stack.inputs = FORMATS["bfloat16"]
    x = torch.randn(tokens, num_in, generator=generator) * 2.0**exponent
    x[0, 0] = 2.0**exponent * (1 + 2.0**-8)  # half-way between two numbers of bf16
    bias = torch.randn(num_out, generator=generator)
    got = panels.linear(library, stack, x, bias)
    want = x.bfloat16().double() @ wide.double().t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * num_in**0.5 * 2.0**exponent)
    for token in {0, tokens // 2, tokens - 1}:
        assert torch.equal(panels.linear(library, stack, x[token : token + 1], bias)[0], got[token])


@needs_bf16
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_product_of_tokens_in_bf16_loses_nothing_that_is_not_finite(wrong: float) -> None:
    stored = panels.empty_panels((40, 64), torch.bfloat16)
    panels.fill_rows(stored, 0, torch.ones(40, 64))
    stack = panels.stack_of(stored, 40, 64)
    stack.inputs = FORMATS["bfloat16"]
    x = torch.ones(3, 64)
    x[1, 40] = wrong
    got = panels.linear(load(), stack, x, None)
    torch.testing.assert_close(got, x.bfloat16().float().sum(1, keepdim=True).expand(-1, 40), equal_nan=True)


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_product_of_whole_numbers_loses_nothing_that_is_not_finite(
    instructions: InstructionSet, wrong: float
) -> None:
    codes, scales = groups.quantise(torch.randn(40, 64, generator=torch.Generator().manual_seed(0)), 8, 32)
    stored = torch.zeros(code_panels.code_panel_shape((40, 64), 8, 32), dtype=torch.uint8)
    code_panels.fill_codes(stored, 0, codes, scales, 8)
    x = torch.ones(3, 64)
    x[1, 40] = wrong
    stack = code_panels.stack_of_codes(stored, 40, 64, 8, rounds_inputs=True)
    got = panels.linear(load(instructions), stack, x, None)
    assert got[[0, 2]].isfinite().all() and not got[1].isfinite().any()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@needs_cores
def test_no_thread_is_left() -> None:
    before = num_threads()
    teams = [Team(load(), 2) for _ in range(3)]
    assert num_threads() == before + 3
    for team in teams[:2]:
        team.close()
        team.close()
    del teams, team
    assert num_threads() == before
    for count in (0, num_cores() + 1):
        with pytest.raises(ValueError, match=f"{count} threads were asked for; this process may use {num_cores()}"):
            Team(load(), count)


@needs_cores
def test_a_team_works_for_any_thread_and_after_it_slept() -> None:
    team, data = Team(load(), 2), torch.ones(2**14)
    sums: list[float] = []

    def read() -> None:
        sums.extend(team.library.read(team.handle, data.data_ptr(), data.nbytes) for _ in range(200))

    threads = [Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read()
    assert sums == [2.0**14] * 800
    team.close()


@needs_cores
def test_a_child_of_a_fork_has_workers_of_its_own() -> None:
    program = (
        "import os, torch\n"
        "from snapstream.kernels.cpu.looped.library import Team, load\n"
        "team, data = Team(load(), 2), torch.ones(2**14)\n"
        "read = lambda: team.library.read(team.handle, data.data_ptr(), data.nbytes)\n"
        "assert read() == 2.0**14\n"
        "child = os.fork()\n"
        "assert [read() for _ in range(50)] == [2.0**14] * 50\n"
        "if child == 0:\n"
        "    team.close()\n"
        "    assert len(os.listdir('/proc/self/task')) == 1\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "os._exit(0 if read() == 2.0**14 else 1)\n"
    )
    compiled(instruction_sets()[0])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    broken = tmp_path / "compiler"
    broken.write_text(
        "#!/bin/sh\necho 'file.cpp: in function f'\necho 'file.cpp:3: error: no such thing' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ValueError, match=r"failed: file.cpp:3: error: no such thing"):
        compiled("portable")
    assert not list((tmp_path / "cache").rglob("*.so"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        compiled("portable")


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
