"""What the engine does with the runner's word that a row's logits were not finite: a token id below 0."""

from __future__ import annotations

import pytest

from snapstream.request import NOT_FINITE, FinishReason
from tests.engine.build import config_of, drain, engine_of, request_of


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("sampling", [{}, {"stop": ["zz"]}, {"min_tokens": 4}, {"stop_token_ids": [5]}])
def test_the_request_ends_and_others_go_on(count: int, sampling: dict[str, object]) -> None:
    engine, _ = engine_of(config_of(), {"bad": [*range(1, count + 1), -1]})
    engine.add_request(request_of("bad", max_tokens=9, **sampling))
    engine.add_request(request_of("good", max_tokens=9))
    outputs = drain(engine)
    sample = outputs["bad"].samples[0]
    assert (sample.finish_reason, sample.stop_reason) == (FinishReason.ERROR, NOT_FINITE)
    assert sample.token_ids == list(range(1, count + 1)) and sample.text == "abc"[:count]
    assert outputs["good"].finish_reason is FinishReason.LENGTH and outputs["good"].token_ids == [1] * 9
    assert engine.rows_free == 4 and not engine.has_work


def test_log_probabilities_have_as_many_entries_as_tokens() -> None:
    engine, _ = engine_of(config_of(), {"bad": [1, 2, -1]})
    engine.add_request(request_of("bad", max_tokens=9, logprobs=0))
    sample = drain(engine)["bad"].samples[0]
    assert sample.logprobs is not None and [one.token_id for one in sample.logprobs] == sample.token_ids == [1, 2]
