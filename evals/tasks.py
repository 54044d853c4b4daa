"""Questions with known answers, for any tokenizer and length, in groups: RULER's (arXiv 2404.06654), where it has one.

Documents come from ``recipes.documents`` with held-out keys and values. Prompts are the same for the same
task, length and seed. One question per document keeps the prompts of a cell independent, which the standard errors
assume.

A second question about the same document comes in a later turn; the first turn's answer is given.

``second_kept``: the row that was compressed for question 1 goes on; answer 1, and question 2, are fed to it as output.
Only question 1 voted for what it keeps. This is what an engine that continues a row without prefilling does.
``second_anew``: the whole conversation is a new prompt, in which question 2 votes. This is what a chat client gets
from an engine without state between requests, and it pays a prefill for it.
``second_dense`` is ``second_kept`` over four times as many facts, more than a quarter of the slots can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from recipes.documents import make_document
from snapstream.assets.documents import Document

Message = dict[str, str]


class ChatModel(Protocol):
    """What a task needs of a model; ``evals.chat.Chat`` is one."""

    def count_tokens(self, text: str) -> int: ...

    def chat_token_ids(self, messages: list[Message]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt and what counts as its answer.

    ``forced_ids`` are fed as output before the answer begins: a later turn over the row of the first one.
    """

    prompt_ids: list[int]
    references: tuple[str, ...]  # the score is the share of them that the answer contains
    forced_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """``make(model, seed, prompt_len)`` returns one item of at most ``prompt_len`` prompt tokens."""

    name: str
    group: str
    make: Callable[[ChatModel, str, int], Item]
    max_tokens: int = 32  # longest answer, forced tokens included


TEMPLATE_TOKENS = 48  # room for the chat template and a question about one key
DENSE_FACTS = 64  # of a dense document, four times the usual number: a fifth to a third of 2,048 tokens


def document_of(
    model: ChatModel,
    family: str,
    seed: str,
    target_tokens: int,
    num_questions: int = 1,
    num_facts: int | None = None,
) -> Document:
    """A generated document with held-out keys and values; ``num_facts``: see ``make_document``."""
    return make_document(
        family=family,
        seed=seed,
        count_tokens=model.count_tokens,
        target_tokens=target_tokens,
        num_facts=num_facts,
        num_questions=num_questions,
    )


def ask(
    family: str,
    *,
    question_tokens: int = TEMPLATE_TOKENS,
    question_first: bool = False,
    num_facts: int | None = None,
) -> Callable[[ChatModel, str, int], Item]:
    """The plain task: a document of that family and one question at its end, or before it."""

    def make(model: ChatModel, seed: str, prompt_len: int) -> Item:
        document = document_of(model, family, seed, prompt_len - question_tokens, num_facts=num_facts)
        question = document.questions[0]
        content = document.prompt(question, question_first=question_first)
        return Item(
            prompt_ids=model.chat_token_ids([{"role": "user", "content": content}]), references=question.answers
        )

    return make


_FAMILY = "multi_number"
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


def _continued(model: ChatModel, messages: list[Message], references: tuple[str, ...]) -> Item:
    """The first message is the prompt; the rest is fed to its row."""
    first, whole = model.chat_token_ids(messages[:1]), model.chat_token_ids(messages)
    if whole[: len(first)] != first:
        raise ValueError("this model's chat template rewrites earlier turns; a row cannot be continued under it")
    return Item(prompt_ids=first, references=references, forced_ids=tuple(whole[len(first) :]))


RETRIEVAL = ("single_number", "single_words", "multi_number", "multi_words", "multi_value")  # RULER's needles
# The SnapStream paper's weak spot: identifiers, hidden numbers, documents of keys and values only.
EXACT = ("passkey", "number_string", "single_uuid", "multi_uuid", "kv", "json")
_ALL = (
    *(Task(name=name, group="retrieval", make=ask(name)) for name in RETRIEVAL),
    Task(name="multi_query", group="retrieval", make=ask("multi_query", question_tokens=80), max_tokens=64),
    *(Task(name=name, group="exact retrieval", make=ask(name)) for name in EXACT),
    # Variables that point to variables; the question names the first, the answer is the number of the last. Dense: four
    # times as many assignments in the same text. Where facts stand in filler, whatever looks for unlike tokens finds
    # them; among many facts it must choose.
    Task(name="variable", group="multi-hop", make=ask("variable")),
    Task(name="variable_dense", group="multi-hop, dense", make=ask("variable", num_facts=DENSE_FACTS)),
    # Which words of a list occur most often: every word counts, so every eviction costs something.
    *(Task(name=name, group="aggregation", make=ask(name)) for name in ("common_words", "frequent_words")),
    # Facts about people, asked in other words than they are stated in.
    Task(name="paraphrase", group="question answering", make=ask("paraphrase")),
    # The question stands before the document, where it is not among the queries that vote.
    Task(name="question_first", group="question first", make=ask("multi_number", question_first=True)),
    Task(name="second_anew", group="second question, prefilled anew", make=make_anew),
    Task(name="second_kept", group="second question, same row", make=make_kept, max_tokens=96),
    Task(name="second_dense", group="second question, same row, dense", make=make_dense, max_tokens=96),
    # Sixteen keys are asked at once; the answer is several times a small ring. While it grows, the question leaves the
    # ring. ``accuracy_by_reference`` of a cell tells from where on that shows.
    Task(name="recite", group="long generation", make=ask("recite", question_tokens=160), max_tokens=192),
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def make_items(model: ChatModel, task: str, num_prompts: int, prompt_len: int, seed: int = 0) -> list[Item]:
    """``num_prompts`` prompts of at most ``prompt_len`` tokens; the same for the same arguments."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return [TASKS[task].make(model, f"{seed}/{index}", prompt_len) for index in range(num_prompts)]
