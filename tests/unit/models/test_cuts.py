"""What a rank reads of a checkpoint: its own slices, byte for byte, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from snapstream.config import ModelConfig, ParallelConfig, SplitExperts, WeightForm, WeightForms
from snapstream.models import checkpoint, loader, packed
from snapstream.models.cuts import Share
from snapstream.models.dense_roles import dense_roles
from snapstream.models.families import FAMILIES, Family
from snapstream.models.loader import load_weights
from snapstream.models.quantized_checkpoint import quantize_checkpoint
from snapstream.models.registry import read_model_config
from snapstream.models.roles import Roles
from snapstream.models.weights import DecoderWeights
from tests.parity.checkpoints import make_model, save


def load(folder: Path, share: Share | None, forms: WeightForms | None = None) -> DecoderWeights:
    model = read_model_config(folder)
    return load_weights(folder, model, torch.float32, "cpu", False, forms, share=share)


def share_of(folder: Path, rank: int, size: int = 2, experts: SplitExperts = "tp") -> Share:
    return Share.of(read_model_config(folder), ParallelConfig(size=size, experts=experts), rank)


class CountedShard:
    """A file of weights that counts the bytes that are taken from it."""

    def __init__(self, shard: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.shard, self.count, self.offset_keys = shard, count, shard.offset_keys

    def get_tensor(self, name: str) -> Tensor:
        return self.count(self.shard.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self.shard.get_slice(name), self.count)


class CountedSlice:
    def __init__(self, whole: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.whole, self.count, self.get_shape = whole, count, whole.get_shape

    def __getitem__(self, place: Any) -> Tensor:
        return self.count(self.whole[place])


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor, or part of one, that was taken from a file."""
    sizes: list[int] = []

    def count(taken: Tensor) -> Tensor:
        sizes.append(taken.nbytes)
        return taken

    @contextmanager
    def opened(file: Path) -> Iterator[Any]:
        with checkpoint.open_shard(file) as shard:
            yield CountedShard(shard, count)

    for module in (loader, packed):
        monkeypatch.setattr(module, "open_shard", opened)
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
    form = WeightForm(width=bits, group=32)
    forms = WeightForms(layers=form, tables=WeightForm(width="float32"))
    quantize_checkpoint(source, folder, form)
    for own_folder in (source, folder):
        whole, own = load(own_folder, None, forms), load(own_folder, share_of(own_folder, 1), forms)
        for role in ("o", "down"):
            half = whole.stored()[role].chunk(2, -1)[1]
            assert torch.equal(own.stored()[role], half)
            assert own.matrices[role].num_bytes * 2 == whole.matrices[role].num_bytes
    num_read.clear()
    load(folder, share_of(folder, 1), forms)
    own_bytes = sum(num_read)
    num_read.clear()
    load(folder, None, forms)
    assert own_bytes < 0.6 * sum(num_read)


def test_a_group_is_not_cut(tmp_path: Path) -> None:
    """96 inner numbers in groups of 32 are 48 of each of two ranks: one and a half groups."""
    source, folder = tmp_path / "source", tmp_path / "codes"
    make_model("qwen3", hidden_size=64, intermediate_size=96, head_dim=16).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    quantize_checkpoint(source, folder, WeightForm(width="int8", group=32))
    with pytest.raises(ValueError, match="a rank's share of its 96 columns is 0 to 48; it must be a multiple of 32"):
        load(folder, share_of(folder, 0))


def test_a_family_says_what_may_be_cut(tmp_path: Path) -> None:
    def roles(config: ModelConfig) -> Roles:
        found = dense_roles(config)
        return {**found, "o": replace(found["o"], shard_dim=None)}

    folder = save(make_model("llama-mha"), tmp_path)
    share = share_of(folder, 0)
    FAMILIES.add("UncutForCausalLM", Family(roles=roles))
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
