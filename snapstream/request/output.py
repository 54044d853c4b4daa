"""What a caller gets back: samples that grow, why they ended, what the row kept, how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sample ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # end token, stop id or stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # the logits were not finite, or the grammar could not be followed; ``stop_reason`` says which


NOT_FINITE = "logits are not finite"  # stop_reason of an ERROR: the model computed NaN or infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """What a draft model took out of a prompt before its prefill; counts are tokens of the model that answers."""

    prompt_tokens: int  # the logical prompt: before
    kept_tokens: int  # what was prefilled
    draft_ms: float
    reason: str = ""  # why nothing was taken out; empty if something was
    num_cached: int = 0  # texts whose scores the draft remembered

    @property
    def is_applied(self) -> bool:
        return not self.reason

    @property
    def trimmed_tokens(self) -> int:
        return self.prompt_tokens - self.kept_tokens


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model, before temperature, penalties and bias."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBitmap:
    """One bit per layer, kv head and prompt token: 1 where the row kept it, as sink, top-k or recent token alike.

    Token t of a head is bit t % 8, the least significant first, of its byte t // 8. Heads follow each other, those of
    layer 0 first, each from a byte of its own on: ``bits`` has L x G x ceil(N / 8) bytes.
    """

    num_layers: int
    num_kv_heads: int
    num_tokens: int
    bits: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What the row kept of a prompt; counts are tokens per layer and kv head."""

    prompt_tokens: int
    kept_tokens: int
    evicted_tokens: int
    row_bytes: int  # K and V of one row, all layers, at the request's capacity
    full_bytes: int  # what a full cache of this prompt would hold
    compress_ms: float  # scoring, selection and the write of the row, all layers
    ring_tokens: (
        int  # slots of the ring of recent tokens as the prompt left it; answer and end of the prompt share them
    )
    # Selected prompt positions by layer and kv head, ascending; None unless asked for and something was evicted. Where
    # kv heads have slots of their own, lists have unlike lengths; of a head that holds the prompt whole, all but sinks
    # and the num_recent last.
    kept_positions: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # [L][G][K]
    kept_bitmap: KeptBitmap | None = None  # all that was kept; under the same conditions


@dataclass(slots=True)
class Timings:
    """Wall-clock milliseconds of a request; fields are filled as the request moves on."""

    queue_ms: float = 0.0  # arrival to first prefill unit
    prefill_ms: float = 0.0  # first unit to first token
    first_token_ms: float = 0.0  # arrival to first token (queue + prefill)
    decode_ms: float = 0.0  # first token to last
    total_ms: float = 0.0
    per_token_ms: float = 0.0  # decode_ms per output token after the first, of the longest sample


@dataclass(slots=True)
class SampleOutput:
    """One of the ``n`` samples of a request. ``text`` and ``token_ids`` only ever grow."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it, or the fault of an error


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """What the prefix store did for a prompt."""

    cached_tokens: int = 0  # tokens at its beginning that were restored instead of computed
    # Tokens that it shares with the nearest stored prompt, where it then reads otherwise; None if nothing diverges.
    diverged_at: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer so far; ``is_finished`` tells whether it is whole. The same object is updated as tokens come."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: list[SampleOutput]
    prompt: str | None = None
    prompt_logprobs: list[Logprob | None] | None = None  # entry 0 is None: nothing precedes the first token
    compression: Compression | None = None  # known from the first token on
    trim: Trim | None = None  # if prompt compression was asked for
    prefix: PrefixUse | None = None  # from the first unit on, if the prompt was looked up in a prefix store
    timings: Timings = field(default_factory=Timings)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the logical prompt, those that a draft left out included."""
        return self.trim.prompt_tokens if self.trim is not None else len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came out of the prefix store."""
        return 0 if self.prefix is None else self.prefix.cached_tokens

    @property
    def is_finished(self) -> bool:
        return all([sample.finish_reason is not None for sample in self.samples])

    @property
    def has_outgrown_ring(self) -> bool:
        """Whether a sample is longer than the ring of its row: the end of the prompt, which is usually the question,
        has then left the ring, and so does the answer's own beginning. Tokens that a window region or rescoring keeps
        are still there.
        """
        ring = None if self.compression is None else self.compression.ring_tokens
        return ring is not None and any(len(sample.token_ids) > ring for sample in self.samples)

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        """Output ids of the first sample."""
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> list[Logprob] | None:
        """Log-probabilities of the first sample's tokens, if asked for."""
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None while it runs."""
        return self.samples[0].finish_reason
