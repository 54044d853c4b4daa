"""What ``bind`` hands out: a version by device, every field with the meaning and the signature of the reference."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from subprocess import run

import pytest
import torch
from torch import Tensor

from snapstream.kernels import interface, reference
from snapstream.kernels.interface import HeadNorm, Kernels, KernelVersion, LayerRows, RowPlaces, bind

VERSIONS: list[KernelVersion] = ["cpu", "torch"]
FIELDS = [field.name for field in fields(Kernels) if field.name not in ("version", "batch_tiles")]


def test_versions_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind("cpu").version == "cpu" and bind("meta").version == "torch" and bind("cpu", "torch").version == "torch"
    monkeypatch.setattr(interface, "has_triton", lambda: False)
    assert bind("cuda").version == "torch"


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'cpu' run on a CPU, and the device is cuda:1"):
        bind("cuda:1", "cpu")
    with pytest.raises(ValueError, match="'fast'; they must be one of triton, cpu, torch"):
        bind("cpu", "fast")  # type: ignore[arg-type]
    monkeypatch.setattr(interface, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="Triton"):
        bind("cpu", "triton")


@pytest.mark.slow
def test_binding_a_cpu_imports_no_triton() -> None:
    code = "import sys; from snapstream.kernels.interface import bind; bind('cpu'); "
    code += "sys.exit(any(name.startswith('snapstream.kernels.triton') for name in sys.modules))"
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_has_the_signature_of_its_reference(version: KernelVersion, field: str) -> None:
    function = getattr(bind("cpu", version), field)
    if function is None:
        # Matrices of codes are widened there, and states copied.
        assert field in ("code_linear", "one_linear", "add_one_linear", "few_linear", "conv_step", "memory_step")
        return
    want = list(inspect.signature(getattr(reference, field)).parameters)
    got = list(inspect.signature(function).parameters)
    assert got[: len(want)] == want  # the tests of a part may give more


def step(dtype: torch.dtype) -> tuple[Tensor, HeadNorm, tuple[Tensor, Tensor], LayerRows, RowPlaces]:
    """Heads of four entries (4 query heads, 2 kv heads, E = 16), and layer 1 of two."""
    torch.manual_seed(0)
    heads, stacks = torch.randn(4, 8, 16).to(dtype), torch.randn(2, 2, 5, 2, 21, 16).to(dtype)
    angle = torch.randn(4, 1, 8)
    rope = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    places = RowPlaces(torch.tensor([2, 0, 1, 3]), torch.tensor([20, 0, 7, 3]), torch.tensor([21, 1, 21, 4]))
    return heads, HeadNorm(torch.rand(6, 16).to(dtype) + 0.5, 1e-6), rope, LayerRows(*stacks, 1), places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_attend_rows_equals_the_reference(version: KernelVersion, has_norm: bool, dtype: torch.dtype) -> None:
    results = []
    for function in (reference.attend_rows, bind("cpu", version).attend_rows):
        heads, norm, rope, cache, places = step(dtype)
        kept: list[Tensor] = []
        out = function(heads, norm if has_norm else HeadNorm(None, 0.0), rope, cache, places, kept.append)
        results.append((out, kept[0].contiguous(), cache.keys, cache.values))
    exact = dtype == torch.float32
    for want, got in zip(*results, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2e-6 if exact else 2e-2, atol=4e-6 if exact else 4e-2)


@pytest.mark.parametrize("version", VERSIONS)
def test_swiglu_equals_the_reference(version: KernelVersion) -> None:
    x = torch.randn(3, 64)
    torch.testing.assert_close(bind("cpu", version).swiglu(x), reference.swiglu(x))
