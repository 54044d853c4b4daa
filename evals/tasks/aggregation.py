"""Aggregation: which words of a list occur most often. Every word counts, so every eviction costs something."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [Task(name=name, group="aggregation", make=ask(name)) for name in ("common_words", "frequent_words")]
