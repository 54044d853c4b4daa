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
Text = tuple[list[int], list[int]]  # tokens of a prompt, and of what follows


def generated(tokenizer: PreTrainedTokenizerBase, prompt_len: int, count: int) -> Iterator[Text]:
    """``count`` documents of at most ``prompt_len`` tokens, of the split that the evals do not ask about."""
    encode = _encoder(tokenizer)
    for index in range(count):
        document = make_document(
            family=FAMILIES[index % len(FAMILIES)],
            seed=f"calibrate/{index}",
            count_tokens=lambda text: len(encode(text)),
            target_tokens=prompt_len - TEMPLATE_TOKENS,
            num_questions=1,
            style=Style(split="train"),
        )
        question = document.questions[0]
        asked = document.prompt(question)
        if tokenizer.chat_template is not None:
            message = [{"role": "user", "content": asked}]
            asked = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            yield encode(asked), encode(question.answer)
        else:
            yield encode(f"{asked}\n\n"), encode(question.answer)


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
