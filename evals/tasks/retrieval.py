"""Retrieval (RULER's needles): one fact alone or among others of its wording, all values of a key, several keys."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [
    Task(name=name, group="retrieval", make=ask(name))
    for name in ("single_number", "single_words", "multi_number", "multi_words", "multi_value")
]
TASKS.append(Task(name="multi_query", group="retrieval", make=ask("multi_query", question_tokens=80), max_tokens=64))
