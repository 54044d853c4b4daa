"""Two tokenizers that cut text very differently: bytes alone (characters fall apart), and the shipped model's words."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from snapstream.assets import TINY_MODEL

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}\n{% endfor %}<assistant>"


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<bos>", *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", chat_template=template)


def word_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)
