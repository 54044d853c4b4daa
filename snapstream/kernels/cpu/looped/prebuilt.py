"""Libraries that came with the package: ``make wheel`` puts one per instruction set of the machine's kind into a wheel.

Invariant: a file is opened only if its name says that it was made from the sources beside it, with today's flags; one
that the system refuses (another libc) is told and left alone. Without one, ``build.py`` compiles.

    python -m snapstream.kernels.cpu.looped.prebuilt FOLDER     # writes them, for setup.py
"""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from snapstream.kernels.cpu.looped.build import InstructionSet, check_instructions, compiled, library_name

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "prebuilt"  # setup.py writes to it, too


def open_library(instructions: InstructionSet, folder: Path = FOLDER) -> ctypes.CDLL:
    """The library for these instructions: the one that came with the package, else one that is compiled here.

    ValueError where neither can be had.
    """
    check_instructions(instructions)
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


def write_libraries(folder: Path, sets: Sequence[InstructionSet]) -> list[Path]:
    """Compile a library for each of ``sets`` into ``folder``, which is made; ValueError where that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(compiled(name), folder / library_name(name))) for name in sets]


def sets_of_machine() -> tuple[InstructionSet, ...]:
    """All that processors of this machine's kind may have, whether its own has them or not."""
    return get_args(InstructionSet) if platform.machine() == "x86_64" else ("portable",)


def main() -> int:
    """Write all of them to the folder that is named."""
    if len(sys.argv) != 2:
        print("usage: python -m snapstream.kernels.cpu.looped.prebuilt FOLDER", file=sys.stderr)
        return 2
    try:
        for path in write_libraries(Path(sys.argv[1]), sets_of_machine()):
            print(path)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
