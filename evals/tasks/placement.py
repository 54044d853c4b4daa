"""Question first: the question stands before the document, where it is not among the queries that vote."""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [Task(name="question_first", group="question first", make=ask("multi_number", question_first=True))]
