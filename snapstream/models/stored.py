"""How a checkpoint stores its matrices: what its files say of themselves, else what config.json says. No torch.

Read before anything is decided, so it judges nothing: a file that cannot be read says nothing here, and the loader
refuses it with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from snapstream.config import DTYPE_BYTES, DType, StoredWeights
from snapstream.models.quantization import FP8_SCALES, SCALES, stored_attention, stored_form

_NAMES: dict[str, DType] = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_HEADER_BYTES = 100 * 2**20


def stored_weights(folder: Path, settings: Mapping[str, Any]) -> StoredWeights:
    """``settings``: the parsed config.json of ``folder``, which need not hold weights."""
    found = {dtype for file in sorted(folder.glob("*.safetensors")) for dtype in _matrix_dtypes(file)}
    dtype = found.pop() if len(found) == 1 else "float32" if found else _declared(settings)  # fp32 holds all of them
    return StoredWeights(dtype=dtype, codes=stored_form(settings), attention=stored_attention(settings))


def _declared(settings: Mapping[str, Any]) -> DType | None:
    name = settings.get("dtype") or settings.get("torch_dtype")
    plain = name.removeprefix("torch.") if isinstance(name, str) else ""
    plain = "float32" if plain == "float64" else plain
    return cast(DType, plain) if plain in DTYPE_BYTES else None


def _matrix_dtypes(file: Path) -> Iterator[DType]:
    """Of every tensor of two dimensions or more but scales, from the header at the head of a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= _MOST_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return
    for name, tensor in header.items() if isinstance(header, dict) else ():
        if name.endswith((SCALES, FP8_SCALES)):
            continue
        if isinstance(tensor, dict) and isinstance(tensor.get("shape"), list) and len(tensor["shape"]) > 1:
            dtype = tensor.get("dtype")
            if isinstance(dtype, str) and dtype in _NAMES:
                yield _NAMES[dtype]
