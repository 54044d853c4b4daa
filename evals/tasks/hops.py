"""Multi-hop: variables that point to variables; the question names the first, the answer is the number of the last."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [Task(name="variable", group="multi-hop", make=ask("variable"))]
