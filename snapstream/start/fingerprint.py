"""Tells one checkpoint from another without reading it whole: what ranks compare before they load their shares."""

from __future__ import annotations

import hashlib
from pathlib import Path

MAX_HEADER = 2**26  # bytes that are read of a safetensors header
_ENDS = 2**16  # bytes of the numbers at both ends of a file


def checkpoint_fingerprint(folder: Path) -> str:
    """Of the config, and of each file of weights: its name, size, header, first and last numbers.

    Copies of a folder on different machines have the same one. ValueError where there is no config.json.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} has no config.json; it is no checkpoint folder")
    found = hashlib.sha256(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            start = file.read(8)
            found.update(start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER)))
            found.update(file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            found.update(file.read(_ENDS))
    return found.hexdigest()
