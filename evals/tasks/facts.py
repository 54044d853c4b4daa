"""Question answering: facts about people, asked in other words than they are stated in."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [Task(name="paraphrase", group="question answering", make=ask("paraphrase"))]
