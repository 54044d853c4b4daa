"""The oracle of one selection per head: the same model over keys and values per head."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.by_head import by_head_runner
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.llm import LLM
from snapstream.request import SamplingParams
from snapstream.start.build import MakeRunner, build_runner
from tests.parity.checkpoints import make_model, save

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, return_kept=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(70)], [3 + 11 * i % 170 for i in range(33)]]
MAKE_RUNNERS: list[MakeRunner] = [build_runner, by_head_runner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("deepseek"))


def answers(folder: Path, budget: KVBudget, make_runner: MakeRunner) -> list[tuple[list[int], list[list[list[int]]]]]:
    """Tokens of every prompt, and the positions that each layer's heads kept."""
    with LLM(
        folder, budget=budget, max_model_len=96, executor="eager", chunk_len=16, progress=False, make_runner=make_runner
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    found: list[tuple[list[int], list[list[list[int]]]]] = []
    for output in outputs:
        kept = output.compression.kept_positions if output.compression is not None else None
        found.append((output.token_ids, kept or []))
    return found


def test_with_room_for_every_token_it_is_the_same_model(folder: Path) -> None:
    latents, by_head = (answers(folder, KVBudget.full(96), make) for make in MAKE_RUNNERS)
    assert [tokens for tokens, _ in latents] == [tokens for tokens, _ in by_head]


def test_heads_of_a_layer_keep_tokens_of_their_own(folder: Path) -> None:
    budget = KVBudget(num_sink=2, num_topk=8, num_recent=34)
    latents, by_head = (answers(folder, budget, make)[0][1] for make in MAKE_RUNNERS)
    assert all(len(layer) == 1 for layer in latents)
    assert any(len({tuple(head) for head in layer}) > 1 for layer in by_head)


def test_it_needs_latents() -> None:
    with pytest.raises(ValueError, match="only models of latents have one selection per layer"):
        LLM(TINY_MODEL, executor="eager", progress=False, make_runner=by_head_runner)
