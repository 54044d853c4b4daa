"""A request and its samples on their way through the engine: progress, text and the reasons to end.

Two counts run apart and must not be mixed up: ``num_planned`` (tokens that plans have asked of the device;
the scheduler's) and ``len(output.token_ids)`` (tokens that the host has read; one step behind).

Invariant: once ``is_over``, a sample's output does not change: results that still arrive for it are surplus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from snapstream.config import EngineConfig, KVBudget, Selector
from snapstream.engine.detokenizer import TextStream, Tokenizer
from snapstream.engine.seeds import sample_seed
from snapstream.request import NOT_FINITE, FinishReason, Logprob, Request, RequestOutput, SampleOutput, SamplingParams
from snapstream.step import PrefillResult


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSample:
    """One sample: it owns a row from admission until its last token is planned, or its end is seen."""

    sampling: SamplingParams
    seed: int
    output: SampleOutput
    text: TextStream | None  # None: no tokenizer, ids only
    request: LiveRequest = field(init=False)
    row: int = -1  # last row owned; the scheduler knows whether it still is
    num_planned: int = 0

    @property
    def is_over(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def is_fully_planned(self) -> bool:
        """True when the last token that max_tokens allows is on its way."""
        return self.num_planned >= self.sampling.max_tokens

    def take(self, token: Logprob, eos_token_ids: frozenset[int], grammar_end: str | None = None) -> None:
        """Append a token that the device reported, and decide whether the sample ends with it.

        ``grammar_end``: the grammar lets nothing follow; empty where the text is complete, else the reason. A token
        below 0 is none: the model's logits were not finite, and the sample ends with that.
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
        """Show what is held back and close the sample; a stop string in the rest is what came first."""
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason
        if self.text is None:
            return
        piece, stop = self.text.finish()
        self.output.text += piece
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
        self.output.text += piece
        if stop is not None:
            self.output.finish_reason, self.output.stop_reason = FinishReason.STOP, stop
        return stop is not None


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """One request; its output is the object that the caller sees."""

    request: Request
    budget: KVBudget
    selector: Selector
    samples: tuple[LiveSample, ...]
    output: RequestOutput
    arrived: float  # seconds of the engine's clock, as the two below
    first_unit: float | None = None
    first_token: float | None = None

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
        """The first prefill unit is about to run."""
        self.first_unit = now
        self.output.timings.queue_ms = (now - self.arrived) * 1e3

    def take_prefill(self, result: PrefillResult, now: float) -> None:
        """The prompt is done; its first tokens are taken by the samples."""
        assert self.first_unit is not None
        self.first_token = now
        self.output.timings.prefill_ms = (now - self.first_unit) * 1e3
        self.output.timings.first_token_ms = (now - self.arrived) * 1e3
        self.output.compression = result.compression
        if self.request.sampling.prompt_logprobs is not None:
            self.output.prompt_logprobs = result.prompt_logprobs

    def mark(self, now: float) -> None:
        """Bring the timings up to date after a token, or at the end."""
        timings = self.output.timings
        timings.total_ms = (now - self.arrived) * 1e3
        if self.first_token is not None:
            timings.decode_ms = (now - self.first_token) * 1e3
            longest = max(len(sample.token_ids) for sample in self.output.samples)
            timings.per_token_ms = timings.decode_ms / (longest - 1) if longest > 1 else 0.0


def live_request(
    request: Request, config: EngineConfig, tokenizer: Tokenizer | None, random: Random, now: float
) -> LiveRequest:
    """A request that has arrived, with its samples; ``random`` draws its seed where it brings none."""
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
    samples = tuple(_sample(sampling, tokenizer, seed, index) for index in range(sampling.n))
    return LiveRequest(
        request=request,
        budget=request.budget or config.budget,
        selector=request.selector or config.selector,
        samples=samples,
        output=RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            samples=[sample.output for sample in samples],
            prompt=request.prompt,
            trim=request.trim,
        ),
        arrived=now,
    )


def _sample(sampling: SamplingParams, tokenizer: Tokenizer | None, seed: int, index: int) -> LiveSample:
    text = None
    if tokenizer is not None:
        text = TextStream(
            tokenizer,
            stop=tuple(sampling.stop),
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
        )
    output = SampleOutput(index=index, logprobs=None if sampling.logprobs is None else [])
    return LiveSample(sampling=sampling, seed=sample_seed(seed, index), output=output, text=text)
