"""Rope frequencies against transformers for settings of published models, and the laws of the rotation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from benchmarks.stand_ins import checkpoint_of, random_weights
from snapstream.config import ModelConfig, RopeConfig
from snapstream.config.model import LatentConfig, MoEConfig
from snapstream.kernels import reference
from snapstream.kernels.interface import bind
from snapstream.kernels.pytorch import rotate
from snapstream.models.checkpoint import load_weights
from snapstream.models.config_json import parse_rope
from snapstream.models.latent import LatentHeads
from snapstream.models.layers import route
from snapstream.models.registry import tensor_specs
from snapstream.models.rope import Rope, rope_frequencies

HEAD_DIM = 128
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # max_position_embeddings, rope parameters
    "Llama 3.1": (131072, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "Llama 3.2": (131072, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "Vicuna 16k": (4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "Qwen2.5 yarn": (32768, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                             "original_max_position_embeddings": 32768}),
    "DeepSeek V2 yarn": (163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32,
                                  "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
                                  "original_max_position_embeddings": 4096}),
    "yarn, not truncated": (131072, {"rope_type": "yarn", "rope_theta": 1e5, "factor": 32, "truncate": False,
                                     "original_max_position_embeddings": 4096}),
    "yarn, empty ramp": (2048, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 4,
                                "beta_slow": 4, "truncate": False, "original_max_position_embeddings": 1024}),
}  # fmt: skip


def llama_config(max_position: int, parameters: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("name", list(SETTINGS))
def test_frequencies_equal_transformers(name: str) -> None:
    max_position, parameters = SETTINGS[name]
    theirs, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](llama_config(max_position, dict(parameters)))
    rope = Rope(parse_rope({"rope_parameters": parameters}, max_position), HEAD_DIM, "cpu")
    torch.testing.assert_close(rope.frequencies, theirs, rtol=2e-6, atol=0.0)
    assert rope.scale == pytest.approx(scale, rel=1e-6)
    plain = rope_frequencies(RopeConfig(theta=parameters["rope_theta"]), HEAD_DIM)
    assert not torch.allclose(rope.frequencies, plain, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("length", [1, 4096, 4097, 10_000, 60_000])
def test_dynamic_frequencies_equal_transformers(length: int) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama_config(4096, dict(parameters)), seq_len=length)
    rope = Rope(parse_rope({"rope_parameters": parameters}, 4096), HEAD_DIM, "cpu")
    position = torch.tensor([length - 1])
    cos, sin = rope.angles(position, torch.tensor([length]))
    angle = (length - 1) * theirs.double()
    # fp32 keeps about 7 digits of an angle, whoever computes it
    torch.testing.assert_close(cos[0, 0, : HEAD_DIM // 2].double(), angle.cos(), rtol=0, atol=2e-6 * length + 1e-6)
    torch.testing.assert_close(sin[0, 0, HEAD_DIM // 2 :].double(), angle.sin(), rtol=0, atol=2e-6 * length + 1e-6)


def test_dynamic_stretching_needs_more_than_a_pair() -> None:
    rope = parse_rope({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, 4096)
    with pytest.raises(ValueError, match="rotates 2 numbers of a head; it needs 4 or more"):
        Rope(rope, 2, "cpu")


def test_rotation_is_that_of_the_complex_plane() -> None:
    """The pair (x[i], x[i + E/2]) turns by position times frequency i."""
    rope = Rope(RopeConfig(), 8, "cpu")
    positions = torch.tensor([0, 1, 5, 1000])
    heads = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate(heads, rope.angles(positions, positions + 1))
    plane = torch.complex(heads[..., :4], heads[..., 4:]).to(torch.complex128)
    turn = torch.polar(torch.ones(4, 4).double(), positions[:, None] * rope.frequencies.double())
    want = plane * turn[:, None]
    torch.testing.assert_close(rotated, torch.cat((want.real, want.imag), -1).float(), rtol=0, atol=3e-4)
    assert torch.equal(rotated[0], heads[0])


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(RopeConfig(), 16, "cpu")
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1)).unbind()

    def score(at: int, distance: int) -> torch.Tensor:
        here, there = torch.tensor([at]), torch.tensor([at - distance])
        return (rotate(q, rope.angles(here, here + 1)) * rotate(k, rope.angles(there, there + 1))).sum()

    torch.testing.assert_close(score(50, 7), score(500, 7), rtol=0, atol=1e-3)
    assert (score(50, 7) - score(50, 8)).abs() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rotated_in_fp32(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(), 16, "cpu")
    positions = torch.arange(900, 908)
    heads = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    angles = rope.angles(positions, positions + 1)
    rotated = rotate(heads, angles)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, rotate(heads.float(), angles).to(dtype))


# Routing against transformers' routers, and what a choice may depend on.

SIZES = {"hidden_size": 32, "num_experts_per_tok": 3}
V2 = {**SIZES, "n_routed_experts": 12, "routed_scaling_factor": 1.7, "topk_group": 2, "n_group": 4}
V3 = {**V2, "num_experts_per_tok": 4, "norm_topk_prob": True}
CASES: dict[str, tuple[type[Any], Any, MoEConfig]] = {
    "mixtral": (
        MixtralTopKRouter,
        transformers.MixtralConfig(**SIZES, num_local_experts=6),
        MoEConfig(num_experts=6, top_k=3, inner=1, normalise=True),
    ),
    "qwen3": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(**SIZES, num_experts=10, norm_topk_prob=True),
        MoEConfig(num_experts=10, top_k=3, inner=1, normalise=True),
    ),
    "qwen3, plain weights": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(**SIZES, num_experts=10),
        MoEConfig(num_experts=10, top_k=3, inner=1),
    ),
    "v2 greedy": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(**V2, topk_method="greedy"),
        MoEConfig(num_experts=12, top_k=3, inner=1, scale=1.7),
    ),
    "v2 groups": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(**V2, topk_method="group_limited_greedy"),
        MoEConfig(num_experts=12, top_k=3, inner=1, scale=1.7, num_groups=4, top_groups=2),
    ),
    "v3": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config(**V3),
        MoEConfig(num_experts=12, top_k=4, inner=1, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2",
                  normalise=True, scale=1.7, has_bias=True),
    ),
    "v3, one group, plain weights": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config(**{**V3, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        MoEConfig(num_experts=12, top_k=4, inner=1, scoring="sigmoid", scale=1.7, has_bias=True),
    ),
}  # fmt: skip


def by_expert(weights: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """The weights at the places of their experts, ``[T, X]``: in which order they were chosen says nothing."""
    return torch.zeros(len(weights), num_experts).scatter(1, experts, weights)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_routes_the_same(name: str) -> None:
    make, config, moe = CASES[name]
    torch.manual_seed(len(name))
    router = make(config)
    router.weight.normal_()
    correction = None
    if moe.has_bias:
        correction = router.e_score_correction_bias.normal_()
    x = torch.randn(200, 32)
    _, weights, experts = router(x)
    ours = route(x @ router.weight.T, correction, moe)
    torch.testing.assert_close(by_expert(*ours, moe.num_experts), by_expert(weights, experts, moe.num_experts))
    if correction is not None:
        plain = route(x @ router.weight.T, None, moe)
        assert not torch.equal(plain[1].sort(-1).values, ours[1].sort(-1).values), "the correction changes no choice"


def test_a_choice_is_of_its_token_alone() -> None:
    moe = CASES["v3"][2]
    logits, correction = torch.randn(50, 12), torch.randn(12)
    weights, experts = route(logits, correction, moe)
    for row in range(len(logits)):
        alone = route(logits[row : row + 1], correction, moe)
        assert torch.equal(alone[1][0], experts[row])
        torch.testing.assert_close(alone[0][0], weights[row])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_k": 0}, "top_k is 0; it must be >= 1"),
        ({"top_k": 13}, "top_k is 13; it must be <= 12"),
        ({"num_groups": 5}, r"num_experts \(12\) is not a multiple of num_groups \(5\)"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups is 5; there are 4 groups"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 4}, "top_k is 4; it must be <= 3, the experts to choose among"),
        ({"num_groups": 12, "group_score": "top2"}, "a group has 1 experts; group_score 'top2' needs 2"),
        ({"num_shared": -1}, "num_shared is -1; it must be >= 0"),
    ],
)
def test_refused_numbers(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MoEConfig(**{"num_experts": 12, "top_k": 1, "inner": 8, **changes})


def test_experts_read_by_a_step() -> None:
    moe = MoEConfig(num_experts=256, top_k=8, inner=1)
    assert [round(moe.num_read(count)) for count in (0, 1, 8, 64)] == [0, 8, 57, 222]


# The two forms of latent attention choose and attend alike, and rotated rows are permuted without loss.

MODEL = ModelConfig(
    architecture="DeepseekV3ForCausalLM", vocab_size=20, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=1,
    head_dim=28, intermediate_size=24, max_position=128, num_mtp_layers=1,
    latent=LatentConfig(q_rank=10, kv_rank=20, nope_dim=6, rope_dim=8, value_dim=18, softmax_scale=0.7),
)  # fmt: skip


def test_votes_of_latents_are_the_sum_over_the_expanded_heads() -> None:
    """One selection per layer: what absorbed queries vote for is what the heads of the paper's prefill vote for."""
    assert MODEL.latent is not None
    weights = random_weights(MODEL, torch.float32, "cpu", seed=1)
    heads = LatentHeads(MODEL, MODEL.latent, weights.layer(1), bind("cpu", "torch"))
    torch.manual_seed(0)
    queries, latents = 3 * torch.randn(5, 4, 14), torch.randn(40, 28)
    keys, values = torch.zeros(4, 40, 18), torch.zeros(4, 40, 18)
    heads.expand(latents, keys, values)
    absorbed, expanded = heads.absorbed(queries), heads.expanded(queries)
    spans = {"first_query": 35, "start": 3, "stop": 30, "over_row": False}
    own = reference.snapkv_scores(expanded, keys, **spans, group_max=False)  # type: ignore[arg-type]
    for group_max, want in ((False, own.sum(0)), (True, own.amax(0))):
        got = reference.snapkv_scores(absorbed, latents[None], **spans, group_max=group_max)  # type: ignore[arg-type]
        torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
    attended = reference.prefill_attention(absorbed, latents[None], latents[None, :, :20])
    want = reference.prefill_attention(expanded, keys, values)
    torch.testing.assert_close(heads.values(attended), want[..., :18], rtol=1e-4, atol=1e-5)
    logits = torch.einsum("the,hne->htn", queries, keys[..., :14]) * 0.7  # the model's own scale of the softmax
    last = logits[:, -1].softmax(-1) @ values[..., :18]
    torch.testing.assert_close(want[-1, :, :18], torch.stack([last[h, h] for h in range(4)]), rtol=1e-4, atol=1e-5)


def test_pairs_become_halves() -> None:
    """Of each of four heads of 6 + 8 rows the last 8, in the order in which kernels rotate."""
    order = tensor_specs(MODEL)["q"].row_order["self_attn.q_b_proj.weight"]
    assert order[:14] == (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 7, 9, 11, 13)
    assert sorted(order) == list(range(56)) and order[14:] == tuple(row + 14 for row in order[:42])
    (kept,) = tensor_specs(MODEL)["kv_a"].row_order.values()
    assert kept == (*range(20), 20, 22, 24, 26, 21, 23, 25, 27)


def test_weights_are_a_checkpoint_again_and_further_layers_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = random_weights(MODEL, torch.float32, "cpu", seed=1)
    tensors = {name: tensor.clone() for name, tensor in checkpoint_of(weights).items()}
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa.weight" in tensors
    more = {"model.layers.2.enorm.weight": torch.ones(16), "model.layers.2.embed_tokens.weight": torch.ones(20, 16)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        loaded = load_weights(tmp_path, MODEL, torch.float32, "cpu", progress=False)
    assert "2 tensors of multi-token prediction" in caplog.text
    for role, numbers in weights.stored().items():
        assert torch.equal(loaded.stored()[role], numbers), role
    save_file({**tensors, "model.layers.3.enorm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.3\.enorm\.weight, which DeepseekV3ForCausalLM does not use"):
        load_weights(tmp_path, MODEL, torch.float32, "cpu", progress=False)
