"""A wheel with its native library, in an environment of its own and without a compiler: steps are looped."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.kernels.cpu.looped.build import VARIABLE, find_compiler, instruction_sets, library_name, write_libraries
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
SETUPTOOLS = 77  # that pyproject.toml asks for; with it here nothing is fetched


def has_tools() -> bool:
    """Whether this environment can build a wheel with what it has."""
    try:
        tools = bool(version("pip") and version("auditwheel") and version("patchelf"))
        return tools and int(version("setuptools").partition(".")[0]) >= SETUPTOOLS
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not has_tools(), reason="no pip, auditwheel or patchelf, or no setuptools of today"),
]
PROGRAM = f"""
import snapstream
from snapstream import LLM, SamplingParams
with LLM({str(TINY_MODEL)!r}, max_model_len=64, progress=False) as llm:
    answer = llm.generate([5, 6, 7, 8], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids
    print(snapstream.__file__, llm.config.executor, len(answer))
"""


def run(*command: str | Path, **more: str) -> str:
    """What a command prints; ``more`` is added to the environment, from which PYTHONPATH is taken."""
    env: Mapping[str, str] = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy, because a build writes into its folder."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    shutil.copytree(ROOT / "snapstream", folder / "snapstream", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def wheel_of(sources: Path, out: Path, **env: str) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "--wheel-dir", out, sources, **env)  # fmt: skip
    (wheel,) = out.iterdir()
    return wheel


def repaired(wheel: Path) -> Path:
    """By auditwheel, as ``make wheel`` does it: an error where the libraries need a newer glibc than 2.28, or a newer
    libstdc++ than its systems have."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # has patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", f"manylinux_2_28_{platform.machine()}", "--only-plat",
        "--wheel-dir", wheel.parent / "repaired", wheel, PATH=path)  # fmt: skip
    (done,) = (wheel.parent / "repaired").iterdir()
    return done


def test_steps_are_looped_without_a_compiler(sources: Path, tmp_path: Path) -> None:
    best = instruction_sets()[0]
    write_libraries(tmp_path / "libraries", [best])
    wheel = repaired(wheel_of(sources, tmp_path / "wheels", SNAPSTREAM_PREBUILT=str(tmp_path / "libraries")))
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    assert not [name for name in ZipFile(wheel).namelist() if ".libs/" in name], "a library of others was taken along"
    own = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", own)
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", own / "bin" / "python",
        "install", "--no-deps", "--no-index", wheel)  # fmt: skip
    (packages,) = (own / "lib").glob("python3*/site-packages")
    (installed,) = packages.glob("snapstream/kernels/cpu/looped/prebuilt/*")
    assert installed.name == library_name(best)
    (packages / "torch_and_others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind its own packages
    bare = {"PATH": str(tmp_path / "nothing"), "CXX": "", VARIABLE: str(tmp_path / "cache")}
    where, executor, tokens = run(own / "bin" / "python", "-P", "-c", PROGRAM, **bare).split()
    assert Path(where).is_relative_to(own) and (executor, tokens) == ("looped", "4")
    assert not list(tmp_path.glob("cache/**/looped-*"))

    plain = wheel_of(sources, tmp_path / "plain")  # in the folder of the first build
    assert plain.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(plain).namelist() if name.endswith(".so")]
