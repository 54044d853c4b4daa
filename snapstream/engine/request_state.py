"""State of a request and its samples in the engine: progress, text, finish reasons, deltas.

Two counts differ by a step: ``num_planned`` (tokens that plans have requested of the device; the scheduler's) and
``len(output.token_ids)`` (tokens that the host has read).

Invariants: once ``is_over``, a sample's output does not change. Text that was shown is never taken back, and no part of
the stop string that ends a sample is shown (unless ``include_stop``). The deltas of a request add up to its
``RequestOutput``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Protocol

from snapstream.config import EngineConfig, KVBudget, Selector
from snapstream.step import PrefillResult, splitmix64
from snapstream.types import (
    NOT_FINITE,
    Compression,
    FinishReason,
    Logprob,
    PrefixUse,
    Request,
    RequestOutput,
    SampleOutput,
    SamplingParams,
    Timings,
)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``, 63 bits, so that it fits a signed device integer; a function of these two alone.

    The request's seed is mixed before the index is added: otherwise sample 1 of seed 7 would repeat sample 0 of seed 8.
    """
    return splitmix64(splitmix64(seed) + index) >> 1


REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) a character
# A character is 4 bytes at most, so valid text waits for 3 tokens. A longer run is broken output, or special tokens
# without text; the limit bounds the delay and the cost of decoding the run again at each token.
MAX_HELD_TOKENS = 16
MAX_CACHED_RUNS = 2**14  # of tokens: some megabytes of text


class Tokenizer(Protocol):
    """All that the engine needs of a tokenizer."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class CachingTokenizer:
    """A tokenizer with an LRU cache of decoded runs; most runs have one token or two."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = lru_cache(MAX_CACHED_RUNS)(
            lambda ids, skips: tokenizer.decode(list(ids), skip_special_tokens=skips)
        )

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return self._texts(tuple(ids), skip_special_tokens)


class Detokenizer:
    """Incremental decode, whole characters only, by the prefix-offset method.

    ``decode`` of a list is not the sum of ``decode`` of its parts (spaces, byte tokens), so each new piece is the
    difference between the text of the last tokens with and without the new ones. The tokens of the previous piece give
    the new ones their context.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # tokens of the previous piece, then those not shown yet
        self._num_shown = 0  # of these, tokens that were shown
        self._shown = ""  # their text

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        self._ids.append(token_id)
        text = self._decode()
        is_whole = len(text) > len(self._shown) and not text.endswith(REPLACEMENT)
        if not is_whole and len(self._ids) - self._num_shown < MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode()
        return piece

    def flush(self) -> str:
        """The whole characters among what is held; an incomplete one is dropped."""
        text = self._decode() if self._num_shown < len(self._ids) else self._shown
        piece = text[len(self._shown) :].rstrip(REPLACEMENT)
        self._ids, self._num_shown, self._shown = [], 0, ""
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)


class StopMatcher:
    """Holds back text that may become a stop string, and finds the one that is complete first; of two complete at the
    same character, the longer one. The result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""  # longest end of the text so far that begins a stop string

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], stop
        shown = text[: len(text) - overlap(text, self._stops)]
        self._held = text[len(shown) :]
        return shown, None

    def flush(self) -> str:
        """The text that is held."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, tags: Collection[str]) -> int:
    """Length of the longest end of ``text`` with which a longer one of ``tags`` begins."""
    most = min(max(map(len, tags), default=1) - 1, len(text))
    ends = (n for n in range(most, 0, -1) if any(len(tag) > n and tag.startswith(text[-n:]) for tag in tags))
    return next(ends, 0)


class TextStream:
    """Text of one sample. It must not be used again after ``finish`` or after it returned a stop string."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopMatcher(sampling.stop, include_stop=sampling.include_stop)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """New text to show, and the stop string if this token completed one."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, which may contain a stop string."""
        text, stop = self._matcher.push(self._detokenizer.flush())
        return text + self._matcher.flush(), stop


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """What one sample gained since the last delta."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None  # aligned with token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one request gained since the last delta."""

    request_id: str
    samples: tuple[SampleDelta, ...]
    is_finished: bool = False
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # once, with the first token
    compression: Compression | None = None  # once, with the first token
    timings: Timings | None = None  # once, with the last delta
    prefix: PrefixUse | None = None  # once, with the first token


def grow(output: RequestOutput, delta: RequestDelta) -> None:
    """Add a delta to the output that the earlier deltas made."""
    for part in delta.samples:
        sample = output.samples[part.index]
        sample.add_text(part.text)
        sample.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            sample.logprobs = [*(sample.logprobs or ()), *part.logprobs]
        if part.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = part.finish_reason, part.stop_reason
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = list(delta.prompt_logprobs)
    output.compression = delta.compression or output.compression
    output.timings = delta.timings or output.timings
    output.prefix = delta.prefix or output.prefix


@dataclass(slots=True)
class _SampleSent:
    """How much of one sample was sent."""

    num_pieces: int = 0  # of its text
    num_tokens: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _RequestSent:
    samples: list[_SampleSent]
    has_prompt_fields: bool = False  # compression, prompt log-probabilities, prefix use


class DeltaTracker:
    """The deltas of all live requests; a finished request is forgotten."""

    def __init__(self) -> None:
        self._sent: dict[str, _RequestSent] = {}

    def has_begun(self, request_id: str) -> bool:
        """Whether a live request has had a delta with tokens."""
        sent = self._sent.get(request_id)
        return sent is not None and sent.has_prompt_fields

    def take(self, output: RequestOutput) -> RequestDelta:
        """What ``output`` gained since the last call."""
        request_id, is_finished = output.request_id, output.is_finished
        sent = self._sent.get(request_id)
        if sent is None:
            sent = self._sent[request_id] = _RequestSent([_SampleSent() for _ in output.samples])
        gains = map(_gain, output.samples, sent.samples)
        samples = tuple([gain for gain in gains if gain is not None])
        if is_finished:
            del self._sent[request_id]
        if sent.has_prompt_fields and not is_finished:
            return RequestDelta(request_id, samples)
        # A request whose row was sent to another engine ends without a token.
        is_prefilled = any(one.num_tokens for one in sent.samples) or (is_finished and output.compression is not None)
        is_first = is_prefilled and not sent.has_prompt_fields
        sent.has_prompt_fields = sent.has_prompt_fields or is_first
        prompt_logprobs = output.prompt_logprobs if is_first else None
        return RequestDelta(
            request_id=request_id,
            samples=samples,
            is_finished=is_finished,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            compression=output.compression if is_first else None,
            timings=replace(output.timings) if is_finished else None,  # the engine's own object changes
            prefix=output.prefix if is_first else None,
        )


def _gain(sample: SampleOutput, sent: _SampleSent) -> SampleDelta | None:
    """What one sample gained; None if nothing."""
    num_pieces = sample.num_pieces
    text, token_ids = sample.text_since(sent.num_pieces), tuple(sample.token_ids[sent.num_tokens :])
    ends_now = sample.finish_reason is not None and not sent.is_over
    if not (text or token_ids or ends_now):
        return None
    logprobs = None if sample.logprobs is None else tuple(sample.logprobs[sent.num_tokens :])
    sent.num_pieces, sent.num_tokens = num_pieces, len(sample.token_ids)
    sent.is_over = sent.is_over or ends_now
    return SampleDelta(
        index=sample.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason if ends_now else None,
        stop_reason=sample.stop_reason if ends_now else None,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSample:
    """One sample: it owns a row from admission until its last token is planned, or its end is seen."""

    sampling: SamplingParams
    seed: int
    output: SampleOutput
    text: TextStream | None  # None: no tokenizer, ids only
    request: LiveRequest = field(init=False)
    row: int = -1  # the last one that it owned
    num_planned: int = 0

    @property
    def is_over(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def is_fully_planned(self) -> bool:
        """Whether the last token that max_tokens allows is planned."""
        return self.num_planned >= self.sampling.max_tokens

    def take(self, token: Logprob, eos_token_ids: frozenset[int], grammar_end: str | None = None) -> None:
        """Append a token, and decide whether the sample ends with it.

        ``grammar_end``: the grammar allows no further token; empty if the text is complete, else the reason. A token
        below 0 means that the model's logits were not finite, which ends the sample.
        """
        if token.token_id < 0:
            self.end(FinishReason.ERROR, NOT_FINITE)
            return
        self.output.token_ids.append(token.token_id)
        if self.output.logprobs is not None:
            self.output.logprobs.append(token)
        if self._is_end(token.token_id, eos_token_ids):
            is_eos = token.token_id in eos_token_ids and not self.sampling.ignore_eos
            self.end(FinishReason.STOP, None if is_eos else token.token_id)
            return
        if self._show(token.token_id):
            return
        if grammar_end is not None:
            self.end(FinishReason.ERROR if grammar_end else FinishReason.STOP, grammar_end or None)
            return
        if len(self.output.token_ids) >= self.sampling.max_tokens:
            self.end(FinishReason.LENGTH)

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Show the text that is held back, and end the sample; a stop string in it takes precedence."""
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason
        if self.text is None:
            return
        piece, stop = self.text.finish()
        self.output.add_text(piece)
        if stop is not None and reason is not FinishReason.ABORT:
            self.output.finish_reason, self.output.stop_reason = FinishReason.STOP, stop

    def _is_end(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """End token or stop id, once min_tokens are reached. Its text is not shown."""
        if len(self.output.token_ids) < self.sampling.min_tokens:
            return False
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        return is_eos or token_id in self.sampling.stop_token_ids

    def _show(self, token_id: int) -> bool:
        """Add the token's text; True if a stop string ended the sample."""
        if self.text is None:
            return False
        piece, stop = self.text.push(token_id)
        self.output.add_text(piece)
        if stop is not None:
            self.output.finish_reason, self.output.stop_reason = FinishReason.STOP, stop
        return stop is not None


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    request: Request
    budget: KVBudget
    selector: Selector
    samples: tuple[LiveSample, ...]
    output: RequestOutput
    arrived: float  # time in seconds
    namespace: str  # in the prefix store
    first_unit: float | None = None
    first_token: float | None = None
    stores_answer: bool = True  # in the prefix store; False after a reset
    is_idle: bool = False  # the engine's own: it fills the prefix store, and makes way for others

    def __post_init__(self) -> None:
        for sample in self.samples:
            sample.request = self

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def is_over(self) -> bool:
        return self.output.is_finished

    def start(self, now: float) -> None:
        """The first prefill unit is planned."""
        self.first_unit = now
        self.output.timings.queue_ms = (now - self.arrived) * 1e3

    def take_prefill(self, result: PrefillResult, now: float) -> None:
        assert self.first_unit is not None
        self.first_token = now
        self.output.timings.prefill_ms = (now - self.first_unit) * 1e3
        self.output.timings.first_token_ms = (now - self.arrived) * 1e3
        self.output.compression = result.compression
        if self.request.sampling.prompt_logprobs is not None:
            self.output.prompt_logprobs = result.prompt_logprobs

    def mark(self, now: float) -> None:
        timings = self.output.timings
        timings.total_ms = (now - self.arrived) * 1e3
        if self.first_token is not None:
            timings.decode_ms = (now - self.first_token) * 1e3
            longest = max(len(sample.token_ids) for sample in self.output.samples)
            timings.per_token_ms = timings.decode_ms / (longest - 1) if longest > 1 else 0.0


def live_request(
    request: Request, config: EngineConfig, tokenizer: Tokenizer | None, random: Random, now: float
) -> LiveRequest:
    """``random`` draws the seed of a request without one."""
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
    output = request.new_output()
    samples = (
        LiveSample(
            sampling=sampling,
            seed=sample_seed(seed, own.index),
            output=own,
            text=None if tokenizer is None else TextStream(tokenizer, sampling),
        )
        for own in output.samples
    )
    return LiveRequest(
        request=request,
        budget=request.budget or config.budget,
        selector=request.selector or config.selector,
        samples=tuple(samples),
        output=output,
        arrived=now,
        namespace=config.prefix_namespace(request.namespace, request.lora),
    )
