"""A re-selected row: the engine gives what the list-based engine gives, alone, beside others and in compiled steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evals.selectors import Random, Variant
from snapstream.config import DTYPE_BYTES, EngineConfig, KVBudget, ReselectionConfig, Selector
from snapstream.exec.runner import ModelRunner
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.registry import read_model_config
from snapstream.plan.memory import engine_memory
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.lists_engine import ListsEngine


def budget_of(num_sink: int, num_topk: int, num_window: int, num_recent: int) -> KVBudget:
    return KVBudget(num_sink=num_sink, num_topk=num_topk, num_window=num_window, num_recent=num_recent)


def reselection_of(every: int, num_queries: int, memory: float = 0.98) -> ReselectionConfig:
    return ReselectionConfig(every=every, num_queries=num_queries, memory=memory)


CASES = [
    # budget (sinks, top-k, window, ring), selection, KV re-selection (every, num_queries, memory): plain, no memory,
    # every token, more queries than are freed, softmax over the row, window, no sinks and hops
    (budget_of(2, 12, 0, 10), Variant(observation_len=8, pool_width=3), reselection_of(5, 5)),
    (budget_of(2, 12, 0, 10), SnapKV(observation_len=8), reselection_of(5, 5, 0.0)),
    (budget_of(4, 10, 0, 6), Variant(observation_len=4, pool_width=1), reselection_of(1, 2, 0.5)),
    (budget_of(2, 9, 0, 8), SnapKV(observation_len=4), reselection_of(3, 8)),
    (budget_of(3, 9, 0, 8), Variant(observation_len=4, softmax_over="row", group_reduce="max"), reselection_of(7, 6)),
    (budget_of(2, 9, 5, 6), SnapKV(observation_len=4), reselection_of(4, 4)),
    (budget_of(0, 20, 0, 5), Hops(observation_len=4, num_hops=2), reselection_of(3, 3, 1.0)),
]
LENGTHS = (1, 3, 15, 19, 24, 40, 60)
COUNT = 32
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


KINDS = ("llama-gqa-tied", "qwen3", "deepseek-v3-dense", "gpt-oss-full", "gemma2-full", "falcon-h1")


@pytest.mark.parametrize(  # each case with two kinds of layers, each kind with two cases or three
    ("case", "name"),
    [
        pytest.param(case, KINDS[(case + more) % len(KINDS)], marks=[pytest.mark.slow] * (more > 0))
        for case in range(len(CASES))
        for more in (0, 3)
    ],
)
def test_engine_equals_the_list_based_engine(case: int, name: str, tmp_path: Path) -> None:
    """Rows of different lengths decode side by side; the lists know of one."""
    budget, selector, reselection = CASES[case]
    folder = save(make_model(name), tmp_path)
    with LLM(
        folder, budget=budget, selector=selector, reselection=reselection, max_rows=3, chunk_len=16, max_model_len=120,
        progress=False,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts(case), PARAMS)
        decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
    for prompt, output in zip(prompts(case), outputs, strict=True):
        lists = ListsEngine(decoder, budget, selector, reselection)
        tokens, logprobs = lists.generate(prompt, COUNT)
        assert output.token_ids == tokens, len(prompt)
        assert [entry.logprob for entry in output.logprobs or []] == pytest.approx(logprobs, abs=1e-3)
        assert lists.num_reselections or len(prompt) == 1
    plain = ListsEngine(decoder, budget, selector).generate(prompts(case)[-1], COUNT)[0]
    assert plain != tokens, "the plain rule gives the same answer: the equality says nothing"


@pytest.mark.parametrize(
    ("case", "name"),
    [(0, "qwen2-windows"), (5, "gpt-oss"), (5, "lfm2"), pytest.param(0, "granite-hybrid", marks=pytest.mark.slow)],
)
def test_layers_of_several_kinds_equal_the_list_based_engine(case: int, name: str, tmp_path: Path) -> None:
    """Windows and states go on where full layers re-select; what is planned is allocated."""
    budget, selector, reselection = CASES[case]
    with LLM(
        save(make_model(name), tmp_path), budget=budget, selector=selector, reselection=reselection, max_rows=3,
        max_model_len=120, progress=False,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts(case), PARAMS)
        runner = llm.engine.runner
        planned = 4 * engine_memory(llm.model_config, llm.config).row_bytes
        assert runner.cache.num_bytes + runner.reselector.num_bytes == planned  # type: ignore[attr-defined]
    for prompt, output in zip(prompts(case), outputs, strict=True):
        lists = ListsEngine(runner.decoder, budget, selector, reselection)  # type: ignore[attr-defined]
        assert output.token_ids == lists.generate(prompt, COUNT)[0], len(prompt)
        assert lists.num_reselections or len(prompt) == 1


def test_a_row_is_alone(tmp_path: Path) -> None:
    """The same answers one after the other in one row, with a smaller budget of its own, and with two samples."""
    budget, selector, reselection = CASES[0]
    folder = save(make_model("qwen3"), tmp_path)
    settings = {
        "budget": budget,
        "selector": selector,
        "reselection": reselection,
        "max_model_len": 120,
        "progress": False,
    }
    with LLM(folder, max_rows=4, **settings) as llm:  # type: ignore[arg-type]
        together = [o.token_ids for o in llm.generate(prompts(9), PARAMS)]
        twice = llm.generate(prompts(9)[-1], replace(PARAMS, n=2))[0]
        small = KVBudget(num_sink=1, num_topk=8, num_recent=7)
        fewer = [o.token_ids for o in llm.generate(prompts(9), PARAMS, budget=small)]
    with LLM(folder, max_rows=1, **settings) as llm:  # type: ignore[arg-type]
        assert [o.token_ids for o in llm.generate(prompts(9), PARAMS)] == together
    with LLM(folder, max_rows=1, **(settings | {"budget": small})) as llm:  # type: ignore[arg-type]
        assert [o.token_ids for o in llm.generate(prompts(9), PARAMS)] == fewer
    assert [sample.token_ids for sample in twice.samples] == [together[-1]] * 2


def test_what_is_allocated_is_what_is_counted(tmp_path: Path) -> None:
    budget, selector, reselection = CASES[0]
    folder = save(make_model("qwen3"), tmp_path)
    model = read_model_config(folder)
    decoder = Decoder(model, load_weights(folder, model, torch.float32, "cpu", False))
    config = EngineConfig(budget=budget, selector=selector, reselection=reselection, max_model_len=120, max_rows=3)
    runner = ModelRunner(decoder, config)
    memory = engine_memory(model, config)
    assert runner.reselector is not None
    assert (
        memory.row_bytes * 4 == runner.cache.num_bytes + runner.reselector.num_bytes
    )  # the padding row is one of them
    plain = engine_memory(model, replace(config, reselection=None))
    assert plain.row_bytes * 4 == runner.cache.num_bytes
    assert DTYPE_BYTES["float32"] * runner.reselector.queries.buffer.numel() == runner.reselector.queries.num_bytes


def test_without_it_nothing_is_kept(tmp_path: Path) -> None:
    budget, selector, _ = CASES[0]
    folder = save(make_model("qwen3"), tmp_path)
    model = read_model_config(folder)
    decoder = Decoder(model, load_weights(folder, model, torch.float32, "cpu", False))
    runner = ModelRunner(decoder, EngineConfig(budget=budget, selector=selector, max_model_len=120))
    assert runner.reselector is None


@pytest.mark.parametrize(
    ("reselection", "selector", "message"),
    [
        (ReselectionConfig(every=10, num_queries=4), SnapKV(observation_len=8), "ring of 10 slots.*at least 11"),
        (ReselectionConfig(every=4, num_queries=11), SnapKV(observation_len=8), "ring of 10 slots.*at least 11"),
        (ReselectionConfig(every=4, num_queries=4), Random(observation_len=8), "'random' cannot"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    reselection: ReselectionConfig, selector: Selector, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(budget=CASES[0][0], selector=selector, reselection=reselection, max_model_len=120)


@pytest.mark.parametrize("budget", [KVBudget.full(120), KVBudget(num_sink=4, num_topk=0, num_recent=40)])
def test_a_budget_that_selects_nothing_is_refused_with_it(budget: KVBudget) -> None:
    with pytest.raises(ValueError, match="num_topk > 0"):
        EngineConfig(budget=budget, reselection=CASES[0][2], max_model_len=120)


def test_fp8_rows_are_refused_with_it() -> None:
    budget, selector, reselection = CASES[0]
    with pytest.raises(ValueError, match="kv_dtype"):
        EngineConfig(budget=budget, selector=selector, reselection=reselection, max_model_len=120, kv_dtype="fp8")


@pytest.mark.parametrize("fields", [{"every": 0}, {"num_queries": 0}, {"memory": 1.5}, {"memory": -0.1}])
def test_settings_have_limits(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ReselectionConfig(**fields)  # type: ignore[arg-type]
