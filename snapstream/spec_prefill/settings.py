"""How a draft scores a prompt and how much of it is kept, as frozen dataclasses validated once. No torch.

``ScoringSettings`` is the method (SpecPrefill, arXiv 2502.02789; cross-family, arXiv 2603.02631); the defaults are the
published ones. ``Protection`` names the parts that are never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from snapstream.config import EngineConfig, KVBudget, ModelConfig, as_count, as_number
from snapstream.config.engine import setting
from snapstream.config.values import check_choice, set_counts
from snapstream.exec.executors import why_not_looped

Mode = Literal["text", "code", "auto"]
Snap = Literal["none", "word", "line"]

CHUNK_LEN = {"text": 32, "code": 128}  # draft tokens per chunk, as published
POOL_KERNEL = 13  # odd width of the average over adjacent keys, stride 1, zero padding; as published
OWN_QUERIES = 8  # look_ahead=0: so many of the prompt's last queries score


def num_passages(device_type: str) -> int:
    """Passages of a long text that look ahead together."""
    return 1 if device_type == "cpu" else 4


def num_prefill_tokens(device_type: str) -> int:
    """Tokens per matrix product of the draft's prefill: large where the host launches kernels for a device."""
    return 512 if device_type == "cpu" else 4096


def step_config(model: ModelConfig, budget: KVBudget, num_rows: int, *, dtype: str, device: str) -> EngineConfig | None:
    """Config of the draft's looped decode over ``num_rows`` rows; None if the draft decodes eagerly."""
    if why_not_looped(model, dtype=dtype, device=device) is not None:
        return None
    return EngineConfig(budget=budget, max_model_len=budget.capacity, max_rows=num_rows, executor="looped")


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """How the draft reads a prompt. Lengths are in draft tokens."""

    look_ahead: int = (
        8  # queries that score: the last of the prompt, then greedy tokens; 0: the prompt's last OWN_QUERIES
    )
    ignore_eos: bool = False  # go on past the draft's end token; else the queries up to it score
    context_len: int = 0  # tokens that the draft reads at once, longer texts in passages; 0: its model's limit
    overlap: int = 256  # tokens that consecutive passages share

    def __post_init__(self) -> None:
        set_counts(self, look_ahead=0, context_len=0, overlap=0)


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """How text is cut into chunks and put together again."""

    mode: Mode = "text"
    chunk_len: int = 0  # draft tokens; 0: 32 for text, 128 for code
    snap: Snap | None = None  # kept spans grow to this boundary; None: word for text, line for code
    delimiter: str | None = None  # between spans that are not adjacent; None: by mode

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        set_counts(self, chunk_len=0)
        if self.snap is not None:
            check_choice("snap", self.snap, get_args(Snap))
        if self.delimiter is not None and not self.delimiter:
            raise ValueError("delimiter is empty; a reader could not see that text is missing")


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Parts that are never dropped, lengths in draft tokens. System messages, tools and template always stay."""

    threshold: int = 1024  # prompts of fewer target tokens stay uncompressed
    roles: tuple[str, ...] = ("user", "assistant", "tool")  # roles whose older messages may be cut
    recent_tools: int = 1  # so many of the last tool outputs stay verbatim
    min_message: int = 256  # shorter messages stay verbatim
    last_user_limit: int = 1024  # a longer last user message is cut, except its head and its tail
    head: int = 64  # its first paragraph stays if it is not longer
    tail: int = 256  # its last paragraphs stay, as many as fit; if the last is longer, its last tokens

    def __post_init__(self) -> None:
        set_counts(self, threshold=0, recent_tools=0, min_message=0, last_user_limit=0, head=0, tail=0)
        unknown = [role for role in self.roles if role not in ("user", "assistant", "tool")]
        if unknown:
            raise ValueError(f"roles has {unknown[0]!r}; only 'user', 'assistant' and 'tool' messages may be cut")


def scoring_of(look_ahead: int | None, context_len: int | None) -> ScoringSettings:
    """Settings from the flags of a command; None is the default. A context of 0 tokens is refused."""
    settings = ScoringSettings()
    if look_ahead is not None:
        settings = replace(settings, look_ahead=look_ahead)
    return settings if context_len is None else replace(settings, context_len=as_count("context_len", context_len, 1))


def chunks_of(chunk_len: int | None, **others: Any) -> ChunkSettings:
    return ChunkSettings(chunk_len=0 if chunk_len is None else as_count("chunk_len", chunk_len, 1), **others)


def protection_of(threshold: int | None) -> Protection:
    return Protection() if threshold is None else Protection(threshold=threshold)


@dataclass(frozen=True, kw_only=True)
class PromptCompression:
    """How the draft compresses the prompts of a call or a request: the value of its ``prompt_compression``.

    The text that is kept is tokenized again, so draft and target may have different tokenizers.
    """

    keep: float | None = None  # share of the chunks, in (0, 1]
    max_tokens: int | None = None  # or a ceiling in target tokens for the whole prompt
    query: str | None = None  # what a plain text will be asked; not part of the prompt
    threshold: int | None = None  # prompts of fewer tokens stay uncompressed; None: the draft's Protection
    sticky: bool = False  # of a conversation: earlier turns stay compressed as they were, so that prefixes hit

    def __post_init__(self) -> None:
        check_amount(self.keep, self.max_tokens)
        if self.threshold is not None:
            as_count("threshold", self.threshold, 0)
        if not isinstance(self.sticky, bool):
            raise ValueError(f"sticky is {self.sticky!r}; it must be true or false")
        if self.sticky and self.query is not None:
            raise ValueError("sticky takes no query; what was cut for one question is kept for the next")

    def arguments(self) -> dict[str, Any]:
        """How much stays, as keywords of ``PromptCompressor.compress`` and ``compress_turn``."""
        return {"keep": self.keep, "max_tokens": self.max_tokens, "threshold": self.threshold}


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """An engine's or server's draft, and how it compresses the prompts of requests that do not say."""

    draft: Path | None = setting(
        None, "Checkpoint folder of a draft that compresses prompts on request. Default: none."
    )
    prompt_keep: float | None = setting(
        None, "With --draft: share to keep of long prompts, unless the request sets it."
    )
    prompt_max_tokens: int | None = setting(None, "With --draft: maximum tokens of a prompt, instead of --prompt-keep.")
    prompt_threshold: int | None = setting(
        None, "With --draft: prompts of fewer tokens stay uncompressed. Default: 1024."
    )
    draft_context_len: int | None = setting(None, "With --draft: tokens it reads at once. Default: the model's limit.")

    def __post_init__(self) -> None:
        for name in ("prompt_keep", "prompt_max_tokens", "prompt_threshold", "draft_context_len"):
            if self.draft is None and (value := getattr(self, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is {value}, and there is no draft to shorten prompts; give one with --draft")

    @property
    def prompt_compression(self) -> PromptCompression | None:
        """Compression of requests that set none; None: their prompts stay uncompressed."""
        if self.prompt_keep is None and self.prompt_max_tokens is None:
            return None
        return PromptCompression(keep=self.prompt_keep, max_tokens=self.prompt_max_tokens)

    @property
    def scoring(self) -> ScoringSettings:
        return scoring_of(None, self.draft_context_len)


def why_uncompressed(num_tokens: int, num_stored: int, how: PromptCompression, threshold: int) -> str:
    """Why a prompt stays uncompressed of which so much is in a prefix store, or nothing: if no more is left to compute
    than compression would leave, exact is as fast. A ceiling holds in any case.

    ``threshold``: prompts of fewer tokens are left alone, unless ``how`` says otherwise.
    """
    if how.keep is None or how.keep == 1 or num_stored == 0:
        return ""
    least = threshold if how.threshold is None else how.threshold
    if num_tokens - num_stored > max(least, how.keep * num_tokens):
        return ""
    return f"{num_stored:,} of {num_tokens:,} tokens are in the prefix store"


def check_amount(keep: float | None, max_tokens: int | None) -> None:
    """Exactly one of a share in (0, 1] and a number of target tokens."""
    if (keep is None) == (max_tokens is None):
        raise ValueError(f"keep is {keep!r} and max_tokens is {max_tokens!r}; give exactly one of them")
    if keep is not None and not as_number("keep", keep, 0.0, 1.0) > 0:
        raise ValueError(f"keep is {keep!r}; it must be in (0, 1]")
    if max_tokens is not None:
        as_count("max_tokens", max_tokens, 1)
