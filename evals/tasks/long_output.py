"""Long generation: sixteen keys are asked at once; the answer is several times a small ring.

While it grows, the question leaves the ring. ``accuracy_by_reference`` of a cell tells from where on that shows.
"""

from __future__ import annotations

from evals.tasks.item import Task, ask

TASKS = [Task(name="recite", group="long generation", make=ask("recite", question_tokens=160), max_tokens=192)]
