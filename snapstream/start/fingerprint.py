"""Tells one checkpoint from another without reading it whole: what ranks, and engines that exchange rows, compare."""

from __future__ import annotations

import hashlib
from pathlib import Path

MAX_HEADER = 2**26  # bytes that are read of a safetensors header
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of the numbers of a file, spread: a fine-tune may leave both ends as they were


def checkpoint_fingerprint(folder: Path) -> str:
    """Of the config, and of each file of weights: its name, size, header, and samples of its numbers.

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
            first = file.tell()
            for index in range(_SAMPLES):
                file.seek(first + index * max(size - first - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()
