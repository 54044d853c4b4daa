"""Two ranks answer as one device does: the same tokens and kept positions, logits equal but for fp32 rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snapstream.cache.selectors.diverse import Diverse
from snapstream.cache.selectors.hops import Hops
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import (
    ParallelConfig,
    RescoringConfig,
    Selector,
    SplitAttention,
    SplitExperts,
    WeightForm,
    WeightForms,
)
from snapstream.distributed.group import Alone, Pretend
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.models.decoder import Decoder
from snapstream.models.loader import load_weights
from snapstream.models.quantized_checkpoint import quantize_checkpoint
from snapstream.models.registry import read_model_config
from snapstream.models.shapes import weight_bytes
from snapstream.models.shards import rank_config
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pool import Pool, ranks
from tests.parity.checkpoints import make_model, save
from tests.parity.test_fp8_blocks import narrowed

TOLERANCE = 2e-5  # of logits of order 1
Checkpoint = Callable[[str], Path]
# What no architecture of ARCHITECTURES has.
BLOCKS = {
    "head_dim": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}  # each rank's parts are whole blocks of FP8
GROUPS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # and whole groups of codes
MORE = {
    "llama-all-biases": ("llama-mha", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-blocks": ("qwen3", BLOCKS),
    "deepseek-v3-blocks": (
        "deepseek-v3",
        {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
         "moe_intermediate_size": 256, "intermediate_size": 256},
    ),
    "qwen3-groups": ("qwen3", GROUPS),
}  # fmt: skip
FLOAT = WeightForm(width="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            own, changes = MORE.get(name, (name, {}))
            made[name] = save(make_model(own, **changes), tmp_path_factory.mktemp(name))
        return made[name]

    return get


def check(pool: Pool, asked: Asked, tolerance: float = TOLERANCE) -> None:
    """Every rank says what one device says."""
    alone = cases.answered(Alone(), replace(asked, experts="tp"))
    answers = pool.run(cases.answered, asked)
    assert alone.logits.std() > 0.1, "logits too small for the tolerance to mean anything"
    scale = max(1.0, float(alone.logits.std()))
    for rank in answers:
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=tolerance * scale)
        assert rank.tokens == alone.tokens
        assert rank.kept == alone.kept
        assert rank.row_bytes == alone.row_bytes
        assert rank.logprobs == pytest.approx(alone.logprobs, abs=tolerance)
        assert torch.equal(rank.logits, answers[0].logits)
        assert max(rank.own_bytes[0] / alone.own_bytes[0], rank.own_bytes[1] / alone.own_bytes[1]) <= 1


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen2", "qwen3", "llama-all-biases"])
@pytest.mark.parametrize("budget", [None, 40])
def test_dense_models(two: Pool, checkpoint: Checkpoint, name: str, budget: int | None) -> None:
    """Two kv heads, one on each rank; one on both (qwen2); 199 token ids; biases on every product."""
    check(two, Asked(checkpoint(name), budget=budget))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "glm4-moe"])
def test_experts(two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts) -> None:
    """The inner size of every expert is split, or whole experts are dealt out; latents and shared experts too."""
    check(two, Asked(checkpoint(name), experts=experts, budget=40))


@pytest.mark.parametrize("selector", [Hops(observation_len=8, num_hops=2), Diverse(observation_len=8)])
def test_selectors(two: Pool, checkpoint: Checkpoint, selector: Selector) -> None:
    """Where one kv head is on both ranks, which must keep the same tokens."""
    check(two, Asked(checkpoint("qwen2"), budget=40, selector=selector))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "deepseek-v3"])
def test_rows_that_choose_again(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    check(two, Asked(checkpoint(name), budget=40, rescoring=RescoringConfig(every=8, num_queries=2)))


@pytest.mark.parametrize("attention", ["tp", "dp"])
def test_another_kernel_for_latents(two: Pool, checkpoint: Checkpoint, attention: SplitAttention) -> None:
    """As ``build_rank`` binds one that was chosen: votes are shared once, and it sees the heads of its rank."""
    asked = Asked(checkpoint("deepseek-v3"), budget=40, attention=attention, has_package=True)
    plainly = two.run(cases.answered, replace(asked, has_package=False))
    for one, other in zip(two.run(cases.answered, asked), plainly, strict=True):
        assert one.tokens == other.tokens and one.kept == other.kept
        torch.testing.assert_close(one.logits, other.logits, rtol=0.0, atol=1e-4)
        assert set(one.package_heads) == {2 if attention == "tp" else 4} and not other.package_heads


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(("name", "experts"), [("qwen3-blocks", "tp"), ("deepseek-v3-blocks", "tp"),
                                               ("deepseek-v3-blocks", "ep")])  # fmt: skip
def test_fp8_blocks(
    two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts, executor: str, tmp_path: Path
) -> None:
    folder, _ = narrowed(checkpoint(name), tmp_path)
    forms = WeightForms(layers=WeightForm(width="fp8"), tables=FLOAT)
    if executor == "looped" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    # Logits of this model of latents reach 7, and products that are rounded less move them by 1.5e-4 on one device.
    tolerance = 2 * TOLERANCE if executor == "looped" and "deepseek" in name else TOLERANCE
    check(two, Asked(folder, experts=experts, forms=forms, executor=executor), tolerance)


def test_codes_in_groups(two: Pool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of a checkpoint, and made while it is read, embeddings too."""
    source = checkpoint("qwen3-groups")
    (source / "tokenizer.json").write_text("{}")
    form = WeightForm(width="int4", group=32)
    quantize_checkpoint(source, tmp_path / "codes", form)
    check(two, Asked(tmp_path / "codes", forms=WeightForms(layers=form, tables=FLOAT)))
    check(two, Asked(source, forms=WeightForms.of("int8")))


def test_four_ranks(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A head of queries each; two ranks share a kv head, all share the latents; the last has 49 of 199 token ids.

    Of kv heads with unlike slots one keeps a prompt that another compresses: no rank waits for votes that do not come.
    """
    with ranks(4, tmp_path) as pool:
        for selector in (SnapKV(observation_len=8), Hops(observation_len=8, num_hops=2)):
            check(pool, Asked(checkpoint("llama-gqa-tied"), budget=24, heads=cases.UNLIKE, selector=selector))
        check(pool, Asked(checkpoint("llama-gqa-tied"), budget=40))
        check(pool, Asked(checkpoint("deepseek-v3"), experts="ep", budget=40))


def test_a_share_alone(checkpoint: Checkpoint) -> None:
    """One rank of two without the other answers, in the shapes of the whole, from its share of the bytes."""
    asked = Asked(checkpoint("deepseek-v3"), budget=40)
    alone, pretended = cases.answered(Alone(), asked), cases.answered(Pretend(1, 2), asked)
    assert pretended.logits.shape == alone.logits.shape and not torch.equal(pretended.logits, alone.logits)
    assert pretended.own_bytes[0] < 0.7 * alone.own_bytes[0]


def test_weights_that_are_no_share_of_these_ranks(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama-gqa-tied")
    model = read_model_config(folder)
    whole = load_weights(folder, model, torch.float32, "cpu", progress=False)
    with pytest.raises(ValueError, match="these weights have 4 of 4 query heads, and there are 2 ranks"):
        Decoder(model, whole, group=Pretend(0, 2))


def test_random_shares(two: Pool, checkpoint: Checkpoint) -> None:
    """What both ranks hold is the same on both, what is split differs, and together they are a model."""
    model = read_model_config(checkpoint("qwen2"))
    (logits, own, size), (other_logits, others, other_size) = two.run(cases.random_logits, model)
    assert torch.equal(logits, other_logits) and logits.shape == (1, 199) and 0.3 < logits.std() < 3.0
    assert size == other_size == weight_bytes(rank_config(model, ParallelConfig(size=2)), "float32")
    q, k, v = own["qkv"].split((24, 12, 12), 1)  # two of four query heads, and the only kv head
    other_q, other_k, other_v = others["qkv"].split((24, 12, 12), 1)
    assert torch.equal(k, other_k) and torch.equal(v, other_v) and not torch.equal(q, other_q)
    assert not torch.equal(own["down"], others["down"]) and torch.equal(own["input_norm"], others["input_norm"])
