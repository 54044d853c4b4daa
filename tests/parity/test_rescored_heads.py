"""Kv heads with slots of their own choose again, each as a row of its own budget would.

The twin is the list-based engine (``lists_engine.py``), which knows of no slots, counters or executors.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from snapstream.config import RescoringConfig
from snapstream.config.heads import HeadProfile
from snapstream.kernels.bound import bind
from snapstream.kernels.cpu.native import find_compiler
from snapstream.llm import LLM
from snapstream.models.fingerprint import fingerprint
from snapstream.plan.memory import engine_memory
from snapstream.request import SamplingParams
from snapstream.runner.model_runner import ModelRunner
from snapstream.start.build import build_runner
from tests.parity import tape
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.lists_engine import ListsEngine
from tests.parity.test_capture import OnTapes
from tests.parity.test_heads import BUDGET, SETTINGS, VOTES, profile

RESCORING = RescoringConfig(every=5, num_queries=5)
LENGTHS = (24, 1, 60, 33)  # full in no head, in some, in all; more prompts than rows
COUNT = 40
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def answers(folder: Path, prompts: list[list[int]], **changes: Any) -> list[list[int]]:
    own = {"heads": profile(folder), "rescoring": RESCORING, **changes}
    with LLM(folder, **SETTINGS | own) as llm:
        return [output.token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(folder, prompts)


def test_answers_are_those_of_the_list_based_engine(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM(folder, heads=profile(folder), rescoring=RESCORING, **SETTINGS) as llm:
        runner = cast(ModelRunner, llm.engine.runner)
        assert llm.config.heads is not None and runner.rescorer is not None
        assert min(map(min, llm.config.heads.topk)) == 0, "a head that selects nothing never chooses again"
        for prompt, own in zip(prompts, expected, strict=True):
            lists = ListsEngine(runner.decoder, BUDGET, VOTES, RESCORING, llm.config.heads.budgets)
            assert lists.generate(prompt, COUNT)[0] == own, len(prompt)
            assert lists.num_refreshes
        planned = engine_memory(llm.model_config, llm.config).row_bytes
        assert runner.cache.num_bytes + runner.rescorer.num_bytes == (llm.config.max_rows + 1) * planned
    assert answers(folder, prompts, rescoring=None) != expected, "rescoring does something"


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_looped_steps_answer_alike(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert answers(folder, prompts, executor="looped") == expected


def test_captured_steps_answer_alike(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tape.install(monkeypatch)
    make_runner = partial(build_runner, kernels=bind("cpu", "torch"), make_decode=OnTapes)
    assert answers(folder, prompts, make_runner=make_runner) == expected


def test_a_row_of_another_owner_begins_anew(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert answers(folder, prompts, max_rows=1) == expected


def test_equal_shares_are_equal_heads(folder: Path, prompts: list[list[int]]) -> None:
    even = HeadProfile(shares=((1 / 6, 1 / 6),) * 3, model=fingerprint(folder))
    assert answers(folder, prompts, heads=even) == answers(folder, prompts, heads=None)
