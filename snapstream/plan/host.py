"""How much memory this machine, or the container around this process, has.

Invariant: memory that the kernel would refuse, or kill for, is not counted: the smallest limit of the process's cgroups
bounds both figures. Page cache counts as available, because the kernel gives it back. ``start/measure.py`` measures by
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class _Kind(NamedTuple):
    """Names of one version of cgroups: folder under /sys/fs/cgroup, files, and the count of reclaimable pages."""

    folder: str
    limit: str
    usage: str
    reclaimable: str


UNIFIED = _Kind("", "memory.max", "memory.current", "inactive_file")
LEGACY = _Kind("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """``root``: where proc and sys are."""
    page = os.sysconf("SC_PAGE_SIZE")
    told = _table(root / "proc/meminfo")
    total = told["MemTotal"] * 1024 if "MemTotal" in told else page * os.sysconf("SC_PHYS_PAGES")
    available = told["MemAvailable"] * 1024 if "MemAvailable" in told else page * os.sysconf("SC_AVPHYS_PAGES")
    for kind, folder in _cgroups(root):
        limit = _number(folder / kind.limit)
        if limit is not None:
            used = (_number(folder / kind.usage) or 0) - _table(folder / "memory.stat").get(kind.reclaimable, 0)
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _cgroups(root: Path) -> Iterator[tuple[_Kind, Path]]:
    """This process's cgroups with memory, and all above them; a container sees its own as the topmost."""
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = LEGACY if controllers else UNIFIED
        top = root / "sys/fs/cgroup" / kind.folder
        own = top / path.strip("/")
        yield from ((kind, folder) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.replace(":", " ").split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
