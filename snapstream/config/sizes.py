"""Byte sizes as people write and read them. K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti of 1024."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def _parse(text: str) -> int:
    """0 where ``text`` is no size, or only a number: nobody means 80 bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", text.upper())
    return int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0


def parse_bytes(text: str) -> int:
    """``"80GiB"``, ``"24GB"``, ``"512M"``, ``"100B"``; a number without a unit is refused."""
    size = _parse(text)
    if size < 1:
        raise ValueError(f"{text!r} is not a size; write a number > 0 and a unit, such as 80GiB or 24GB")
    return size


def parse_bandwidth(text: str) -> int:
    """Bytes per second: a size with or without ``/s``, such as ``"3.35TB/s"``."""
    size = _parse(re.sub(r"/s\s*$", "", text))
    if size < 1:
        raise ValueError(f"{text!r} is not a bandwidth; write a number > 0 and a unit, such as 3.35TB/s")
    return size


def parse_flops(text: str) -> int:
    """Operations per second: a number with a unit of 1000s, with or without ``FLOP/s``, such as ``"989TFLOP/s"``."""
    size = _parse(re.sub(r"FLOPS?(/s)?\s*$", "", text, flags=re.IGNORECASE))
    if size < 1:
        raise ValueError(f"{text!r} is not a rate of products; write a number > 0 and a unit, such as 989TFLOP/s")
    return size


def format_bytes(size: float) -> str:
    """Three significant digits and a binary unit, e.g. ``1.53 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_BINARY) - 1:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f}".removesuffix(".00").removesuffix(".0") + f" {_BINARY[unit]}"
