"""What a task is: a name, a group, the longest answer, and a function that makes its prompts."""

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
    group: str  # RULER's (arXiv 2404.06654), where it has one
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
