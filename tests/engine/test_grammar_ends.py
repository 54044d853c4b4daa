"""What the engine does with the runner's word that a grammar lets nothing follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapstream.request import FinishReason
from snapstream.step import PendingStep, StepPlan, StepResult
from tests.engine.build import config_of, drain, engine_of, request_of
from tests.engine.fake_runner import FakeRunner

GO_ON = [1] * 9


class _Ending:
    """Says of some steps how grammars ended in them."""

    def __init__(self, runner: FakeRunner, ends: dict[int, dict[int, str]]) -> None:
        self._runner, self._ends = runner, ends  # by step id

    prefix_tier = None

    def is_ready(self, job_id: int) -> bool:
        return True

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> PendingStep:
        pending = self._runner.submit(plan)
        ends = self._ends.get(plan.step_id, {})

        class Ended:
            def result(self) -> StepResult:
                return replace(pending.result(), grammar_ends=ends)

        return Ended()


@pytest.mark.parametrize(
    ("ends", "max_tokens", "count", "reason", "stop_reason"),
    [
        ({}, 5, 5, FinishReason.LENGTH, None),
        ({2: {0: ""}}, 5, 3, FinishReason.STOP, None),
        ({0: {0: ""}}, 5, 1, FinishReason.STOP, None),  # with the first token
        ({4: {0: ""}}, 5, 5, FinishReason.STOP, None),  # with the last that is allowed
        ({2: {0: "grammar: no way on"}}, 5, 3, FinishReason.ERROR, "grammar: no way on"),
        ({2: {1: ""}}, 5, 5, FinishReason.LENGTH, None),  # another row
    ],
)
def test_ends(
    ends: dict[int, dict[int, str]], max_tokens: int, count: int, reason: FinishReason, stop_reason: str | None
) -> None:
    engine, runner = engine_of(config_of(), around=lambda runner: _Ending(runner, ends))
    if count < max_tokens:
        runner.length_of = lambda entry, index: count  # type: ignore[method-assign]
    engine.add_request(request_of("r", max_tokens=max_tokens))
    sample = drain(engine)["r"].samples[0]
    assert (len(sample.token_ids), sample.finish_reason, sample.stop_reason) == (count, reason, stop_reason)
    assert engine.rows_free == 4
