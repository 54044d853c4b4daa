"""The folder of the disk cache: private, used by one engine at a time. No torch: a server checks it before it starts.

It holds keys and values of prompts, which can be turned back into text, so only its owner may read it (0700). A marker
file shows that it is a disk cache; a folder with other files in it is refused, never cleaned. ``secret`` keys the names
of all files, so that they reveal nothing about prompts, and namespaces survive a restart. Each rank of a distributed
engine has a folder within it (``rank_part``), with its own secret and lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path

from snapstream.config import ParallelConfig

MARKER = "snapstream-prefixes"
SECRET = "secret"
SECRET_BYTES = 32


class PrefixFolder:
    """An open folder; ValueError for one that cannot be used."""

    def __init__(self, path: Path, part: str = "") -> None:
        """``part``: the folder in ``path`` of one rank; other ranks may then have the other parts."""
        self._locks = [_locked(path, fcntl.LOCK_SH if part else fcntl.LOCK_EX)]
        self.part, self.path = part, path / part
        try:
            if part:
                self._locks.append(_locked(self.path, fcntl.LOCK_EX))
            self.secret = folder_secret(self.path)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder; may be repeated."""
        while self._locks:
            os.close(self._locks.pop())


def rank_part(parallel: ParallelConfig, rank: int) -> str:
    """The name of a rank's folder, another one for each way to split a model. Empty for one device."""
    if parallel.size == 1:
        return ""
    return f"rank-{rank}-of-{parallel.size}-{parallel.experts}-{parallel.attention}"


def _locked(path: Path, kind: int) -> int:
    """The open, locked marker of a folder; ValueError if another engine has locked it."""
    lock = os.open(_prepared(path) / MARKER, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"prefix_dir {path} is in use by another engine") from None
    return lock


def folder_secret(path: Path) -> bytes:
    """The secret of a folder, which is prepared if it is new; ValueError for one that cannot be used."""
    _prepared(path)
    file = path / SECRET
    try:
        if not file.exists():
            fresh = path / f"{SECRET}.{os.getpid()}"
            fresh.touch(mode=0o600)
            fresh.write_bytes(secrets.token_bytes(SECRET_BYTES))
            try:
                os.link(fresh, file)  # atomic, and never replaces another process's
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        found = file.read_bytes()
    except OSError as error:
        raise ValueError(f"prefix_dir {path} cannot be used: {error.strerror}") from None
    if len(found) != SECRET_BYTES:
        raise ValueError(f"prefix_dir {path}: {SECRET} has {len(found)} bytes, not {SECRET_BYTES}; delete the folder")
    return found


def _prepared(path: Path) -> Path:
    """The folder, created if it is missing; ValueError for one that cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise ValueError(f"prefix_dir {path} is not a folder")
        if info.st_uid != os.geteuid():
            raise ValueError(f"prefix_dir {path} belongs to user {info.st_uid}, not to this one")
        if info.st_mode & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise ValueError(f"prefix_dir {path} has mode {mode:o}; prompts lie in it, so it must be private (700)")
        if not (path / MARKER).exists():
            others = [own.name for own in path.iterdir() if not own.name.startswith(SECRET)]
            if others and not (path / MARKER).exists():  # another process may have made it meanwhile
                raise ValueError(f"prefix_dir {path} is not ours: it holds {others[0]!r}; give an empty folder")
            (path / MARKER).touch(mode=0o600)
        if not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"prefix_dir {path} cannot be written to")
    except OSError as error:
        raise ValueError(f"prefix_dir {path} cannot be used: {error.strerror or error}") from None
    return path
