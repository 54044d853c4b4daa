"""Triton's interpreter: kernels run as NumPy programs on CPU tensors, one program after another.

It must be switched on before ``triton`` is first imported (its own library is compiled or interpreted from then on),
so ``tests/conftest.py`` does it for the whole run, unless there is a GPU: there ``tests/gpu`` runs the real thing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any

import pytest
import torch


def switch_on() -> None:
    """Make kernels interpreted, if Triton is here and no GPU is."""
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def why_not() -> str | None:
    """Reason why kernels cannot be interpreted, None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'snapstream-llm[gpu]')"
    if not importlib.metadata.version("triton").startswith("3.6."):
        return "this Triton is not 3.6, whose interpreter is mended here"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "not under Triton's interpreter: on a GPU tests/gpu runs the same checks on compiled kernels"
    return None


def interpreted() -> list[pytest.MarkDecorator]:
    """Marks of tests that interpret kernels, which are skipped where that cannot be; mends the interpreter."""
    reason = why_not()
    if reason is None:
        mend()
    overflow = "ignore::RuntimeWarning"  # NumPy says where exp overflows; a GPU does not
    return [pytest.mark.skipif(reason is not None, reason=reason or ""), pytest.mark.filterwarnings(overflow)]


def mend() -> None:
    """Three repairs of the interpreter of Triton 3.6, none of which touches a kernel.

    Loop bounds may be scalars: it keeps them as arrays of one element, which NumPy 2.4 refuses as ints. And products
    of bf16 tiles are products of numbers: it multiplies the bits, which it keeps as uint16. And what is rounded to FP8
    (e4m3) is rounded to nearest even, as GPUs do: it rounds halves up and loses the carry. torch rounds it here.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "snapstream_mended"):
        return
    interpreter.snapstream_mended = True
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    convert = interpreter._convert_float
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
             tl.float32: torch.float32}  # fmt: skip

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding)
        bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        numbers = bits.view(kinds[source]).to(kinds[target])
        unsigned = getattr(np, f"uint{target.primitive_bitwidth}")
        return numbers.view(torch.uint8).numpy().view(unsigned).reshape(data.shape)

    interpreter._convert_float = converted
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
