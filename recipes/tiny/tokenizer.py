"""Builds the tiny model's tokenizer: byte-level BPE, so any text round-trips.

Numbers split into groups of at most three digits, each group one token (with or without a space before it), so
a 7-digit number is three tokens. All words of the generated documents are one token each; invented words fall
apart into syllables and everything else into bytes. Merges come from word lists in a fixed order: no corpus.
"""

from __future__ import annotations

import json
from itertools import product
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from snapstream.assets.documents import syllables, vocabulary

VOCAB_SIZE = 4608
PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] | trim + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PATTERN = r" ?\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE = "Ġ"  # how byte-level BPE writes a space


def _number_merges() -> list[tuple[str, str]]:
    """Merges that join one to three digits, then a space before them, in whatever order they apply."""
    digits = "0123456789"
    merges = [(a, b) for a, b in product(digits, digits)]
    for a, b, c in product(digits, digits, digits):
        merges += [(a + b, c), (a, b + c)]
    for length in (3, 2, 1):
        merges += [(_SPACE, "".join(group)) for group in product(digits, repeat=length)]
    return merges


def _word_counts() -> list[str]:
    """The training text of the word merges: known words often, invented words seldom."""
    rng = Random(0)
    lines = [f" {word}" for word in vocabulary() for _ in range(60)]
    lines += [word for word in vocabulary() for _ in range(40)]
    for _ in range(2000):
        lines.append(" " + "".join(rng.choice(syllables()) for _ in range(rng.randint(2, 3))))
    lines += list(".,:?!;-*|='\"()") * 10 + [f" {mark}" for mark in "-*|='\"("] * 10 + ["\n", "\n\n"] * 10
    return lines


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready to be saved beside the model."""
    merges = _number_merges()
    number_tokens = list(dict.fromkeys(a + b for a, b in merges))

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(number_tokens) - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_word_counts(), trainer)
    learned = json.loads(core.to_str())["model"]
    ordered = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *ordered, *number_tokens])}
    merges += [(a, b) for a, b in learned["merges"]]

    full = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    full.pre_tokenizer = core.pre_tokenizer
    full.decoder = decoders.ByteLevel()
    full.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=full,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
    )
