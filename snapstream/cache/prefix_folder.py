"""The folder of the prefix store's disk tier: ours, private, one engine at a time. No torch.

An engine over several ranks has a folder for each rank within it (``rank_part``), with a secret and a lock of its own.

It holds keys and values of prompts, which can be turned back into text, so only its owner may read it (0700). A marker
file says that it is ours; a folder with other people's files in it is refused, never cleaned. ``secret`` keys the names
of all files: they tell nothing about prompts, and namespaces survive a restart.
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
        """``part``: the folder in ``path`` that belongs to one rank; others may then have the other parts."""
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
        """Let others use it; may be repeated."""
        while self._locks:
            os.close(self._locks.pop())


def rank_part(parallel: ParallelConfig, rank: int) -> str:
    """The name of a rank's folder: ranks that divide a model otherwise never see its files. Empty for one device."""
    if parallel.size == 1:
        return ""
    return f"rank-{rank}-of-{parallel.size}-{parallel.experts}-{parallel.attention}"


def _locked(path: Path, kind: int) -> int:
    """The open marker of a folder that is ours now; ValueError if it is another engine's."""
    lock = os.open(_prepared(path) / MARKER, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"prefix_dir {path} is in use by another engine") from None
    return lock


def folder_secret(path: Path) -> bytes:
    """The secret of a folder, which is made ready if it is new; ValueError for one that cannot be used."""
    _prepared(path)
    file = path / SECRET
    try:
        if not file.exists():
            fresh = path / f"{SECRET}.{os.getpid()}"
            fresh.touch(mode=0o600)
            fresh.write_bytes(secrets.token_bytes(SECRET_BYTES))
            try:
                os.link(fresh, file)  # whole or not at all, and never over another process's
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
    """The folder, made if it is missing, once all is well with it."""
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
