"""Compiles the C++ of this folder, or opens a library that came with the package.

A library is compiled for one instruction set, once, and kept in the user's cache folder; ``make wheel``
puts one per instruction set of the machine's kind into a wheel. Invariant: a library is complete or absent, and
its name is made of its sources, flags and compiler, so one of other sources is never opened.

    python -m snapstream.kernels.cpu.looped.build FOLDER     # compiles them into FOLDER, for setup.py

With ``CXX=aarch64-linux-gnu-g++`` those of another kind of machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from tqdm import tqdm

from snapstream.version import __version__

logger = logging.getLogger(__name__)

VARIABLE = "SNAPSTREAM_CACHE"  # a folder to use instead of the user's cache folder


def cache_root() -> Path:
    """``$SNAPSTREAM_CACHE``, else ``snapstream`` in the user's cache folder."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapstream"


def compile_folder() -> Path:
    """The folder for this version, this torch and this processor, made if it is not there.

    ValueError where it cannot be made, or where somebody else could write to it.
    """
    import torch  # here: who asks for ``cache_root`` alone does not wait seconds for it

    key = sha256("\n".join((__version__, torch.__version__, platform.python_version(), _processor())).encode())
    folder = cache_root() / f"compiled-{key.hexdigest()[:16]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"no folder for compiled code: {error}; set {VARIABLE}") from None
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{folder} can be written by others, and code in it would be run; set {VARIABLE}")
    return folder


def _processor() -> str:
    """What decides which instructions may be used: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return "\n".join((platform.machine(), *dict.fromkeys(found)))


InstructionSet = Literal["avx512", "avx2", "portable"]  # best first

SOURCES = Path(__file__).parent
LIBRARY = tuple(  # the slowest to compile first
    SOURCES / f"{name}.cpp"
    for name in (
        *"step products_integers products_fp8 products_bf16 prompt_attention_bf16 prompt_products".split(),
        *"prompt_attention library sampling logits prompt_recurrent threads".split(),
    )
)
# No -ffast-math: sums keep their order, infinities and NaN their meaning. A product and a sum may be fused.
_FLAGS = (*"-std=c++20 -O3 -ffp-contract=fast -fno-math-errno -fopenmp -pthread -fPIC -fvisibility=hidden".split(),)
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
    """Those that this processor has, best first; with ``$SNAPSTREAM_INSTRUCTIONS``, none better than that one.

    ValueError if the variable names no instruction set of this processor.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() and platform.machine() == "x86_64" else []
    flags = frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())
    found = tuple(name for name in get_args(InstructionSet) if _NEEDED[name] <= flags)
    most = os.environ.get("SNAPSTREAM_INSTRUCTIONS", found[0])
    if most not in found:
        raise ValueError(f"SNAPSTREAM_INSTRUCTIONS is {most!r}; this processor has {', '.join(found)}")
    return found[found.index(most) :]


def check_instructions(instructions: InstructionSet) -> None:
    """ValueError for instructions that this processor lacks."""
    if instructions not in instruction_sets():
        raise ValueError(f"this processor has no {instructions}; it has {', '.join(instruction_sets())}")


def library_name(instructions: InstructionSet, compiler_version: str = "", sources: Sequence[Path] = ()) -> str:
    """The file name of a library of this folder's sources, and of others, under today's flags."""
    sources = sorted({*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), *sources})
    texts = (compiler_version, *_flags(instructions))
    parts = (*(source.read_bytes() for source in sources), *(text.encode() for text in texts))
    return f"looped-{instructions}-{sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def compiled(instructions: InstructionSet, sources: Sequence[Path] = LIBRARY) -> Path:
    """The library for these instructions in the cache folder, compiled if it is not there. Any instruction set may be
    compiled for.

    ValueError, with the compiler's or the system's first error, where that fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError("no C++ compiler: neither $CXX nor g++ is on the path")
    extra = () if sources is LIBRARY else sources
    library = compile_folder() / library_name(instructions, _version(compiler), extra)
    if not library.is_file():
        # A warning, so that a start that compiles for a minute says so at any log level.
        logger.warning("compiling the %s kernels with %s; this happens once", instructions, compiler)
        try:
            with library.with_suffix(".lock").open("w") as lock:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together wait for one of them
                if not library.is_file():
                    _build(compiler, _flags(instructions), sources, library)
        except OSError as error:
            raise ValueError(f"{library.parent} cannot take compiled code: {error}") from None
    return library


def _flags(instructions: InstructionSet) -> tuple[str, ...]:
    """``$SNAPSTREAM_CXXFLAGS`` come last, such as those of sanitizers (CONTRIBUTING.md)."""
    return (*_FLAGS, *FLAGS_OF_SET[instructions], *os.environ.get("SNAPSTREAM_CXXFLAGS", "").split())


def _version(compiler: str) -> str:
    try:
        return subprocess.run((compiler, "--version"), capture_output=True, text=True).stdout.partition("\n")[0]
    except OSError as error:
        raise ValueError(f"the compiler {compiler} cannot be run: {error}") from None


def _build(compiler: str, flags: tuple[str, ...], sources: Sequence[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # private, and on the same disk
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        compiling = [
            subprocess.Popen(
                (compiler, *flags, "-I", str(SOURCES), "-c", str(source), "-o", made),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, made in zip(sources, objects, strict=True)
        ]
        finished = tqdm(compiling, desc="Compiling kernels", unit="file", disable=not sys.stderr.isatty())
        outputs = [process.communicate()[0] for process in finished]
        for process, output in zip(compiling, outputs, strict=True):
            _check(process.returncode, output, compiler)
        whole = str(Path(folder) / "whole.so")
        # Linked to no OpenMP runtime: `open_library` finds torch's. Clang's code works with Clang's own runtime alone.
        linking = [flag for flag in flags if flag != "-fopenmp" or "clang" in _version(compiler)]
        linked = subprocess.run((compiler, *linking, "-shared", *objects, "-o", whole), capture_output=True, text=True)
        _check(linked.returncode, linked.stderr, compiler)
        os.replace(whole, library)  # atomic: another process may build the same


def _check(code: int, output: str, compiler: str) -> None:
    if code:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {code}")
        raise ValueError(f"{compiler} failed: {first[:300]}")


FOLDER = SOURCES / "prebuilt"  # setup.py writes to it, too


def open_library(instructions: InstructionSet, folder: Path = FOLDER) -> ctypes.CDLL:
    """The library for these instructions: the one that came with the package, else one compiled here.

    ValueError where neither works.
    """
    check_instructions(instructions)
    _share_openmp()
    ready, problem = folder / library_name(instructions), ""
    if ready.is_file():
        try:
            return ctypes.CDLL(str(ready))
        except OSError as error:
            problem = f"the library that came with the package cannot be loaded ({error})"
            logger.warning("%s; it is compiled instead", problem)
    try:
        return ctypes.CDLL(str(compiled(instructions)))
    except ValueError as error:
        raise ValueError(f"{problem}; {error}" if problem else str(error)) from None


def _share_openmp() -> None:
    """Make an OpenMP runtime visible to libraries that are linked to none: torch's, which all pips' and Conda's builds
    bring and load so, else the system's. A second one beside torch's would compete for the cores.

    ValueError where there is none.
    """
    try:
        if hasattr(ctypes.CDLL(None), "GOMP_parallel") or ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL):
            return
    except OSError as error:
        raise ValueError(f"torch came without an OpenMP runtime, and the system has none ({error})") from None


def write_libraries(folder: Path, sets: Sequence[InstructionSet]) -> list[Path]:
    """Compile a library for each of ``sets`` into ``folder``, creating it; ValueError where that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(compiled(name), folder / library_name(name))) for name in sets]


def sets_of_compiler() -> tuple[InstructionSet, ...]:
    """Every instruction set of the kind of machine that the compiler compiles for, this one or another."""
    compiler = find_compiler()
    target = compiler and subprocess.run((compiler, "-dumpmachine"), capture_output=True, text=True).stdout
    return get_args(InstructionSet) if target and target.startswith("x86_64") else ("portable",)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m snapstream.kernels.cpu.looped.build FOLDER", file=sys.stderr)
        return 2
    try:
        for path in write_libraries(Path(sys.argv[1]), sets_of_compiler()):
            print(path)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
