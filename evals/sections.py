"""Which table stands in which section of the documents, and the cells of which model it is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evals import sweep, sweep_tables, tables
from evals.peer_table import peer_table
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

DRAFT = "draft_"  # sections of the second model (Qwen3, another tokenizer): are results one model's accident?

SECTIONS: dict[str, Callable[[], str]] = {
    "accuracy": tables.accuracy,
    "accuracy_tasks": tables.tasks_table,
    "accuracy_by_position": lambda: tables.by_position(TINY_DRAFT_MODEL),  # the first model cannot recite
    "accuracy_peers": peer_table,
    "accuracy_fp8": tables.fp8_table,
    "accuracy_goals": sweep_tables.goals,
    "chains": sweep_tables.chains,
    f"{DRAFT}accuracy_tasks": lambda: tables.tasks_table(TINY_DRAFT_MODEL),
    **{f"sweep_{name}": (lambda name=name: sweep_tables.sweep_table(name)) for name in sweep.SWEEPS},
    **{f"{DRAFT}sweep_{name}": (lambda name=name: sweep_tables.sweep_table(name, TINY_DRAFT_MODEL))
       for name in sweep.SWEEPS},
}  # fmt: skip


def model_of(section: str) -> Path:
    """The model whose cells a section shows."""
    return TINY_DRAFT_MODEL if section.startswith(DRAFT) or section == "accuracy_by_position" else TINY_MODEL
