"""Executes step plans on one device: opens prefill jobs, runs units, decodes rows.

Owns everything that lives there: weights, rows, staging pool, sampling state. Holds no opinion on who runs next (that
is ``engine/``), nor on what a layer computes (``models/``).
"""

from __future__ import annotations

import logging

import torch

from snapstream.cache import layout
from snapstream.cache.kept import kept_bitmap, selected_positions
from snapstream.cache.kv_cache import KVCache
from snapstream.config import EngineConfig
from snapstream.grammar import GrammarCompiler
from snapstream.kernels import fp8
from snapstream.kernels.dispatch import runs_triton
from snapstream.kernels.prefill.choice import choose
from snapstream.kernels.prefill.versions import Case
from snapstream.layers.logprobs import prompt_logprobs
from snapstream.layers.sampler import sample
from snapstream.layers.sampling_state import NewRow, SamplingNeeds, SamplingState
from snapstream.layers.upload import upload
from snapstream.models.decoder import Decoder
from snapstream.request import Compression, Logprob, SamplingParams
from snapstream.runner.executors import make_decode
from snapstream.runner.grammars import RowGrammars
from snapstream.runner.prefill import PrefillJob, PromptProgress
from snapstream.runner.rescoring import RecentQueries, Rescorer
from snapstream.runner.results import FinishedPrompt, SubmittedStep
from snapstream.runner.rows import Rows
from snapstream.runner.staging import StagingPool
from snapstream.runner.warm_up import warm_up_kernels
from snapstream.step import JobSpec, StepPlan

logger = logging.getLogger(__name__)

# Prompt log-probabilities are taken for so many tokens at a time that their logits, in the storage dtype and in fp32,
# and the softmax stay within what a prefill takes anyway: nothing sets memory aside for them.
_LOGITS_TOKENS, _LOGITS_BYTES = 256, 64 * 2**20


class ModelRunner:
    """The ``Runner`` of one device."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        grammars: GrammarCompiler | None = None,
        *,
        progress: bool = False,
    ) -> None:
        """``grammars`` is needed by requests that bring a grammar, and by no others; ``progress`` shows on stderr."""
        self.decoder, self.config = decoder, config
        model, device, dtype = decoder.config, decoder.device, decoder.dtype
        kv_dtype = fp8.DTYPE if config.kv_dtype == "fp8" else dtype
        self.cache = KVCache(model, config.max_rows, config.budget.capacity, kv_dtype, device)
        self.rows = Rows(config.max_rows, device)
        self.staging = StagingPool(model, config.pool_tokens, dtype, device)
        self.sampling = SamplingState(config.max_rows, model.vocab_size, device)
        case = Case.of(device, dtype, model.head_dim, model.group_size)
        self.prefill_attention = choose(config.prefill_attention, case)
        logger.info(self.prefill_attention.describe())
        queries = self._rescorer = None
        if config.rescoring is not None:
            queries = RecentQueries(model, config.max_rows, config.rescoring.num_queries, dtype, device)
            self._rescorer = Rescorer(self.cache, self.rows, queries, config.snapkv, config.rescoring)
        self._decode = make_decode(decoder, self.cache, self.rows, self.sampling, config, progress, queries)
        if runs_triton(self.staging.k):
            warm_up_kernels(decoder, self.cache, self.staging, config, self.prefill_attention)
            if config.executor == "eager":  # captured decode has run before
                with torch.inference_mode():
                    self._decode.logits(torch.tensor([self.cache.padding_row], device=device))
        # Some checkpoints name end tokens that their vocabulary does not have; they can never be drawn.
        self._end_ids = tuple(token for token in model.eos_token_ids if 0 <= token < model.vocab_size)
        self._grammars = RowGrammars(grammars, self.sampling)
        self._jobs: dict[int, PrefillJob] = {}
        self._params: dict[int, SamplingParams] = {}  # by row: which variant of the sampler a batch needs

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Run a plan; on a GPU this returns before the device is done."""
        try:
            return self._run(plan)
        except BaseException:  # Ctrl-C too: jobs of this plan cannot go on, and their prompts must not be kept
            for job_id in (*(spec.job_id for spec in plan.opened_jobs), *(units.job_id for units in plan.units)):
                self._jobs.pop(job_id, None)
            raise

    def _run(self, plan: StepPlan) -> SubmittedStep:
        step = SubmittedStep(plan.step_id)
        self._grammars.catch_up()
        for job_id in plan.dropped_jobs:
            self._jobs.pop(job_id, None)
        for spec in plan.opened_jobs:
            self._jobs[spec.job_id] = self._open_job(spec)
            self._grammars.prepare(spec)
        for units in plan.units:
            job = self._jobs[units.job_id]
            for unit in range(units.first, units.first + units.count):
                job.run_unit(unit)
            if job.is_done:
                self._finish_job(job, step)
                del self._jobs[units.job_id]
        if plan.decode_rows:
            params = [self._params[row] for row in plan.decode_rows]
            if self._rescorer is not None:
                self._rescorer.before_step(plan.decode_rows)
            rows = upload(plan.decode_rows, torch.int64, self.decoder.device)
            copy = step.add_decoded(self._decode.step(rows, SamplingNeeds.of(params)), params)
            self._grammars.follow(plan.decode_rows, copy, step)
        return step

    def _open_job(self, spec: JobSpec) -> PrefillJob:
        return PrefillJob(
            spec,
            self.decoder,
            self.cache,
            self.staging,
            self.config.snapkv,
            self.config.chunk_len,
            self.prefill_attention,
            self._rescorer,
        )

    def _finish_job(self, job: PrefillJob, step: SubmittedStep) -> None:
        """Sample the first token of every row of the job and hand the rows to decode."""
        table: list[tuple[int, ...]] = []  # per row: itself, index of its prompt, counters
        new: list[NewRow] = []
        for index, prompt in enumerate(job.prompts):
            entry = prompt.entry
            counters = self.rows.entry(prompt.prompt_len, entry.next_position, entry.budget)
            ends = () if entry.sampling.ignore_eos else self._end_ids
            stop_ids = (*ends, *entry.sampling.stop_token_ids)
            for row, seed in zip(entry.rows, entry.seeds, strict=True):
                self._params[row] = entry.sampling
                table.append((row, index, *counters))
                new.append(NewRow(row, entry.sampling, seed, entry.token_ids, stop_ids))
        uploaded = upload(table, torch.int64, self.decoder.device)  # [rows, 6]
        rows, source = uploaded[:, 0], uploaded[:, 1]
        self.rows.admit(rows, uploaded[:, 2:])
        self.sampling.set_rows(new)
        for prompt in job.prompts:
            self._grammars.admit(prompt.entry)
            if self._rescorer is not None:
                self._rescorer.admit(prompt.entry, self.config.rescoring)
        params = [entry.sampling for entry in new]
        logits = self.decoder.logits(job.last_hidden())[source]  # [rows, V]
        sampled = sample(logits, self.sampling, rows, SamplingNeeds.of(params))
        self.rows.feed(rows, sampled.token_ids)
        finished = [
            FinishedPrompt(
                prompt.entry.request_id,
                len(prompt.entry.rows),
                self._compression(prompt),
                prompt.compress_time,
                self._prompt_logprobs(job, prompt),
            )
            for prompt in job.prompts
        ]
        self._grammars.follow([entry.row for entry in new], step.add_prefilled(sampled, params, finished), step)

    def _compression(self, prompt: PromptProgress) -> Compression:
        model, budget = self.decoder.config, prompt.entry.budget
        kept = layout.num_visible(prompt.prompt_len, budget.capacity)
        size = self.config.kv_bytes
        is_bitmap = prompt.entry.sampling.return_kept == "bitmap"
        return Compression(
            prompt_tokens=prompt.prompt_len,
            kept_tokens=kept,
            evicted_tokens=prompt.prompt_len - kept,
            row_bytes=layout.row_bytes(model, budget.capacity, size),
            full_bytes=layout.row_bytes(model, prompt.prompt_len, size),
            compress_ms=0.0,
            ring_tokens=budget.capacity - layout.ring_start(budget, prompt.prompt_len),
            kept_positions=selected_positions(prompt.kept, budget) if prompt.kept and not is_bitmap else None,
            kept_bitmap=kept_bitmap(prompt.kept, prompt.prompt_len) if prompt.kept and is_bitmap else None,
        )

    def _prompt_logprobs(self, job: PrefillJob, prompt: PromptProgress) -> list[Logprob | None] | None:
        """Log-probability of every prompt token after the first, from the uncompressed prefill."""
        num_top = prompt.entry.sampling.prompt_logprobs
        if num_top is None:
            return None
        out: list[Logprob | None] = [None]
        first, last = prompt.job_start, prompt.job_start + prompt.prompt_len - 1
        at_once = logits_tokens(self.decoder.config.vocab_size)
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            logits = self.decoder.logits(job.hidden[start:stop])  # [t, V]
            next_ids = job.token_ids[start + 1 : stop + 1]
            own, top_ids, top_values = prompt_logprobs(logits, next_ids, num_top)
            columns = (next_ids.tolist(), own.tolist(), top_ids.tolist(), top_values.tolist())
            for token, value, ids, values in zip(*columns, strict=True):
                out.append(Logprob(token, value, tuple(zip(ids, values, strict=True))))
        return out


def logits_tokens(vocab_size: int) -> int:
    """Prompt tokens whose logits are there at a time; at most 24 bytes for each token of the vocabulary."""
    return max(1, min(_LOGITS_TOKENS, _LOGITS_BYTES // (24 * vocab_size)))
