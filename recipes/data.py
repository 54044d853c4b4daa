"""Turns generated documents into training sequences in the chat format.

A sequence is one chat: the document with a first question, its answer, then further questions and answers as
turns of their own. Many questions per document make the supervision dense; with one question it is the format of
serving. Only answers (and the end mark after them) are labelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from recipes.chat import Chat
from recipes.corpus import Corpus
from recipes.documents import make_document
from recipes.planted import CHARS_PER_TOKEN, make_planted
from snapstream.assets.documents import Style

_SYSTEM_PROMPTS = ("Answer from the document.", "Look up the answer and give only the value.", "Be brief.")
_QUESTION_TOKENS = 16  # allowance for one question with its answer when a document's length is chosen
_ANSWER_TOKENS = 12  # allowance for one of several answers of a question, its key named in both


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`answer` numbers the answers of a batch from 1 at the positions that predict them; 0 elsewhere."""

    ids: Tensor  # [B, T]
    answer: Tensor  # [B, T]
    families: list[str]  # of each answer, by number - 1


class Encoder:
    """Tokenizes with a memo, because generated sentences repeat."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat: Chat, corpus: Corpus | None = None) -> None:
        """`corpus` is needed by tasks with real text."""
        self.corpus = corpus
        self.core, self.chat = tokenizer.backend_tokenizer, chat
        self.pad_id, self.first_id = (chat.special_tokens.index(mark) for mark in (chat.pad, chat.begin or chat.user))
        self.ordinary_ids = range(len(chat.special_tokens), self.core.get_vocab_size())
        self._counts: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of text; special tokens are recognised, none is added."""
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        """Number of tokens of text."""
        if text not in self._counts:
            if len(self._counts) > 200_000:
                self._counts.clear()
            self._counts[text] = len(self.encode(text))
        return self._counts[text]


def make_chunks(
    encoder: Encoder, rng: Random, length: int, stride: int
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Random chunks of a few random tokens, then the same chunks in another order: copying and nothing else.

    All but the first token of a repeated chunk is labelled: a question and its answer without any language, with
    one label per token instead of a few per document. Every `stride`-th token of the vocabulary takes part.
    """
    chunks: list[list[int]] = []
    total = 1
    while True:
        chunk = rng.sample(encoder.ordinary_ids[::stride], rng.randint(3, 6))
        total += 2 * len(chunk)
        if total > length:
            break
        chunks.append(chunk)
    ids = [encoder.first_id, *(token for chunk in chunks for token in chunk)]
    answers = []
    for chunk in rng.sample(chunks, len(chunks)):
        answers.append((len(ids) + 1, len(ids) + len(chunk), "chunks"))
        ids += chunk
    return ids, answers


def make_text(encoder: Encoder, rng: Random, length: int) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Real text without a question: every token is for the language model alone."""
    ids = [encoder.first_id]
    assert encoder.corpus is not None, "a task with real text needs a corpus"
    while len(ids) < length // 2:
        window, _ = encoder.corpus.window(rng, int(length * CHARS_PER_TOKEN))
        ids += encoder.encode(window)
    return ids[:length], []


def make_sequence(
    encoder: Encoder, rng: Random, seed: str, length: int, task: dict[str, Any], style: Style
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Ids of one chat and its answers as (start, end, family), of at most `length` tokens."""
    if task["family"] == "chunks":
        return make_chunks(encoder, rng, length, task["stride"])
    if task["family"] == "text":
        return make_text(encoder, rng, length)
    num_questions = rng.randint(*task["num_questions"])
    low, high = task.get("num_facts", (0, 0))
    num_answers = rng.randint(*task["num_answers"]) if "num_answers" in task else None
    answer_tokens = _ANSWER_TOKENS * (num_answers or 0) + task.get("extra_tokens", 4)
    target_tokens = length - 8 - (_QUESTION_TOKENS + answer_tokens) * num_questions
    num_facts = rng.randint(low, high) if high else None
    if task.get("planted"):
        assert encoder.corpus is not None, "a task with real text needs a corpus"
        document = make_planted(
            encoder.corpus, family=task["family"], seed=seed, count_tokens=encoder.count, target_tokens=target_tokens,
            num_facts=num_facts or 16, style=replace(style, split="train"),
        )  # fmt: skip
    else:
        document = make_document(
            family=task["family"],
            seed=seed,
            count_tokens=encoder.count,
            target_tokens=target_tokens,
            num_facts=num_facts,
            num_answers=num_answers,
            num_questions=None,
            style=replace(style, split="train"),
        )
    chat = encoder.chat
    start = chat.begin
    if rng.random() < task.get("system", 0.0):
        start += chat.system_turn(rng.choice(_SYSTEM_PROMPTS))
    question_first = rng.random() < task["question_first"] if "question_first" in task else False
    ids: list[int] = []
    answers: list[tuple[int, int, str]] = []
    for i in range(min(num_questions, len(document.questions)) if num_answers else num_questions):
        question = document.questions[i % len(document.questions)]
        if i == 0:
            turn = encoder.encode(start + chat.question_turn(document.prompt(question, question_first=question_first)))
        else:
            turn = encoder.encode(chat.question_turn(question.text))
        answer = encoder.encode(chat.answer_turn(question.answer))
        if len(ids) + len(turn) + len(answer) > length:
            break
        ids += turn
        answers.append((len(ids), len(ids) + len(answer), question.family))
        ids += answer
    return ids, answers


def make_batch(
    encoder: Encoder, seed: str, batch: int, length: int, tasks: list[dict[str, Any]], style: Style
) -> Batch:
    """A batch of chats padded on the right, their families drawn by the tasks' weights."""
    rng = Random(seed)
    weights = [task["weight"] for task in tasks]
    ids = torch.full((batch, length), encoder.pad_id)
    answer = torch.zeros((batch, length), dtype=torch.long)
    families: list[str] = []
    longest = 2
    for row in range(batch):
        task = rng.choices(tasks, weights)[0]
        sequence, answers = make_sequence(encoder, rng, f"{seed}/{row}", length, task, style)
        ids[row, : len(sequence)] = torch.tensor(sequence)
        longest = max(longest, len(sequence))
        for start, end, family in answers:
            families.append(family)
            answer[row, start - 1 : end - 1] = len(families)
    return Batch(ids=ids[:, :longest], answer=answer[:, :longest], families=families)
