"""The table behind the choice: ``table.json``, an order of preference per compute capability, dtype and head dimension.

An entry says where it was measured, or that it was not. ``python -m benchmarks.prefill_table RESULT.json`` writes the
entries of a measured machine; it is the only writer, so that the file stays sorted and whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. Where ``capability`` or ``head_dim`` is None it holds for those that have no line of their own."""

    capability: str | None  # "9.0"
    dtype: str
    head_dim: int | None
    chunk: tuple[str, ...]  # of versions.VERSIONS, the best first
    packed: tuple[str, ...]  # for several prompts in one call; empty: one by one
    measured: str | None  # device, date and file; None: reasoned
    reason: str  # of an order that was not measured

    def describe(self) -> str:
        """For the start-up line."""
        place = f"{self.dtype}, {'any GPU' if self.capability is None else f'compute capability {self.capability}'}"
        if self.head_dim is not None:
            place += f", heads of {self.head_dim}"
        return f"the table's order for {place}, {f'measured on {self.measured}' if self.measured else 'not measured'}"


def read(file: Path = FILE) -> tuple[Entry, ...]:
    """All entries."""
    return tuple(
        Entry(**{**line, "chunk": tuple(line["chunk"]), "packed": tuple(line["packed"])})
        for line in json.loads(file.read_text(encoding="utf-8"))["entries"]
    )


def write(entries: tuple[Entry, ...], file: Path = FILE) -> None:
    """Replace the table; the more general an entry, the later it stands."""
    ordered = sorted(entries, key=lambda e: (e.capability is None, e.capability or "", e.dtype, e.head_dim or 0))
    lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in ordered)
    file.write_text(f'{{"entries": [\n{lines}\n]}}\n', encoding="utf-8")


@lru_cache(maxsize=1)
def _table() -> tuple[Entry, ...]:
    return read()


def lookup(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Entry:
    """The most particular entry. ValueError if none holds."""
    return find(_table(), f"{capability[0]}.{capability[1]}", str(dtype).removeprefix("torch."), head_dim)


def find(entries: tuple[Entry, ...], capability: str, dtype: str, head_dim: int) -> Entry:
    """``lookup`` among given entries."""
    for own_capability, own_head_dim in ((capability, head_dim), (capability, None), (None, None)):
        for entry in entries:
            if (entry.capability, entry.dtype, entry.head_dim) == (own_capability, dtype, own_head_dim):
                return entry
    raise ValueError(f"the table of prefill attention has no entry for {dtype}")
