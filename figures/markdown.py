"""Markdown that documents are made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a ``|`` inside a cell is escaped."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows])


def link(path: Path, document: Path) -> str:
    """The path as seen from a document."""
    return Path(os.path.relpath(path, document.parent)).as_posix()
