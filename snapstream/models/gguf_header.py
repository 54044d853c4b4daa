"""The header of a GGUF file, version 2 or 3: settings, and where its tensors lie. No torch.

Invariants: what a header states is checked against the size of the file before memory is taken for it, and nothing is
executed; a broken file is a ValueError with its path.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from snapstream.config import DType
from snapstream.config.weights import K_GROUPS
from snapstream.models.config_json import MAX_TABLE_BYTES, check_file

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PAIRS, MAX_ENTRIES, MAX_TENSORS, MAX_TEXT_BYTES, MAX_SPLITS = 2**16, 2**23, 2**20, 2**24, 2**10
ALIGNMENT, MAX_ALIGNMENT, MAX_DIMS = 32, 2**16, 4

# Of metadata, by their number: how struct reads one.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY, _FLOAT = 8, 9, 6

FLOATS: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DEQUANTIZED = ("Q5_1", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4")
K_QUANTS = tuple(name.upper() for name in K_GROUPS)
TYPES = (*FLOATS, "Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", *K_QUANTS, *DEQUANTIZED)


def is_gguf(path: Path) -> bool:
    """Whether a MODEL argument names a GGUF file."""
    return path.suffix == SUFFIX


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, read when it is asked for."""

    kind: int
    count: int
    start: int  # byte of the file


@dataclass(frozen=True, slots=True)
class Tensor:
    file: Path
    name: str
    shape: tuple[int, ...]  # as PyTorch counts: the numbers of a row last
    kind: str  # "Q4_K"
    start: int  # byte of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a file states of itself."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def texts(self, name: str) -> list[str]:
        """An array of texts; ValueError if there is none."""
        return [str(one) for one in self._values(name, text=True)]

    def numbers(self, name: str) -> list[float]:
        """An array of numbers; ValueError if there is none."""
        return list(self._values(name, text=False))

    def _values(self, name: str, *, text: bool) -> list[Any]:
        found = self.metadata.get(name)
        if not isinstance(found, Array) or (found.kind == _TEXT) != text:
            raise ValueError(f"{self.file}: {name} is {described(found)}; it must be an array of {_what(text)}")
        with _mapped(self.file) as reader:
            reader.at = found.start
            if text:
                return [reader.decoded(*span) for span in reader.texts(found.count)]
            code = _NUMBERS[found.kind]
            numbers = struct.unpack_from(f"<{found.count}{code[1:]}", reader.data, found.start)
            return [shortest(number) for number in numbers] if found.kind == _FLOAT else [*numbers]


def _what(text: bool) -> str:
    return "texts" if text else "numbers"


class _Reader:
    """Reads values from the front of a file. ValueError past its end."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def unpack(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self.data, self.at)
        except struct.error:
            raise self._truncated() from None
        self.at += struct.calcsize(code)
        return value

    def _truncated(self) -> ValueError:
        return ValueError(f"{self.file} is truncated: its header ends at byte {len(self.data):,}")

    def number(self, kind: int) -> float:
        value = self.unpack(_NUMBERS[kind])
        return shortest(value) if kind == _FLOAT else value

    def skip(self, count: int, size: int, what: str) -> None:
        """Pass ``count`` values of at least ``size`` bytes; ValueError if the file or the limit has fewer."""
        if count > MAX_ENTRIES:
            raise ValueError(f"{self.file}: {what} has {count:,} entries; the limit is {MAX_ENTRIES:,}")
        if count * size > len(self.data) - self.at:
            raise ValueError(f"{self.file} is truncated: {what} has {count:,} entries")

    def texts(self, count: int) -> Iterator[tuple[int, int]]:
        """Where each of ``count`` texts begins and ends; this passes them."""
        length, read = len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = self.at + 8
            if begin > length:
                raise self._truncated()
            (size,) = read(self.data, self.at)
            if size > min(length - begin, MAX_TEXT_BYTES):
                raise ValueError(
                    f"{self.file}: a text of the header has {size:,} bytes; {length - begin:,} are left, and the "
                    f"limit is {MAX_TEXT_BYTES:,}"
                )
            self.at = begin + size
            yield begin, self.at

    def decoded(self, begin: int, end: int) -> str:
        try:
            return self.data[begin:end].decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.file}: a text at byte {begin:,} of the header is not UTF-8") from None

    def text(self) -> str:
        (span,) = self.texts(1)
        return self.decoded(*span)

    def value(self, name: str) -> Any:
        kind = self.unpack("<I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._known(kind, name))
        kind, count = self.unpack("<I"), self.unpack("<Q")
        if kind == _TEXT:
            self.skip(count, 8, name)
            array = Array(kind, count, self.at)
            for _ in self.texts(count):
                pass
        else:
            size = struct.calcsize(_NUMBERS[self._known(kind, name)])
            self.skip(count, size, name)
            array = Array(kind, count, self.at)
            self.at += count * size
        if self.at > MAX_TABLE_BYTES:
            raise ValueError(f"{self.file}: its header has more than {MAX_TABLE_BYTES:,} bytes")
        return array

    def _known(self, kind: int, name: str) -> int:
        if kind not in _NUMBERS:
            raise ValueError(f"{self.file}: {name} has the type {kind}, which GGUF does not define")
        return kind


class _mapped:
    """Maps a file for a reader."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> _Reader:
        try:
            with self.file.open("rb") as opened:
                self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise ValueError(f"{self.file} cannot be read: {error}") from None
        return _Reader(self.file, self.data)

    def __exit__(self, *error: object) -> None:
        self.data.close()


def shortest(value: float) -> float:
    """The number that was written as a 32-bit float: 1e-06 rather than 9.99999997475e-07."""
    rounded = float(f"{value:.7g}") if math.isfinite(value) else value
    return rounded if struct.pack("<f", value) == struct.pack("<f", rounded) else value


def described(value: Any) -> str:
    """A value of the metadata, short, for a message."""
    if isinstance(value, Array):
        return f"an array of {value.count:,} {_what(value.kind == _TEXT)}"
    return f"{value!r:.80}"


def read_header(file: Path) -> Header:
    """Header of one file, cached until the file changes. ValueError, with the path, for anything else."""
    check_file(file)
    try:
        found = file.stat()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    return _read_header(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _read_header(file: Path, mtime: int, size: int) -> Header:
    with _mapped(file) as reader:
        magic = reader.data[:4]
        if magic != MAGIC:
            raise ValueError(f"{file} is not a GGUF file: it begins with {bytes(magic)!r}")
        reader.at = 4
        version = reader.unpack("<I")
        if version not in VERSIONS:
            raise ValueError(f"{file} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
        num_tensors, num_pairs = reader.unpack("<Q"), reader.unpack("<Q")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise ValueError(
                f"{file}: its header counts {num_tensors:,} tensors and {num_pairs:,} settings; the limits are "
                f"{MAX_TENSORS:,} and {MAX_PAIRS:,}"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = reader.text()
            if name in metadata:
                raise ValueError(f"{file}: {name[:80]!r} is set twice")
            metadata[name] = reader.value(name[:80])
        tensors = [_read_tensor(reader, file) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"{file}: general.alignment is {described(alignment)}; it must be a power of two")
        start = -(-reader.at // alignment) * alignment
    return Header(file, metadata, _placed(file, tensors, start, size))


def _read_tensor(reader: _Reader, file: Path) -> Tensor:
    name, num_dims = reader.text(), reader.unpack("<I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"{file}: {name[:80]!r} has {num_dims:,} dimensions; it must be 1 to {MAX_DIMS}")
    shape = tuple(reader.unpack("<Q") for _ in range(num_dims))[::-1]
    kind, start = reader.unpack("<I"), reader.unpack("<Q")
    type_name, block, block_bytes = _type(file, name, kind)
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(
            f"{file}: {name[:80]!r} has the shape {list(shape)}; rows of {type_name} must be a multiple of {block}"
        )
    return Tensor(file, name, shape, type_name, start, math.prod(shape) // block * block_bytes)


def _type(file: Path, name: str, kind: int) -> tuple[str, int, int]:
    """Name of a tensor type, numbers of a block and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{file}: {name[:80]!r} has the tensor type {kind}, which is not known") from None
    if found.name not in TYPES:
        raise ValueError(f"{file}: {name[:80]!r} is stored as {found.name}; known: {', '.join(TYPES)}")
    return found.name, *GGML_QUANT_SIZES[found]


def _placed(file: Path, tensors: Sequence[Tensor], start: int, size: int) -> dict[str, Tensor]:
    """By name, with their place in the file; ValueError for a file that does not hold them."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ValueError(f"{file}: {tensor.name[:80]!r} is in it twice")
        own = replace(tensor, start=start + tensor.start)
        if own.start + own.num_bytes > size:
            raise ValueError(
                f"{file} is truncated: it has {size:,} bytes, and {tensor.name[:80]!r} ends at byte "
                f"{own.start + own.num_bytes:,}"
            )
        found[own.name] = own
    return found


def first_file(file: Path) -> Path:
    """The file with the settings of the model that a file is a part of."""
    split = SPLIT.fullmatch(file.name)
    return file if split is None else file.with_name(f"{split['stem']}-00001-of-{split['count']}.gguf")


def split_files(path: Path) -> list[Path]:
    """All files of the model of ``path``; ValueError for one that is not the first, and where some are missing."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count, stem = int(split["count"]), split["stem"]
    if not 1 <= count <= MAX_SPLITS:
        raise ValueError(f"{path} is one of {count:,} files; the limit is {MAX_SPLITS:,}")
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if int(split["number"]) != 1:
        raise ValueError(f"{path} is a part of a model; give its first file, {files[0].name}")
    missing = [file.name for file in files if not file.is_file()]
    if missing and path.name not in missing:
        raise ValueError(f"{path.parent}: {len(missing)} of {count} files missing: {', '.join(missing[:3])}")
    return files
