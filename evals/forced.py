"""Greedy answers through ``LLM``, with the option to force the first output tokens of each.

Forced tokens are how a later turn is put to the row of the first one without prefilling anything again: the row
answers question 2 with what it kept for question 1. The engine draws a token per step as always; before a row's next
step the runner is handed another one in its place. Nothing else differs from ``LLM.generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from snapstream.config import EngineConfig, ModelConfig
from snapstream.llm import LLM
from snapstream.step import DiskCache, KVConnector, PendingStep, Runner, StepPlan, StepResult
from snapstream.types import Request, RequestOutput, SamplingParams


class _Both:
    """The two halves of a step as one."""

    def __init__(self, prefill: PendingStep, decode: PendingStep) -> None:
        self._prefill, self._decode = prefill, decode

    def result(self) -> StepResult:
        return replace(self._prefill.result(), decoded=self._decode.result().decoded)


class ForcedRunner:
    """A ``Runner`` that feeds each request's forced tokens before it lets the model speak for itself."""

    def __init__(self, runner: Any, forced: dict[str, Sequence[int]]) -> None:
        self._runner, self._forced = runner, forced
        self._speculation, runner.speculation = runner.speculation, None  # a step draws one token, which is replaced
        self._left: dict[int, list[int]] = {}  # by row, next token last

    @property
    def disk_cache(self) -> DiskCache | None:
        disk_cache: DiskCache | None = self._runner.disk_cache
        return disk_cache

    def is_ready(self, job_id: int) -> bool:
        return bool(self._runner.is_ready(job_id))

    def connect(self, connector: KVConnector) -> None:
        self._runner.connect(connector)

    def close(self) -> None:
        self._runner.close()

    def restore(self) -> None:
        """Leave the runner as it was."""
        self._runner.speculation = self._speculation

    def submit(self, plan: StepPlan) -> PendingStep:
        for spec in plan.opened_jobs:
            for entry in spec.entries:
                for row in entry.rows:
                    self._left[row] = list(reversed(self._forced[entry.request_id]))
        prefill = self._runner.submit(replace(plan, decode_rows=()))
        for row in plan.decode_rows:
            if self._left[row]:
                self._runner.rows.last_token[row] = self._left[row].pop()
        return _Both(prefill, self._runner.submit(StepPlan(step_id=plan.step_id, decode_rows=plan.decode_rows)))


def generate(
    llm: LLM, prompts: Sequence[list[int]], forced: Sequence[Sequence[int]], max_tokens: int
) -> list[RequestOutput]:
    """Greedy outputs of at most ``max_tokens`` tokens; entry ``i`` begins with ``len(forced[i])`` that do not count.

    What stands in their place is what the model would have said there.
    """
    if not any(forced):
        return llm.generate(list(prompts), SamplingParams(max_tokens=max_tokens, temperature=0.0))
    requests = [
        Request(
            request_id=f"forced-{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, min_tokens=len(own), temperature=0.0),
        )
        for index, (prompt, own) in enumerate(zip(prompts, forced, strict=True))
    ]
    return answer(llm.engine.runner, llm.config, llm.model_config, requests, forced)  # over the rows of an idle LLM


def answer(
    runner: Runner,
    config: EngineConfig,
    model: ModelConfig,
    requests: Sequence[Request],
    forced: Sequence[Sequence[int]],
) -> list[RequestOutput]:
    """Outputs of an engine of its own over ``runner``; each request begins with its forced tokens, if it has any."""
    from snapstream.engine.core import Engine

    by_id = {request.request_id: own for request, own in zip(requests, forced, strict=True)}
    forcing = ForcedRunner(runner, by_id) if any(forced) else None
    engine = Engine(
        forcing or runner,
        config,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
    )
    outputs = [engine.add_request(request) for request in requests]
    while engine.has_work:
        engine.step()
    if forcing is not None:
        forcing.restore()
    return outputs
