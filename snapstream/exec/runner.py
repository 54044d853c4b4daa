"""Executes step plans on one device: opens prefill jobs, runs units, decodes rows.

The runner owns the state on the device: weights, rows, staging buffers, sampling state. The engine decides what runs
next, ``models/`` what a layer computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.config import EngineConfig, KVBudget
from snapstream.config.kv import LEAST_PART
from snapstream.exec.eager import HoldsPrograms, MakeDecode, StepParts, Verifier
from snapstream.exec.executors import executor_of
from snapstream.exec.prefill import FirstTokens, PrefillJob, PromptProgress, RowWriter
from snapstream.exec.prefix_store import PrefixMover, make_mover, save_row
from snapstream.exec.results import (
    Finished,
    HostCopy,
    PromptLogprobs,
    RowGrammars,
    SubmittedStep,
    last_entries,
    prefill_result,
    received_result,
)
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.row_transfer import RowParts, hidden_bytes, read_later
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import prompt_logprobs
from snapstream.exec.sampling_state import SamplingState
from snapstream.exec.speculation import Follower, Speculation
from snapstream.grammar import GrammarCompiler
from snapstream.kernels.backends.autotune import PrefillAttention, choose
from snapstream.kernels.backends.prefill import Case
from snapstream.kernels.memory import upload
from snapstream.kv import layout
from snapstream.kv.cache import KVCache, RowPartition
from snapstream.kv.compress import Budgets, of_all_heads, packed_bits, selected
from snapstream.kv.prefix_store import PrefixBlocks, PrefixFiles
from snapstream.kv.spec import Full
from snapstream.models.decoder import Decoder
from snapstream.models.views import StagingBuffers
from snapstream.step import JobSpec, KVConnector, PrefillEntry, ReceivedRow, StepPlan
from snapstream.types import Compression, SamplingParams


class Batch(NamedTuple):
    """A decode batch; its tensor is never modified."""

    rows: Tensor  # [B] int64, on the device
    params: list[SamplingParams]
    needs: SamplingNeeds


class DecodeBatches:
    """Makes batches and caches the last one: most steps do not change it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: tuple[int, ...] | None = None
        self._last: Batch | None = None

    def of(self, rows: tuple[int, ...], params: Mapping[int, SamplingParams]) -> Batch:
        """The batch of ``rows``; ``params`` are of all rows in use."""
        own = [params[row] for row in rows]
        if self._last is None or rows != self._rows or own != self._last.params:
            self._last = Batch(upload(rows, torch.int64, self._device), own, SamplingNeeds.of(own))
            self._rows = rows
        return self._last


logger = logging.getLogger(__name__)

_BUDGET = KVBudget(num_sink=0, num_topk=1, num_recent=1)
_MORE = 19  # prompt tokens before the observation window: more than the budget holds


@torch.inference_mode()
def warm_up_kernels(
    decoder: Decoder, cache: KVCache, buffers: StagingBuffers, config: EngineConfig, attention: PrefillAttention
) -> None:
    """Compile the Triton kernels of prefill, compression and eager decode before a request needs them.

    Triton compiles a kernel at its first launch, per combination of dtypes, model sizes and alignment of strides, not
    per prompt length. So this runs one short prompt through the first layer that compresses it, and on to the first
    with experts, and writes to the padding row.
    """
    began = perf_counter()
    if cache.capacity < _BUDGET.capacity:
        return  # nothing is ever selected
    num_tokens, budget = config.selector.observation_len + _MORE, _BUDGET
    if config.heads is not None:
        num_topk = min(2 * LEAST_PART, config.budget.num_topk)  # so that every head selects, if there are as many
        budget = replace(budget, num_topk=num_topk)
        num_tokens = max(num_tokens, budget.capacity + 1)
    entry = PrefillEntry(
        request_id="warm-up",
        token_ids=(0,) * min(num_tokens, config.pool_tokens),
        rows=(config.max_rows,),  # the padding row
        seeds=(0,),
        sampling=SamplingParams(),
        budget=budget,
        selector=config.selector,
    )
    spec = JobSpec(job_id=-1, staging_start=0, entries=(entry,), chunk_len=config.chunking.chunk_len)
    job = PrefillJob(spec, decoder, buffers, RowWriter(cache, config), attention)
    moe, num_layers = decoder.config.moe, decoder.config.num_layers
    first_experts = 0 if moe is None else min(moe.layers(num_layers)[0], num_layers - 1)
    kept = (own.budget(_BUDGET) if isinstance(own, Full) else None for own in cache.spec.layers)
    last = max(first_experts, next((index for index, budget in enumerate(kept) if budget == _BUDGET), 0))
    for unit in range((1 + last) * spec.num_chunks):
        job.run_unit(unit)
    decoder.logits(job.last_hidden())
    logger.info("kernels of prefill and compression are ready after %.1f s", perf_counter() - began)


# Bounds the logits and softmax of prompt log-probabilities to the memory that a prefill needs anyway.
_LOGITS_TOKENS, _LOGITS_BYTES = 256, 64 * 2**20


MakeDiskCache = Callable[[PrefixBlocks], PrefixFiles]
MakeWriter = Callable[[KVCache, EngineConfig], RowWriter]


class ModelRunner:
    """The ``Runner`` of one device, or of one rank."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        grammars: GrammarCompiler | None = None,
        *,
        make_decode: MakeDecode | None = None,
        make_writer: MakeWriter = RowWriter,
        make_disk_cache: MakeDiskCache | None = None,
        on_unit: Callable[[], None] = lambda: None,
        progress: bool = False,
    ) -> None:
        """``grammars`` is needed by requests with a grammar; ``progress`` is shown on stderr.

        ``make_decode`` makes the decode step, by default of ``config.executor``; ``make_writer`` the row writer,
        ``make_disk_cache`` the prefix store on disk. ``on_unit`` is called after each unit of prefill, as a heartbeat.
        """
        self.decoder, self.config = decoder, config
        model, device, dtype = decoder.config, decoder.device, decoder.dtype
        spec = decoder.kv_spec(config.kv_dtype).limited(config.max_model_len)
        self._whole_spec = decoder.whole_kv_spec(config.kv_dtype).limited(config.max_model_len)
        partition = (
            RowPartition(config.max_rows, decoder.group.rank, decoder.group.size) if decoder.is_data_parallel else None
        )
        capacity = config.budget.capacity
        heads = None if config.heads is None else config.heads.of_rank(decoder.group.rank, decoder.group.size)
        self.cache = KVCache(spec, config.max_rows, capacity, device, decoder.kernels, partition, heads, decoder.sinks)
        self.rows = Rows(config.max_rows, device)
        self.buffers = StagingBuffers(spec, model.stream_size, config.pool_tokens, dtype, device)
        self.sampling = SamplingState(config.max_rows, model.vocab_size, device)
        case = Case.of_model(device, dtype, decoder.shard)
        self.prefill_attention = choose(config.prefill_attention, case)
        logger.info(self.prefill_attention.describe())
        self.prefix_blocks: PrefixBlocks | None = None
        self.disk_cache: PrefixFiles | None = None
        self.mover: PrefixMover | None = None
        if config.prefix_store is not None:
            size, pins = config.prefix_store.block_len, device.type == "cuda"
            self.prefix_blocks = PrefixBlocks(spec, config.prefix_blocks, size, config.prefix_snapshots, pins=pins)
            self.disk_cache = None if make_disk_cache is None else make_disk_cache(self.prefix_blocks)
            self.mover = make_mover(self.prefix_blocks, config.pool_tokens, device)
        self._on_unit = on_unit
        self._writer = make_writer(self.cache, config)
        self.step_parts = StepParts(
            decoder=decoder, cache=self.cache, rows=self.rows, sampling=self.sampling, config=config
        )
        self._grammars = RowGrammars(grammars, self.sampling)
        self.first_tokens = FirstTokens(self.step_parts, self._grammars, self._writer)
        self._batches = DecodeBatches(device)
        self._parts = RowParts(self.cache, decoder)
        self._connector: KVConnector | None = None
        self.jobs: dict[int, PrefillJob] = {}  # open ones, by id
        self.speculation: Speculation | None = None
        self.use_decode(make_decode or executor_of(config.executor).decode_step, progress=progress)
        if decoder.kernels.version == "triton":
            warm_up_kernels(decoder, self.cache, self.buffers, config, self.prefill_attention)

    def use_decode(self, make_decode: MakeDecode, *, progress: bool = False) -> None:
        """Make and warm up another decode step over the same rows, to compare executors."""
        self.decode = make_decode(self.step_parts)
        self.decode.warm_up(progress)
        self.first_tokens.use_decode(self.decode)
        self.speculation = None
        if self.config.num_speculative_tokens and isinstance(self.decode, Verifier):
            most = self.config.num_speculative_tokens
            self.speculation = Speculation(self.step_parts, self.decode, most, self._grammars)

    def connect(self, connector: KVConnector) -> None:
        """See ``Runner.connect``. Of several ranks only rank 0 has a connector."""
        self._connector = connector

    def is_ready(self, job_id: int) -> bool:
        return self.mover is None or self.mover.is_ready(job_id)

    def close(self) -> None:
        """See ``Runner.close``; frees captured programs."""
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()  # the last replay may still run
        holders: tuple[object, ...] = (self.decode, self.speculation and self.speculation.drafter)
        for holder in holders:
            if isinstance(holder, HoldsPrograms):
                holder.release()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Run a plan; on a GPU this returns before the device is done."""
        try:
            return self._run(plan)
        except BaseException:  # jobs of this plan cannot continue
            for job_id in (*(spec.job_id for spec in plan.opened_jobs), *(units.job_id for units in plan.units)):
                with suppress(RuntimeError):  # of the device, raised above
                    self._drop(job_id)
            raise

    def _run(self, plan: StepPlan) -> SubmittedStep:
        step = SubmittedStep(plan.step_id)
        self._grammars.catch_up()
        for job_id in plan.dropped_jobs:
            self._drop(job_id)
        if self.prefix_blocks is not None:
            for saved in plan.saved_rows:
                save_row(self.prefix_blocks, self.cache, saved)
        for spec in plan.opened_jobs:
            self.jobs[spec.job_id] = self._open_job(spec)
            for entry in spec.entries:
                self._grammars.prepare(entry)
        for entry in plan.prepared:
            self._grammars.prepare(entry)
        if plan.received:
            self._receive(plan.received, step)
        for units in plan.units:
            job = self.jobs[units.job_id]
            for unit in range(units.first, units.first + units.count):
                job.run_unit(unit)
                self._on_unit()
            if job.is_done:
                if self.mover is not None:
                    self.mover.close(job.spec.job_id, is_done=True)
                self._finish_job(job, step)
                del self.jobs[units.job_id]
        if plan.decode_rows:
            batch = self._batches.of(plan.decode_rows, self.first_tokens.params)
            self._decode(plan, batch, step)
        return step

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> tuple[tuple[int, ...], ...] | None:
        """On rank 0, before all ranks run a plan: its ``drafts``."""
        if self.speculation is None or not plan.decode_rows:
            return None
        self._grammars.catch_up()
        batch = self._batches.of(plan.decode_rows, self.first_tokens.params)
        return self.speculation.propose(plan.decode_rows, batch.rows)

    def _decode(self, plan: StepPlan, batch: Batch, step: SubmittedStep) -> None:
        rows, verified = plan.decode_rows, None
        if self.speculation is None:
            sampled = self.decode.step(batch.rows, batch.needs)
        else:
            sampled, verified = self.speculation.step(rows, batch.rows, batch.needs, plan.drafts)
        copy = step.add_decoded(sampled, batch.params, verified)
        self._grammars.follow(rows if verified is None else last_entries(rows, verified), copy, step)

    def _drop(self, job_id: int) -> None:
        self.jobs.pop(job_id, None)
        if self.mover is not None:  # perhaps opened before the job was registered
            self.mover.close(job_id, is_done=False)

    def _open_job(self, spec: JobSpec) -> PrefillJob:
        if self.mover is not None:
            self.mover.open(spec)
        return PrefillJob(
            spec,
            self.decoder,
            self.buffers,
            self._writer,
            self.prefill_attention,
            self.mover,
            self._send,
            num_hidden=0 if self._follower is None else self._follower.num_hidden,
        )

    def _finish_job(self, job: PrefillJob, step: SubmittedStep) -> None:
        """Sample the first token of every row of the job, except rows that are sent to another engine."""
        hidden = job.last_hidden()  # [prompts, D]
        drawn: list[int] = []
        finished: list[Finished] = []
        for index, prompt in enumerate(job.prompts):
            entry = prompt.entry
            kept = self._kept(prompt), self._budgets(entry)
            logprobs = self._prompt_logprobs(job, prompt)
            result = partial(prefill_result, entry, self._compression(entry), prompt.compress_time, kept, logprobs)
            finished.append(Finished(entry, result))
            if entry.is_sent:
                if self._connector is not None:
                    self._connector.put_last(entry.request_id, hidden_bytes(hidden[index]))
                step.add_sent(finished[-1], self.decoder.device)
            else:
                drawn.append(index)
        if len(drawn) == len(finished):
            self._draw(finished, hidden, step)
        elif drawn:
            self._draw([finished[index] for index in drawn], torch.stack([hidden[i] for i in drawn]), step)
        if (follower := self._follower) is not None:
            for prompt in (job.prompts[index] for index in drawn):
                follower.begin(prompt.entry.rows, *job.last_hidden_of(prompt))

    @property
    def _follower(self) -> Follower | None:
        return None if self.speculation is None else self.speculation.follower

    def _draw(self, prompts: Sequence[Finished], hidden: Tensor, step: SubmittedStep) -> None:
        """First tokens of prompts, from the hidden states ``[P, D]`` of their last tokens."""
        self.first_tokens.draw(prompts, hidden, step)
        if self.speculation is not None:
            for prompt in prompts:
                self.speculation.admit(prompt.entry)

    def _receive(self, received: Sequence[ReceivedRow], step: SubmittedStep) -> None:
        """Copy received rows, and continue as after a prefill."""
        for row in received:
            for layer in range(self.cache.spec.num_layers):
                self._parts.place(layer, row.entry, None if row.row is None else row.row.parts[layer])
                self._on_unit()
        prompts = [Finished(row.entry, partial(received_result, row)) for row in received]
        hidden = self._parts.hidden([row.row for row in received])
        self._draw(prompts, hidden, step)
        if (follower := self._follower) is not None:
            for prompt in prompts:
                follower.begin(prompt.entry.rows, prompt.entry.prompt_len, hidden[:0])

    def _send(self, layer: int, entry: PrefillEntry) -> None:
        part = self._parts.take(layer, entry)  # a collective
        if self._connector is not None:
            self._connector.put(entry.request_id, read_later(part))

    def _compression(self, entry: PrefillEntry) -> Compression:
        budget, prompt_len, spec = entry.budget, entry.prompt_len, self._whole_spec
        kept = layout.num_visible(prompt_len, budget.capacity)
        if self.config.heads is not None:
            kept = self.config.heads.of(budget, prompt_len).mean_visible(prompt_len)
        return Compression(
            prompt_tokens=prompt_len,
            kept_tokens=kept,
            evicted_tokens=prompt_len - kept,
            row_bytes=spec.row_bytes(budget.capacity),
            full_bytes=spec.visible_bytes(prompt_len, prompt_len),
            compress_ms=0.0,
            ring_tokens=budget.capacity - layout.ring_start(budget, prompt_len),
        )

    def _kept(self, prompt: PromptProgress) -> HostCopy | None:
        """The kept positions of a prompt, if requested and any were selected."""
        if not prompt.kept:
            return None
        budgets, prompt_len = self._budgets(prompt.entry), prompt.entry.prompt_len
        kept = of_all_heads(prompt.kept, budgets, prompt_len, self.decoder.group)
        find = packed_bits if prompt.entry.sampling.return_kept == "bitmap" else selected
        return HostCopy(find(kept, budgets, prompt_len))

    def _budgets(self, entry: PrefillEntry) -> Budgets:
        """Of all kv heads of the model."""
        spec, profile = self._whole_spec, self.config.heads
        heads = (spec.slots_of(layer).num_kv_heads for layer in spec.slot_layer_indices)
        equal = tuple((own,) * count for own, count in zip(spec.budgets(entry.budget), heads, strict=True))
        if profile is None:
            return equal
        budgets = profile.of(entry.budget, entry.prompt_len).budgets
        return tuple(budgets[layer] or own for layer, own in zip(spec.slot_layer_indices, equal, strict=True))

    def _prompt_logprobs(self, job: PrefillJob, prompt: PromptProgress) -> PromptLogprobs | None:
        """Log-probability of every prompt token after the first, from the uncompressed prefill."""
        num_top = prompt.entry.sampling.prompt_logprobs
        if num_top is None:
            return None
        out = PromptLogprobs(prompt.entry.token_ids)
        first, last = prompt.job_start, prompt.job_start + prompt.entry.prompt_len - 1
        at_once = logits_tokens(self.decoder.config.vocab_size)
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            logits = self.decoder.logits(job.hidden[start:stop])  # [t, V]
            out.add(prompt_logprobs(logits, job.token_ids[start + 1 : stop + 1], num_top))
            self._on_unit()
        return out


def logits_tokens(vocab_size: int) -> int:
    """Prompt tokens whose logits are computed at a time; at most 24 bytes for each token of the vocabulary."""
    return max(1, min(_LOGITS_TOKENS, _LOGITS_BYTES // (24 * vocab_size)))
