"""What a rank stores: shapes that add up, slices that are the tensor together, refusals with the sizes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B
from snapstream.config import ModelConfig, WeightForms
from snapstream.config.parallel import ParallelConfig
from snapstream.config.weights import WeightForm
from snapstream.models.families import roles_of
from snapstream.models.registry import model_config_from_dict
from snapstream.models.shapes import weight_bytes
from snapstream.models.shards import check_cuts, part_shape, rank_config, slice_of

R1 = model_config_from_dict(DEEPSEEK_V3)
QWEN = model_config_from_dict(QWEN3_30B)
BLOCKS = WeightForms(layers=WeightForm(width="fp8"), tables=WeightForm(width="bfloat16"))
WAYS = [(attention, experts) for attention in ("tp", "dp") for experts in ("tp", "ep")]


def way(size: int, attention: Any = "tp", experts: Any = "tp") -> ParallelConfig:
    return ParallelConfig(size=size, attention=attention, experts=experts)


def covered(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Of every checkpoint tensor of a model, by role and name: how many of its numbers the ranks hold together."""
    whole, count = roles_of(model), dict[str, int]()
    for rank in range(parallel.size):
        for name, role in roles_of(rank_config(model, parallel, rank)).items():
            for part in role.parts:
                cut = slice_of(part_shape(whole[name], part), part_shape(role, part), rank, parallel.size)
                held = 1
                for piece in cut:
                    held *= piece.stop - piece.start
                count[part] = count.get(part, 0) + held
    return count


@pytest.mark.parametrize(("attention", "experts"), WAYS)
@pytest.mark.parametrize("size", [2, 16])
def test_ranks_together_hold_the_model(size: int, attention: str, experts: str) -> None:
    """Every number of a cut tensor once, every number of the others on each rank; none is forgotten."""
    parallel = way(size, attention, experts)
    held, whole = covered(R1, parallel), roles_of(R1)
    attends = ("q_b_proj", "kv_b_proj", "o_proj")
    for role in whole.values():
        for part in role.parts:
            total = 1
            for extent in part_shape(role, part):
                total *= extent
            is_cut = role.shard_dim is not None and not (attention == "dp" and any(word in part for word in attends))
            assert held[part] == (total if is_cut else size * total), part


def test_slices_of_ranks_follow_each_other() -> None:
    """In the order of ranks they are the whole, and none overlaps the next."""
    assert [slice_of((24, 7), (6, 7), rank, 4) for rank in range(4)] == [
        (slice(6 * rank, 6 * rank + 6), slice(0, 7)) for rank in range(4)
    ]
    assert [slice_of((10,), (3,), rank, 4)[0] for rank in range(4)] == [
        slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]  # fmt: skip


def test_kv_heads_fewer_than_ranks_are_held_by_neighbours() -> None:
    """4 kv heads of 128 numbers over 8 ranks: two ranks each; query heads are split."""
    own = rank_config(QWEN, way(8), 5)
    assert (own.num_heads, own.num_kv_heads) == (4, 1)
    keys = "self_attn.k_proj.weight"
    shapes = [part_shape(roles_of(model)["qkv"], keys) for model in (QWEN, own)]
    assert shapes == [(512, 2048), (128, 2048)]
    heads = [slice_of(shapes[0], shapes[1], rank, 8)[0].start // 128 for rank in range(8)]
    assert heads == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_rank_knows_the_names_of_its_experts() -> None:
    own = roles_of(rank_config(R1, way(16, experts="ep"), 3))["experts_down"]
    assert own.shape == (16, 7168, 2048)
    assert own.parts["mlp.experts.48.down_proj.weight"] == (0,) and len(own.parts) == 16


@pytest.mark.parametrize(("attention", "experts"), WAYS)
def test_bytes_of_r1_over_16(attention: str, experts: str) -> None:
    """Attention is 11.4 GB where each rank has all of it; experts are 41 GB of each rank, cut or dealt out."""
    num_bytes = weight_bytes(rank_config(R1, way(16, attention, experts)), "bfloat16", BLOCKS)
    assert num_bytes / 1e9 == pytest.approx(53.5 if attention == "dp" else 42.7, rel=0.03)


def test_one_rank_is_the_model() -> None:
    assert rank_config(R1, way(1, "dp", "ep")) is R1


@pytest.mark.parametrize(
    ("settings", "parallel", "reason"),
    [
        (DEEPSEEK_V3, way(24), "num_heads is 128; it cannot be split over 24 ranks"),
        (DEEPSEEK_V3, way(32, "dp", "ep"), None),
        (QWEN3_30B, way(4, "dp"), "attention is 'dp', which deals out rows of latents"),
        (QWEN3_30B, way(3), "4 kv heads cannot be split over 3 ranks"),
        (MIXTRAL_8X7B, way(16, experts="ep"), "num_experts is 8; it cannot be split over 16 ranks"),
        (DEEPSEEK_V3 | {"vocab_size": 9}, way(4), "a vocabulary of 9 leaves some of 4 ranks without a line"),
        (DEEPSEEK_V3 | {"moe_intermediate_size": 2056}, way(16), "the inner size of an expert is 2056; it cannot"),
        (DEEPSEEK_V3 | {"intermediate_size": 18440}, way(16), "intermediate_size is 18440; it cannot be split"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    settings: dict[str, Any], parallel: ParallelConfig, reason: str | None
) -> None:
    model = model_config_from_dict(settings)
    if reason is None:
        assert rank_config(model, parallel).num_heads == model.num_heads
        return
    with pytest.raises(ValueError, match=reason):
        rank_config(model, parallel)


def test_a_block_of_fp8_is_not_cut() -> None:
    """The 18,432 inner numbers of a dense layer are 144 blocks: 16 ranks have nine each, 32 would have four and a
    half.
    """
    check_cuts(R1, way(16), BLOCKS)
    check_cuts(R1, way(32), None)
    with pytest.raises(ValueError, match=r"32 ranks would have 576 of the 18432 numbers of gate_up each; .* every 128"):
        check_cuts(R1, way(32, "dp"), BLOCKS)
