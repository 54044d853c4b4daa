"""Dtypes and row formats, how single values are checked and parsed, registries, addresses. No torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from ipaddress import ip_address
from operator import index
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "fp8", "int8", "int4", "int8/int4"]  # K/V where they differ

T = TypeVar("T")

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
FP8_CAPABILITY = (8, 9)  # GPUs that convert e4m3: Ada, Hopper and newer


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Size and limits of a row format; ``kernels/formats.py`` has its arithmetic, and says how to add one."""

    name: str
    bits: float  # of a number, without ``scales``
    scales: Literal["head", "slot"] | None = None  # fp32, of K and of V: per kv head of a row, or also per slot
    group: int = 1  # a head is a multiple of this; groups of more numbers have their scale among their bits
    cpu_only: bool = False  # unless it is the dtype of the computation, only a CPU reads it
    capability: tuple[int, int] = (0, 0)  # the least compute capability of a GPU; (0, 0): any

    @property
    def is_integer(self) -> bool:
        """Whether numbers are whole, times a scale: not for latents, and on a CPU for computation in float32 alone."""
        return self.scales == "slot" or self.group > 1

    def num_bytes(self, numbers: int) -> int:
        """Bytes of whole heads that have ``numbers`` numbers together, without ``scales``."""
        return int(numbers * self.bits) // 8


ROW_FORMATS: dict[str, RowFormat] = {
    form.name: form
    for form in (
        RowFormat("float32", 32),
        RowFormat("bfloat16", 16, cpu_only=True),
        RowFormat("float16", 16),  # only as the dtype of the computation
        RowFormat("fp8", 8, scales="head", capability=FP8_CAPABILITY),
        RowFormat("int8", 8, scales="slot"),
        RowFormat("int4", 4.5, group=32),  # 4 bits, and an fp16 scale per group,
    )
}


def kv_dtype_help() -> str:
    """What the option says of the formats."""
    own = [ROW_FORMATS[name] for name in KV_DTYPES if name in ROW_FORMATS]
    scaled = ", ".join(f"{form.name} {form.bits} bits and a scale per {form.scales}" for form in own if form.scales)
    grouped = ", ".join(f"{form.name} {form.bits} bits with scales, rotated" for form in own if form.group > 1)
    cpu_only = ", ".join(form.name for form in own if form.cpu_only)
    return (
        f"Format of rows: auto is that of --dtype, on a CPU bfloat16 unless weights are float32; {scaled}; {grouped}; "
        f"int8/int4 has keys of int8 and values of int4. Only for a CPU: {cpu_only}."
    )


class InvalidValue(ValueError):
    """A refused value. ``field``: the setting or parameter that holds it, whatever the message begins with."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


MAX_DIM = 2**16  # of a head and of a latent


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """ValueError unless ``value`` is one of ``choices``."""
    check(value in choices, f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def as_count(name: str, value: Any, low: int, high: int | None = None, *, field: str | None = None) -> int:
    """``value`` as an int, numpy's included; InvalidValue unless it is a whole number from ``low`` to ``high``.

    ``field``: of the value, if that is not its ``name``.
    """
    limit = f"from {low} to {high}" if high is not None else f">= {low}"
    try:
        count = index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < low or (high is not None and count > high):
        raise InvalidValue(f"{name} is {value!r}; it must be a whole number {limit}", field or name)
    return count


def as_number(name: str, value: Any, low: float, high: float, *, field: str | None = None) -> float:
    """``value`` as a float; InvalidValue unless it is a finite number from ``low`` to ``high``. ``field`` as above."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        raise InvalidValue(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}", field or name)
    return number


def as_kind(name: str, value: Any, kind: type[T]) -> T:
    """``value``, if it is a ``kind``; else TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be a {kind.__name__}")
    return value


def as_path(name: str, value: Any) -> Path:
    """A path of text; TypeError for anything else, ValueError for a text that can be no path."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} is {value!r}; it must be a path")
    if "\0" in os.fspath(value):
        raise ValueError(f"{name} is {str(value)!r}; no path has a null character")
    return Path(value)


def decode_text(data: bytes, name: str) -> str:
    """The text of an input; ValueError with its name where it is binary."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: byte {error.start} ({data[error.start]:#04x}) is not UTF-8") from None


def read_text(file: Path) -> str:
    """The text of a file, unchanged; ValueError where it is binary."""
    return decode_text(file.read_bytes(), str(file))


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value


def as_token_ids(name: str, value: Any) -> list[int]:
    """A sequence, array or tensor of token ids as ints; ValueError unless each is a whole number >= 0."""
    given = plain(value)
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
        raise ValueError(f"{name} is {value!r}; it must be a list of token ids")
    return [as_count(f"{name}: token id", token, 0) for token in given]


def row_formats(dtype: str, kv_dtype: KVDType) -> tuple[RowFormat, RowFormat]:
    """The formats of K and of V, with ``"auto"`` that of ``dtype``; ValueError for an unknown ``kv_dtype``."""
    check(kv_dtype in KV_DTYPES, f"kv_dtype is {kv_dtype!r}; it must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")
    keys, _, values = (dtype if kv_dtype == "auto" else kv_dtype).partition("/")
    return ROW_FORMATS[keys], ROW_FORMATS[values or keys]


def set_counts(config: Any, **lows: int) -> None:
    """Check and normalise the whole-number fields of a frozen dataclass; values are the least allowed."""
    for name, low in lows.items():
        object.__setattr__(config, name, as_count(name, getattr(config, name), low))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def _parse(given: str, text: str, what: str, examples: str) -> int:
    """A number and its unit; ValueError for a number alone: 80 would mean 80 bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ValueError(f"{given!r} is not {what}; write a number > 0 and a unit, such as {examples}")
    return size


def parse_bytes(text: str) -> int:
    """``"80GiB"``, ``"24GB"``, ``"512M"``, ``"100B"``; a number without a unit is refused."""
    return _parse(text, text, "a size", "80GiB or 24GB")


def parse_bandwidth(text: str) -> int:
    """Bytes per second: a size with or without ``/s``, such as ``"3.35TB/s"``."""
    return _parse(text, re.sub(r"/s\s*$", "", text), "a bandwidth", "3.35TB/s")


def format_bytes(size: float) -> str:
    """Three significant digits and a binary unit, e.g. ``1.53 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_BINARY) - 1:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f}".removesuffix(".00").removesuffix(".0") + f" {_BINARY[unit]}"


def imported(entry: Any) -> Any:
    """What the text ``"module:attribute"`` names; anything but text is returned as it is."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Generic[T]):
    """Entries by name, in the order in which they were added: selectors, executors, model families.

    An entry may be the text ``"module:attribute"``, imported on first use, so that settings can check a name without
    importing torch. Anyone may add an entry; nothing in the package lists the names anywhere else.
    """

    def __init__(self, kind: str, entries: dict[str, T | str]) -> None:
        """``kind`` names the entries in errors: the setting that holds their names."""
        self.kind = kind
        self._entries = dict(entries)
        self._shipped = frozenset(entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def is_shipped(self, name: str) -> bool:
        """Whether the package brings it, so that every process knows it."""
        return name in self._shipped

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def check(self, name: Any) -> str:
        """``name`` itself; ValueError with the known names for any other value."""
        if name not in self:
            raise InvalidValue(f"{self.kind} is {name!r}; it must be one of {', '.join(self._entries)}", self.kind)
        return cast(str, name)

    def get(self, name: str) -> T:
        """The entry of that name; ValueError where there is none."""
        entry = self._entries[name] = imported(self._entries[self.check(name)])
        return cast(T, entry)

    def add(self, name: str, entry: T | str) -> None:
        """Register an entry; ValueError for a name that is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is there already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Take an entry out again; for tests that add one."""
        del self._entries[name]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"address is {address!r}; it must be HOST:PORT, such as 10.0.0.1:7690")
    return host.strip("[]"), int(port)


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
