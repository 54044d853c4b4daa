"""A second question about the same document, in a later turn; the first turn's answer is given.

``second_kept``: the row that was compressed for question 1 goes on; answer 1, and question 2, are fed to it as output.
Its observation window saw question 1 only. This is what an engine that continues a row without prefilling does.
``second_anew``: the whole conversation is a new prompt, whose window sees question 2. This is what a chat client gets
from an engine without state between requests, and it pays a prefill for it.
"""

from __future__ import annotations

from evals.tasks.item import ChatModel, Item, Message, Task, document_of

_FAMILY = "multi_number"
_TURN_TOKENS = 96  # room for the template, both questions and the first answer


def conversation(model: ChatModel, seed: str, prompt_len: int) -> tuple[list[Message], tuple[str, ...]]:
    """User, assistant, user; and the references of the second question."""
    document = document_of(model, _FAMILY, seed, prompt_len - _TURN_TOKENS, num_questions=2)
    first, second = document.questions
    messages = [
        {"role": "user", "content": document.prompt(first)},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.text},
    ]
    return messages, second.answers


def make_anew(model: ChatModel, seed: str, prompt_len: int) -> Item:
    messages, references = conversation(model, seed, prompt_len)
    return Item(prompt_ids=model.chat_token_ids(messages), references=references)


def make_kept(model: ChatModel, seed: str, prompt_len: int) -> Item:
    messages, references = conversation(model, seed, prompt_len)
    first, whole = model.chat_token_ids(messages[:1]), model.chat_token_ids(messages)
    if whole[: len(first)] != first:
        raise ValueError("this model's chat template rewrites earlier turns; a row cannot be continued under it")
    return Item(prompt_ids=first, references=references, forced_ids=tuple(whole[len(first) :]))


TASKS = [
    Task(name="second_anew", group="second question, prefilled anew", make=make_anew),
    Task(name="second_kept", group="second question, same row", make=make_kept, max_tokens=96),
]
