"""What a model is calibrated on: generated documents with a question each, or windows of a text of the user's.

A generated prompt asks for something in its document, and the answer is known: it shows which heads look things up. A
window of a text is followed by its own continuation: it shows which heads this text needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from snapstream.assets.documents import Style, make_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES = ("variable", "multi_number", "multi_uuid", "paraphrase", "kv")  # in turn
CONTINUATION = 64  # tokens of a text that count after each window
TEMPLATE_TOKENS = 48  # room for a chat template and a question
QUESTION_TOKENS = 40  # of these the question's, where a template takes more
Text = tuple[list[int], list[int]]  # tokens of a prompt, and of what follows


def generated(tokenizer: PreTrainedTokenizerBase, prompt_len: int, count: int) -> Iterator[Text]:
    """``count`` documents of at most ``prompt_len`` tokens, of the split that the evals do not ask about.

    ValueError for a chat template that leaves them less than half of the prompt.
    """
    encode = _encoder(tokenizer)
    around = max(len(encode(_as_prompt(tokenizer, ""))) + QUESTION_TOKENS, TEMPLATE_TOKENS)
    if around > prompt_len // 2:
        raise ValueError(
            f"prompt_len is {prompt_len}; the chat template and a question take up to {around} of these tokens, and "
            "half of them are for a document"
        )
    for index in range(count):
        document = make_document(
            family=FAMILIES[index % len(FAMILIES)],
            seed=f"calibrate/{index}",
            count_tokens=lambda text: len(encode(text)),
            target_tokens=prompt_len - around,
            num_questions=1,
            style=Style(split="train"),
        )
        question = document.questions[0]
        yield encode(_as_prompt(tokenizer, document.prompt(question))), encode(question.answer)


def _as_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """By the chat template, or without one as a paragraph."""
    if tokenizer.chat_template is None:
        return f"{text}\n\n"
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def windows(tokenizer: PreTrainedTokenizerBase, text: str, prompt_len: int, count: int) -> Iterator[Text]:
    """``count`` windows of ``prompt_len`` tokens, evenly spaced, fewer where the text has fewer; they do not overlap.

    ValueError for a text that is shorter than a window and its continuation.
    """
    ids = _encoder(tokenizer)(text)
    whole = prompt_len + CONTINUATION
    if len(ids) < whole:
        raise ValueError(f"the text has {len(ids)} tokens; a window and what follows it take {whole}")
    count = min(count, len(ids) // whole)
    for index in range(count):
        start = (len(ids) - whole) * index // max(count - 1, 1)
        yield ids[start : start + prompt_len], ids[start + prompt_len : start + whole]


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
