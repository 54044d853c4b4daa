"""What a rank reads of a checkpoint: its own slices, byte for byte, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B
from snapstream.config import ModelConfig, ParallelConfig, SplitExperts, WeightFormat, WeightFormats
from snapstream.models import checkpoint
from snapstream.models.checkpoint import load_weights
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import FAMILIES, Family, model_config_from_dict, read_model_config, tensor_specs
from snapstream.models.sharding import Share, rank_config, slice_of, weight_bytes
from snapstream.models.tensors import TensorSpecs, decoder_tensors, part_shape
from snapstream.models.weights import DecoderWeights
from tests.parity.checkpoints import make_model, save


def load(folder: Path, share: Share | None, formats: WeightFormats | None = None) -> DecoderWeights:
    model = read_model_config(folder)
    return load_weights(folder, model, torch.float32, "cpu", False, formats, share=share)


def share_of(
    folder: Path, rank: int, size: int = 2, experts: SplitExperts = "tp", formats: WeightFormats | None = None
) -> Share:
    return Share.of(read_model_config(folder), ParallelConfig(size=size, experts=experts), rank, formats)


class CountedShard:
    """A file of weights that counts the bytes that are taken from it."""

    def __init__(self, shard: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.shard, self.count = shard, count
        self.keys, self.offset_keys = shard.keys, shard.offset_keys

    def get_tensor(self, name: str) -> Tensor:
        return self.count(self.shard.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self.shard.get_slice(name), self.count)


class CountedSlice:
    def __init__(self, whole: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.whole, self.count = whole, count
        self.get_shape, self.get_dtype = whole.get_shape, whole.get_dtype

    def __getitem__(self, place: Any) -> Tensor:
        return self.count(self.whole[place])


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor, or part of one, that was taken from a file."""
    sizes: list[int] = []
    open_shard = checkpoint.open_shard

    def count(taken: Tensor) -> Tensor:
        sizes.append(taken.nbytes)
        return taken

    monkeypatch.setattr(checkpoint, "open_shard", lambda file: CountedShard(open_shard(file), count))
    return sizes


@pytest.mark.parametrize(("name", "experts"), [("llama-gqa-tied", "tp"), ("qwen2", "tp"), ("deepseek-v3", "tp"),
                                               ("deepseek-v3", "ep")])  # fmt: skip
def test_a_rank_reads_what_it_stores(name: str, experts: SplitExperts, num_read: list[int], tmp_path: Path) -> None:
    """199 token ids over two ranks: the second has 99 and a line of zeros."""
    folder = save(make_model(name), tmp_path)
    for rank in (0, 1):
        num_read.clear()
        weights = load(folder, share_of(folder, rank, experts=experts))
        num_tables = 1 if weights.config.tie_word_embeddings else 2
        assert sum(num_read) == weights.num_bytes - rank * num_tables * 48 * 4
        assert weights.num_bytes < 0.7 * load(folder, None).num_bytes
    assert not weights.embed.dense()[99].any() and weights.embed.dense()[98].any()


def test_stacks_are_cut_part_by_part(tmp_path: Path) -> None:
    """Two of four query heads, one of two kv heads, and a half of gate and of up."""
    folder = save(make_model("qwen3"), tmp_path)
    whole, own = load(folder, None).stored(), load(folder, share_of(folder, 1)).stored()
    q, k, v = whole["qkv"].split((80, 40, 40), 1)  # heads of 20
    gate, up = whole["gate_up"].chunk(2, 1)
    assert torch.equal(own["qkv"], torch.cat((q[:, 40:], k[:, 20:], v[:, 20:]), 1))
    assert torch.equal(own["gate_up"], torch.cat((gate[:, 40:], up[:, 40:]), 1))
    assert torch.equal(own["o"], whole["o"][:, :, 40:]) and torch.equal(own["down"], whole["down"][:, :, 40:])
    assert torch.equal(own["q_norm"], whole["q_norm"]) and torch.equal(own["input_norm"], whole["input_norm"])


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_codes_are_cut_with_their_scales(bits: Any, num_read: list[int], tmp_path: Path) -> None:
    """Whether a file has them or they are made at load, a rank's codes are a part of the whole model's."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    source, folder = tmp_path / "source", tmp_path / "codes"
    make_model("qwen3", **sizes).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    form = WeightFormat(dtype=bits, group=32)
    formats = WeightFormats(layers=form, tables=WeightFormat(dtype="float32"))
    quantize_checkpoint(source, folder, form)
    for own_folder in (source, folder):
        whole, own = load(own_folder, None, formats), load(own_folder, share_of(own_folder, 1), formats)
        for role in ("o", "down"):
            half = whole.stored()[role].chunk(2, -1)[1]
            assert torch.equal(own.stored()[role], half)
            assert own.matrices[role].num_bytes * 2 == whole.matrices[role].num_bytes
    num_read.clear()
    load(folder, share_of(folder, 1), formats)
    own_bytes = sum(num_read)
    num_read.clear()
    load(folder, None, formats)
    assert own_bytes < 0.6 * sum(num_read)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_shards_are_whole_groups(bits: Any, size: int, tmp_path: Path) -> None:
    """Three groups of inner numbers over two ranks, two of them on the first, and over four, of which the last has
    none. Heads of 24 give no whole groups of ``o``: these columns are floats, of the values that one rank has.
    """
    source, folder = tmp_path / "source", tmp_path / "codes"
    model = make_model("qwen3", hidden_size=64, intermediate_size=96, head_dim=24, num_attention_heads=4,
                       num_key_value_heads=4)  # fmt: skip
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    form = WeightFormat(dtype=bits, group=32)
    formats = WeightFormats(layers=form, tables=WeightFormat(dtype="float32"))
    quantize_checkpoint(source, folder, form)
    for own_folder in (source, folder):
        whole = load(own_folder, None, formats).stored()
        shares = [load(own_folder, share_of(own_folder, rank, size, formats=formats), formats) for rank in range(size)]
        inner = 64 if size == 2 else 32
        assert all(own.config.intermediate_size == inner for own in shares)
        stored = [own.stored() for own in shares]
        down = torch.cat([own["down"] for own in stored], -1)
        assert torch.equal(down[..., :96], whole["down"]) and not down[..., 96:].any()
        for at in (0, 1):  # gate, up
            found = torch.cat([own["gate_up"][:, at * inner : (at + 1) * inner] for own in stored], 1)
            assert torch.equal(found[:, :96], whole["gate_up"].chunk(2, 1)[at]) and not found[:, 96:].any()
        assert torch.equal(torch.cat([own["o"] for own in stored], -1), whole["o"])
        assert all(own.config.float_tensors == ("o",) for own in shares)


def test_a_family_says_what_may_be_cut(tmp_path: Path) -> None:
    def tensors(config: ModelConfig) -> TensorSpecs:
        found = decoder_tensors(config)
        return {**found, "o": replace(found["o"], shard_dim=None)}

    folder = save(make_model("llama-mha"), tmp_path)
    share = share_of(folder, 0)
    FAMILIES.add("UncutForCausalLM", Family(tensors=tensors))
    try:
        uncut = replace(share, whole=replace(share.whole, architecture="UncutForCausalLM"),
                        own=replace(share.own, architecture="UncutForCausalLM"))  # fmt: skip
        with pytest.raises(ValueError, match=r"o_proj.weight \[48, 48\] cannot be split over 2 ranks along 1"):
            load(folder, uncut)
    finally:
        FAMILIES.remove("UncutForCausalLM")


def test_a_rank_is_one_of_its_group(tmp_path: Path) -> None:
    folder = save(make_model("llama-mha"), tmp_path)
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        share_of(folder, 2)


# What a rank stores: shapes that add up, slices that are the tensor together, refusals with the sizes.

R1 = model_config_from_dict(DEEPSEEK_V3)
QWEN = model_config_from_dict(QWEN3_30B)
BLOCKS = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
WAYS = [(attention, experts) for attention in ("tp", "dp") for experts in ("tp", "ep")]


def way(size: int, attention: Any = "tp", experts: Any = "tp") -> ParallelConfig:
    return ParallelConfig(size=size, attention=attention, experts=experts)


def covered(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Of every checkpoint tensor of a model, by role and name: how many of its numbers the ranks hold together."""
    whole, count = tensor_specs(model), dict[str, int]()
    for rank in range(parallel.size):
        for name, role in tensor_specs(rank_config(model, parallel, rank)).items():
            for part in role.parts:
                cut = slice_of(
                    part_shape(whole[name], part),
                    part_shape(role, part),
                    rank,
                    parallel.size,
                    is_padded=role.is_padded,
                )
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
    held, whole = covered(R1, parallel), tensor_specs(R1)
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
    shapes = [part_shape(tensor_specs(model)["qkv"], keys) for model in (QWEN, own)]
    assert shapes == [(512, 2048), (128, 2048)]
    heads = [slice_of(shapes[0], shapes[1], rank, 8)[0].start // 128 for rank in range(8)]
    assert heads == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_rank_knows_the_names_of_its_experts() -> None:
    own = tensor_specs(rank_config(R1, way(16, experts="ep"), 3))["experts_down"]
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
        (QWEN3_30B, way(4, "dp"), "attention is 'dp', which needs latent attention"),
        (QWEN3_30B, way(3), "4 kv heads cannot be split over 3 ranks"),
        (MIXTRAL_8X7B, way(16, experts="ep"), "num_experts is 8; it cannot be split over 16 ranks"),
        (DEEPSEEK_V3 | {"vocab_size": 9}, way(4), "a vocabulary of 9 leaves some of 4 ranks without a line"),
        (DEEPSEEK_V3 | {"moe_intermediate_size": 2056, "intermediate_size": 18440}, way(16, "dp"), None),
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


def test_inner_sizes_are_cut_by_whole_groups() -> None:
    """Of the 144 blocks of a dense layer, 32 ranks store five each: rank 28 has four and
    padding, the last three have padding alone. An expert's 2,048 numbers are 16 blocks: half of the ranks have none.
    """
    assert rank_config(R1, way(16), formats=BLOCKS).intermediate_size == 9 * 128
    own = rank_config(R1, way(32), 31, BLOCKS)
    assert own.moe is not None and (own.intermediate_size, own.moe.inner, own.float_tensors) == (640, 128, ())
    assert rank_config(R1, way(32)).intermediate_size == 576
    cuts = [slice_of((18432,), (640,), rank, 32, is_padded=True)[0] for rank in range(32)]
    assert cuts[28:30] == [slice(17920, 18432), slice(18432, 18432)]
    assert sum(cut.stop - cut.start for cut in cuts) == 18432
    shared = rank_config(R1, way(32, experts="ep"), 0, BLOCKS).moe
    assert shared is not None and shared.shared_inner == 128 and shared.inner == 2048
    one_block = model_config_from_dict(QWEN3_30B | {"moe_intermediate_size": 128})
    with pytest.raises(ValueError, match="128 inner numbers are at most one group of 128, which 2 ranks cannot share"):
        rank_config(one_block, way(2), formats=BLOCKS)


def test_heads_that_cut_through_groups_are_not_quantized() -> None:
    """Four of 32 heads of 48 numbers are whole groups, and an odd number of heads is not."""
    model = model_config_from_dict(QWEN3_30B | {"head_dim": 48})
    formats = WeightFormats.of("int4")
    assert rank_config(model, way(8), formats=formats).float_tensors == ()
    own = rank_config(model, way(32), formats=formats)
    assert own.float_tensors == ("o",)
    assert weight_bytes(own, "bfloat16", formats) > 0
    assert rank_config(model, way(32), formats=WeightFormats.of("bfloat16")).float_tensors == ()
