"""Names that settings may have, and how a single value is checked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal, TypeVar

DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["auto", "bfloat16", "fp8", "int8"]

T = TypeVar("T")

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES: dict[KVDType, int] = {"bfloat16": 2, "fp8": 1, "int8": 1}  # of a number in a row, scales apart
KV_DTYPES: tuple[KVDType, ...] = ("auto", *KV_BYTES)


class InvalidValue(ValueError):
    """A value that is refused. ``field``: the setting or parameter that holds it, whatever the message begins with."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def as_count(name: str, value: Any, low: int, high: int | None = None, *, field: str | None = None) -> int:
    """``value`` as an int, numpy's included; InvalidValue unless it is a whole number from ``low`` to ``high``.

    ``field``: where the value stands, if that is not its ``name``.
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


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value


def as_token_ids(name: str, value: Any) -> list[int]:
    """A sequence, array or tensor of token ids as ints; ValueError unless each is a whole number >= 0."""
    given = plain(value)
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
        raise ValueError(f"{name} is {value!r}; it must be a list of token ids")
    return [as_count(f"{name}: token id", token, 0) for token in given]


def kv_dtype_bytes(dtype: str, kv_dtype: KVDType) -> int:
    """Bytes of a number in a row, by default those of ``dtype``; ValueError for an unknown ``kv_dtype``."""
    check(kv_dtype in KV_DTYPES, f"kv_dtype is {kv_dtype!r}; it must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")
    return KV_BYTES.get(kv_dtype, DTYPE_BYTES[dtype])


def set_counts(config: Any, **lows: int) -> None:
    """Check and normalise the whole-number fields of a frozen dataclass; values are the least allowed."""
    for name, low in lows.items():
        object.__setattr__(config, name, as_count(name, getattr(config, name), low))
