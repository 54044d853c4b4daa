"""From sampled tensors to the plain data of a ``StepResult``, read when the engine asks for it.

On a GPU the copy to the host is started when the step is submitted and waited for only when the result is read, one
step later; on a CPU the tensors are simply read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache.kept import as_bitmap, as_positions, as_positions_by_heads
from snapstream.config.heads import HeadSlots
from snapstream.layers.logprobs import TokenLogprobs
from snapstream.layers.sampler import Sampled
from snapstream.request import Compression, Logprob, SamplingParams
from snapstream.runner.stopwatch import Stopwatch
from snapstream.step import PrefillEntry, PrefillReport, PrefillResult, StepResult

_NAN = float("nan")


class Arriving:
    """Tensors of one device on their way to the host, waited for only when they are read."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [_to_host(tensor) if tensor.is_cuda else tensor for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """The tensors, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class HostCopy:
    """Sampled tokens on their way to the host."""

    def __init__(self, sampled: Sampled) -> None:
        self._fields = Arriving(*[field for field in sampled if field is not None])

    def token_ids(self) -> list[int]:
        """The drawn tokens, as soon as they are there."""
        return list(self._fields.read()[0].tolist())

    def read(self, params: list[SamplingParams]) -> tuple[Logprob, ...]:
        """One ``Logprob`` per entry, with as many of the likeliest as ``params`` of that entry asks for."""
        fields = self._fields.read()
        ids = fields[0].tolist()
        if len(fields) == 1:
            return tuple([Logprob(token, _NAN) for token in ids[: len(params)]])
        logprobs, top_ids, top_logprobs = (field.tolist() for field in fields[1:])
        out = []
        for i, wanted in enumerate(params):
            num_top = wanted.logprobs or 0
            top = tuple(zip(top_ids[i][:num_top], top_logprobs[i][:num_top], strict=True)) if num_top else ()
            out.append(Logprob(ids[i], logprobs[i], top))
        return tuple(out)


def _to_host(field: Tensor) -> Tensor:
    pinned = torch.empty(field.shape, dtype=field.dtype, pin_memory=True)
    return pinned.copy_(field, non_blocking=True)


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens after the first, on their way to the host."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._parts: list[Arriving] = []

    def add(self, part: TokenLogprobs) -> None:
        """Those of the next tokens."""
        self._parts.append(Arriving(*part))

    def read(self) -> list[Logprob | None]:
        """One entry per token of the prompt, None for the first."""
        lines = (
            line for part in self._parts for line in zip(*(column.tolist() for column in part.read()), strict=True)
        )
        told = zip(self._token_ids[1:], lines, strict=True)
        return [None, *(Logprob(token, own, tuple(zip(*top, strict=True))) for token, (own, *top) in told)]


class Finished(Protocol):
    """A prompt whose rows are written."""

    @property
    def entry(self) -> PrefillEntry: ...

    def result(self, tokens: tuple[Logprob, ...]) -> PrefillResult: ...


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    """What the host knows of a prompt whose prefill has just been submitted to its end; the rest is on its way."""

    entry: PrefillEntry
    compression: Compression  # without what the device has yet to tell
    compress_time: Stopwatch
    kept: Arriving | None  # what was selected, or all that was kept, as ``cache/kept.py`` has it
    prompt_logprobs: PromptLogprobs | None
    heads: HeadSlots | None = None  # slots of kv heads that have their own

    def result(self, tokens: tuple[Logprob, ...]) -> PrefillResult:
        """Wait for what is on its way; ``tokens`` are the first ones, of each row."""
        told = replace(self.compression, compress_ms=self.compress_time.milliseconds())
        if self.kept is not None:
            (kept,) = self.kept.read()
            prompt_len, heads = len(self.entry.token_ids), self.heads
            if self.entry.sampling.return_kept == "bitmap":
                told = replace(told, kept_bitmap=as_bitmap(kept, prompt_len))
            else:
                found = as_positions(kept) if heads is None else as_positions_by_heads(kept, heads, prompt_len)
                told = replace(told, kept_positions=found)
        logprobs = None if self.prompt_logprobs is None else self.prompt_logprobs.read()
        return PrefillResult(tokens=tokens, compression=told, prompt_logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class ReceivedPrompt:
    """A prompt that another engine read, and what it told of it."""

    entry: PrefillEntry
    report: PrefillReport | None  # None on followers

    def result(self, tokens: tuple[Logprob, ...]) -> PrefillResult:
        report = self.report
        assert report is not None, "results are read on the leader"
        return PrefillResult(tokens=tokens, compression=report.compression, prompt_logprobs=report.prompt_logprobs)


class SubmittedStep:
    """A ``PendingStep``: what was submitted, readable once the device has done it."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._decoded: tuple[HostCopy, list[SamplingParams]] | None = None
        self._prefilled: list[tuple[HostCopy, list[SamplingParams], Sequence[Finished]]] = []
        self._sent: list[Finished] = []
        self._grammar_ends: list[Callable[[], dict[int, str]]] = []

    def add_decoded(self, sampled: Sampled, params: list[SamplingParams]) -> HostCopy:
        """The step's decode batch: one entry of ``params`` per planned row."""
        self._decoded = (HostCopy(sampled), params)
        return self._decoded[0]

    def add_sent(self, prompt: Finished) -> None:
        """A prompt whose row goes to another engine, which draws its tokens."""
        self._sent.append(prompt)

    def add_prefilled(self, sampled: Sampled, params: list[SamplingParams], prompts: Sequence[Finished]) -> HostCopy:
        """Prompts that have been read: their first tokens, prompt after prompt, one per row."""
        copy = HostCopy(sampled)
        self._prefilled.append((copy, params, prompts))
        return copy

    def add_grammar_ends(self, ends: Callable[[], dict[int, str]]) -> None:
        """Tells, once the tokens are read, which rows their grammar ended."""
        self._grammar_ends.append(ends)

    def drawn_ids(self) -> list[int]:
        """Wait for the device; all tokens that were drawn, those of prompts first."""
        copies = [copy for copy, *_ in self._prefilled] + ([self._decoded[0]] if self._decoded else [])
        return [token for copy in copies for token in copy.token_ids()]

    def result(self) -> StepResult:
        """Wait for the device and return plain data."""
        prefilled = {prompt.entry.request_id: prompt.result(()) for prompt in self._sent}
        for copy, params, prompts in self._prefilled:
            tokens = copy.read(params)
            for prompt in prompts:
                num_rows = len(prompt.entry.rows)
                prefilled[prompt.entry.request_id] = prompt.result(tokens[:num_rows])
                tokens = tokens[num_rows:]
        decoded = self._decoded[0].read(self._decoded[1]) if self._decoded else ()
        ends: dict[int, str] = {}
        for read in self._grammar_ends:
            ends.update(read())
        return StepResult(step_id=self._step_id, prefilled=prefilled, decoded=decoded, grammar_ends=ends)
