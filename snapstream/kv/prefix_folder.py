"""The directory of the disk cache: private, locked by one engine. No torch, so that a server can check it at startup.

It holds keys and values of prompts, from which text can be recovered, so only its owner may read it (0700). A marker
file identifies it; a directory with other files is refused, never cleaned. ``secret`` keys all file names, so that they
reveal nothing about prompts and namespaces survive a restart. Each rank of a distributed engine has a subdirectory
(``rank_part``) with its own secret and lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from io import FileIO
from pathlib import Path

from snapstream.config import ParallelConfig

MARKER = "snapstream-prefixes"
SECRET = "secret"
SECRET_BYTES = 32


class PrefixFolder:
    """An open, locked folder; ValueError for one that cannot be used."""

    def __init__(self, path: Path, part: str = "") -> None:
        """``part``: a rank's subdirectory of ``path``; other ranks may then use the others."""
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
        """Release the locks, as the end of this object does; idempotent."""
        for lock in self._locks:
            lock.close()


def rank_part(parallel: ParallelConfig, rank: int) -> str:
    """A rank's subdirectory, different for each parallel configuration; empty for one device."""
    if parallel.size == 1:
        return ""
    return f"rank-{rank}-of-{parallel.size}-{parallel.experts}-{parallel.attention}"


def _locked(path: Path, kind: int) -> FileIO:
    """A folder's marker, locked until it is closed; ValueError if another engine has locked it."""
    lock = FileIO(_prepared(path) / MARKER, "r+")
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        is_held = isinstance(error, BlockingIOError)
        why = "is in use by another engine" if is_held else f"cannot be locked: {error.strerror}"
        raise ValueError(f"prefix_dir {path} {why}") from None
    return lock


def folder_secret(path: Path) -> bytes:
    """The secret of a folder, created if new; ValueError for a folder that cannot be used."""
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
            raise ValueError(f"prefix_dir {path} has mode {mode:o}; it holds prompts, so it must be private (700)")
        if not (path / MARKER).exists():
            others = [file.name for file in path.iterdir() if not file.name.startswith(SECRET)]
            if others and not (path / MARKER).exists():  # another process may have made it meanwhile
                raise ValueError(f"prefix_dir {path} is not a disk cache: it holds {others[0]!r}; give an empty folder")
            (path / MARKER).touch(mode=0o600)
        if not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"prefix_dir {path} cannot be written to")
    except OSError as error:
        raise ValueError(f"prefix_dir {path} cannot be used: {error.strerror or error}") from None
    return path
