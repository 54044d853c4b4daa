"""Messages between ranks as bytes: frozen dataclasses to JSON and back, by their types. Nothing is ever unpickled.

    u32 length of the head | head: JSON [name, values, [bytes of each array]] | arrays of int64, one after the other

A message is a dataclass whose fields are numbers, texts, bytes, ``None``, tuples, mappings, and such dataclasses again;
long tuples of whole numbers (token ids) travel as arrays, bytes in base64. What comes out is made by the same
constructors that a caller uses, so it is checked as a caller's values are. Invariant: ``unpack(pack(m)) == m`` for what
``kinds`` names, and a ValueError, never anything else, for bytes that are none. ``messages.py`` has the messages,
``link.py`` brings them.
"""

from __future__ import annotations

import json
import struct
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from snapstream.config import SELECTORS, Selector
from snapstream.config.selector import is_shipped

MAX_BYTES = 2**28  # of a message: a plan carries the token ids of its prompts, 8 bytes each
_HEAD = struct.Struct("<I")
_LONG = 16  # numbers from which a tuple travels as an array
_INT64 = "q"

Read = Callable[[Any, Sequence[tuple[int, ...]]], Any]  # a value of the head, and the arrays


def pack(message: object) -> bytes:
    """A message as bytes. TypeError for a value that has no plain form."""
    arrays: list[bytes] = []
    values = _plain(message, arrays)
    head = json.dumps([type(message).__name__, values, [len(own) for own in arrays]], separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(head)), head, *arrays))


def unpack(data: bytes, kinds: Mapping[str, type]) -> object:
    """The message in ``data``, one of ``kinds`` by name. ValueError for anything else."""
    try:
        (length,) = _HEAD.unpack_from(data)
        name, values, sizes = json.loads(data[_HEAD.size : _HEAD.size + length])
        arrays, start = [], _HEAD.size + length
        for size in sizes:
            own = array(_INT64)
            own.frombytes(data[start : start + size])
            arrays.append(tuple(own))
            start += size
        if start != len(data):
            raise ValueError(f"{len(data)} bytes came, and the message has {start}")
        return reader(kinds[name])(values, arrays)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise ValueError(f"{len(data)} bytes that are no message: {type(error).__name__}: {error}") from None


def _plain(value: Any, arrays: list[bytes]) -> Any:
    """``value`` in JSON's types; its long tuples of whole numbers go to ``arrays``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Selector) and is_shipped(value):
        return [value.name, _values(value, arrays)]
    if is_dataclass(value) and not isinstance(value, Selector):
        return _values(value, arrays)
    if isinstance(value, Mapping):
        return [[_plain(key, arrays), _plain(own, arrays)] for key, own in value.items()]
    if isinstance(value, (tuple, list)):
        if len(value) >= _LONG and all(type(own) is int and own.bit_length() < 64 for own in value):
            arrays.append(array(_INT64, value).tobytes())
            return {"array": len(arrays) - 1}
        return [_plain(own, arrays) for own in value]
    raise TypeError(f"{type(value).__name__} has no plain form, so that it cannot be sent to other ranks: {value!r}")


def _values(message: Any, arrays: list[bytes]) -> list[Any]:
    return [_plain(getattr(message, name), arrays) for name in _field_names(cast(Any, type(message)))]


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(own.name for own in fields(kind))


@cache
def reader(kind: Any) -> Read:
    """Reads values of a type back; TypeError for a type that no message may have."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Selector:
        return _read_selector
    if is_dataclass(kind):
        made, hints = cast(type, kind), get_type_hints(kind)
        names = _field_names(made)
        return partial(_read_fields, made, names, tuple(hints[name] for name in names))
    if kind in (NoneType, bool, int, float, str):
        return partial(_read_scalar, kind)
    if kind is bytes:
        return _read_bytes
    if origin is Literal:
        return partial(_read_literal, args)
    if origin in (Union, UnionType):
        return partial(_read_union, tuple(reader(own) for own in args))
    if origin is tuple and len(args) == 2 and args[1] is ... or origin is Sequence:
        return partial(_read_tuple, reader(args[0]))
    if origin is Mapping:
        return partial(_read_mapping, reader(args[0]), reader(args[1]))
    raise TypeError(f"no message may have a {kind}")


def _read_bytes(value: Any, arrays: Any) -> bytes:
    return b64decode(value, validate=True)


def _read_fields(kind: type, names: Sequence[str], kinds: Sequence[Any], value: Any, arrays: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{kind.__name__} is {value!r:.80}; it must be a list of its fields")
    return kind(**{name: reader(own)(item, arrays) for name, own, item in zip(names, kinds, value, strict=True)})


def _read_scalar(kind: type, value: Any, arrays: Any) -> Any:
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{value!r:.80} is no {kind.__name__}")


def _read_literal(names: Sequence[Any], value: Any, arrays: Any) -> Any:
    if value not in names:
        raise ValueError(f"{value!r:.80} is none of {names}")
    return value


def _read_union(readers: Sequence[Read], value: Any, arrays: Any) -> Any:
    reasons = []
    for read in readers:
        try:
            return read(value, arrays)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError("; ".join(reasons))


def _read_tuple(read: Read, value: Any, arrays: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(arrays[value["array"]])
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is no list")
    return tuple(read(own, arrays) for own in value)


def _read_mapping(read_key: Read, read_own: Read, value: Any, arrays: Any) -> dict[Any, Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is no list of pairs")
    return {read_key(key, arrays): read_own(own, arrays) for key, own in value}


def _read_selector(value: Any, arrays: Any) -> Selector:
    name, values = value
    kind = SELECTORS.get(name)
    made: Selector = reader(kind)(values, arrays) if is_dataclass(kind) else kind()
    return made
