"""Single fields of a config.json, checked; ValueError with the field's name and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_WHOLE = 2**40  # of a size or a token id; larger ones are no model's
MAX_NUMBER = 1e12  # of a base frequency, the largest number in any config


def whole_number(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; ``default`` where the field is absent or null."""
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_WHOLE:
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    return value


def number(
    settings: Mapping[str, Any], name: str, default: float | None = None, *, above: float = -math.inf,
    most: float = MAX_NUMBER,
) -> float:  # fmt: skip
    """A finite number over ``above`` and up to ``most``; ``default`` where the field is absent or null."""
    value = settings.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not above < value <= most:  # type: ignore[arg-type, operator]
        limits = f" over {above:g} and" if above > -math.inf else ""
        raise ValueError(f"{name} is {value!r}; it must be a number{limits} up to {most:g}")
    return float(value)  # type: ignore[arg-type]


def flag(settings: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; ``default`` where the field is absent or null."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def token_ids(settings: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One token id, a list of them, or none where the field is absent or null."""
    value = settings.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_WHOLE:
            raise ValueError(f"{name} is {value!r}; it must be a token id (a whole number >= 0) or a list of them")
    return tuple(ids)
