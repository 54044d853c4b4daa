"""What a caller asks for and what it gets back. Plain data; no torch.

``SamplingParams`` validates itself; limits that depend on the model (vocabulary, window, rows) are checked where the
request enters the engine. See ``engine/`` for the life of a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from snapstream.config import KVBudget

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_LOGIT_BIAS = 1024


class FinishReason(StrEnum):
    """Why a sample ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # end token, stop id or stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller gave up


def _finite(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")


def _count(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f">= {low}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number {limit}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a sample ends. Names and ranges follow the OpenAI API and vLLM."""

    n: int = 1  # samples of one prompt: one prefill, n rows
    max_tokens: int = 256
    min_tokens: int = 0  # no end token or stop id before this many output tokens
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1) means off
    min_p: float = 0.0  # drop tokens less likely than min_p x the likeliest
    presence_penalty: float = 0.0  # subtracted once from every token of the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (multiplies) positive (negative) logits of prompt and output tokens
    logit_bias: Mapping[int, float] | None = None  # token id -> value added to its logit
    seed: int | None = None  # same seed, same output, whatever the batch
    stop: Sequence[str] = ()  # a str is taken as one stop string
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # per generated token: its own log-probability and this many of the likeliest
    prompt_logprobs: int | None = None  # the same for every prompt token, from the uncompressed prefill
    return_kept: bool = False  # report which prompt positions each row kept (Compression.kept_positions)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _count("n", self.n, 1, MAX_SAMPLES)
        _count("max_tokens", self.max_tokens, 1)
        _count("min_tokens", self.min_tokens, 0, self.max_tokens)
        _finite("temperature", self.temperature, 0.0, 100.0)
        if not (isinstance(self.top_p, (int, float)) and 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p is {self.top_p!r}; it must be a number in (0, 1]")
        _count("top_k", self.top_k, 0)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _finite("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _finite("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _count("seed", self.seed, -(2**63), 2**63 - 1)
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(stop)} stop strings given; the limit is {MAX_STOP_STRINGS}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop string {text!r} is not a non-empty string")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"{len(self.stop_token_ids)} stop token ids given; the limit is {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            _count("stop token id", token, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logit_bias:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}")
            for token, bias in self.logit_bias.items():
                _count("logit_bias token id", token, 0)
                _finite(f"logit_bias of token {token}", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    budget: KVBudget | None = None  # None means the engine's own
    prompt: str | None = None  # source text, if there was one; only echoed


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model, before temperature, penalties and bias."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What the row kept of a prompt; counts are tokens per layer and kv head."""

    prompt_tokens: int
    kept_tokens: int
    evicted_tokens: int
    row_bytes: int  # K and V of one row, all layers, at the request's capacity
    full_bytes: int  # what a full cache of this prompt would hold
    compress_ms: float  # scoring, selection and the write of the row, all layers
    # Selected prompt positions by layer and kv head, ascending; None unless asked for and something was evicted.
    kept_positions: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # [L][G][K]


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
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for the end token


@dataclass(slots=True)
class RequestOutput:
    """The answer so far; ``is_finished`` tells whether it is whole. The same object is updated as tokens come."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: list[SampleOutput]
    prompt: str | None = None
    prompt_logprobs: list[Logprob | None] | None = None  # entry 0 is None: nothing precedes the first token
    compression: Compression | None = None  # known from the first token on
    timings: Timings = field(default_factory=Timings)

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

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
