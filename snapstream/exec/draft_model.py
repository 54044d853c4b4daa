"""A small model that drafts tokens for the rows of an engine (speculative decoding, Leviathan et al. 2023).

It drafts greedily where prompt lookup finds nothing; ``speculation.py`` decides how many tokens pay and verifies them.
Its own memory is constant too: a row holds the last tokens of its sequence (``config/engine.py:Speculator``). When it
is full, or too far behind, half as many tokens are read anew, by prefill. Slots never wrap around, so a rejected token
is taken back by a counter. Invariant: nothing here changes an answer, only how many tokens a step
accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from snapstream.config import EngineConfig, KVBudget, make_selector
from snapstream.exec.eager import DecodeStep, StepParts, draft_batch
from snapstream.exec.executors import max_batch
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.rows import Rows
from snapstream.exec.sampling_state import SamplingNeeds, SamplingState
from snapstream.exec.speculation import History
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import Case
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import write_rows
from snapstream.models.decoder import Decoder
from snapstream.models.prefill import LayerPass, PassTokens
from snapstream.models.views import StagingBuffers

MOST_FED = 64  # tokens that a row may be behind; more are read by prefill
_GREEDY = SamplingNeeds()
_DECAY = 0.9  # of what is known of times, per call


@dataclass(slots=True)
class _Held:
    """Tokens ``start .. end`` of a sequence are in the slots of its row, and behind them drafted ones."""

    start: int
    end: int
    drafted: list[int] = field(default_factory=list)

    def confirm(self, history: History) -> list[int]:
        """Take drafted tokens that the sequence has into what is held; the tokens that are not held."""
        behind = history.since(self.end).tolist()
        num_right = 0
        for own, token in zip(self.drafted, behind, strict=False):
            if own != token:
                break
            num_right += 1
        self.end += num_right
        self.drafted = []
        return [int(token) for token in behind[num_right:]]


class DraftModel:
    """A ``speculation.Drafter`` on a CPU."""

    def __init__(self, decoder: Decoder, config: EngineConfig, target: DecodeStep) -> None:
        """``config``: of its steps (``plan/memory.py:speculator_config``). It uses the threads of ``target``."""
        assert isinstance(target, LoopedDecode)  # others are refused with a draft model
        self._decoder, self._capacity, device = decoder, config.budget.capacity, decoder.device
        spec = decoder.kv_spec(config.kv_dtype).limited(config.max_model_len)
        self._cache = KVCache(spec, config.max_rows, self._capacity, device, decoder.kernels)
        self._cache.sinks = decoder.weights.vectors.get("sinks")
        self._rows = Rows(config.max_rows, device)
        sampling = SamplingState(config.max_rows, decoder.config.vocab_size, device)
        parts = StepParts(decoder=decoder, cache=self._cache, rows=self._rows, sampling=sampling, config=config)
        self._decode, self._max_batch = LoopedDecode(parts, pool=target.pool), max_batch(config)
        size = decoder.config.hidden_size
        self._buffers = StagingBuffers(spec, size, config.pool_tokens, decoder.dtype, device)
        self._chunk_len, self._read_len = config.chunking.chunk_len, config.pool_tokens
        self._attention = choose("auto", Case.of_model(device, decoder.dtype, decoder.shard))
        self._selector = make_selector()
        self._held: dict[int, _Held] = {}
        self.seconds = self.read_seconds = 0.0

    def forget(self, row: int) -> None:
        self._held.pop(row, None)

    def holds(self, row: int) -> bool:
        return row in self._held

    @torch.inference_mode()
    def draft(self, wanted: Sequence[tuple[int, History, int]]) -> list[list[int]]:
        """For each row and its tokens so far, up to ``count >= 1`` tokens that are likeliest to follow."""
        began, read_s = perf_counter(), 0.0
        most = max(self._capacity - self._read_len, 1)  # tokens that fit behind what is read
        wanted = [(row, history, min(count, most)) for row, history, count in wanted]
        first: dict[int, int] = {}
        behind: list[tuple[int, list[int]]] = []
        for row, history, count in wanted:
            held = self._held.get(row)
            missing = [] if held is None else held.confirm(history)
            if held is None or len(missing) > MOST_FED or held.end + len(missing) + count > held.start + self._capacity:
                reads = perf_counter()
                first[row] = self._read(row, history)
                self.read_seconds = _mean(self.read_seconds, perf_counter() - reads)
                read_s += perf_counter() - reads
            else:
                self._rows.num_tokens[row] = self._rows.next_position[row] = held.end - held.start
                held.end += len(missing)
                behind.append((row, missing))
        first |= self._feed(behind)
        drafts = [[first[row]] for row, _, _ in wanted]
        rows = [row for row, _, _ in wanted]
        self._rows.last_token[rows] = torch.tensor([first[row] for row in rows])
        for depth in range(1, max(count for _, _, count in wanted)):
            active = [index for index, (_, _, count) in enumerate(wanted) if count > depth]
            tokens = self._decode.step(torch.tensor([rows[index] for index in active]), _GREEDY).token_ids.tolist()
            for index, token in zip(active, tokens, strict=True):
                drafts[index].append(token)
        for row, draft in zip(rows, drafts, strict=True):
            self._held[row].drafted = draft[:-1]  # the last is not fed
        if behind:
            depth = max(count for _, _, count in wanted)
            self.seconds = _mean(self.seconds, (perf_counter() - began - read_s) / depth)
        return drafts

    def _known(self, tokens: list[int]) -> torch.Tensor:
        """Padding of the larger vocabulary becomes the last token of this one."""
        return torch.tensor(tokens).clamp(max=self._decoder.config.vocab_size - 1)

    def _read(self, row: int, history: History) -> int:
        """Prefill the last tokens of a sequence into its row; the likeliest next one."""
        start = max(history.num_tokens - self._read_len, 0)
        ids = self._known(history.since(start).tolist())
        num_tokens, budget = len(ids), KVBudget.full(self._capacity)

        def write(prompt: int, layer: int, queries: object, keys: torch.Tensor, values: torch.Tensor) -> None:
            write_rows(self._cache, layer, (row,), keys, values, None, budget, self._selector)

        positions = torch.arange(num_tokens)
        tokens = PassTokens(
            token_ids=ids, positions=positions, seq_lens=positions + 1, prompt_lens=[num_tokens], num_queries=[0]
        )
        one = LayerPass(self._decoder, self._buffers, tokens, self._chunk_len, self._attention, write)
        one.run()
        self._rows.admit(torch.tensor([row]), torch.tensor([Rows.entry(num_tokens, num_tokens, budget)]))
        self._held[row] = _Held(start, history.num_tokens)
        return int(self._decoder.logits(one.last_hidden()).argmax())

    def _feed(self, behind: Sequence[tuple[int, list[int]]]) -> dict[int, int]:
        """Feed rows the tokens that they lack, at least one each; by row the likeliest next one."""
        first: dict[int, int] = {}
        left = [(row, self._known(tokens).tolist()) for row, tokens in behind]
        while left:
            fed: list[tuple[int, list[int]]] = []
            room = self._max_batch
            while left and room:
                row, tokens = left.pop(0)
                fed.append((row, tokens[:room]))
                if len(tokens) > room:
                    left.insert(0, (row, tokens[room:]))
                room -= len(fed[-1][1])
            batch = draft_batch([row for row, _ in fed], [t[0] for _, t in fed], [t[1:] for _, t in fed])
            best = self._decode.feed(batch).argmax(1).tolist()
            for (row, tokens), start in zip(fed, batch.starts, strict=True):
                self._rows.num_tokens[row] += len(tokens)
                self._rows.next_position[row] += len(tokens)
                first[row] = best[start + len(tokens) - 1]
        return first


def _mean(before: float, seconds: float) -> float:
    return _DECAY * before + (1.0 - _DECAY) * seconds if before else seconds
