"""A small model that drafts tokens for the rows of an engine (speculative decoding, Leviathan et al. 2023).

It drafts greedily where prompt lookup finds nothing; ``speculation.py`` decides how many tokens pay and verifies them.
Its steps are those of an executor, not always that of the target (``plan/fit.py``).
Its own memory is constant too: a row holds the last tokens of its sequence (``config/engine.py:Speculator``). When it
is full, or too far behind, half as many tokens are read anew, by prefill. Slots never wrap around, so a rejected token
is taken back by a counter. Invariant: nothing here changes an answer, only how many tokens a step accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from snapstream.config import EngineConfig, KVBudget, make_selector
from snapstream.exec.eager import DraftBatch, HoldsPrograms, MakeDecode, StepParts, Verifier, draft_batch
from snapstream.exec.executors import MAX_DRAFTED
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.rows import Rows
from snapstream.exec.sampling_state import SamplingState
from snapstream.exec.speculation import History
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import Case
from snapstream.kernels.memory import upload
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import write_rows
from snapstream.models.decoder import Decoder
from snapstream.models.prefill import LayerPass, PassTokens
from snapstream.models.views import StagingBuffers

MOST_FED = 64  # tokens that a row may be behind; more are read by prefill
_WARM_UP_LEN = 20  # tokens
_GREEDY = SamplingNeeds()
_DECAY = 0.9  # of what is known of times, per call


@dataclass(slots=True)
class _Held:
    """Tokens ``start .. end`` of a sequence are in the slots of its row, and behind them drafted ones."""

    start: int
    end: int
    drafted: list[int] = field(default_factory=list)

    def confirm(self, history: History) -> list[int]:
        """Take drafted tokens that the sequence has into what is held; the others, and always its last: what follows it
        is drafted from its logits. It too may be a drafted one, where a grammar has ended a draft.
        """
        behind = history.since(self.end).tolist()
        num_right = 0
        for own, token in zip(self.drafted, behind[:-1], strict=False):
            if own != token:
                break
            num_right += 1
        self.end += num_right
        self.drafted = []
        return [int(token) for token in behind[num_right:]]


Wanted = tuple[int, History, int]  # a row, its tokens, and how many drafted ones


class DraftModel:
    """A ``speculation.Drafter``; on a GPU a draft waits for the device once."""

    def __init__(self, decoder: Decoder, config: EngineConfig, make_decode: MakeDecode) -> None:
        """``config``: of its steps (``plan/memory.py:speculator_config``), which ``make_decode`` makes."""
        self._decoder, self._capacity, self._device = decoder, config.budget.capacity, decoder.device
        spec = decoder.kv_spec(config.kv_dtype).limited(config.max_model_len)
        self._cache = KVCache(spec, config.max_rows, self._capacity, self._device, decoder.kernels, sinks=decoder.sinks)
        self._rows = Rows(config.max_rows, self._device)
        sampling = SamplingState(config.max_rows, decoder.config.vocab_size, self._device)
        parts = StepParts(
            decoder=decoder, cache=self._cache, rows=self._rows, sampling=sampling, config=config, is_greedy=True
        )
        decode = make_decode(parts)
        assert isinstance(decode, Verifier)  # others are refused
        self.decode = decode
        size = decoder.config.stream_size
        self._buffers = StagingBuffers(spec, size, config.pool_tokens, decoder.dtype, self._device)
        self._chunk_len, self._read_len = config.chunking.chunk_len, config.pool_tokens
        self._attention = choose("auto", Case.of_model(self._device, decoder.dtype, decoder.shard))
        self._selector = make_selector()
        self._held: dict[int, _Held] = {}
        self.seconds = self.read_seconds = 0.0

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Called once before the first draft; ``progress`` is shown on stderr."""
        self.decode.warm_up(progress)
        if self._decoder.kernels.version == "triton":  # compiles those of prefill
            self._read(0, History([0] * min(_WARM_UP_LEN, self._read_len)))
            self.forget(0)

    def forget(self, row: int) -> None:
        self._held.pop(row, None)

    def holds(self, row: int) -> bool:
        return row in self._held

    @torch.inference_mode()
    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """For each row and its tokens so far, up to ``count >= 1`` tokens that are likeliest to follow."""
        began, read_s = perf_counter(), 0.0
        most = max(self._capacity - self._read_len, 1)  # tokens that fit behind what is read
        most_fed = min(MOST_FED, self._read_len)
        wanted = [(row, history, min(count, most)) for row, history, count in wanted]
        first: dict[int, Tensor] = {}
        behind: list[tuple[int, list[int]]] = []
        for row, history, count in wanted:
            held = self._held.get(row)
            missing = [] if held is None else held.confirm(history)
            if held is None or len(missing) > most_fed or held.end + len(missing) + count > held.start + self._capacity:
                reads = perf_counter()
                first[row] = self._read(row, history)
                read_s += perf_counter() - reads
                self.read_seconds = _mean(self.read_seconds, perf_counter() - reads)
            else:
                behind.append((row, missing))
        first |= self._feed(behind)
        rows, counts = [row for row, _, _ in wanted], [count for _, _, count in wanted]
        longest = sorted(range(len(rows)), key=lambda index: -counts[index])  # rows of a step are the first of these
        active = upload([rows[index] for index in longest], torch.int64, self._device)
        turns = [torch.stack([first[rows[index]] for index in longest])]
        for depth in range(1, max(counts)):
            num_left = sum(count > depth for count in counts)
            active = active if num_left == len(active) else active[:num_left].clone()
            going_on = [rows[index] for index in longest[:num_left]]
            self._feed_drafted(active, going_on, turns[-1], depth)
            turns.append(self.decode.step(active, _GREEDY).token_ids.clone())
        drafts: list[list[int]] = [[] for _ in rows]
        for turn in torch.cat(turns).cpu().split(list(map(len, turns))):
            for index, token in zip(longest, turn.tolist(), strict=False):
                drafts[index].append(token)
        for row, draft in zip(rows, drafts, strict=True):
            self._held[row].drafted = draft[:-1]  # the last is not fed
        if behind:
            self.seconds = _mean(self.seconds, (perf_counter() - began - read_s) / max(counts))
        return drafts

    def release(self) -> None:
        """Free captured programs; no draft is made afterwards."""
        if isinstance(self.decode, HoldsPrograms):
            self.decode.release()

    def _inputs(self, fed: Sequence[tuple[int, int, list[int]]]) -> list[list[int]]:
        """Ids that stand for runs of tokens: each of a row, from an index in its sequence on. Padding of the larger
        vocabulary becomes the last token of this one.
        """
        last = self._decoder.config.vocab_size - 1
        return [[min(token, last) for token in tokens] for _, _, tokens in fed]

    def _feed_drafted(self, active: Tensor, rows: Sequence[int], tokens: Tensor, depth: int) -> None:
        """Feed rows, on the device and here, their ``depth``-th drafted tokens, the first of ``tokens``."""
        if depth == 1:  # further ones are fed by the step that draws them
            self._rows.feed(active, tokens[: len(rows)])

    def _feed_batch(self, rows: Sequence[int], batch: DraftBatch) -> Tensor:
        """Logits after the last entry of each of ``rows``."""
        return self.decode.feed(batch)

    def _read_logits(self, row: int, hidden: Tensor) -> Tensor:
        """Logits ``[1, V]`` from what the last layer gave the last token of a row."""
        return self._decoder.logits(hidden)

    def _place(self, rows: Sequence[int]) -> None:
        """Set the counters of rows to what is held: what was drafted behind it is taken back."""
        nums = [self._held[row].end - self._held[row].start for row in rows]
        budget = KVBudget.full(self._capacity)
        table = upload([(row, *Rows.entry(num, budget)) for row, num in zip(rows, nums, strict=True)], torch.int64,
                       self._device)  # fmt: skip
        self._rows.admit(table[:, 0], table[:, 1:])

    def _first_of(self, row: int) -> int:
        """The first token of its sequence that can be read."""
        return 0

    def _read(self, row: int, history: History) -> Tensor:
        """Prefill the last tokens of a sequence into its row; the likeliest next one. Waits for the device."""
        start = max(history.num_tokens - self._read_len, self._first_of(row))
        (read,) = self._inputs([(row, start, history.since(start).tolist())])
        ids = upload(read, torch.int64, self._device)
        num_tokens, budget = len(ids), KVBudget.full(self._capacity)

        def write(prompt: int, layer: int, queries: object, keys: Tensor, values: Tensor) -> None:
            write_rows(self._cache, layer, (row,), keys, values, None, budget, self._selector)

        positions = torch.arange(num_tokens, device=self._device)
        tokens = PassTokens(
            token_ids=ids, positions=positions, seq_lens=positions + 1, prompt_lens=[num_tokens], num_queries=[0]
        )
        one = LayerPass(self._decoder, self._buffers, tokens, self._chunk_len, self._attention, write)
        one.run()
        self._held[row] = _Held(start, history.num_tokens)
        self._place([row])
        best = self._read_logits(row, one.last_hidden())[0].argmax()
        int(best)  # its time is measured
        return best

    def _feed(self, behind: Sequence[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """Feed rows the tokens that they lack, at least one each; by row the likeliest next one."""
        first: dict[int, Tensor] = {}
        left = list(behind)
        while left:
            fed: list[tuple[int, list[int]]] = []
            room = MAX_DRAFTED
            for row, tokens in left:
                fed.append((row, tokens[: 1 + room]))
                room -= len(fed[-1][1]) - 1
            self._place([row for row, _ in fed])
            ids = self._inputs([(row, self._held[row].end, tokens) for row, tokens in fed])
            batch = draft_batch([row for row, _ in fed], [own[0] for own in ids], [own[1:] for own in ids])
            best = self._feed_batch([row for row, _ in fed], batch).argmax(1)
            for (row, tokens), token in zip(fed, best, strict=True):
                self._held[row].end += len(tokens)
                first[row] = token
            left = [
                (row, tokens[len(own) :])
                for (row, tokens), (_, own) in zip(left, fed, strict=True)
                if len(own) < len(tokens)
            ]
        if behind:
            self._place([row for row, _ in behind])
        return first


def _mean(before: float, seconds: float) -> float:
    return _DECAY * before + (1.0 - _DECAY) * seconds if before else seconds
