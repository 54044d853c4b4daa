"""What a caller asks for and what it gets back. Plain data; no torch.

``SamplingParams`` validates itself; limits that depend on the model (vocabulary, window, rows) are checked where the
request enters the engine. See ``engine/`` for the life of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from snapstream.config import KVBudget, as_count, as_number

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_LOGIT_BIAS = 1024


# Least and greatest values of the numeric sampling parameters.
_COUNTS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, MAX_SAMPLES), ("max_tokens", 1, None), ("min_tokens", 0, None), ("top_k", -1, None),
)  # fmt: skip
_NUMBERS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 0.01, 100.0),
)  # fmt: skip


def _as_tuple(name: str, values: Sequence[Any] | None) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Sequence):
        raise ValueError(f"{name} is {values!r}; it must be a list")
    return tuple(values or ())


class FinishReason(StrEnum):
    """Why a sample ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # end token, stop id or stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller gave up


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
        for name, low, high in _COUNTS:
            self._set(name, as_count(name, getattr(self, name), low, high))
        as_count("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, least, most in _NUMBERS:
            self._set(name, as_number(name, getattr(self, name), least, most))
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; it must be a number in (0, 1]")
        self._set("top_k", max(self.top_k, 0))
        for name, lowest, highest in (("seed", -(2**63), 2**63 - 1), ("logprobs", 0, MAX_LOGPROBS),
                                      ("prompt_logprobs", 0, MAX_LOGPROBS)):  # fmt: skip
            if getattr(self, name) is not None:
                self._set(name, as_count(name, getattr(self, name), lowest, highest))
        for name in ("ignore_eos", "include_stop", "skip_special_tokens", "return_kept"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._check_stops()
        self._check_bias()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(stop)} stop strings given; the limit is {MAX_STOP_STRINGS}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop string {text!r} is not a non-empty string")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"{len(ids)} stop token ids given; the limit is {MAX_STOP_TOKEN_IDS}")
        self._set("stop", stop)
        self._set("stop_token_ids", tuple(as_count("stop token id", token, 0) for token in ids))

    def _check_bias(self) -> None:
        if not self.logit_bias:
            self._set("logit_bias", None)
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}")
        bias = {
            as_count("logit_bias token id", token, 0): as_number(f"logit_bias of token {token}", value, -100.0, 100.0)
            for token, value in self.logit_bias.items()
        }
        self._set("logit_bias", bias)

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
    compress_ms: float  # scoring, selection and the write of the row, all layers; on a GPU the time to launch them
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
