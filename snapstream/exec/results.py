"""The rows that follow a grammar: their matchers, and the masks that the sampler reads.

        step t draws --> tokens read --> matchers go on --> masks --> step t + 1 draws

Invariant: before a row draws, its mask reflects every token that it drew before. A step therefore waits for the tokens
of the one before it, but only if a row with a grammar drew in that; a batch without grammars pays nothing.
``grammar.py`` compiles and matches; ``exec/sampling_state.py`` holds the masks on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from snapstream.exec.sampling import NO_TOKEN, Sampled, TokenLogprobs
from snapstream.exec.sampling_state import SamplingState
from snapstream.grammar import GrammarCompiler, Matcher
from snapstream.kv.compress import Budgets, as_bitmap, as_positions
from snapstream.step import PrefillEntry, PrefillReport, PrefillResult, StepResult
from snapstream.types import Compression, Logprob, SamplingParams

# Time that the device spends on something, read only once the device is known to be past it.


class Stopwatch:
    """Sum of the stretches between ``start`` and ``stop``: of the stream on a GPU, of the host on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0
        self._sum_ms = 0.0

    def start(self) -> None:
        if self._is_cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events.append(pair)
            pair[0].record()
        else:
            self._began = perf_counter()

    def stop(self) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._sum_ms += (perf_counter() - self._began) * 1e3

    def milliseconds(self) -> float:
        """The sum so far; on a GPU every ``stop`` must have been reached by the device."""
        return self._sum_ms + sum(start.elapsed_time(stop) for start, stop in self._events)


# From sampled tensors to the plain data of a ``StepResult``, read when the engine asks for it.
#
# On a GPU the copy to the host is started when the step is submitted and waited for only when the result is read, one
# step later; on a CPU the tensors are simply read.

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
        rest = zip(self._token_ids[1:], lines, strict=True)
        return [None, *(Logprob(token, own, tuple(zip(*top, strict=True))) for token, (own, *top) in rest)]


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
    kept: Arriving | None  # what was selected, or all that was kept, as ``kv/compress.py`` has it
    prompt_logprobs: PromptLogprobs | None
    budgets: Budgets

    def result(self, tokens: tuple[Logprob, ...]) -> PrefillResult:
        """Wait for what is on its way; ``tokens`` are the first ones, of each row."""
        compression = replace(self.compression, compress_ms=self.compress_time.milliseconds())
        if self.kept is not None:
            (kept,) = self.kept.read()
            prompt_len = len(self.entry.token_ids)
            if self.entry.sampling.return_kept == "bitmap":
                compression = replace(compression, kept_bitmap=as_bitmap(kept, prompt_len))
            else:
                compression = replace(compression, kept_positions=as_positions(kept, self.budgets, prompt_len))
        logprobs = None if self.prompt_logprobs is None else self.prompt_logprobs.read()
        return PrefillResult(tokens=tokens, compression=compression, prompt_logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class ReceivedPrompt:
    """A prompt that another engine prefilled, and what it reported."""

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


@dataclass(slots=True, eq=False)
class _Drawn:
    """Tokens on their way to the matchers."""

    tokens: HostCopy
    places: list[tuple[int, int]]  # index in the batch, row
    ends: dict[int, str] = field(default_factory=dict)


class RowGrammars:
    """Matchers by row. Without a compiler, entries with a grammar must not come."""

    def __init__(self, compiler: GrammarCompiler | None, state: SamplingState) -> None:
        self._compiler = compiler
        self._state = state
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, str] = {}  # rows that have a grammar and no matcher
        self._drawn: list[_Drawn] = []

    def prepare(self, entry: PrefillEntry) -> None:
        """Compile while the prompt is prefilled."""
        if entry.sampling.grammar is not None and self._compiler is not None:
            self._compiler.prepare(entry.sampling.grammar)

    def admit(self, entry: PrefillEntry) -> None:
        """Give the entry's rows, whose sampling state was just reset, to their new owner."""
        for row in entry.rows:
            self._matchers.pop(row, None)
            self._faults.pop(row, None)
        if entry.sampling.grammar is None:
            return
        if self._compiler is None:
            raise RuntimeError(f"request {entry.request_id} has a grammar, and this runner has no compiler")
        for row in entry.rows:
            try:
                self._matchers[row] = self._compiler.matcher(entry.sampling.grammar)
            except ValueError as error:  # it compiled when it was submitted
                self._faults[row] = str(error)
        self._allow([row for row in entry.rows if row in self._matchers])
        self._allow_all([row for row in entry.rows if row in self._faults])

    def follow(self, rows: Sequence[int], tokens: HostCopy, step: SubmittedStep) -> None:
        """Tokens were drawn for ``rows``; ``step`` will tell whose grammar ends with them."""
        if not self._matchers and not self._faults:
            return
        followed = self._matchers.keys() | self._faults.keys()
        places = [(index, row) for index, row in enumerate(rows) if row in followed]
        if places:
            drawn = _Drawn(tokens, places)
            self._drawn.append(drawn)
            step.add_grammar_ends(lambda: self._ends(drawn))

    def catch_up(self) -> None:
        """Read what was drawn, let the matchers go on, and set the masks of the next draw."""
        if self._drawn:
            self._catch_up()

    @torch.inference_mode()
    def _catch_up(self) -> None:
        waiting, self._drawn = self._drawn, []
        for drawn in waiting:
            ids = drawn.tokens.token_ids()
            drawn.ends.update((row, self._faults.pop(row)) for _, row in drawn.places if row in self._faults)
            for index, row in drawn.places:
                if ids[index] == NO_TOKEN:  # the request ends, whatever its grammar says
                    self._matchers.pop(row, None)
            places = [(index, row) for index, row in drawn.places if row in self._matchers]
            for index, row in places:
                self._matchers[row].take(ids[index])
            drawn.ends.update(self._allow([row for _, row in places]))

    def _ends(self, drawn: _Drawn) -> dict[int, str]:
        if drawn in self._drawn:
            self.catch_up()
        return drawn.ends

    def _allow(self, rows: list[int]) -> dict[int, str]:
        """Set the masks of rows; those that nothing can follow lose their matcher, and are returned with the reason."""
        if not rows:
            return {}
        assert self._compiler is not None
        words = np.empty((len(rows), self._compiler.num_words), dtype=np.int32)
        ends: dict[int, str] = {}
        for row, own in zip(rows, words, strict=True):
            if not self._matchers[row].fill(own):
                ends[row] = self._matchers.pop(row).fault
                own.fill(-1)  # what it still draws is thrown away
        num_words = -(-self._state.vocab_size // 32)
        self._state.allow(rows, torch.from_numpy(words)[:, :num_words])
        return ends

    def _allow_all(self, rows: list[int]) -> None:
        if rows:
            self._state.allow(rows, torch.full((len(rows), 1), -1, dtype=torch.int32))
