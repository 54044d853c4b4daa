"""The draft: a small model and its tokenizer, which together give every character range of a text a score.

Invariant: scores are laid over the *source text* by the tokenizer's character offsets, so a kept part of the text is
kept character by character; token ids never leave this module. A text longer than the context is read in overlapping
passages of one size, each with the words around it (a template, a question) in full; where two passages overlap, a
token's score is the mean. ``lookahead.py`` computes the scores, ``spans.py`` cuts the text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from snapstream.config import DTYPE_BYTES, DType, as_path
from snapstream.models.decoder import Decoder
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import load_tokenizer
from snapstream.spec_prefill.lookahead import scores_of_passages, token_scores
from snapstream.spec_prefill.settings import ScoringSettings, check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP_TOKENS = 4  # windows that look ahead together, as a rule: a token of each is fed at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """A text as the draft reads it: ``ids[first:stop]`` are its tokens, the others stand around it."""

    ids: tuple[int, ...]
    first: int
    stop: int
    starts: tuple[int, ...]  # of each of its tokens: first character, never decreasing

    @property
    def num_tokens(self) -> int:
        """Tokens of the text itself."""
        return self.stop - self.first


class Draft:
    """A loaded draft. ``digest`` names it in caches: it changes when the checkpoint does."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, digest: str) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which gives no character offsets; "
                "a draft needs a tokenizer.json"
            )
        self.decoder, self.tokenizer, self.digest = decoder, tokenizer, digest

    @classmethod
    def load(cls, folder: str | Path, *, dtype: DType = "float32", device: str = "cpu", progress: bool = False) -> Self:
        """Read a Hugging Face checkpoint folder. ValueError, with the reason, for a model that cannot be a draft."""
        check_choice("dtype", dtype, tuple(DTYPE_BYTES))
        folder = as_path("the draft's folder", folder)
        check_torch_device(device)
        config = read_model_config(folder)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise ValueError(f"{folder} has no tokenizer; a draft needs a tokenizer.json")
        tokenizer = load_tokenizer(folder)
        decoder = Decoder.load(folder, config, dtype, device, max_tokens=STEP_TOKENS, progress=progress)
        return cls(decoder, tokenizer, f"{_digest_of(folder)}/{dtype}")

    def count_tokens(self, text: str) -> int:
        """Tokens of a text on its own, without special ones."""
        return len(self._encode(text, special=False)["input_ids"])

    def read(self, text: str, *, before: str = "", after: str = "", as_chat: bool = False) -> ReadText:
        """Tokenize ``text`` with the words around it; ``as_chat`` puts all of it into a user message.

        A draft without a chat template reads the plain words.
        """
        if not text:
            return ReadText(ids=(), first=0, stop=0, starts=())
        whole, start = before + text + after, len(before)
        template = as_chat and self.tokenizer.chat_template is not None
        if template:
            rendered = str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": whole}], tokenize=False, add_generation_prompt=True
                )
            )
            found = _place_of(whole, rendered)
            template = found is not None
            if found is not None:  # else a template that alters the words: read them plainly
                whole, start = rendered, found + len(before)
        encoded = self._encode(whole, special=not template)
        stop = start + len(text)
        inside = [
            i
            for i, ((a, b), special) in enumerate(
                zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
            )
            if a < stop and b > start and a < b and not (special and a == b)
        ]
        ids = tuple(encoded["input_ids"])
        if not inside:
            return ReadText(ids=ids, first=0, stop=0, starts=())
        offsets = encoded["offset_mapping"][inside[0] : inside[-1] + 1]
        clipped = (min(max(a, start), stop) - start for a, _ in offsets)
        return ReadText(ids=ids, first=inside[0], stop=inside[-1] + 1, starts=tuple(accumulate(clipped, max)))

    def score(self, text: ReadText, settings: ScoringSettings) -> tuple[Tensor, int]:
        """Score of each token of the text, ``[n]`` fp32, and in how many passages it was read."""
        limit = self.context_of(settings)
        around = len(text.ids) - text.num_tokens
        room = limit - settings.look_ahead - around
        if text.num_tokens <= room:
            return token_scores(self.decoder, text.ids, settings)[text.first : text.stop], 1
        if settings.long_texts == "refuse":
            raise ValueError(
                f"the draft reads {limit} tokens, {settings.look_ahead} of them ahead; this text has "
                f"{text.num_tokens} and {around} around it, and longer texts are to be refused"
            )
        if room < 2:
            raise ValueError(f"{around} tokens around the text leave no room among the {limit} that the draft reads")
        head, tail = text.ids[: text.first], text.ids[text.stop :]
        total, count = torch.zeros(2, text.num_tokens)
        passages = passages_of(text.num_tokens, room, min(settings.overlap, room // 2))
        read = [(*head, *text.ids[text.first + a : text.first + b], *tail) for a, b in passages]
        for (a, b), scores in zip(passages, scores_of_passages(self.decoder, read, settings), strict=True):
            total[a:b] += scores[text.first : text.first + b - a].cpu()
            count[a:b] += 1
        return total / count, len(passages)

    def context_of(self, settings: ScoringSettings) -> int:
        """Tokens that are read at once, look-ahead included. ValueError for a ``context_len`` that cannot work."""
        limit, least = self.decoder.config.max_position, settings.look_ahead + 2
        if settings.context_len > limit:
            raise ValueError(f"context_len is {settings.context_len}; the draft reads at most {limit} tokens")
        if 0 < settings.context_len < least:
            raise ValueError(
                f"context_len is {settings.context_len}; a look-ahead of {settings.look_ahead} needs {least}"
            )
        return settings.context_len or limit

    def _encode(self, text: str, *, special: bool) -> Any:
        return self.tokenizer(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,  # a text longer than the context is no surprise here
        )


def check_torch_device(device: str) -> None:
    """ValueError for a device that torch does not know or this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # which of them depends on how torch was built
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def passages_of(num_tokens: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Passages of exactly ``room`` tokens that cover ``num_tokens``, neighbours sharing ``overlap`` or more."""
    starts = list(range(0, max(num_tokens - room, 0), room - overlap))
    return [*((a, a + room) for a in starts if a + room < num_tokens), (max(num_tokens - room, 0), num_tokens)]


def _place_of(words: str, rendered: str) -> int | None:
    """Where ``words`` begin in a rendered template, which may have stripped them; negative if it cut the front."""
    found = rendered.find(words)
    if found >= 0:
        return found
    found = rendered.find(words.strip())
    if found < 0 or not words.strip():
        return None
    return found - (len(words) - len(words.lstrip()))


def _digest_of(folder: Path) -> str:
    """Hash of the settings and the tokenizer, and of each weight file its name, size and first bytes."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode() + stream.read(2**16))
    return digest.hexdigest()[:16]
