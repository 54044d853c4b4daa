"""Every task makes prompts of the length it was asked for, the same each time, for both models that ship."""

from __future__ import annotations

import pytest

from evals.chat import Chat
from evals.tasks import TASKS, make_items
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

CHATS = {model.name: Chat(model) for model in (TINY_MODEL, TINY_DRAFT_MODEL)}


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("model", list(CHATS))
def test_prompts_fit_and_are_the_same_each_time(name: str, model: str) -> None:
    chat, task = CHATS[model], TASKS[name]
    items = make_items(chat, name, 3, 600)
    assert items == make_items(chat, name, 3, 600) and items != make_items(chat, name, 3, 600, seed=1)
    for item in items:
        assert 400 < len(item.prompt_ids) <= 600
        answer = sum(len(chat.token_ids(" " + reference)) + 1 for reference in item.references)
        assert len(item.forced_ids) + answer < task.max_tokens


def test_the_question_stands_where_the_task_says() -> None:
    chat = CHATS["tiny"]
    for name, begins in (("question_first", True), ("multi_number", False)):
        text = "".join(chat.token_texts(make_items(chat, name, 1, 600)[0].prompt_ids))
        where = text.index("?") if "?" in text else text.index("Give") if "Give" in text else text.index("Tell")
        assert (where < 100) == begins, text


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'magic'"):
        make_items(CHATS["tiny"], "magic", 1, 600)
