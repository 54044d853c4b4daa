"""What tells a checkpoint from every other, wherever it lies: its config and samples of its weights.

Unlike ``cache.prefix_files.model_fingerprint`` it survives a copy of the folder, so that a file about a model can name
it. Reading all weights of a large model would take minutes; a fine-tuned one differs in every sample.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights, evenly spaced
_MAX_HEADER = 2**26


def fingerprint(folder: Path | str) -> str:
    """32 hexadecimal digits. OSError or ValueError for a folder that is no checkpoint."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(8 + min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)))
            for index in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:32]
