"""Prefill jobs: packed prompts go through the layers, and their rows are written as each layer ends.

Of a prompt that begins with blocks of the prefix store only the rest is computed: before each layer ``prefix_store.py``
copies the blocks into staging. Rows are always written from the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from snapstream.config import EngineConfig, KVBudget
from snapstream.exec.eager import DecodeStep, OwnSampler, StepParts
from snapstream.exec.prefix_store import PrefixMover
from snapstream.exec.results import Finished, RowGrammars, Stopwatch, SubmittedStep
from snapstream.exec.row_state import NewRow, SamplingNeeds
from snapstream.exec.rows import Counters, Rows
from snapstream.exec.sampling import sample
from snapstream.kernels.backends.autotune import PrefillAttention
from snapstream.kernels.memory import upload
from snapstream.kv import layout
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import all_kept, kept_positions, write_rows
from snapstream.kv.spec import Shared, State
from snapstream.models.decoder import Decoder
from snapstream.models.prefill import LayerPass, PassTokens
from snapstream.models.views import StagingBuffers
from snapstream.step import JobSpec, PrefillEntry
from snapstream.types import SamplingParams


class RowWriter:
    """Writes prompts to their rows, layer by layer, as they are prefilled.

    Everything that depends on a request's budget and selector is here: to write other rows from the same prefill,
    replace the writer (``evals/shared.py``).
    """

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self.cache, self.config = cache, config

    def num_queries(self, entry: PrefillEntry) -> int:
        """How many of the last queries of a prompt ``write`` needs; 0 if nothing is selected."""
        if not any(layout.candidates(budget, entry.prompt_len) for budget in self._budgets(entry)):
            return 0
        return entry.selector.num_queries(entry.prompt_len)

    def write(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, values: Tensor
    ) -> Tensor | None:
        """Write one layer of a prompt: ``queries [w, H, E]``, ``keys, values [G, N, E]``.

        With data-parallel attention each rank writes its own rows, but all choose together what is kept. Returns the
        kept positions of all heads ``[n]`` (``kv/compress.py``) if the request asks for them and anything is evicted.
        """
        prompt_len = keys.shape[1]
        kept = write_rows(
            self.cache, layer, self.cache.local_rows(entry.rows), keys, values, queries, entry.budget, entry.selector
        )
        asked = self._budget_of_other_ranks(layer, entry)
        if asked is not None:
            kept_positions(queries, keys, layer, asked, entry.selector, self.cache.score_kernels(layer))
        if not entry.sampling.return_kept:
            return None
        if not any(layout.is_compressed(budget, prompt_len) for budget in self._budgets(entry)):
            return None
        return all_kept(kept, self.cache.spans(layer, entry.budget, prompt_len), prompt_len, keys.device)

    def counters(self, entry: PrefillEntry) -> list[Counters]:
        """Counters of each of the entry's rows, which hold the whole prompt now."""
        heads = self.config.heads
        widest = entry.budget if heads is None else heads.of(entry.budget, entry.prompt_len).widest
        return [Rows.entry(entry.prompt_len, widest)] * len(entry.rows)

    def admit(self, entry: PrefillEntry) -> None:
        if self.cache.heads is not None:
            self.cache.heads.admit(entry.rows, entry.budget, entry.prompt_len)

    def _budgets(self, entry: PrefillEntry) -> Collection[KVBudget]:
        """The distinct budgets of kv heads, on all ranks."""
        heads = self.config.heads
        return (entry.budget,) if heads is None else heads.of(entry.budget, entry.prompt_len).distinct

    def _budget_of_other_ranks(self, layer: int, entry: PrefillEntry) -> KVBudget | None:
        """Ranks that share kv heads sum their attention scores in one collective: the budget of a head for which other
        ranks select, where this rank has nothing to select.
        """
        heads, prompt_len = self.config.heads, entry.prompt_len
        if heads is None or self.config.parallel.size <= max(map(len, heads.topk)):
            return None  # kv heads are whole on a rank
        (own,) = self.cache.spans(layer, entry.budget, prompt_len)
        if layout.candidates(own.budget, prompt_len):
            return None
        budgets = heads.of(entry.budget, prompt_len).budgets[layer]
        return next((budget for budget in budgets if layout.candidates(budget, prompt_len)), None)


class FirstTokens:
    """Samples the first token of every row whose prompt was prefilled, here or by another engine.

    Invariant: it depends on the prompt's last hidden state and on nothing else of the prefill engine; sampling,
    grammars and seeds are those of the decode engine.
    """

    def __init__(self, parts: StepParts, grammars: RowGrammars, writer: RowWriter) -> None:
        self._parts, self._grammars, self._writer = parts, grammars, writer
        model = parts.decoder.config
        # Some checkpoints name end tokens that their vocabulary does not have; they can never be drawn.
        self._end_ids = tuple(token for token in model.eos_token_ids if 0 <= token < model.vocab_size)
        self.params: dict[int, SamplingParams] = {}  # by row: which variant of the sampler a batch needs
        self._sampler: OwnSampler | None = None

    def use_decode(self, decode: DecodeStep) -> None:
        """Draw as ``decode`` does from now on; both ways draw the same tokens."""
        self._sampler = decode if isinstance(decode, OwnSampler) else None

    def draw(self, prompts: Sequence[Finished], hidden: Tensor, step: SubmittedStep) -> None:
        """``hidden [P, D]``: of the last token of each prompt, whose rows are written; none may be missing."""
        table: list[tuple[int, ...]] = []  # per row: itself, index of its prompt, its adapter, counters
        new: list[NewRow] = []
        for index, prompt in enumerate(prompts):
            entry = prompt.entry
            ends = () if entry.sampling.ignore_eos else self._end_ids
            stop_ids = (*ends, *entry.sampling.stop_token_ids)
            for row, seed, counters in zip(entry.rows, entry.seeds, self._writer.counters(entry), strict=True):
                self.params[row] = entry.sampling
                table.append((row, index, entry.adapter, *counters))
                new.append(NewRow(row, entry.sampling, seed, entry.token_ids, stop_ids))
        decoder, sampling = self._parts.decoder, self._parts.sampling
        uploaded = upload(table, torch.int64, decoder.device)  # [rows, 6]
        rows, source = uploaded[:, 0], uploaded[:, 1]
        self._parts.rows.admit(rows, uploaded[:, 3:])
        self._parts.rows.adapter[rows] = uploaded[:, 2]
        sampling.set_rows(new)
        for prompt in prompts:
            self._grammars.admit(prompt.entry)
            self._writer.admit(prompt.entry)
        params = [entry.sampling for entry in new]
        logits, needs = decoder.logits(hidden)[source], SamplingNeeds.of(params)  # [rows, V]
        if self._sampler is not None:
            sampled = self._sampler.sample(logits, rows, needs)
        else:
            sampled = sample(logits, sampling, rows, needs)
        self._parts.rows.feed(rows, sampled.token_ids)
        self._grammars.follow([entry.row for entry in new], step.add_prefilled(sampled, params, prompts), step)


class RowStates:
    """A ``PromptStates``: recurrent layers keep the state of a prompt in its first row."""

    def __init__(
        self,
        cache: KVCache,
        entries: Sequence[PrefillEntry],
        send: Callable[[int, PrefillEntry], None],
        mover: PrefixMover | None,
    ) -> None:
        """``send``, ``mover``: see ``PrefillJob``."""
        self._cache, self._entries, self._send, self._mover = cache, entries, send, mover

    def of(self, prompt: int, layer: int) -> Mapping[str, Tensor]:
        row = self._entries[prompt].rows[0]
        return {name: stored[row] for name, stored in self._cache.state(layer).items()}

    def begin(self, prompt: int, layer: int) -> None:
        moves = self._entries[prompt].prefix
        for name, tensor in self.of(prompt, layer).items():
            if moves is None or moves.state is None:
                tensor.zero_()
            else:
                tensor.copy_(self._stored(moves.state, layer)[name])

    def ends(self, prompt: int) -> Sequence[int]:
        moves = self._entries[prompt].prefix
        return () if moves is None else moves.snapshot_ends

    def reached(self, prompt: int, layer: int, num_tokens: int) -> None:
        moves = self._entries[prompt].prefix
        assert moves is not None
        stored = self._stored(moves.snapshots[moves.snapshot_ends.index(num_tokens)], layer)
        for name, tensor in self.of(prompt, layer).items():
            stored[name].copy_(tensor)

    def _stored(self, snapshot: int, layer: int) -> Mapping[str, Tensor]:
        assert self._mover is not None
        return self._mover.blocks.state(snapshot, layer)

    def done(self, prompt: int, layer: int) -> None:
        first, *others = self._entries[prompt].rows
        if others:
            self._cache.copy_state(layer, first, others)
        if self._entries[prompt].is_sent:
            self._send(layer, self._entries[prompt])


class PromptProgress:
    def __init__(self, entry: PrefillEntry, job_start: int, device: torch.device) -> None:
        self.entry = entry
        self.job_start = job_start  # first token, counted in the job
        self.compress_time = Stopwatch(device)
        self.kept: list[Tensor] = []  # per layer [n], if asked for


class PrefillJob:
    """One ``JobSpec`` on the device. ``run_unit`` must be called for units 0, 1, 2, ... in order."""

    def __init__(
        self,
        spec: JobSpec,
        decoder: Decoder,
        buffers: StagingBuffers,
        writer: RowWriter,
        attention: PrefillAttention,
        mover: PrefixMover | None = None,
        send: Callable[[int, PrefillEntry], None] = lambda layer, entry: None,
        *,
        num_hidden: int = 0,
    ) -> None:
        """``mover`` is needed by prompts that use the prefix store; ``send`` is called after a layer of a row for
        another engine was written. ``num_hidden``: see ``last_hidden_of``.
        """
        self.spec, self._writer, self._mover, self._send = spec, writer, mover, send
        device, entries = buffers.hidden.device, spec.entries
        computed = [entry.token_ids[entry.num_restored :] for entry in entries]  # by prompt
        starts = accumulate(map(len, computed), initial=0)
        self.prompts = [PromptProgress(entry, start, device) for entry, start in zip(entries, starts, strict=False)]
        tokens = PassTokens(
            token_ids=upload([token for ids in computed for token in ids], torch.int64, device),
            positions=torch.cat(
                [torch.arange(entry.num_restored, entry.prompt_len, device=device) for entry in entries]
            ),
            seq_lens=torch.cat(
                [
                    torch.full((len(ids),), own.prompt_len, device=device)
                    for own, ids in zip(entries, computed, strict=True)
                ]
            ),
            prompt_lens=[entry.prompt_len for entry in entries],
            num_queries=[writer.num_queries(entry) for entry in entries],
            staging_start=spec.staging_start,
            num_restored=[entry.num_restored for entry in entries],
            adapters=[entry.adapter for entry in entries],
            num_hidden=num_hidden,
        )
        self.token_ids = tokens.token_ids  # [N]
        wants_all = any(entry.sampling.prompt_logprobs is not None for entry in entries)
        self._pass = LayerPass(
            decoder,
            buffers,
            tokens,
            spec.chunk_len,
            attention,
            self._layer_done,
            "all" if wants_all else "last",
            RowStates(writer.cache, entries, send, mover),
        )
        self._num_hidden = num_hidden

    @property
    def hidden(self) -> Tensor:
        """Hidden states ``[N, D]`` of the packed prompts."""
        return self._pass.hidden

    def last_hidden_of(self, prompt: PromptProgress) -> tuple[int, Tensor]:
        """The same of the last ``num_hidden`` tokens of a prompt, or those that were computed; and the first one."""
        count = min(prompt.entry.prompt_len - prompt.entry.num_restored, self._num_hidden)
        end = prompt.job_start + prompt.entry.prompt_len - prompt.entry.num_restored
        return prompt.entry.prompt_len - count, self.hidden[end - count : end]

    @property
    def is_done(self) -> bool:
        return self._pass.is_done

    def last_hidden(self) -> Tensor:
        """Hidden states ``[prompts, D]`` after the last layer, of the last token of each prompt."""
        return self._pass.last_hidden()

    def run_unit(self, unit: int) -> None:
        """One chunk through one layer; its last chunk writes that layer of the rows. RuntimeError out of order."""
        if unit != self._pass.next_unit:
            raise RuntimeError(f"job {self.spec.job_id}: unit {unit} was planned, unit {self._pass.next_unit} is next")
        if self._pass.new_layer is not None:
            self._restore(self._pass.new_layer)
        self._pass.run_unit(unit)

    def _restore(self, layer: int) -> None:
        if self._mover is None or isinstance(self._writer.cache.spec.layers[layer], State):
            return
        for index, prompt in enumerate(self.prompts):
            self._mover.place(self.spec, prompt.entry, layer, *self._pass.staged(index, layer))

    def _layer_done(self, prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        own = self.prompts[prompt]
        if isinstance(self._writer.cache.spec.layers[layer], Shared):  # the source has written its row
            if own.entry.is_sent:
                self._send(layer, own.entry)
            return
        if self._mover is not None:
            self._mover.save(self.spec, own.entry, layer, keys, values)
        own.compress_time.start()
        kept = self._writer.write(layer, own.entry, queries, keys, values)
        if kept is not None:
            own.kept.append(kept)
        own.compress_time.stop()
        if own.entry.is_sent:
            self._send(layer, own.entry)
