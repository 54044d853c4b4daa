"""Answers measured on a shared prefill are the answers of each rule alone."""

from __future__ import annotations

import pytest

from evals.chat import Chat
from evals.forced import generate
from evals.selectors import Random, Variant
from evals.shared import Rule, generate_shared
from evals.tasks import TASKS, make_items
from snapstream.assets import TINY_MODEL
from snapstream.cache.selectors.hops import Hops
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget, RescoringConfig
from snapstream.llm import LLM

RULES: list[Rule] = [
    (KVBudget.full(640), SnapKV(), None),
    (KVBudget.of(64), SnapKV(), None),
    (KVBudget.of(64), SnapKV(), RescoringConfig(every=8, num_queries=8)),
    (KVBudget.of(64), SnapKV(), RescoringConfig(every=4, num_queries=12, memory=0.0)),
    (KVBudget.of(64), Hops(num_hops=3), None),
    (KVBudget.of(64), Random(), None),
    (KVBudget.of(96), Variant(observation_len=8, pool_width=13), None),
    (KVBudget.of(128, num_window=16), SnapKV(), None),
    (KVBudget.streaming(80), SnapKV(), None),
]


@pytest.mark.parametrize("task", ["variable", "second_kept"])
def test_a_rule_answers_beside_others_as_it_does_alone(task: str) -> None:
    items = make_items(Chat(TINY_MODEL), task, 3, 512, 0)
    prompts, forced = [item.prompt_ids for item in items], [item.forced_ids for item in items]
    most = TASKS[task].max_tokens + max(map(len, forced))
    settings = {"max_rows": 4, "max_model_len": 640, "chunk_len": 128, "progress": False}
    with LLM(TINY_MODEL, budget="full", **settings) as llm:  # type: ignore[arg-type]
        shared = generate_shared(llm, prompts, forced, most, RULES)
    for index, (budget, selector, rescoring) in enumerate(RULES):
        with LLM(TINY_MODEL, budget=budget, selector=selector, rescoring=rescoring, **settings) as llm:  # type: ignore[arg-type]
            alone = [output.token_ids for output in generate(llm, prompts, forced, most)]
        assert [answers[index] for answers in shared] == alone, (budget, selector, rescoring)
    texts = {tuple(map(tuple, (answers[index] for answers in shared))) for index in range(len(RULES))}
    assert len(texts) > 2, "the rules do not differ: the test says nothing"
