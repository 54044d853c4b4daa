"""Questions with known answers, for any tokenizer and length. One small file per group of tasks; ``item.py`` first.

Documents come from ``recipes.documents`` with held-out keys and values. Prompts are the same for the same
task, length and seed. One question per document keeps the prompts of a cell independent, which the standard errors
assume.
"""

from __future__ import annotations

from evals.tasks import aggregation, exact, facts, hops, long_output, placement, retrieval, turns
from evals.tasks.item import ChatModel, Item, Task

__all__ = ["LONG_TASKS", "TASKS", "ChatModel", "Item", "Task", "make_items"]

TASKS: dict[str, Task] = {
    task.name: task
    for group in (retrieval, exact, hops, aggregation, facts, placement, turns, long_output)
    for task in group.TASKS
}

# Not in the tables of all arms: what they need is a row that changes while the answer grows.
LONG_TASKS = tuple(name for name, task in TASKS.items() if task.group == turns.LONG_SESSION)


def make_items(model: ChatModel, task: str, num_prompts: int, prompt_len: int, seed: int = 0) -> list[Item]:
    """``num_prompts`` prompts of at most ``prompt_len`` tokens; the same for the same arguments."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return [TASKS[task].make(model, f"{seed}/{index}", prompt_len) for index in range(num_prompts)]
