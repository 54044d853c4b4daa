"""Many rules of one engine measured on one prefill: a prompt is read once, and every rule compresses it into a row.

Keys, values and queries of a prompt do not depend on what will be kept of them, so a row written by one rule beside
others is the row that the rule would have written alone; a test holds the answers equal. Only the time is shared: the
prefill of a prompt costs far more than the rows that it fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from torch import Tensor

from evals.forced import answer
from snapstream.config import EngineConfig, KVBudget, Selector
from snapstream.exec.prefill import RowWriter
from snapstream.exec.rows import Counters, Rows
from snapstream.exec.runner import ModelRunner
from snapstream.kv.cache import KVCache
from snapstream.kv.compress import write_rows
from snapstream.llm import LLM
from snapstream.step import PrefillEntry
from snapstream.types import Request, SamplingParams

Rule = tuple[KVBudget, Selector]
PROMPTS_AT_ONCE = 2  # whose rows decode together


class SharedWriter(RowWriter):
    """Writes row ``i`` of a prompt by rule ``i``."""

    def __init__(self, rules: Sequence[Rule], cache: KVCache, config: EngineConfig) -> None:
        super().__init__(cache, config)
        self._rules = rules

    def _by_row(self, entry: PrefillEntry) -> Iterator[PrefillEntry]:
        """The entry as if each of its rows were its only one, with the rule of that row."""
        for row, (budget, selector) in zip(entry.rows, self._rules, strict=True):
            yield replace(entry, rows=(row,), budget=budget, selector=selector)

    def num_queries(self, entry: PrefillEntry) -> int:
        """As many as the rule needs that needs most."""
        return max(selector.num_queries(len(entry.token_ids)) for _, selector in self._rules)

    def write(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, values: Tensor
    ) -> Tensor | None:
        """Every rule writes its own row."""
        assert queries is not None
        for own in self._by_row(entry):
            last = queries[-own.selector.num_queries(keys.shape[1]) :]
            write_rows(self.cache, layer, own.rows, keys, values, last, own.budget, own.selector)
        return None

    def counters(self, entry: PrefillEntry) -> list[Counters]:
        """Each row's by its own budget."""
        return [Rows.entry(len(own.token_ids), own.budget) for own in self._by_row(entry)]


def generate_shared(
    llm: LLM, prompts: Sequence[list[int]], forced: Sequence[Sequence[int]], max_tokens: int, rules: Sequence[Rule]
) -> list[list[list[int]]]:
    """Greedy token ids by prompt and rule; entry ``i`` begins with ``len(forced[i])`` that do not count.

    ``llm`` lends its weights and its settings; its own rows are not touched.
    """
    config = replace(
        llm.config,
        budget=KVBudget.full(llm.config.max_model_len),  # rows with room for every rule's
        max_rows=PROMPTS_AT_ONCE * len(rules),
        num_speculative_tokens=0,  # rows of a request have other budgets than it says
    )
    lent = cast(ModelRunner, llm.engine.runner)
    runner = ModelRunner(lent.decoder, config, make_writer=partial(SharedWriter, rules))
    requests = [
        Request(
            request_id=f"shared-{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(n=len(rules), max_tokens=max_tokens, min_tokens=len(own), temperature=0.0),
        )
        for index, (prompt, own) in enumerate(zip(prompts, forced, strict=True))
    ]
    outputs = answer(runner, config, llm.model_config, requests, forced)
    return [[sample.token_ids for sample in output.samples] for output in outputs]
