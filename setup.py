"""What a wheel has beyond pyproject.toml: native libraries that are compiled already, if $SNAPSTREAM_PREBUILT names
their folder. ``make wheel`` does so; every other build is one of Python files alone, for any platform.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PLACE = "snapstream/kernels/cpu/looped/prebuilt"  # where build.py looks


def libraries() -> list[Path]:
    """Those to take along; an error for a folder that has none."""
    folder = os.environ.get("SNAPSTREAM_PREBUILT")
    found = sorted(Path(folder).glob("looped-*.so")) if folder else []
    if folder and not found:
        raise SystemExit(f"error: SNAPSTREAM_PREBUILT is {folder}, which holds no looped-*.so")
    return found


OLDEST_GLIBC = (2, 28)  # of a tag: what the oldest distributions in use have
NEWEST_GLIBCXX = (3, 4, 25)  # that distributions of OLDEST_GLIBC have


def needed_version(files: Sequence[Path], name: str) -> tuple[int, ...]:
    """The newest version of ``name``'s symbols that these ELF files ask for; empty where they ask for none.

    Every version that a file needs is a string in it, such as GLIBC_2.32.
    """
    pattern = re.compile(rb"\0" + name.encode() + rb"_(\d+(?:\.\d+)+)(?=\0)")
    found = (match for file in files for match in pattern.findall(file.read_bytes()))
    return max((tuple(int(number) for number in version.split(b".")) for version in found), default=())


def platform_of(files: Sequence[Path], platform: str) -> str:
    """The tag of PEP 600 for these libraries: the oldest glibc that has all their symbols.

    ``platform``, this machine's, where they are for another libc or need a newer libstdc++ than such systems have.
    """
    glibc = needed_version(files, "GLIBC")
    if not platform.startswith("linux_") or not glibc or needed_version(files, "GLIBCXX") > NEWEST_GLIBCXX:
        return platform
    major, minor = max(glibc[:2], OLDEST_GLIBC)
    return f"manylinux_{major}_{minor}_{platform.removeprefix('linux_')}"


class BuildWithLibraries(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, PLACE)
        shutil.rmtree(target, ignore_errors=True)  # what an earlier build left
        for library in libraries():
            target.mkdir(exist_ok=True)
            self.copy_file(str(library), str(target / library.name))


class WheelOfPlatform(bdist_wheel):
    """With native libraries: for one kind of machine and libc, and for every Python 3, whose ABI they do not use."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not libraries()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform_of(libraries(), platform))


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfPlatform})
