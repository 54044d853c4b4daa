"""Questions with known answers, one per document, for any tokenizer and length.

Documents come from ``snapstream.assets.documents`` with held-out keys and values. One question per document keeps the
prompts of a cell independent, which the standard errors assume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from snapstream.assets.documents import Question, make_document

# Question after the document; RULER's groups in the second place (arXiv 2404.06654).
FAMILIES: dict[str, str] = {
    "single_number": "retrieval",
    "single_words": "retrieval",
    "multi_number": "retrieval",
    "multi_words": "retrieval",
    "kv": "exact retrieval",
    "variable": "multi-hop",
    "paraphrase": "question answering",
}
TEMPLATE_TOKENS = 48  # room for the chat template and the question


class ChatModel(Protocol):
    """What a task needs of an engine: a tokenizer's count and its chat template."""

    def count_tokens(self, text: str) -> int: ...

    def chat_token_ids(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt and what counts as its answer."""

    family: str
    question: Question
    token_ids: list[int]


def make_items(model: ChatModel, family: str, num_prompts: int, prompt_len: int, seed: int) -> list[Item]:
    """``num_prompts`` prompts of at most ``prompt_len`` tokens; the same for the same arguments."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    items = []
    for index in range(num_prompts):
        document = make_document(
            family=family,
            seed=f"{seed}/{index}",
            count_tokens=model.count_tokens,
            target_tokens=prompt_len - TEMPLATE_TOKENS,
            num_questions=1,
        )
        question = document.questions[0]
        ids = model.chat_token_ids([{"role": "user", "content": document.prompt(question)}])
        items.append(Item(family=family, question=question, token_ids=ids))
    return items
