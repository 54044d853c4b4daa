"""What a wheel has beyond pyproject.toml: native libraries that are compiled already, if $SNAPSTREAM_PREBUILT names
their folder. ``make wheel`` does so; every other build is one of Python files alone, for any platform.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
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


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        """What a wheel with native libraries has in the eyes of setuptools."""
        return bool(libraries())


class WheelOfPlatform(bdist_wheel):
    """With native libraries: for this kind of machine, to which auditwheel adds a libc, and for every Python 3, whose
    ABI they do not use."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfPlatform})
