"""Executes step plans on one device: opens prefill jobs, runs units, decodes rows.

Owns everything that lives there: weights, rows, staging pool, sampling state. Holds no opinion on who runs next (that
is ``engine/``), nor on what a layer computes (``models/``).
"""

from __future__ import annotations

import torch

from snapstream.cache import layout
from snapstream.cache.kv_cache import KVCache
from snapstream.config import DTYPE_BYTES, EngineConfig
from snapstream.layers.logprobs import prompt_logprobs
from snapstream.layers.sampler import sample
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.models.decoder import Decoder
from snapstream.request import Compression, Logprob, SamplingParams
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.prefill import PrefillJob, PromptProgress
from snapstream.runner.results import FinishedPrompt, SubmittedStep
from snapstream.runner.rows import Rows
from snapstream.runner.staging import StagingPool
from snapstream.step import StepPlan

_LOGITS_TOKENS = 256  # prompt log-probabilities are taken for this many tokens at a time: [256, V] fp32


class ModelRunner:
    """The ``Runner`` of one device."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.decoder, self.config = decoder, config
        model, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.cache = KVCache(model, config.max_rows, config.budget.capacity, dtype, device)
        self.rows = Rows(config.max_rows, device)
        self.staging = StagingPool(model, config.pool_tokens, dtype, device)
        self.sampling = SamplingState(config.max_rows, model.vocab_size, device)
        self._decode = EagerDecode(decoder, self.cache, self.rows, self.sampling)
        # Some checkpoints name end tokens that their vocabulary does not have; they can never be drawn.
        self._end_ids = tuple(token for token in model.eos_token_ids if 0 <= token < model.vocab_size)
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
        for job_id in plan.dropped_jobs:
            self._jobs.pop(job_id, None)
        for spec in plan.opened_jobs:
            self._jobs[spec.job_id] = PrefillJob(
                spec, self.decoder, self.cache, self.staging, self.config.snapkv, self.config.chunk_len
            )
        for units in plan.units:
            job = self._jobs[units.job_id]
            for unit in range(units.first, units.first + units.count):
                job.run_unit(unit)
            if job.is_done:
                self._finish_job(job, step)
                del self._jobs[units.job_id]
        if plan.decode_rows:
            params = [self._params[row] for row in plan.decode_rows]
            rows = torch.tensor(plan.decode_rows, dtype=torch.int64, device=self.decoder.device)
            step.add_decoded(self._decode.step(rows, SamplingNeeds.of(params)), params)
        return step

    def _finish_job(self, job: PrefillJob, step: SubmittedStep) -> None:
        """Sample the first token of every row of the job and hand the rows to decode."""
        row_list: list[int] = []
        source: list[int] = []  # index of the prompt, per row
        params: list[SamplingParams] = []
        for index, prompt in enumerate(job.prompts):
            entry = prompt.entry
            row_list.extend(entry.rows)
            source.extend([index] * len(entry.rows))
            params.extend([entry.sampling] * len(entry.rows))
            self.rows.admit(entry.rows, prompt.prompt_len, prompt.prompt_len, entry.budget)
            ends = () if entry.sampling.ignore_eos else self._end_ids
            stop_ids = (*ends, *entry.sampling.stop_token_ids)
            for row, seed in zip(entry.rows, entry.seeds, strict=True):
                self._params[row] = entry.sampling
                self.sampling.set_row(row, entry.sampling, seed, entry.token_ids, stop_ids)
        device = self.decoder.device
        rows = torch.tensor(row_list, dtype=torch.int64, device=device)
        logits = self.decoder.logits(job.last_hidden())[torch.tensor(source, device=device)]  # [rows, V]
        sampled = sample(logits, self.sampling, rows, SamplingNeeds.of(params))
        self.rows.last_token[rows] = sampled.token_ids
        finished = [
            FinishedPrompt(
                prompt.entry.request_id,
                len(prompt.entry.rows),
                self._compression(prompt),
                self._prompt_logprobs(job, prompt),
            )
            for prompt in job.prompts
        ]
        step.add_prefilled(sampled, params, finished)

    def _compression(self, prompt: PromptProgress) -> Compression:
        model, budget = self.decoder.config, prompt.entry.budget
        kept = layout.num_visible(prompt.prompt_len, budget.capacity)
        size = DTYPE_BYTES[self.config.dtype]
        positions = None
        if prompt.kept:
            region = slice(budget.num_sink, budget.num_sink + budget.num_topk)
            positions = tuple(tuple(map(tuple, layer[:, region].tolist())) for layer in prompt.kept)
        return Compression(
            prompt_tokens=prompt.prompt_len,
            kept_tokens=kept,
            evicted_tokens=prompt.prompt_len - kept,
            row_bytes=layout.row_bytes(model, budget.capacity, size),
            full_bytes=layout.row_bytes(model, prompt.prompt_len, size),
            compress_ms=prompt.compress_ms,
            kept_positions=positions,
        )

    def _prompt_logprobs(self, job: PrefillJob, prompt: PromptProgress) -> list[Logprob | None] | None:
        """Log-probability of every prompt token after the first, from the uncompressed prefill."""
        num_top = prompt.entry.sampling.prompt_logprobs
        if num_top is None:
            return None
        out: list[Logprob | None] = [None]
        first, last = prompt.job_start, prompt.job_start + prompt.prompt_len - 1
        for start in range(first, last, _LOGITS_TOKENS):
            stop = min(start + _LOGITS_TOKENS, last)
            logits = self.decoder.logits(job.hidden[start:stop])  # [t, V]
            next_ids = job.token_ids[start + 1 : stop + 1]
            own, top_ids, top_values = prompt_logprobs(logits, next_ids, num_top)
            columns = (next_ids.tolist(), own.tolist(), top_ids.tolist(), top_values.tolist())
            for token, value, ids, values in zip(*columns, strict=True):
                out.append(Logprob(token, value, tuple(zip(ids, values, strict=True))))
        return out
