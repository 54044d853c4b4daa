"""Compiles the C++ of this folder for this processor, once: a few seconds, then it lies in the user's cache folder.

Invariant: a library is whole or not there; its name says what it was made from - sources, compiler, flags - and its
folder for which processor (``compile_cache.py``). ``prebuilt.py`` has libraries that came with the package.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from snapstream.kernels.compile_cache import compile_folder

InstructionSet = Literal["avx512", "avx2", "portable"]  # the best first

SOURCES = Path(__file__).parent
# The slowest to compile first.
_UNITS = (
    *"step codes blocks bf16 prompt prompt_layer prompt_experts prompt_f32 library bounds".split(),
    *"sample candidates masses adjust team ranks".split(),
)
# Sums keep their order and infinities and NaN their meaning, so -ffast-math is not among them; a multiplication and an
# addition may become one instruction.
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=hidden")
FLAGS_OF_SET: dict[InstructionSet, tuple[str, ...]] = {
    "avx512": (
        "-DISA=512",
        *"-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512".split(),
    ),
    "avx2": ("-DISA=256", "-mavx2", "-mfma", "-mf16c"),
    "portable": ("-DISA=0",),
}
_NEEDED: dict[InstructionSet, frozenset[str]] = {  # as /proc/cpuinfo names them
    "avx512": frozenset("avx512f avx512bw avx512vl avx512dq fma f16c".split()),
    "avx2": frozenset("avx2 fma f16c".split()),
    "portable": frozenset(),
}


def find_compiler() -> str | None:
    """Path of ``$CXX``, ``g++`` or ``c++``; None where there is none."""
    own = os.environ.get("CXX")
    return shutil.which(own) if own else shutil.which("g++") or shutil.which("c++")


@cache
def instruction_sets() -> tuple[InstructionSet, ...]:
    """Those that this processor has, the best first."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() and platform.machine() == "x86_64" else []
    flags = frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())
    return tuple(name for name in get_args(InstructionSet) if _NEEDED[name] <= flags)


def check_instructions(instructions: InstructionSet) -> None:
    """ValueError for instructions that this processor lacks."""
    if instructions not in instruction_sets():
        raise ValueError(f"this processor has no {instructions}; it has {', '.join(instruction_sets())}")


def library_name(instructions: InstructionSet, compiler_version: str = "") -> str:
    """The file of a library that is made from today's sources and flags, by a compiler that may be told too."""
    sources = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    texts = (compiler_version, *_flags(instructions))
    parts = (*(source.read_bytes() for source in sources), *(text.encode() for text in texts))
    return f"looped-{instructions}-{sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def compiled(instructions: InstructionSet) -> Path:
    """Where this machine keeps the library for these instructions, which need not be its own; compiled if it is not
    there.

    ValueError, with the first thing that the compiler or the system had to say, where that fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError("no C++ compiler: neither $CXX nor g++ is on the path")
    library = compile_folder() / library_name(instructions, _version(compiler))
    if not library.is_file():
        try:
            _build(compiler, _flags(instructions), library)
        except OSError as error:
            raise ValueError(f"{library.parent} cannot take compiled code: {error}") from None
    return library


def _flags(instructions: InstructionSet) -> tuple[str, ...]:
    return (*_FLAGS, *FLAGS_OF_SET[instructions])


def _version(compiler: str) -> str:
    """Compilers change under their names."""
    try:
        return subprocess.run((compiler, "--version"), capture_output=True, text=True).stdout.partition("\n")[0]
    except OSError as error:
        raise ValueError(f"the compiler {compiler} cannot be run: {error}") from None


def _build(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # private, and on the same disk
        objects = [str(Path(folder) / f"{name}.o") for name in _UNITS]
        compiling = [
            subprocess.Popen(
                (compiler, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", made),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
            for name, made in zip(_UNITS, objects, strict=True)
        ]
        told = [process.communicate()[0] for process in compiling]
        for process, text in zip(compiling, told, strict=True):
            _check(process.returncode, text, compiler)
        whole = str(Path(folder) / "whole.so")
        linked = subprocess.run(
            (compiler, "-shared", "-fopenmp", *objects, "-o", whole), capture_output=True, text=True
        )
        _check(linked.returncode, linked.stderr, compiler)
        os.replace(whole, library)  # at once: another process may build the same


def _check(code: int, told: str, compiler: str) -> None:
    if code:
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {code}")
        raise ValueError(f"{compiler} failed: {first[:300]}")
