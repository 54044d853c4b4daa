"""Results of a step, from sampled tensors to plain data, and the grammars of rows.

On a GPU the copy to the host starts when the step is submitted, and is waited for one step later, when the result is
read. Grammars need the tokens earlier:

        step t samples --> tokens read --> matchers advance --> masks --> step t + 1 samples

Invariant: before a row is sampled, its mask reflects all its earlier tokens. So a step waits for the tokens of the one
before, but only if that sampled a row with a grammar. In a step with drafts, matchers advance between two turns
(``RowGrammars.go_on``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snapstream.exec.sampling import NO_TOKEN, Sampled, TokenLogprobs
from snapstream.exec.sampling_state import SamplingState
from snapstream.grammar import GrammarCompiler, Matcher
from snapstream.kv.compress import Budgets, as_bitmap, as_positions
from snapstream.step import DraftResult, PrefillEntry, PrefillResult, ReceivedRow, StepResult
from snapstream.types import Compression, Logprob, SamplingParams


class Stopwatch:
    """Total time between ``start`` and ``stop``: of the stream on a GPU, of the host on a CPU."""

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
        """On a GPU the device must have reached every ``stop``."""
        return self._sum_ms + sum(start.elapsed_time(stop) for start, stop in self._events)


_NAN = float("nan")


class HostCopy:
    """An asynchronous copy of tensors to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [_to_host(tensor) if tensor.is_cuda else tensor for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """Wait for the tensors."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class SampledCopy:
    """An asynchronous copy of sampled tokens to the host."""

    def __init__(self, sampled: Sampled) -> None:
        self._fields = HostCopy(*[field for field in sampled if field is not None])

    def token_ids(self) -> list[int]:
        """Wait for the tokens."""
        return list(self._fields.read()[0].tolist())

    def read(self, params: list[SamplingParams]) -> tuple[Logprob, ...]:
        """One ``Logprob`` per entry, with as many top tokens as its ``params`` request."""
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
    """An asynchronous copy of the log-probabilities of a prompt's tokens after the first."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._parts: list[HostCopy] = []

    def add(self, part: TokenLogprobs) -> None:
        """Append those of the next tokens."""
        self._parts.append(HostCopy(*part))

    def read(self) -> list[Logprob | None]:
        """One entry per token of the prompt, None for the first."""
        lines = (
            line for part in self._parts for line in zip(*(column.tolist() for column in part.read()), strict=True)
        )
        rest = zip(self._token_ids[1:], lines, strict=True)
        return [None, *(Logprob(token, own, tuple(zip(*top, strict=True))) for token, (own, *top) in rest)]


class Verified(NamedTuple):
    """What a step with drafts has of one row."""

    num_tokens: int  # sampled: one, and the accepted
    num_drafted: int


class Finished(NamedTuple):
    """A prompt whose rows are written; ``result``, of the first token of each row, waits for the device."""

    entry: PrefillEntry
    result: Callable[[tuple[Logprob, ...]], PrefillResult]


def prefill_result(
    entry: PrefillEntry,
    compression: Compression,
    compress_time: Stopwatch,
    kept: tuple[HostCopy | None, Budgets],
    prompt_logprobs: PromptLogprobs | None,
    tokens: tuple[Logprob, ...],
) -> PrefillResult:
    """``compression`` lacks the fields that the device computes; ``kept`` are positions or bits of ``kv/compress.py``,
    and the budgets of all kv heads.
    """
    compression = replace(compression, compress_ms=compress_time.milliseconds())
    copy, budgets = kept
    if copy is not None:
        (positions,) = copy.read()
        if entry.sampling.return_kept == "bitmap":
            compression = replace(compression, kept_bitmap=as_bitmap(positions, entry.prompt_len))
        else:
            compression = replace(compression, kept_positions=as_positions(positions, budgets, entry.prompt_len))
    logprobs = None if prompt_logprobs is None else prompt_logprobs.read()
    return PrefillResult(tokens=tokens, compression=compression, prompt_logprobs=logprobs)


def received_result(received: ReceivedRow, tokens: tuple[Logprob, ...]) -> PrefillResult:
    """Of a prompt that another engine prefilled."""
    assert received.row is not None, "only rank 0 reads results"
    report = received.row.report
    return PrefillResult(tokens=tokens, compression=report.compression, prompt_logprobs=report.prompt_logprobs)


class SubmittedStep:
    """A ``PendingStep``."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._decoded: tuple[SampledCopy, list[SamplingParams]] | None = None
        self._verified: Sequence[Verified] | None = None  # of each decoded row; None: a token each
        self._prefilled: list[tuple[SampledCopy, list[SamplingParams], Sequence[Finished]]] = []
        self._sent: list[Finished] = []
        self._sent_event: torch.cuda.Event | None = None  # behind the last of them
        self._grammar_ends: list[Callable[[], dict[int, str]]] = []

    def add_decoded(
        self, sampled: Sampled, params: list[SamplingParams], verified: Sequence[Verified] | None
    ) -> SampledCopy:
        """The step's decode batch: one entry of ``params`` per planned row, which has a token, or those verified."""
        if verified is not None:
            params = [own for own, row in zip(params, verified, strict=True) for _ in range(row.num_tokens)]
        self._decoded, self._verified = (SampledCopy(sampled), params), verified
        return self._decoded[0]

    def add_sent(self, prompt: Finished, device: torch.device) -> None:
        """A prompt whose row is sent to another engine, with all its work on ``device`` submitted."""
        self._sent.append(prompt)
        if device.type == "cuda":  # no token is sampled whose copy ``result`` would wait for
            self._sent_event = torch.cuda.Event()
            self._sent_event.record()

    def add_prefilled(self, sampled: Sampled, params: list[SamplingParams], prompts: Sequence[Finished]) -> SampledCopy:
        """The first tokens of prompts: prompt after prompt, one per row."""
        copy = SampledCopy(sampled)
        self._prefilled.append((copy, params, prompts))
        return copy

    def add_grammar_ends(self, ends: Callable[[], dict[int, str]]) -> None:
        """``ends`` returns, once the tokens are read, the rows whose grammar has ended."""
        self._grammar_ends.append(ends)

    def drawn_ids(self) -> list[int]:
        """Wait for the device; all sampled tokens, those of prompts first."""
        copies = [copy for copy, *_ in self._prefilled] + ([self._decoded[0]] if self._decoded else [])
        return [token for copy in copies for token in copy.token_ids()]

    def result(self) -> StepResult:
        """Wait for the device and return plain data."""
        if self._sent_event is not None:
            self._sent_event.synchronize()
        prefilled = {prompt.entry.request_id: prompt.result(()) for prompt in self._sent}
        for copy, params, prompts in self._prefilled:
            tokens = copy.read(params)
            for prompt in prompts:
                num_rows = len(prompt.entry.rows)
                prefilled[prompt.entry.request_id] = prompt.result(tokens[:num_rows])
                tokens = tokens[num_rows:]
        decoded = self._decoded[0].read(self._decoded[1]) if self._decoded else ()
        drafted: dict[int, DraftResult] = {}
        if self._verified is not None:
            starts = accumulate((row.num_tokens for row in self._verified), initial=0)
            runs = [decoded[start : start + row.num_tokens] for start, row in zip(starts, self._verified, strict=False)]
            decoded = tuple(own[0] for own in runs)
            pairs = enumerate(zip(runs, self._verified, strict=True))
            drafted = {index: DraftResult(own[1:], row.num_drafted) for index, (own, row) in pairs if row.num_drafted}
        ends: dict[int, str] = {}
        for read in self._grammar_ends:
            ends.update(read())
        return StepResult(
            step_id=self._step_id, prefilled=prefilled, decoded=decoded, drafted=drafted, grammar_ends=ends
        )


def last_entries(rows: Sequence[int], verified: Sequence[Verified]) -> list[int]:
    """The rows of sampled entries; -1 for all but the last of a row, which matchers took between turns."""
    pairs = zip(rows, verified, strict=True)
    return [number for row, own in pairs for number in (*[-1] * (own.num_tokens - 1), row)]


@dataclass(slots=True, eq=False)
class _Drawn:
    """Sampled tokens that the matchers have not read."""

    tokens: SampledCopy
    places: list[tuple[int, int]]  # index in the batch, row
    ends: dict[int, str] = field(default_factory=dict)


class RowGrammars:
    """Matchers by row. Entries with a grammar need a compiler."""

    def __init__(self, compiler: GrammarCompiler | None, state: SamplingState) -> None:
        self._compiler = compiler
        self._state = state
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, str] = {}  # rows that have a grammar and no matcher: ends to report
        self._drawn: list[_Drawn] = []

    def prepare(self, entry: PrefillEntry) -> None:
        """Compile while the prompt is prefilled."""
        if entry.sampling.grammar is not None and self._compiler is not None:
            self._compiler.prepare(entry.sampling.grammar)

    def admit(self, entry: PrefillEntry) -> None:
        """Set up the entry's rows, whose sampling state was just reset."""
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
        if failed := [row for row in entry.rows if row in self._faults]:
            self._state.allow(failed, torch.full((len(failed), 1), -1, dtype=torch.int32))  # every token

    def follow(self, rows: Sequence[int], tokens: SampledCopy, step: SubmittedStep) -> None:
        """Tokens were sampled for ``rows``; ``step`` will report whose grammar ends with them."""
        if not self._matchers and not self._faults:
            return
        followed = self._matchers.keys() | self._faults.keys()
        places = [(index, row) for index, row in enumerate(rows) if row in followed]
        if places:
            drawn = _Drawn(tokens, places)
            self._drawn.append(drawn)
            step.add_grammar_ends(lambda: self._ends(drawn))

    def holds(self, row: int) -> bool:
        """Whether a row has a grammar that has not ended."""
        return row in self._matchers

    def forced(self, row: int, most: int) -> list[int]:
        """Up to ``most`` tokens that must follow in a row."""
        if most < 1 or row not in self._matchers:
            return []
        return list(takewhile(lambda token: token < self._state.vocab_size, self._matchers[row].forced()))[:most]

    def possible(self, row: int, draft: list[int]) -> list[int]:
        """A draft up to the first token that the grammar of its row does not allow."""
        return draft[: self._matchers[row].num_allowed(draft)] if draft and row in self._matchers else draft

    def go_on(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """See ``eager.GoOn``: the masks of rows that do are set; whose grammar has ended does not."""
        own = {row: token for row, token in zip(rows, tokens, strict=True) if row in self._matchers}
        for row, token in own.items():
            self._matchers[row].take(token)
        ends = self._allow(list(own))
        self._faults.update(ends)  # of the last token that ``follow`` gets
        return [row not in ends for row in rows]

    def catch_up(self) -> None:
        """Read the sampled tokens, advance the matchers, and set the masks of the next step."""
        if self._drawn:
            self._catch_up()

    @torch.inference_mode()
    def _catch_up(self) -> None:
        waiting, self._drawn = self._drawn, []
        for drawn in waiting:
            ids = drawn.tokens.token_ids()
            drawn.ends.update((row, self._faults.pop(row)) for _, row in drawn.places if row in self._faults)
            for index, row in drawn.places:
                if ids[index] == NO_TOKEN:  # the request ends with an error
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
        """Set the masks of rows; rows that allow no further token lose their matcher and are returned with the
        reason."""
        if not rows:
            return {}
        assert self._compiler is not None
        words = np.empty((len(rows), self._compiler.num_words), dtype=np.int32)
        ends: dict[int, str] = {}
        for row, own in zip(rows, words, strict=True):
            if not self._matchers[row].fill(own):
                ends[row] = self._matchers.pop(row).fault
                own.fill(-1)  # a surplus token is discarded
        num_words = -(-self._state.vocab_size // 32)
        self._state.allow(rows, torch.from_numpy(words)[:, :num_words])
        return ends
