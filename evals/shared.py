"""Many rules of one engine measured on one prefill: a prompt is read once, and every rule compresses it into a row.

Keys, values and queries of a prompt do not depend on what will be kept of them, so a row written by one rule beside
others is the row that the rule would have written alone; a test holds the answers equal. Only the time is shared: the
prefill of a prompt costs far more than the rows that it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from evals.forced import ForcedRunner
from snapstream.cache.compress import write_rows
from snapstream.config import KVBudget, RescoringConfig, SnapKVConfig
from snapstream.llm import LLM
from snapstream.request import Request, SamplingParams
from snapstream.runner.model_runner import ModelRunner
from snapstream.runner.prefill import PrefillJob
from snapstream.runner.results import SubmittedStep
from snapstream.step import JobSpec

Rule = tuple[KVBudget, SnapKVConfig, RescoringConfig | None]
PROMPTS_AT_ONCE = 2  # whose rows decode together


class _SharedJob(PrefillJob):
    """Writes row ``i`` of a prompt by rule ``i``."""

    def __init__(self, runner: SharedRunner, spec: JobSpec) -> None:
        super().__init__(
            spec, runner.decoder, runner.cache, runner.staging, runner.config.snapkv, runner.config.chunking.chunk_len,
            runner.prefill_attention,
            runner._rescorer,
        )  # fmt: skip
        self._rules = runner.rules
        shape = (runner.decoder.config.num_heads, runner.decoder.config.head_dim)
        for prompt in self.prompts:
            most = max(snapkv.num_queries(prompt.prompt_len) for _, snapkv, _ in self._rules)
            prompt.queries = torch.empty((most, *shape), dtype=runner.staging.k.dtype)

    def _compress(self, layer: int) -> None:
        for prompt in self.prompts:
            place = slice(prompt.staging_start, prompt.staging_start + prompt.prompt_len)
            keys, values = self._staging.k[:, place], self._staging.v[:, place]
            assert prompt.queries is not None
            for row, (budget, snapkv, rescoring) in zip(prompt.entry.rows, self._rules, strict=True):
                own = prompt.queries[-snapkv.num_queries(prompt.prompt_len) :]
                kept = write_rows(self._cache, layer, [row], keys, values, own, budget, snapkv)
                if self._rescorer is not None and rescoring is not None:
                    entry = replace(prompt.entry, rows=(row,), budget=budget)
                    window = own[-rescoring.num_queries :]
                    self._rescorer.keep_votes(layer, entry, window, keys, kept)


class SharedRunner(ModelRunner):
    """A ``Runner`` whose requests have one sample per rule, greedy, each in a row of that rule."""

    rules: Sequence[Rule] = ()

    def _open_job(self, spec: JobSpec) -> PrefillJob:
        return _SharedJob(self, spec)

    def _finish_job(self, job: PrefillJob, step: SubmittedStep) -> None:
        super()._finish_job(job, step)
        for prompt in job.prompts:
            counters = [self.rows.entry(prompt.prompt_len, prompt.entry.next_position, own) for own, *_ in self.rules]
            self.rows.admit(torch.tensor(prompt.entry.rows), torch.tensor(counters))
            for row, (budget, _, rescoring) in zip(prompt.entry.rows, self.rules, strict=True):
                if self._rescorer is not None:
                    self._rescorer.admit(replace(prompt.entry, rows=(row,), budget=budget), rescoring)


def _widest(configs: Sequence[RescoringConfig | None]) -> RescoringConfig | None:
    """One whose buffer of queries serves all."""
    found = [config for config in configs if config is not None]
    return max(found, key=lambda config: config.num_queries) if found else None


def generate_shared(
    llm: LLM, prompts: Sequence[list[int]], forced: Sequence[Sequence[int]], max_tokens: int, rules: Sequence[Rule]
) -> list[list[list[int]]]:
    """Greedy token ids by prompt and rule; entry ``i`` begins with ``len(forced[i])`` that do not count.

    ``llm`` lends its weights and its settings; its own rows are not touched.
    """
    from snapstream.engine.core import Engine

    config = replace(
        llm.config,
        # Rows with room for every rule's; rescoring is refused where no slot is selected, so one is.
        budget=KVBudget(num_sink=0, num_topk=1, num_recent=llm.config.max_model_len - 1),
        max_rows=PROMPTS_AT_ONCE * len(rules),
        rescoring=_widest([rescoring for *_, rescoring in rules]),
    )
    runner = SharedRunner(llm.engine._runner.decoder, config)  # type: ignore[attr-defined]
    runner.rules = rules
    requests = [
        Request(
            request_id=f"shared-{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(n=len(rules), max_tokens=max_tokens, min_tokens=len(own), temperature=0.0),
        )
        for index, (prompt, own) in enumerate(zip(prompts, forced, strict=True))
    ]
    by_id = {request.request_id: own for request, own in zip(requests, forced, strict=True)}
    driven: Any = ForcedRunner(runner, by_id) if any(forced) else runner
    model = llm.model_config
    engine = Engine(
        driven,
        config,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
    )
    outputs = [engine.add_request(request) for request in requests]
    while engine.has_work:
        engine.step()
    return [[sample.token_ids for sample in output.samples] for output in outputs]
