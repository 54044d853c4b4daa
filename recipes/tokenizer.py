"""Builds a recipe's tokenizer: byte-level BPE, so any text round-trips.

Numbers split into groups of at most `number_digits` digits, each group one token (with or without a space before
it), so that a 7-digit number is three tokens or four. All words of the generated documents are one token each;
invented words fall apart into syllables and everything else into bytes. Merges come from word lists in a fixed
order, and from real text where a recipe has a corpus. The chat formats are in `chat.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.chat import CHATS
from recipes.corpus import Corpus
from snapstream.assets.documents import (
    ADJECTIVES,
    FILLER,
    FIRST_NAMES,
    KV_LINES,
    KV_QUESTIONS,
    LAST_NAMES,
    NOUNS,
    NUMBER_FACTS,
    PLACES,
    RELATIONS,
    SYLLABLES,
    TIMES,
    UUID_FACT,
    VARIABLE_QUESTIONS,
    VERBS,
    WORDS_FACTS,
)

_SPACE = "Ġ"  # how byte-level BPE writes a space


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What a recipe chooses. `words` are known beside the documents' vocabulary."""

    vocab_size: int
    number_digits: int
    chat: str
    words: tuple[str, ...] = ()
    corpus_chars: int = 0  # of the corpus's pieces, as they come, that merges are learned from


def vocabulary() -> list[str]:
    """The words of documents, for training a tokenizer; the order is fixed.

    It lacks the few words that only questions with several answers have ("codes", "all", "common"): a shipped tokenizer
    is older than they are and must stay as it was.
    """
    parts = [*ADJECTIVES, *NOUNS, *FIRST_NAMES, *LAST_NAMES, *PLACES, *TIMES, *VERBS]
    templates = [
        *FILLER,
        *UUID_FACT[:1],
        *KV_LINES,
        *KV_QUESTIONS,
        *VARIABLE_QUESTIONS,
        "Let = .",
        "And",
    ]
    for sentence, questions in (*NUMBER_FACTS, *WORDS_FACTS):
        templates += [sentence, *questions]
    for _, statements, questions in RELATIONS:
        templates += [*statements, *questions]
    for template in templates:
        text = "".join(ch if ch.isalpha() else " " for ch in template)
        parts += [word for word in text.split() if len(word) > 1]
    return list(dict.fromkeys(parts))


def _number_merges(number_digits: int) -> list[tuple[str, str]]:
    """Merges that join the digits of a group, then a space before them, in whatever order they apply."""
    digits = "0123456789"
    merges = [(a, b) for a, b in product(digits, digits)]
    if number_digits > 2:
        for a, b, c in product(digits, digits, digits):
            merges += [(a + b, c), (a, b + c)]
    for length in range(number_digits, 0, -1):
        merges += [(_SPACE, "".join(group)) for group in product(digits, repeat=length)]
    return merges


def _word_counts(words: list[str]) -> list[str]:
    """The training text of the word merges: known words often, invented words seldom."""
    rng = Random(0)
    lines = [f" {word}" for word in words for _ in range(60)]
    lines += [word for word in words for _ in range(40)]
    for _ in range(2000):
        lines.append(" " + "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))))
    lines += list(".,:?!;-*|='\"()") * 10 + [f" {mark}" for mark in "-*|='\"("] * 10 + ["\n", "\n\n"] * 10
    return lines


def corpus_texts(config: TokenizerConfig, corpus: Corpus | None) -> list[str]:
    """What merges are learned from beside words; ValueError for a recipe that needs a corpus and has none."""
    if not config.corpus_chars:
        return []
    if corpus is None:
        raise ValueError("this recipe's tokenizer is learned from real text; give --corpus (recipes/corpus.py)")
    pieces = list(corpus.pieces)
    Random(0).shuffle(pieces)
    texts, room = [], config.corpus_chars
    for piece in pieces:
        texts += piece.text[:room].splitlines(keepends=True)
        room -= len(piece.text)
        if room <= 0:
            break
    return texts


def build_tokenizer(config: TokenizerConfig, corpus: Corpus | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready to be saved beside the model."""
    if config.number_digits not in (2, 3):
        raise ValueError(f"number_digits must be 2 or 3, got {config.number_digits}")
    chat = CHATS[config.chat]
    merges = _number_merges(config.number_digits)
    number_tokens = list(dict.fromkeys(a + b for a, b in merges))
    special = chat.special_tokens

    core = Tokenizer(models.BPE())
    pattern = rf" ?\p{{N}}{{1,{config.number_digits}}}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(number_tokens) - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = _word_counts([*vocabulary(), *config.words]) + corpus_texts(config, corpus)
    core.train_from_iterator(lines, trainer)
    learned = json.loads(core.to_str())["model"]
    ordered = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokens = dict.fromkeys([*special, *ordered, *number_tokens])  # real text has taught some groups of digits already
    vocab = {token: i for i, token in enumerate(tokens)}
    merges += [(a, b) for a, b in learned["merges"]]

    full = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    full.pre_tokenizer = core.pre_tokenizer
    full.decoder = decoders.ByteLevel()
    full.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, lstrip=chat.newline_before_header and "\n" in token)
            for token in special
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=full,
        **({"bos_token": chat.begin} if chat.begin else {}),
        eos_token=chat.end,
        pad_token=chat.pad,
        additional_special_tokens=[chat.system, chat.user, chat.assistant],
        chat_template=chat.template,
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
    )
