"""An answer that is longer than the ring of its row says so: the end of the prompt has left the ring by then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstream.config import KVBudget, RescoringConfig, SnapKVConfig
from snapstream.llm import LLM
from snapstream.request import SamplingParams

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
WINDOW = KVBudget(num_sink=2, num_topk=10, num_window=8, num_recent=12)


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[LLM]:
    snapkv = SnapKVConfig(window_len=8)
    with LLM(
        checkpoint, budget=BUDGET, snapkv=snapkv, max_rows=4, max_model_len=256, chunk_len=32, progress=False
    ) as llm:
        yield llm


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)


@pytest.mark.parametrize(
    ("budget", "prompt_len", "ring"),
    [
        (None, 100, 16),
        (None, 32, 16),
        (None, 20, 28),  # slots that a short prompt leaves unselected belong to the ring
        (WINDOW, 100, 12),
        ("full", 100, None),
    ],
)
def test_an_answer_longer_than_the_ring(
    small: LLM, llm: LLM, budget: KVBudget | str | None, prompt_len: int, ring: int | None
) -> None:
    prompt = list(range(50, 50 + prompt_len))
    if ring is None:  # a ring of the whole window never wraps
        (output,) = llm.generate([prompt], params(256 - prompt_len))
        assert output.compression is not None and not output.has_outgrown_ring
        return
    fitting, longer = (small.generate([prompt], params(size), budget=budget)[0] for size in (ring, ring + 1))
    assert fitting.compression is not None and fitting.compression.ring_tokens == ring
    assert (fitting.has_outgrown_ring, longer.has_outgrown_ring) == (False, True)


def test_it_is_known_while_the_answer_grows(small: LLM) -> None:
    seen = [(len(output.token_ids), output.has_outgrown_ring) for output in small.stream([60] * 50, params(20, n=2))]
    assert {is_over for size, is_over in seen if size <= 16} == {False}
    assert {is_over for size, is_over in seen if size > 16} == {True}


def test_rescoring_does_not_hide_it(checkpoint: Path) -> None:
    rescoring = RescoringConfig(every=4, num_queries=4)
    with LLM(
        checkpoint, budget=BUDGET, snapkv=SnapKVConfig(window_len=8), rescoring=rescoring, max_model_len=256,
        progress=False,
    ) as llm:  # fmt: skip
        assert llm.generate([[60] * 50], params(40))[0].has_outgrown_ring
