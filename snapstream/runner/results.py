"""From sampled tensors to the plain data of a ``StepResult``, read when the engine asks for it.

On a GPU the copy to the host is started when the step is submitted and waited for only when the result is read, one
step later; on a CPU the tensors are simply read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapstream.layers.sampler import Sampled
from snapstream.request import Compression, Logprob, SamplingParams
from snapstream.runner.stopwatch import Stopwatch
from snapstream.step import PrefillResult, StepResult

_NAN = float("nan")


class HostCopy:
    """Sampled tokens on their way to the host."""

    def __init__(self, sampled: Sampled) -> None:
        fields = (sampled.token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        self._fields: list[Tensor | None] = [_to_host(field) for field in fields]
        self._event: torch.cuda.Event | None = None
        if sampled.token_ids.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def token_ids(self) -> list[int]:
        """The drawn tokens, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        ids = self._fields[0]
        assert ids is not None
        return list(ids.tolist())

    def read(self, params: list[SamplingParams]) -> tuple[Logprob, ...]:
        """One ``Logprob`` per entry, with as many of the likeliest as ``params`` of that entry asks for."""
        if self._event is not None:
            self._event.synchronize()
        ids, logprobs, top_ids, top_logprobs = ([] if field is None else field.tolist() for field in self._fields)
        if not logprobs:
            return tuple(Logprob(token, _NAN) for token in ids[: len(params)])
        out = []
        for i, wanted in enumerate(params):
            num_top = wanted.logprobs or 0
            top = tuple(zip(top_ids[i][:num_top], top_logprobs[i][:num_top], strict=True)) if num_top else ()
            out.append(Logprob(ids[i], logprobs[i], top))
        return tuple(out)


def _to_host(field: Tensor | None) -> Tensor | None:
    if field is None or field.device.type != "cuda":
        return field
    pinned = torch.empty(field.shape, dtype=field.dtype, pin_memory=True)
    return pinned.copy_(field, non_blocking=True)


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    """What the host knows of a prompt whose prefill has just been submitted to its end."""

    request_id: str
    num_rows: int
    compression: Compression  # compress_ms is read off the stopwatch with the result
    compress_time: Stopwatch
    prompt_logprobs: list[Logprob | None] | None


class SubmittedStep:
    """A ``PendingStep``: what was submitted, readable once the device has done it."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._decoded: tuple[HostCopy, list[SamplingParams]] | None = None
        self._prefilled: list[tuple[HostCopy, list[SamplingParams], list[FinishedPrompt]]] = []
        self._grammar_ends: list[Callable[[], dict[int, str]]] = []

    def add_decoded(self, sampled: Sampled, params: list[SamplingParams]) -> HostCopy:
        """The step's decode batch: one entry of ``params`` per planned row."""
        self._decoded = (HostCopy(sampled), params)
        return self._decoded[0]

    def add_prefilled(self, sampled: Sampled, params: list[SamplingParams], prompts: list[FinishedPrompt]) -> HostCopy:
        """A job that ended: its first tokens, prompt after prompt, one per row."""
        copy = HostCopy(sampled)
        self._prefilled.append((copy, params, prompts))
        return copy

    def add_grammar_ends(self, ends: Callable[[], dict[int, str]]) -> None:
        """Tells, once the tokens are read, which rows their grammar ended."""
        self._grammar_ends.append(ends)

    def result(self) -> StepResult:
        """Wait for the device and return plain data."""
        prefilled = {}
        for copy, params, prompts in self._prefilled:
            tokens = copy.read(params)
            for prompt in prompts:
                own, tokens = tokens[: prompt.num_rows], tokens[prompt.num_rows :]
                compression = replace(prompt.compression, compress_ms=prompt.compress_time.milliseconds())
                prefilled[prompt.request_id] = PrefillResult(
                    tokens=own, compression=compression, prompt_logprobs=prompt.prompt_logprobs
                )
        decoded = self._decoded[0].read(self._decoded[1]) if self._decoded else ()
        ends = {row: end for read in self._grammar_ends for row, end in read().items()}
        return StepResult(step_id=self._step_id, prefilled=prefilled, decoded=decoded, grammar_ends=ends)
