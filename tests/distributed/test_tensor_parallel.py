"""Two ranks answer as one device does: the same tokens and kept positions, logits equal but for fp32 rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snapstream.distributed.group import Alone
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pool import Pool
from tests.parity.checkpoints import make_model, save

TOLERANCE = 2e-5  # of logits of order 1
Checkpoint = Callable[[str], Path]
# What no architecture of ARCHITECTURES has.
MORE = {"llama-all-biases": ("llama-mha", {"attention_bias": True, "mlp_bias": True})}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            own, changes = MORE.get(name, (name, {}))
            made[name] = save(make_model(own, **changes), tmp_path_factory.mktemp(name))
        return made[name]

    return get


def check(pool: Pool, asked: Asked) -> None:
    """Every rank says what one device says."""
    alone = cases.answered(Alone(), replace(asked, experts="tp"))
    ranks = pool.run(cases.answered, asked)
    assert alone.logits.std() > 0.1, "logits too small for the tolerance to mean anything"
    for rank in ranks:
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE)
        assert rank.tokens == alone.tokens
        assert rank.kept == alone.kept
        assert rank.row_bytes == alone.row_bytes
        assert rank.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
        assert torch.equal(rank.logits, ranks[0].logits)
        assert max(rank.own_bytes[0] / alone.own_bytes[0], rank.own_bytes[1] / alone.own_bytes[1]) <= 1


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen2", "qwen3", "llama-all-biases"])
@pytest.mark.parametrize("budget", [None, 40])
def test_dense_models(two: Pool, checkpoint: Checkpoint, name: str, budget: int | None) -> None:
    """Two kv heads, one on each rank; one on both (qwen2); 199 token ids; biases on every product."""
    check(two, Asked(checkpoint(name), budget=budget))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "glm4-moe"])
def test_experts(two: Pool, checkpoint: Checkpoint, name: str, experts: str) -> None:
    """The inner size of every expert is split, or whole experts are dealt out; latents and shared experts too."""
    check(two, Asked(checkpoint(name), experts=experts, budget=40))
