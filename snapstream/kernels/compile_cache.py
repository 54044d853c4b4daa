"""Where compiled code is kept between runs: one folder per user, machine and version.

Invariant: the folder belongs to this user and no other user can write to it, because what lies in it is loaded and run.
``cpu/looped/build.py`` keeps the library of the looped executor here.
"""

from __future__ import annotations

import os
import platform
import stat
from hashlib import sha256
from pathlib import Path

from snapstream.version import __version__

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
