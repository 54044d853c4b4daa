"""Attention of looped steps where its tiles end: groups and sizes of heads, parts of rows, all kinds of rows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapstream.config import KVDType, ModelConfig, WeightFormats
from snapstream.exec.eager import EagerDecode, draft_batch
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.exec.sampling import NO_TOKEN
from snapstream.exec.speculation import SlotBackup
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load, num_cores
from snapstream.llm import LLM
from snapstream.models.matrix import make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict
from tests.parity.checkpoints import ARCHITECTURES, RECURRENT, VOCAB, make_model, save
from tests.parity.test_looped import LENGTHS, ROPES, SETTINGS, WIDTHS, answers, random_runner, runner_of

# Looped steps of models with experts and with latents: eager's tokens, its logits to rounding, the same bits in any
# batch.

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SPARSE = (
    "Mo",
    "Mixtral",
    "GptOss",
    "MiniMaxM",
    "Dots1",
    "Olmoe",
    "HYV3",
    "Mellum",
    "Kolibri",
    "SolarOpen",
    "Flint",
    "HunYuanMoE",
    "Afmoe",
    "Laguna",
    "Step3",
    "Phimoe",
    "Llama4",
)
MIXTURES = [
    name
    for name, (config, _) in ARCHITECTURES.items()
    if any(kind in config for kind in SPARSE) and name not in RECURRENT
]
LATENTS = [
    name
    for name, (config, _) in ARCHITECTURES.items()
    if any(kind in config for kind in ("Deepseek", "Youtu", "Mistral4", "AXK1"))
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("name", [*MIXTURES, *LATENTS, *RECURRENT])
def test_tokens_equal_eager(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    assert answers(folder, prompts, "looped") == answers(folder, prompts, "eager")


@pytest.mark.parametrize(
    "changes",
    [
        # Inputs that prefill rounds make an expert of difference here and there (test_prefill_that_rounds_its_inputs).
        {"weights": "bfloat16", "activations": "dtype"},
        {"weights": "int8", "activations": "dtype"},
        {"weights": "int4", "activations": "dtype"},
        {"max_rows": 7, "budget": "full"},
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_tokens_equal_eager_in_other_engines(
    name: str, changes: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= {"head_dim": 16} if name == "glm4-moe" else {"q_lora_rank": 32, "kv_lora_rank": 32}
    folder = save(make_model(name, **sizes), tmp_path)
    assert answers(folder, prompts, "looped", **changes) == answers(folder, prompts, "eager", **changes)


def test_they_are_the_default(tmp_path: Path) -> None:
    with LLM(save(make_model("deepseek-v3"), tmp_path), **SETTINGS) as llm:
        assert isinstance(llm.engine.runner.decode, LoopedDecode)  # type: ignore[attr-defined]


def test_scores_that_are_not_numbers_draw_no_token() -> None:
    """Whatever experts they choose."""
    model = model_config_from_dict({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 5,
        "intermediate_size": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "hidden_act": "silu",
    })  # fmt: skip
    runner = random_runner(model, WeightFormats.of("float32"), "auto", make_panels(load()), 24, 0)
    runner.decoder.weights.vectors["router"][0, 2] = float("nan")
    drawn = LoopedDecode(runner.step_parts, 1).step(torch.tensor([0, 3]), SamplingNeeds())
    assert drawn.token_ids.tolist() == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(("rank", "rope_dim"), [(16, 8), (24, 4), (32, 8)])
def test_values_wider_than_latents(rank: int, rope_dim: int, instructions: Any) -> None:
    """What all heads attended is the widest input of a product then: of every row of a full batch, in every layer."""
    model = model_config_from_dict({
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 90, "hidden_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 80,
        "kv_lora_rank": rank, "qk_nope_head_dim": 16, "qk_rope_head_dim": rope_dim, "v_head_dim": rank + rope_dim + 4,
        "n_routed_experts": None, "first_k_dense_replace": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0,
    })  # fmt: skip
    for num_rows in (1, 4, 17):
        runner = random_runner(
            model, WeightFormats.of("float32"), "auto", make_panels(load(instructions)), 24, 0, num_rows=num_rows
        )
        rows = torch.arange(num_rows)
        with torch.inference_mode():
            got, want = (step(runner.step_parts).logits(rows).clone() for step in (LoopedDecode, EagerDecode))
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5 * float(want.abs().max()))


@st.composite
def mixtures(draw: st.DrawFn, multiple: int) -> dict[str, Any]:
    """Fields of experts by the names of DeepSeek-V3, in sizes that are multiples of ``multiple``."""
    groups = draw(st.sampled_from([1, 2, 4]))
    top_groups, size = draw(st.integers(1, groups)), draw(st.integers(2, 10))
    return {
        "n_routed_experts": groups * size, "n_group": groups, "topk_group": top_groups,
        "num_experts_per_tok": draw(st.integers(1, min(top_groups * size, 6))),
        "moe_intermediate_size": multiple * draw(st.integers(1, 100 // multiple)),
        "n_shared_experts": draw(st.integers(0, 2)), "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0,
    }  # fmt: skip


@st.composite
def models(draw: st.DrawFn, multiple: int) -> ModelConfig:
    """Experts behind attention of every kind, scored either way; layers with one MLP before them, or nothing else."""
    family = draw(st.sampled_from(["DeepseekV3", "DeepseekV2", "Glm4Moe", "Qwen3Moe", "GptOss"]))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    found: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "vocab_size": 61, "hidden_size": multiple * draw(st.integers(1, 150 // multiple)),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": multiple * draw(st.integers(1, 90 // multiple)), "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "first_k_dense_replace": draw(st.integers(0, layers)), **draw(mixtures(multiple)),
    }  # fmt: skip
    if family in ("Glm4Moe", "Qwen3Moe"):
        own = {"head_dim": 32, "attention_bias": draw(st.booleans()), "num_experts": found["n_routed_experts"]}
        first = {"first_k_dense_replace": draw(st.integers(0, layers - 1))}
        return model_config_from_dict(found | own | first)
    if family == "GptOss":
        groups = draw(st.integers(1, 3))
        return model_config_from_dict(found | {
            "num_attention_heads": groups * heads, "head_dim": 32, "attention_bias": draw(st.booleans()),
            "num_local_experts": found["n_routed_experts"], "intermediate_size": found["moe_intermediate_size"],
            "swiglu_limit": draw(st.sampled_from([0.5, 2.0])), "layer_types": ["full_attention"] * layers,
        })  # fmt: skip
    rope = draw(st.sampled_from([own for own in ROPES if own is None or own["rope_type"] != "longrope"]))
    return model_config_from_dict(
        found | {"norm_topk_prob": False if family == "DeepseekV2" else found["norm_topk_prob"]} | {
            "q_lora_rank": draw(st.sampled_from([None, 32, 2 * multiple])),
            "kv_lora_rank": draw(st.sampled_from([32, 96, 3 + multiple])) if multiple == 1 else 64,
            "qk_nope_head_dim": draw(st.integers(1, 40)), "qk_rope_head_dim": draw(st.sampled_from([4, 8, 64])),
            "v_head_dim": 32 if multiple > 1 else draw(st.integers(1, 40)), "rope_scaling": rope,
            "max_position_embeddings": 64 if rope and rope["rope_type"] == "dynamic" else 4096,
            "topk_method": "noaux_tc" if family == "DeepseekV3" else draw(st.sampled_from(
                ["greedy", "group_limited_greedy"])),
        }
    )  # fmt: skip


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=25)
@given(
    data=st.data(), width=st.sampled_from([*WIDTHS, "mxfp4"]), kv_dtype=st.sampled_from(["auto", "fp8"]),
    capacity=st.sampled_from([1, 2, 17, 40, 1100]), threads=st.integers(1, min(2, num_cores())),
    batch=st.permutations(range(5)), size=st.integers(1, 5), seed=st.integers(0, 999),
)  # fmt: skip
def test_logits_equal_eager_and_do_not_depend_on_neighbours(
    data: st.DataObject, width: str, kv_dtype: str, instructions: Any, capacity: int, threads: int, batch: list[int],
    size: int, seed: int,
) -> None:  # fmt: skip
    model = data.draw(models(multiple=32 if width in ("int8", "int4", "mxfp4") else 1))
    runner = random_runner(model, WeightFormats.of(width), kv_dtype, make_panels(load(instructions)), capacity, seed)
    looped, eager = LoopedDecode(runner.step_parts, threads), EagerDecode(runner.step_parts)
    before, rows = runner.cache.k.clone(), torch.tensor(batch[:size])
    with torch.inference_mode():
        got = looped.logits(rows).clone()
        written = runner.cache.k.float().clone()
        alone = torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(size)])
        assert torch.equal(alone, got)
        runner.cache.k.copy_(before)
        want = eager.logits(rows)
    # A number of FP8 rows may round to its neighbour, one part in eight of itself.
    limit, rtol = (5e-5, 1e-4) if kv_dtype == "auto" else (2e-2, 0.13)
    torch.testing.assert_close(got, want, rtol=0, atol=limit * float(want.abs().max()))
    torch.testing.assert_close(written, runner.cache.k.float(), rtol=rtol, atol=1e-3)
    looped.close()


# Key heads, value heads, elements of a key and of a value; hidden size, tokens of a convolution.
NETS = [(2, 6, 8, 12, 48, 4), (3, 3, 5, 7, 20, 2), (1, 4, 16, 33, 40, 3), (2, 2, 128, 128, 64, 4), (1, 1, 1, 81, 36, 7)]
NETS_IN_GROUPS = [(2, 4, 16, 32, 64, 4), (3, 3, 32, 32, 32, 3)]
CONVS = [(48, 3), (20, 2), (138, 7)]


def delta_net(sizes: tuple[int, ...], is_mixture: bool) -> ModelConfig:
    key_heads, value_heads, key_dim, value_dim, hidden, kernel = sizes
    experts = {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32 if hidden == 64 else 24,
    }  # fmt: skip
    return model_config_from_dict({
        "architectures": ["Qwen3_5MoeForCausalLM" if is_mixture else "Qwen3_5ForCausalLM"], "vocab_size": 61,
        "hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 32, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": kernel,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 4, **(experts if is_mixture else {}),
    })  # fmt: skip


def short_conv(hidden: int, kernel: int) -> ModelConfig:
    return model_config_from_dict({
        "architectures": ["Lfm2ForCausalLM"], "vocab_size": 61, "hidden_size": hidden, "intermediate_size": 64,
        "block_auto_adjust_ff_dim": False, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "conv_L_cache": kernel, "conv_bias": True, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "conv", "conv"],
    })  # fmt: skip


# Groups, heads, elements of B and of a head; hidden size, tokens of a convolution.
SCANS = [(1, 6, 20, 24, 48, 3), (3, 3, 5, 7, 21, 2), (2, 4, 128, 64, 128, 4), (1, 1, 81, 36, 36, 7)]
SCAN_IN_GROUPS = (2, 4, 16, 32, 64, 4)


def mamba2(sizes: tuple[int, ...], is_mixture: bool) -> ModelConfig:
    groups, heads, states, head_dim, hidden, kernel = sizes
    return model_config_from_dict({
        "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 61, "hidden_size": hidden,
        "intermediate_size": 32, "shared_intermediate_size": 64, "num_local_experts": 5 if is_mixture else 0,
        "num_experts_per_tok": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
        "mamba_n_groups": groups, "mamba_n_heads": heads, "mamba_d_state": states, "mamba_d_head": head_dim,
        "mamba_expand": heads * head_dim // hidden, "mamba_d_conv": kernel, "mamba_conv_bias": heads > 1,
        "mamba_proj_bias": is_mixture, "attention_multiplier": 0.05, "residual_multiplier": 0.6,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "num_hidden_layers": 4, "max_position_embeddings": 512,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    })  # fmt: skip


def kimi(sizes: tuple[int, int, int], q_rank: int | None) -> ModelConfig:
    """KDA beside latents."""
    heads, dim, kernel = sizes
    return model_config_from_dict({
        "architectures": ["KimiLinearForCausalLM"], "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 5, "kv_lora_rank": 24, "q_lora_rank": q_rank, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "linear_num_heads": heads, "linear_head_dim": dim,
        "linear_conv_kernel_dim": kernel, "num_hidden_layers": 4, "max_position_embeddings": 512,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    })  # fmt: skip


def single_parts(pattern: str, inner: int, moe_inner: int, latent: int | None = None) -> ModelConfig:
    """Layers of one part each, MLPs and experts without gate."""
    return model_config_from_dict({
        "architectures": ["NemotronHForCausalLM"], "vocab_size": 61, "hidden_size": 64, "intermediate_size": inner,
        "hybrid_override_pattern": pattern, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 20, "conv_kernel": 4,
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": moe_inner,
        "moe_shared_expert_intermediate_size": 2 * moe_inner, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 512, "moe_latent_size": latent,
    })  # fmt: skip


RECURRENT_MODELS = [
    (kimi((3, 12, 3), 20), "float32", False), (kimi((1, 130, 4), None), "float32", False),
    (kimi((2, 32, 4), 32), "int8", False), (kimi((2, 37, 2), None), "bfloat16", False),
    (single_parts("M-E*EM", 96, 32), "float32", False), (single_parts("-EM*MM", 90, 36), "float32", False),
    (single_parts("EM-*", 160, 96), "int8", False), (single_parts("M-*-", 96, 32), "int8", True),
    (single_parts("*MM-", 96, 32), "int4", True), (single_parts("M*E", 96, 40), "bfloat16", False),
    (single_parts("ME*E", 96, 32, 37), "float32", False), (single_parts("ME*-", 160, 96, 32), "int8", True),
    (single_parts("EM*", 96, 40, 45), "bfloat16", False),
    *((mamba2(sizes, at % 2 == 0), width, False)
      for at, sizes in enumerate(SCANS) for width in (("float32", "bfloat16") if at == 1 else ("float32",))),
    (mamba2(SCAN_IN_GROUPS, True), "int8", False), (mamba2(SCAN_IN_GROUPS, False), "int8", True),
    (mamba2(SCAN_IN_GROUPS, False), "int4", True),
    *((delta_net(sizes, at % 2 == 0), width, False)
      for at, sizes in enumerate(NETS) for width in (("float32", "bfloat16") if at == 1 else ("float32",))),
    *((delta_net(NETS_IN_GROUPS[at], False), "int8", at == 1) for at in (0, 1, 1)),
    (delta_net(NETS_IN_GROUPS[0], False), "int4", True),
    *((short_conv(*sizes), "float32", False) for sizes in CONVS),
    (short_conv(20, 2), "bfloat16", False), (short_conv(64, 3), "int8", False), (short_conv(64, 3), "int4", True),
]  # fmt: skip


def recurrent_formats(case: int) -> WeightFormats:
    _, width, rounds = RECURRENT_MODELS[case]
    return WeightFormats.of(width).rounding_inputs() if rounds else WeightFormats.of(width)


def with_random_states(case: int, instructions: InstructionSet) -> tuple[ModelConfig, ModelRunner, list[Tensor]]:
    """A recurrent model, its runner, and the states of its layers."""
    model = RECURRENT_MODELS[case][0]
    runner = random_runner(model, recurrent_formats(case), "auto", make_panels(load(instructions)), 24, case)
    states = [tensor for layer in model.recurrent_layers for tensor in runner.cache.state(layer).values()]
    for tensor in states:
        tensor.normal_()
    return model, runner, states


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("case", range(len(RECURRENT_MODELS)))
def test_states_go_on_by_accepted_drafts(case: int, instructions: InstructionSet) -> None:
    """Of rows whose drafts are right, right at first, wrong and absent: tokens and states are those of single steps."""
    model, runner, states = with_random_states(case, instructions)
    if model.latent is not None:  # drafts are not verified in full rings, where latents are written before any attends
        runner.rows.num_tokens.clamp_(max=20)
    counters = runner.rows.last_token, runner.rows.num_tokens
    all_state = (*states, runner.cache.k, runner.cache.v, *counters)
    kept, rows = [tensor.clone() for tensor in all_state], [3, 0, 4, 1]
    looped, after, said = LoopedDecode(runner.step_parts, min(1 + case % 2, num_cores())), [], []
    with torch.inference_mode():
        for _ in range(4):
            said.append(looped.step(torch.tensor(rows), SamplingNeeds()).token_ids.tolist())
            after.append([tensor.clone() for tensor in states])
        for tensor, before in zip(all_state, kept, strict=True):
            tensor.copy_(before)
        by_row = [list(tokens) for tokens in zip(*said, strict=True)]
        wrong = [(tokens[turn] + 1) % model.vocab_size for turn, tokens in zip((0, 1, 0, 0), by_row, strict=True)]
        drafts = [by_row[0][:3], [by_row[1][0], wrong[1], 1], [], [wrong[3]]]
        last = runner.rows.last_token[rows].tolist()
        batch = draft_batch(rows, last, drafts)
        backup = SlotBackup(runner.step_parts, batch)
        sampled, counts = looped.verify(batch, SamplingNeeds())
        backup.restore(batch, counts)
        assert counts == [4, 2, 1, 1]
        assert sampled.token_ids.tolist() == [t for own, count in zip(by_row, counts, strict=True) for t in own[:count]]
        for row, count in zip(rows, counts, strict=True):
            assert all(torch.equal(own[row], want[row]) for own, want in zip(states, after[count - 1], strict=True))
        untouched = torch.tensor([2, 5])
        assert all(torch.equal(own[untouched], before[untouched]) for own, before in zip(states, kept, strict=False))
        too_many = draft_batch([0], last[:1], [[1] * 17])
        with pytest.raises(ValueError, match="17 drafted entries in a step; this engine has 16"):
            looped.verify(too_many, SamplingNeeds())
    looped.close()


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("case", range(len(RECURRENT_MODELS)))
def test_recurrent_layers(case: int, instructions: InstructionSet) -> None:
    """Several steps from random states: logits and states are eager's, and the same bits in a batch and alone."""
    (model, runner, states), rounds = with_random_states(case, instructions), RECURRENT_MODELS[case][2]
    kept = [tensor.clone() for tensor in (*states, runner.cache.k, runner.cache.v)]
    counters = runner.rows.last_token, runner.rows.num_tokens
    counted = [tensor.clone() for tensor in counters]

    def run(step: Any, batches: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for tensor, before in zip((*states, runner.cache.k, runner.cache.v), kept, strict=True):
            tensor.copy_(before)
        for tensor, before in zip(counters, counted, strict=True):
            tensor.copy_(before)
        found = []
        for _ in range(1 if rounds else 3):  # an input that rounds to its neighbour makes a difference, which grows
            found.append(torch.cat([step.logits(torch.tensor(rows)).clone() for rows in batches]))
            runner.rows.last_token[:5] = found[-1].argmax(-1)
            runner.rows.num_tokens[:5] += 1
        return torch.stack(found), [tensor.clone() for tensor in states]

    looped = LoopedDecode(runner.step_parts, min(1 + case % 2, num_cores()))
    with torch.inference_mode():
        got, left = run(looped, [list(range(5))])
        alone, left_alone = run(looped, [[row] for row in range(5)])
        parts = runner.step_parts
        if rounds:  # outside of looped steps, products over panels do not round
            parts = replace(
                parts, decoder=random_runner(model, recurrent_formats(case), "auto", make_matrix, 24, case).decoder
            )
        want, expected = run(EagerDecode(parts), [list(range(5))])
    looped.close()
    assert torch.equal(got, alone) and all(map(torch.equal, left, left_alone))
    limit = 2e-2 if rounds else 2e-4
    torch.testing.assert_close(got, want, rtol=0, atol=limit * float(want.abs().max()))
    for own, other in zip(left, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=limit * float(other.abs().max()))


def model_of(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return model_config_from_dict({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 40,
        "max_position_embeddings": 4096,
    })  # fmt: skip


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "capacity"),
    [(1, 1, 64, 1024), (4, 1, 64, 1025), (7, 1, 96, 1039), (9, 1, 40, 1023), (6, 2, 20, 2064), (8, 1, 256, 300)],
)
def test_rows_of_any_kind_and_length(
    heads: int, kv_heads: int, head_dim: int, capacity: int, instructions: InstructionSet
) -> None:
    """Eager's logits, the same bits alone and beside others; unseen slots (NaN, in FP8 zeros) change none."""
    for kv_dtype in get_args(KVDType):
        if "int4" in kv_dtype and head_dim % 32:
            continue
        runner = runner_of(model_of(heads, kv_heads, head_dim), "float32", kv_dtype, instructions, capacity, 0)
        cache, rows = runner.cache, torch.tensor([3, 0, 4, 1, 2])
        for encoding, stored, scale in zip(
            cache.encodings, (cache.k, cache.v), (cache.k_scale, cache.v_scale), strict=True
        ):
            tensor, name = stored if encoding.format.scales != "slot" or scale is None else scale, encoding.format.name
            for row, seen in ((0, 1), (1, 2)):
                tensor[:, row, :, seen:] = 0.0 if name == "fp8" else 255 if name == "int4" else float("nan")
        looped, eager = LoopedDecode(runner.step_parts, 1), EagerDecode(runner.step_parts)
        with torch.inference_mode():
            got = looped.logits(rows).clone()
            want = eager.logits(rows)  # which writes the tokens that are there already, once more
            again = torch.cat([looped.logits(row[None]).clone() for row in rows])
        looped.close()
        limit = 2e-5 if kv_dtype == "auto" else 2e-2  # as a new token's numbers may round to their neighbours
        torch.testing.assert_close(got, want, rtol=0, atol=limit * float(want.abs().max()))
        assert torch.equal(again, got)
