"""From answers that grow to what is new in them: remembers, per sample, how much was already sent.

Invariant: the deltas of a request, put together, are its ``RequestOutput``, and nothing is sent twice. Compression, the
use of the prefix store and prompt log-probabilities go with the first token, timings with the last delta. ``grow`` puts
them together again, where another thread or process must not see an output while the engine changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.request import (
    Compression,
    FinishReason,
    Logprob,
    PrefixUse,
    RequestOutput,
    SampleOutput,
    Timings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one sample gained since the last delta."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None  # aligned with token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Add a delta to the output that the deltas before it made."""
    for part in delta.samples:
        sample = output.samples[part.index]
        sample.text += part.text
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
    """How much of one sample has gone out."""

    num_chars: int = 0
    num_tokens: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _RequestSent:
    samples: list[_SampleSent]
    has_facts: bool = False  # compression and prompt log-probabilities


class DeltaTracker:
    """The deltas of all live requests; a finished request is forgotten."""

    def __init__(self) -> None:
        self._sent: dict[str, _RequestSent] = {}

    def take(self, output: RequestOutput) -> RequestDelta:
        """What ``output`` gained since it was last given."""
        request_id, is_finished = output.request_id, output.is_finished
        sent = self._sent.get(request_id)
        if sent is None:
            sent = self._sent[request_id] = _RequestSent([_SampleSent() for _ in output.samples])
        gains = map(_gain, output.samples, sent.samples)
        samples = tuple([gain for gain in gains if gain is not None])
        if is_finished:
            del self._sent[request_id]
        if sent.has_facts and not is_finished:
            return RequestDelta(request_id=request_id, samples=samples)
        # A request whose row was sent ends without a token, and has facts to tell.
        has_facts = any(one.num_tokens for one in sent.samples) or (is_finished and output.compression is not None)
        is_first = not sent.has_facts and has_facts
        sent.has_facts = sent.has_facts or is_first
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
    text, token_ids = sample.text[sent.num_chars :], tuple(sample.token_ids[sent.num_tokens :])
    ends_now = sample.finish_reason is not None and not sent.is_over
    if not (text or token_ids or ends_now):
        return None
    logprobs = None if sample.logprobs is None else tuple(sample.logprobs[sent.num_tokens :])
    sent.num_chars, sent.num_tokens = len(sample.text), len(sample.token_ids)
    sent.is_over = sent.is_over or ends_now
    return SampleDelta(
        index=sample.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason if ends_now else None,
        stop_reason=sample.stop_reason if ends_now else None,
    )
