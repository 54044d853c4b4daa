"""A second question about the same document, in a later turn; the first turn's answer is given.

``second_kept``: the row that was compressed for question 1 goes on; answer 1, and question 2, are fed to it as output.
Only question 1 voted for what it keeps. This is what an engine that continues a row without prefilling does.
``second_anew``: the whole conversation is a new prompt, in which question 2 votes. This is what a chat client gets
from an engine without state between requests, and it pays a prefill for it.
``second_dense`` is ``second_kept`` over four times as many facts, more than a quarter of the slots can hold.

``told`` and ``asked_again`` go on for longer than the ring: a later turn brings a document of its own, which nobody
prefills. Then its first fact is asked for, or the first question once more. A row should know both.
"""

from __future__ import annotations

from evals.tasks.item import DENSE_FACTS, ChatModel, Item, Message, Task, document_of
from recipes.documents import make_document
from snapstream.assets.documents import Question

_FAMILY = "multi_number"
LONG_SESSION = "long session, same row"
LATER_TOKENS = 256  # of the document that comes in a later turn
_TURN_TOKENS = 96  # room for the template, both questions and the first answer


def conversation(
    model: ChatModel, seed: str, prompt_len: int, num_facts: int | None = None
) -> tuple[list[Message], tuple[str, ...]]:
    """User, assistant, user; and the references of the second question."""
    room = prompt_len - _TURN_TOKENS
    document = document_of(model, _FAMILY, seed, room, num_questions=2, num_facts=num_facts)
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
    return _continued(model, messages, references)


def make_dense(model: ChatModel, seed: str, prompt_len: int) -> Item:
    messages, references = conversation(model, seed, prompt_len, DENSE_FACTS)
    return _continued(model, messages, references)


def _session(model: ChatModel, seed: str, prompt_len: int) -> tuple[list[Message], Question, Question]:
    """A turn about a document, then a turn that brings a short document of its own; and what is asked of each."""
    first = document_of(model, _FAMILY, seed, prompt_len - _TURN_TOKENS, num_questions=1)
    later = make_document(
        family=_FAMILY,
        seed=f"{seed}/later",
        count_tokens=model.count_tokens,
        target_tokens=LATER_TOKENS,
        num_facts=4,
    )
    old, new = first.questions[0], min(later.questions, key=lambda question: question.spans[0])
    messages = [
        {"role": "user", "content": first.prompt(old)},
        {"role": "assistant", "content": old.answer},
        {"role": "user", "content": later.prompt(new)},
    ]
    return messages, old, new


def make_told(model: ChatModel, seed: str, prompt_len: int) -> Item:
    """Asks for the first fact of the later document, when the rest of it has been read."""
    messages, _, new = _session(model, seed, prompt_len)
    return _continued(model, messages, new.answers)


def make_asked_again(model: ChatModel, seed: str, prompt_len: int) -> Item:
    """Asks the first question once more, after the later document."""
    messages, old, new = _session(model, seed, prompt_len)
    messages += [{"role": "assistant", "content": new.answer}, {"role": "user", "content": old.text}]
    return _continued(model, messages, old.answers)


def _continued(model: ChatModel, messages: list[Message], references: tuple[str, ...]) -> Item:
    """The first message is the prompt; the rest is fed to its row."""
    first, whole = model.chat_token_ids(messages[:1]), model.chat_token_ids(messages)
    if whole[: len(first)] != first:
        raise ValueError("this model's chat template rewrites earlier turns; a row cannot be continued under it")
    return Item(prompt_ids=first, references=references, forced_ids=tuple(whole[len(first) :]))


TASKS = [
    Task(name="second_anew", group="second question, prefilled anew", make=make_anew),
    Task(name="second_kept", group="second question, same row", make=make_kept, max_tokens=96),
    Task(name="second_dense", group="second question, same row, dense", make=make_dense, max_tokens=96),
    Task(name="told", group=LONG_SESSION, make=make_told, max_tokens=LATER_TOKENS + 96),
    Task(name="asked_again", group=LONG_SESSION, make=make_asked_again, max_tokens=LATER_TOKENS + 128),
]
