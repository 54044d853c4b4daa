"""The contents of a checkpoint folder: its shards and the shape of every tensor in them, read from headers alone.

Invariant: after ``read_manifest`` every shard exists, is whole, and every tensor has one place. ``loader.py``
compares the manifest with what the model needs before a byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from snapstream.models.json_file import read_object
from snapstream.request.conversation import named

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names of what converts to a weight as it is


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how it looks."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"


def read_manifest(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name. Raises ValueError for absent, cut or contradictory shards."""
    manifest: dict[str, StoredTensor] = {}
    for file in _shards(folder):
        for name, tensor in _read_header(file).items():
            if name in manifest:
                raise ValueError(f"{name} is in two shards: {manifest[name].file.name} and {file.name}")
            manifest[name] = tensor
    return manifest


@contextmanager
def open_shard(file: Path) -> Iterator[safe_open]:
    """Memory-map a shard; pages that were read belong to the mapping and go when it closes."""
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def read_part(shard: safe_open, name: str, place: tuple[slice, ...]) -> Tensor:
    """The part ``place`` of a tensor; no other page of the file is read."""
    stored = shard.get_slice(name)
    if all(cut == slice(0, size) for cut, size in zip(place, stored.get_shape(), strict=True)):
        whole: Tensor = shard.get_tensor(name)
        return whole
    part: Tensor = stored[place]
    return part


def _shards(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a checkpoint folder")
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_shards(index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} holds weights only as pytorch_model.bin, which can run code when read; "
            "convert them to safetensors"
        )
    raise ValueError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_shards(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} is not an index of shards: weight_map is {named(weight_map)}; it must map tensors to files"
        )
    for tensor, name in weight_map.items():
        _check_name(index, tensor, name)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index.parent}: {len(missing)} of {len(files)} shards missing: {', '.join(missing)}")
    return files


def _check_name(index: Path, tensor: str, name: Any) -> None:
    """A shard lies in the folder of its index. It may be a link to elsewhere, as in the caches of model hubs."""
    if not isinstance(name, str):
        raise ValueError(f"{index}: weight_map names {named(name)} for {tensor}; it must be the name of a file")
    if name in ("", ".", "..") or any(sign in name for sign in ("/", "\\", "\0")):
        raise ValueError(f"{index}: weight_map names {name!r} for {tensor}; a shard is a file of the same folder")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with open_shard(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 - not a mapping
        return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
