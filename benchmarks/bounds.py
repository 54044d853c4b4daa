"""Loops that reach what a machine can do: reading memory, multiply-adds, barriers (``bounds.cpp``)."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from snapstream.kernels.cpu.looped import build
from snapstream.kernels.cpu.looped.library import ThreadPool

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "read": (c_double, [c_void_p, c_void_p, c_int64]),
    "barriers": (None, [c_void_p, c_int64]),
    "multiply": (c_double, [c_void_p, c_int64]),
    "multiply_bf16": (c_double, [c_void_p, c_int64]),
    "multiply_int8": (c_double, [c_void_p, c_int64]),
}


@cache
def _library(instructions: build.InstructionSet) -> ctypes.CDLL:
    sources = (Path(__file__).with_suffix(".cpp"), build.SOURCES / "threads.cpp")
    loaded = ctypes.CDLL(str(build.compiled(instructions, sources)))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"bounds_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def run(pool: ThreadPool, name: str, *arguments: int) -> Any:
    """``read``: the sum of fp32 numbers at an address, of so many bytes; ``barriers``: so many, returns nothing;
    ``multiply``, ``multiply_bf16``, ``multiply_int8``: the operations of so many rounds."""
    return getattr(_library(pool.library.instructions), f"bounds_{name}")(pool.handle, *arguments)
