"""Exact retrieval, the SnapStream paper's weak spot: identifiers, hidden numbers, documents of keys and values only."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [
    Task(name=name, group="exact retrieval", make=ask(name))
    for name in ("passkey", "number_string", "single_uuid", "multi_uuid", "kv", "json")
]
