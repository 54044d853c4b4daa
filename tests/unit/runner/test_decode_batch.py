"""The batch of a decode step is made anew when rows or their parameters change, and only then."""

from __future__ import annotations

from dataclasses import replace

import torch

from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.request import SamplingParams
from snapstream.runner.decode_batch import DecodeBatches

GREEDY = SamplingParams(temperature=0.0)


def test_rows_that_go_on_are_not_uploaded_again() -> None:
    batches = DecodeBatches(torch.device("cpu"))
    params = {2: GREEDY, 5: GREEDY}
    first = batches.of((2, 5), params)
    assert first.rows.tolist() == [2, 5] and first.rows.dtype == torch.int64
    assert first.params == [GREEDY, GREEDY] and first.needs == SamplingNeeds()
    assert batches.of((2, 5), {**params, 3: GREEDY}) is first


def test_other_rows_and_a_row_with_another_owner_are_another_batch() -> None:
    batches = DecodeBatches(torch.device("cpu"))
    params = {2: GREEDY, 5: GREEDY}
    batches.of((2, 5), params)
    assert batches.of((5,), params).rows.tolist() == [5]
    params[5] = replace(GREEDY, temperature=1.0, top_k=3)
    drawn = batches.of((5,), params)
    assert drawn.needs == SamplingNeeds(random=True, top_k=True) and drawn.params == [params[5]]
