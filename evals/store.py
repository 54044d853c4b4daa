"""Stored measurements: one JSON object per line, a file per model and group of tasks.

A record has ``settings``, which identify it, what ``figures.machine.describe`` says, and ``result``. Writing settings
again replaces the record before. Several processes may append to a file. An interrupted run can leave half a line at
the end: reading ignores it, and the next record takes its place.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def key_of(settings: dict[str, Any]) -> str:
    """Equal for equal settings."""
    return json.dumps(settings, sort_keys=True)


def read(path: Path) -> dict[str, Record]:
    """Records by the key of their settings, in the order of their first writing; none if there is no file.

    ValueError if a line before the last is no record.
    """
    found: dict[str, Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record: Record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a record") from None
        found[key_of(record["settings"])] = record
    return found


def append(path: Path, record: Record) -> None:
    """Store a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        stored = file.read()
        if stored and not stored.endswith(b"\n"):
            line = _mend(file, stored) + line
        file.write(line)


def _mend(file: Any, stored: bytes) -> bytes:
    """Cut off a last line that is no record; what to write before the next one."""
    start = stored.rfind(b"\n") + 1
    try:
        json.loads(stored[start:])
    except ValueError:
        file.truncate(start)
        return b""
    return b"\n"
