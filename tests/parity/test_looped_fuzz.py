"""Looped decode of models whose every dimension is drawn by itself: batches, each row alone, and eager.

``SNAPSTREAM_FUZZ=COUNT[:FIRST]`` draws the configurations FIRST .. FIRST + COUNT - 1 (``make test-all``); the number of
a failed one runs it again. Sizes that no published model has are the point: they find a buffer sized by the wrong one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import gcd
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from snapstream.config import KV_DTYPES, KVBudget, ModelConfig, WeightFormat, WeightFormats
from snapstream.config.model import MoEConfig
from snapstream.config.weights import K_BLOCK, K_GROUPS, WeightDType, stack_name
from snapstream.exec.eager import EagerDecode, draft_batch
from snapstream.exec.executors import MAX_DRAFTED
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.row_state import NewRow, SamplingNeeds
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import Sampled
from snapstream.exec.speculation import SlotBackup
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load, num_cores
from snapstream.kv.spec import Window
from snapstream.models import layers as router
from snapstream.models.adapters import Projection, model_problems, projections
from snapstream.models.adapters import num_rows as rows_of
from snapstream.models.lora import Adapters, LowRank
from snapstream.models.matrix import MakeMatrix, Matrix, make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import FAMILIES, model_config_from_dict, tensor_specs
from snapstream.types import SamplingParams
from tests.parity.test_looped import ROPES, WIDTHS, random_runner

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

_COUNT, _, _FIRST = os.environ.get("SNAPSTREAM_FUZZ", "24").partition(":")
SEEDS = range(int(_FIRST or 0), int(_FIRST or 0) + int(_COUNT))
STEPS = 2


NEED_WINDOWS = (
    "Afmoe",
    "Cohere2",
    "Flint",
    "Gemma2",
    "Gemma3",
    "Granite",
    "Kolibri",
    "Lfm3",
    "MuseGlimmer",
    "Olmo3",
    "VaultGemma",
)  # in some layers
OTHER_ACTIVATIONS = {"GemmaForCausalLM": "gelu_pytorch_tanh", "ArceeForCausalLM": "relu2",
                     "ApertusForCausalLM": "xielu", "NanoChatForCausalLM": "relu2", "NemotronForCausalLM": "relu2",
                     "Jais2ForCausalLM": "relu2", "PhiForCausalLM": "gelu_new",
                     "Starcoder2ForCausalLM": "gelu_pytorch_tanh"}  # fmt: skip
NEED_LENGTH_SCALE = ("Ministral3", "Mistral4")
LENGTH_SCALE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.3,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


class Sizes:
    """Draws sizes; those that matrices of codes have as inputs are whole groups."""

    def __init__(self, random: Random, group: int) -> None:
        self.random, self.group = random, group

    def any(self, low: int, high: int, multiple: int = 1) -> int:
        return multiple * self.random.randint(-(-low // multiple), max(high // multiple, -(-low // multiple)))

    def inputs(self, high: int, times: int = 1, multiple: int = 1) -> int:
        """Of which ``times`` are the input of a matrix."""
        whole = self.group // gcd(self.group, times)
        return self.any(1, max(high, whole), multiple * whole // gcd(multiple, whole))


def draw_model(random: Random, architecture: str, group: int) -> ModelConfig:
    """Of that architecture, by the fields of its config.json."""
    size, family = Sizes(random, group), FAMILIES.get(architecture)
    layers, kv_heads, vocab = size.any(1, 3), size.any(1, 4), size.any(3, 300)
    heads = kv_heads * size.any(1, 5)
    rope = LENGTH_SCALE if architecture.startswith(NEED_LENGTH_SCALE) else random.choice(ROPES)
    if architecture.startswith(("HunYuan", "NanoChat")) and rope and rope["rope_type"] in ("yarn", "longrope"):
        rope = None
    if architecture.startswith(("Phimoe", "PhiMoE")):
        has_factors = rope is not None and rope["rope_type"] == "longrope"
        rope = {**rope, "short_mscale": 1.3, "long_mscale": 1.3} if rope and has_factors else None
    found: dict[str, Any] = {
        "architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": OTHER_ACTIVATIONS.get(architecture, "silu"),
        "rms_norm_eps": 10.0 ** random.randint(-6, -2), "vocab_size": vocab,
        "hidden_size": size.inputs(200), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": size.inputs(300), "rope_theta": 10000.0,
        "rope_scaling": rope, "sliding_window": None, "tie_word_embeddings": random.random() < 0.3,
        "max_position_embeddings": 64 if rope and rope["rope_type"] == "dynamic" else 8192,
        "attention_bias": random.random() < 0.5 and "Afmoe" not in architecture,
        "mlp_bias": random.random() < 0.5 and not architecture.startswith(("HYV3", "Arcee", "Apertus", "NanoChat")),
        "no_rope_layers": random.choices([0, 1], k=layers),
    }  # fmt: skip
    part = family.defaults.get("partial_rotary_factor", 1.0) if family.is_partly_rotated else 1.0
    part = 0.5 if architecture.startswith("Bamba") else part
    if architecture == "InternLM3ForCausalLM":
        found["attention_bias"] = found["mlp_bias"]
    if "kv_lora_rank" in family.defaults:
        heads = found["num_attention_heads"] = found["num_key_value_heads"] = size.any(1, 9)
        found |= {
            "q_lora_rank": random.choice([None, size.inputs(100)]), "kv_lora_rank": size.any(2, 100, 2),
            "qk_nope_head_dim": size.any(1, 70), "qk_rope_head_dim": size.any(4, 40, 2), "attention_bias": False,
            "v_head_dim": size.inputs(100, times=heads), "topk_method": "noaux_tc",
        }  # fmt: skip
        if architecture == "DeepseekV2ForCausalLM":
            found["topk_method"] = random.choice(["greedy", "group_limited_greedy"])
        elif architecture.startswith(("Mistral4", "Kimi")):
            del found["topk_method"]
        elif architecture.startswith("Bailing"):
            found["q_lora_rank"] = None
        if architecture.startswith(("HYV4", "Glm5Next")):
            found |= {"q_lora_rank": size.inputs(100), **draw_hyper(random, size)}
            if architecture.startswith("Glm5Next"):
                found["qk_rope_head_dim"], rope = 0, None
    else:
        rotated = 4 if rope and rope["rope_type"] == "dynamic" else 2  # elements of a head at least
        found["head_dim"] = size.inputs(160, times=heads, multiple=max(4, int(rotated / part)))
        if architecture == "StableLmForCausalLM":  # whatever the file says of heads
            names = "use_parallel_residual", "use_qkv_bias", "qk_layernorm"
            found |= {name: random.random() < 0.5 for name in names}
            found["hidden_size"] = heads * found["head_dim"]
        if architecture == "CohereForCausalLM":
            found["use_qk_norm"] = random.random() < 0.5
        if architecture == "Cohere2ForCausalLM":  # whatever the file says of heads
            found["head_dim"] = size.inputs(40, times=heads, multiple=4)
            found["hidden_size"] = heads * found["head_dim"]
    if family.has_windows and random.random() < 0.5:
        found |= {
            "sliding_window": random.choice([1, 30, 1025, 5000]), "use_sliding_window": True,
            "max_window_layers": size.any(0, layers),
        }  # fmt: skip
    elif family.has_windows and architecture.startswith(NEED_WINDOWS):
        found["sliding_window"] = 5000
    if architecture.startswith(("Gemma2", "VaultGemma")):
        caps = random.choice([None, 0.3, 50.0]), random.choice([None, 3.0])
        found |= dict(zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True))
    if architecture.startswith(("Laguna", "Step3")):
        found |= draw_laguna(random, size, kv_heads, layers)
        rope = None
    if architecture.startswith("MiMo"):
        found |= draw_mimo(random, size, heads, layers)
        rope = None
    if architecture.startswith("Step3"):
        kinds = dict(zip(found["layer_types"], found["num_attention_heads_per_layer"], strict=True))
        found |= {
            "num_sliding_attention_heads": kinds.get("sliding_attention"), "mlp_bias": False,
            "num_attention_heads": kinds.get("full_attention", heads),
            **{name: random.choices([0.0, 0.3, 2.0], k=layers) for name in ("swiglu_limits", "swiglu_limits_shared")},
        }  # fmt: skip
    if architecture.startswith("MiniMaxM3"):
        found |= {
            "dense_intermediate_size": size.inputs(300), "swiglu_limit": random.choice([0.3, 5.0]),
            "mlp_layer_types": ["dense"] * (first := size.any(0, layers)) + ["sparse"] * (layers - first),
        }  # fmt: skip
    if architecture.startswith("Llama4"):
        found |= {
            "intermediate_size_mlp": size.inputs(300), "attention_chunk_size": random.choice([1, 30, 129]),
            "floor_scale": random.choice([1, 7, 50]), "attn_scale": 0.7, "attn_temperature_tuning": size.any(0, 1),
            "interleave_moe_layer_step": size.any(1, 2),
            "use_qk_norm": rope is None or rope["rope_type"] not in ("yarn", "longrope"),
        }  # fmt: skip
    if architecture.startswith(("MuseGlimmer", "NanoChat")):
        found |= {"attention_bias": False, "tie_word_embeddings": False, "post_norm_eps": random.choice([1e-8, 0.1])}
    if "SWA" in architecture:  # by kind of layers a base of rope, or none
        found |= {"rope_scaling": None, "layer_rope_theta": [
            random.choice([0.0, 1e4 if layer % 4 else 5e4]) for layer in range(layers)]}  # fmt: skip
        rope = None
    if architecture.startswith("HyperCLOVA"):
        found |= {"attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 2.0,
                  "embedding_multiplier": 3.0, "use_post_norm": random.random() < 0.7}  # fmt: skip
    if architecture.startswith("Gemma4"):
        found |= draw_gemma4(random, size, heads)
    if architecture.startswith("Gemma3n"):
        found |= draw_gemma3n(random, size)
    if architecture.startswith("Falcon"):
        found |= draw_falcon(random, size)
    elif family.other_layer_types:
        found |= draw_recurrent(random, size, family.other_layer_types[0], layers)
        if architecture.startswith("Lfm3"):
            found |= draw_lfm3(random, found)
        if architecture.startswith(("Bamba", "Granite")):
            found |= draw_mamba(random, size, found["hidden_size"])
            found["attn_layer_indices"] = [
                at for at, kind in enumerate(found["layer_types"]) if kind != "linear_attention"
            ]
        if architecture.startswith("Kimi"):
            found |= {"linear_num_heads": (count := size.any(1, 4)), "tie_word_embeddings": False,
                      "linear_head_dim": size.inputs(140, times=count)}  # fmt: skip
        if architecture.startswith("Bailing"):
            found |= {"tie_word_embeddings": False, "linear_head_dim": size.inputs(100, times=heads),
                      "short_conv_kernel_size": size.any(2, 6), "kda_safe_gate": random.random() < 0.7}  # fmt: skip
        if architecture.startswith("Nemotron"):
            latent = random.choice([None, size.inputs(found["hidden_size"])])
            found |= draw_single_parts(random, size) | {"moe_latent_size": latent}
    if family.has_experts:
        found["router_jitter_noise"] = random.choice([0.0, 0.01, 0.5])
        found |= draw_experts(random, size, architecture, layers)
    if "Gemma4" in architecture:
        found["vocab_size_per_layer_input"] = found["vocab_size"]
    if rope is None or (rope["rope_type"] != "longrope" and architecture != "Phi3ForCausalLM"):
        return model_config_from_dict(found)
    dim = found.get("qk_rope_head_dim") or found["head_dim"]
    pairs = int(dim * part) // 2
    factors = {"short_factor": [1.5] * pairs, "long_factor": [2.0 + pair for pair in range(pairs)]}
    return model_config_from_dict(found | {"rope_scaling": rope | factors})


def draw_gemma4(random: Random, size: Sizes, heads: int) -> dict[str, Any]:
    """Layers of two kinds, whose heads differ; of the last ones some share keys and values, or experts in all."""
    layers = size.any(1, 6)
    kinds = [*random.choices(["sliding_attention", "full_attention"], k=layers - 1), "full_attention"]
    has_experts = random.random() < 0.5
    shared = 0 if has_experts else random.randint(0, layers - 1)
    while set(kinds[layers - shared :]) - set(kinds[: layers - shared]):
        shared -= 1
    return {
        "num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": shared, "attention_bias": False,
        "use_double_wide_mlp": random.random() < 0.5, "attention_k_eq_v": random.random() < 0.5,
        "global_head_dim": size.inputs(160, times=heads, multiple=4), "sliding_window": random.choice([1, 30, 1025]),
        "num_global_key_value_heads": random.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        "hidden_size_per_layer_input": random.choice([0, max(size.group, 32) * size.any(1, 2)]),
        "final_logit_softcapping": random.choice([None, 3.0]), "enable_moe_block": has_experts,
        "top_k_experts": size.any(1, 2), "rope_scaling": None,
    }  # fmt: skip


def draw_gemma3n(random: Random, size: Sizes) -> dict[str, Any]:
    """Residual streams of a token; of the last layers some share keys and values."""
    layers = size.any(1, 6)
    kinds, shared = random.choices(["sliding_attention", "full_attention"], k=layers), random.randint(0, layers - 1)
    while set(kinds[layers - shared :]) - set(kinds[: layers - shared]):
        shared -= 1
    return {
        "num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": shared, "attention_bias": False,
        "sliding_window": random.choice([1, 30, 1025]), "altup_num_inputs": size.any(2, 16), "mlp_bias": False,
        "laurel_rank": size.inputs(300), "activation_sparsity_pattern": random.choices([0.0, 0.3, 0.5, 0.8], k=layers),
        "hidden_size_per_layer_input": max(size.group, 32) * size.any(1, 2), "rope_scaling": None,
        "vocab_size_per_layer_input": size.any(1, 400), "final_logit_softcapping": random.choice([None, 3.0]),
    }  # fmt: skip


def draw_recurrent(random: Random, size: Sizes, kind: str, layers: int) -> dict[str, Any]:
    """Layers of a recurrent kind, and one of attention or more."""
    kinds = random.choices([kind, "full_attention"], k=layers)
    kinds[random.randrange(layers)] = "full_attention"
    key_heads, each = size.any(1, 3), size.any(1, 3)
    return {
        "layer_types": kinds, "conv_L_cache": size.any(2, 6), "conv_bias": random.random() < 0.5,
        "block_auto_adjust_ff_dim": False, "num_dense_layers": size.any(0, layers),
        "linear_conv_kernel_dim": size.any(2, 6), "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * each, "linear_key_head_dim": size.any(1, 140),
        "linear_value_head_dim": size.inputs(140, times=key_heads * each),
        "shared_expert_intermediate_size": size.inputs(100),
    }  # fmt: skip


def draw_hyper(random: Random, size: Sizes) -> dict[str, Any]:
    """Hyper-connections, and the parts of latent attention that their models have."""
    return {
        "hc_mult": size.any(2, 6), "hc_eps": random.choice([1e-6, 0.1]), "hc_magnitude": random.choice([2.0, 0.7]),
        "hc_sinkhorn_iters": random.choice([1, 2, 20]), "swiglu_limit": random.choice([0.3, 5.0]),
        "linear_num_heads": (heads := size.any(1, 4)), "linear_head_dim": size.inputs(140, times=heads),
        "linear_lower_bound": random.choice([None, -5.0]), "tie_word_embeddings": False,
    }  # fmt: skip


def draw_lfm3(random: Random, drawn: dict[str, Any]) -> dict[str, Any]:
    """Some layers of attention with windows, gates without biases beside them."""
    kinds = [random.choice([kind, "sliding_attention"]) for kind in drawn["layer_types"]]
    has_gate = random.random() < 0.5
    return {
        "layer_types": kinds, "use_sandwich_norm": random.random() < 0.5, "use_attention_gate": has_gate,
        "attention_bias": drawn["attention_bias"] and not has_gate,
    }  # fmt: skip


def draw_laguna(random: Random, size: Sizes, kv_heads: int, layers: int) -> dict[str, Any]:
    """Query heads, and how much of them is rotated, by kind of layers."""
    heads = {kind: kv_heads * size.any(1, 5) for kind in ("sliding_attention", "full_attention")}
    kinds = random.choices(list(heads), k=layers)
    ropes = {kind: {"rope_theta": 1e4, "partial_rotary_factor": random.choice([0.5, 1.0])} for kind in heads}
    return {
        "layer_types": kinds, "num_attention_heads_per_layer": [heads[kind] for kind in kinds], "attention_bias": False,
        "head_dim": size.inputs(100, times=gcd(*heads.values()), multiple=4), "rope_parameters": ropes,
        "rope_scaling": None, "sliding_window": random.choice([1, 30, 1025]),
        "mlp_layer_types": ["dense"] * (first := size.any(0, layers)) + ["sparse"] * (layers - first),
    }  # fmt: skip


def draw_mimo(random: Random, size: Sizes, heads: int, layers: int) -> dict[str, Any]:
    """Values smaller than keys; kv heads and rope by kind of layers, experts in any of them."""
    counts = [count for count in range(1, heads + 1) if heads % count == 0]
    values = max(2, size.inputs(100, times=heads))
    ropes = {kind: {"rope_theta": 1e4, "partial_rotary_factor": random.choice([0.5, 1.0])}
             for kind in ("full_attention", "sliding_attention")}  # fmt: skip
    return {
        "layer_types": random.choices(list(ropes), k=layers), "head_dim": size.any(values, values + 70, 4),
        "v_head_dim": values, "swa_num_key_value_heads": random.choice(counts), "rope_parameters": ropes,
        "rope_scaling": None, "sliding_window": random.choice([1, 30, 1025]),
        "num_key_value_heads": random.choice(counts), "attention_value_scale": random.choice([None, 0.7]),
        "mlp_layer_types": ["dense"] * (first := size.any(0, layers)) + ["sparse"] * (layers - first),
    }  # fmt: skip


def draw_mamba(random: Random, size: Sizes, hidden: int) -> dict[str, Any]:
    """Mamba-2, and Granite's multipliers; the sizes of all heads together are a multiple of the hidden size."""
    expand = size.any(1, 3)
    heads = random.choice([count for count in range(1, 10) if expand * hidden % count == 0])
    return {
        "mamba_expand": expand, "mamba_n_heads": heads, "mamba_d_head": expand * hidden // heads,
        "mamba_n_groups": random.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        "mamba_d_state": size.any(1, 140), "mamba_d_conv": size.any(2, 6), "mamba_conv_bias": random.random() < 0.5,
        "mamba_proj_bias": random.random() < 0.5, "shared_intermediate_size": size.inputs(100),
        "position_embedding_type": random.choice([None, "rope"]), "attention_multiplier": random.choice([1.0, 0.1]),
        "residual_multiplier": 0.6, "logits_scaling": 2.0, "embedding_multiplier": 3.0,
    }  # fmt: skip


def draw_falcon(random: Random, size: Sizes) -> dict[str, Any]:
    """Mamba-2 beside attention, and the multipliers around both."""
    groups = size.any(1, 3)
    heads = groups * size.any(1, 3)
    names = "embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_in", "ssm_out"
    return {
        "mamba_d_ssm": heads * size.inputs(60, times=heads), "mamba_n_heads": heads, "mamba_n_groups": groups,
        "mamba_d_state": size.any(1, 140), "mamba_d_conv": size.any(2, 6), "mamba_conv_bias": random.random() < 0.5,
        "mamba_rms_norm": random.random() < 0.5, "mamba_norm_before_gate": False, "attention_bias": False,
        "mlp_bias": False, "ssm_multipliers": [random.uniform(0.5, 1.5) for _ in range(5)],
        "mlp_multipliers": [random.uniform(0.5, 1.5) for _ in range(2)],
        **{f"{name}_multiplier": random.uniform(0.5, 1.5) for name in names},
    }  # fmt: skip


def draw_single_parts(random: Random, size: Sizes) -> dict[str, Any]:
    """Layers of one part each, in any order, one of Mamba-2 and one of attention among them."""
    kinds = ["M", "*", *random.choices("M*-E", k=size.any(0, 4))]
    random.shuffle(kinds)
    groups = size.any(1, 3)
    heads = groups * size.any(1, 3)
    return {
        "hybrid_override_pattern": "".join(kinds), "layer_types": None, "mamba_num_heads": heads, "n_groups": groups,
        "mamba_head_dim": size.inputs(60, times=heads), "ssm_state_size": size.any(1, 140),
        "conv_kernel": size.any(2, 6), "use_conv_bias": random.random() < 0.5, "use_bias": random.random() < 0.5,
        "moe_shared_expert_intermediate_size": size.inputs(100), "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


def draw_experts(random: Random, size: Sizes, architecture: str, layers: int) -> dict[str, Any]:
    groups = (
        random.choice([1, 1, 2, 4])
        if any(
            name in architecture
            for name in (
                "Bailing",
                "Deepseek",
                "Glm4",
                "Glm5",
                "HYV4",
                "Nemotron",
                "Kimi",
                "ExaoneMoe",
                "Solar",
                "AXK1",
            )
        )
        else 1
    )
    experts, top_groups = groups * size.any(2, 12), size.any(1, groups)
    has_one_inner = architecture.startswith(("Mixtral", "GraniteMoe", "Cohere2Moe", "HunYuanMoE", "Phi"))
    inner = size.inputs(120)
    return {
        "num_experts": experts, "n_routed_experts": experts, "num_local_experts": experts, "n_group": groups,
        "topk_group": top_groups, "num_experts_per_tok": size.any(1, min(6, experts // groups * top_groups)),
        **({"num_experts_per_tok": 2} if architecture.startswith("Phi") else {}),
        "moe_intermediate_size": inner, "routed_scaling_factor": 1.7,
        "n_shared_experts": 0 if "MiMo" in architecture else size.any(0, 2),
        "norm_topk_prob": architecture.startswith(("Laguna", "Step3")) or (
            architecture != "DeepseekV2ForCausalLM" and random.random() < 0.5
        ),
        "first_k_dense_replace": 0 if "Solar" in architecture else size.any(0, layers), "num_nextn_predict_layers": 0,
        "num_shared_experts": size.any(0, 2), "shared_expert_intermediate_size": size.inputs(100),
        "moe_topk": size.any(1, min(6, experts)),
        "mlp_only_layers": random.sample(range(layers), size.any(0, layers - 1)) if "Flint" in architecture else [],
        "expert_selection_fn": random.choice(["softmax", "sigmoid"]),
    } | ({"intermediate_size": inner} if has_one_inner else {}) | (
        {"shared_intermediate_size": random.choice([0, size.inputs(100)])} if "GraniteMoe" in architecture else {}
    ) | (
        {"shared_intermediate_size": size.inputs(100), "intermediate_size": inner, "n_shared_experts": 1}
        if "MiniMaxM3" in architecture else {}
    )  # fmt: skip


def forms_of(width: str, group: int) -> WeightFormats:
    if width == "fp8":  # in blocks, as checkpoints have them
        return WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
    if width in K_GROUPS:
        form = WeightFormat(dtype=cast(WeightDType, width), group=K_GROUPS[width])
        return WeightFormats(layers=form, tables=form)
    return WeightFormats.of(width, group)


OWN_FORMATS = [
    *(WeightFormat(dtype=dtype, group=32) for dtype in ("uint4", "int4", "int8")),  # type: ignore[arg-type]
    *(WeightFormat(dtype=dtype, group=group) for dtype, group in K_GROUPS.items()),  # type: ignore[arg-type]
]


def in_own_formats(
    random: Random, model: ModelConfig, formats: WeightFormats, group: int
) -> tuple[ModelConfig, WeightFormats]:
    """Matrices of the checkpoint have formats of their own, or none, and values others than queries; in some models
    those with none are floats.
    """
    known = [form for form in OWN_FORMATS if group % form.block == 0]
    names: dict[WeightFormat, set[str]] = {form: set() for form in known}
    for spec in tensor_specs(model).values():
        kept = random.choices([*known, None], k=random.randint(1, 2))
        for layer in spec.layers_of(model.num_layers) if spec.per_layer else (None,):
            parts, form = list(spec.parts), random.choice(kept)
            other = form and random.choice([known[known.index(form) - 1], None])
            last = random.randint(0, 2 * len(parts)) if any(".q_proj." in part for part in parts) else len(parts)
            for at, part in enumerate(parts):
                name = part if layer is None else f"model.layers.{layer}.{part}"
                own = form if at < last else other
                if own is not None and stack_name(name) not in set().union(*names.values()):
                    names[own].add(stack_name(name))
    own_names = tuple((form, frozenset(own)) for form, own in names.items())
    model = replace(model, stored=replace(model.stored, own=own_names))
    if random.random() < 0.3:
        floats = WeightFormat(dtype=random.choice(["float32", "bfloat16", "float16"]))
        formats = replace(formats, layers=floats, attention=None)
    return model, replace(formats, own=tuple(known))


def instructions_of(seed: int) -> InstructionSet:
    every = instruction_sets()
    return every[seed // 3 % len(every)]


EVERY_SEED = pytest.mark.parametrize(
    "seed",
    [
        pytest.param(own, marks=() if instructions_of(own) == instruction_sets()[0] else pytest.mark.slow)
        for own in SEEDS
    ],
)


def draw_adapters(random: Random, model: ModelConfig, make: MakeMatrix) -> Adapters | None:
    """Two LoRA adapters of any ranks and any projections, for half of the models that can have some."""
    if random.random() < 0.5 or any(model_problems(model)):
        return None
    products: dict[tuple[int, str], list[Projection]] = {}
    for own in sorted(projections(model).values(), key=lambda own: own[:3]):
        products.setdefault((own.layer, own.product), []).append(own)

    def matrix(rows: int, columns: int) -> Matrix:
        made = make(WeightFormat(dtype="float32"), (rows, columns), torch.float32, "cpu")
        made.fill(torch.randn(rows, columns) / columns**0.5)
        return made

    found = {}
    for adapter in (1, 2):
        for (layer, product), all_own in products.items():
            some = [own for own in all_own if random.random() < 0.7]
            ranks = [random.randint(1, 40) for _ in some]
            if some:
                ups = [(own.first, matrix(rows_of(own), rank)) for own, rank in zip(some, ranks, strict=True)]
                found[adapter, layer, product] = LowRank(matrix(sum(ranks), some[0].shape[1]), ups)
    return Adapters(found, "cpu") if found else None


class Drawn:
    """A model with random weights and rows, a batch of them, and both executors."""

    needs = SamplingNeeds()

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        architecture, width = random.choice(FAMILIES.names), random.choice([*WIDTHS, "k", "uint4", "mxfp4", "fp8"])
        group = random.choice([32, 64, 128]) if width in ("int8", "int4", "uint4") else 32 if width == "mxfp4" else 1
        width, group = (random.choice([*K_GROUPS]), K_BLOCK) if width == "k" else (width, group)
        model, formats = draw_model(random, architecture, group), forms_of(width, group)
        if group >= 32 and seed % 3:
            model, formats = in_own_formats(Random(-1 - seed), model, formats, group)
        kv_dtype = random.choice(["auto", "fp8"] if model.latent else [
            own for own in KV_DTYPES
            if own != "float32" and ("int4" not in own or not any(heads.head_dim % 32 for heads in model.all_heads))
        ])  # fmt: skip
        instructions = instructions_of(seed)
        plain = formats
        if width != "fp8" and random.random() < 0.5:
            formats = formats.rounding_inputs()
            if model.moe is None is model.latent and load(instructions).multiplies_bf16():
                formats = formats.rounding_to_bf16()
        num_rows, capacity = random.randint(1, 33), random.choice([1, 2, 17, 40, 129, 1100])
        if group == K_BLOCK:  # heads are large, and windows may be
            num_rows, capacity = min(num_rows, 4 if model.windows else 33), min(capacity, 129)
        num_queries = 0
        is_full = model.windows is None and not model.recurrent_layers
        if is_full and random.random() < 0.3:
            num_queries = random.randint(1, 5)
        make, asked = make_panels(load(instructions)), (capacity, seed, num_rows, num_queries)
        torch.manual_seed(seed)
        adapters = draw_adapters(Random(-2 - seed), model, make)
        self.model, self.runner = model, random_runner(model, formats, kv_dtype, make, *asked, adapters)
        if adapters is not None:
            self.runner.rows.adapter[:num_rows] = torch.randint(0, 3, (num_rows,))
        for layer in model.recurrent_layers:
            for own in self.runner.cache.state(layer).values():
                own.normal_()
        for row in range(num_rows):
            self.admit(row, random, capacity)
        self.rows = torch.tensor(random.sample(range(num_rows), random.randint(1, num_rows)))
        self.looped = LoopedDecode(self.runner.step_parts, random.randint(1, min(2, num_cores())))
        parts = self.runner.step_parts
        if formats != plain:  # products over panels outside of looped steps do not round
            rounded = random_runner(model, formats, kv_dtype, make_matrix, *asked, adapters)
            parts = replace(parts, decoder=rounded.decoder)
        self.eager = EagerDecode(parts)
        self.is_exact = kv_dtype == "auto" and formats == plain

    def admit(self, row: int, random: Random, capacity: int) -> None:
        """A request with a budget of its own, somewhere in its answer."""
        kept = random.choice([capacity, random.randint(1, capacity)])
        sink, topk = sorted(random.randint(0, kept - 1) for _ in range(2))
        budget = KVBudget(num_sink=sink, num_topk=topk - sink, num_recent=kept - topk)
        counters = list(Rows.entry(random.randint(0, 3 * capacity), budget))
        counters[0] += random.choice([0, random.randint(0, 3 * capacity)])
        self.runner.rows.admit(torch.tensor([row]), torch.tensor([counters]))

    def state(self) -> list[Tensor]:
        """All that a step may write but for the counters."""
        queries = self.runner.step_parts.queries
        stored = [tensor for tensor in vars(self.runner.cache).values() if isinstance(tensor, Tensor)]
        stored += [own for layer in self.model.recurrent_layers for own in self.runner.cache.state(layer).values()]
        return stored if queries is None else [*stored, queries.buffer]

    def kept(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.state()]

    def counters(self) -> list[Tensor]:
        """Copies of what a step advances."""
        return [own.clone() for own in self._advanced()]

    def set_counters(self, kept: list[Tensor]) -> None:
        for own, stored in zip(self._advanced(), kept, strict=True):
            own.copy_(stored)

    def _advanced(self) -> list[Tensor]:
        rows = [own for own in vars(self.runner.rows).values() if isinstance(own, Tensor)]
        return [*rows, self.runner.sampling.num_sampled, self.runner.sampling.output_counts]

    def restore(self, kept: list[Tensor]) -> None:
        for tensor, own in zip(self.state(), kept, strict=True):
            tensor.copy_(own)


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of each call of the router in eager steps: by how much each token's chosen experts are ahead, ``[T]``."""
    found: list[Tensor] = []
    original = router.route

    def route(logits: Tensor, correction: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        found.append(margin_of(logits, correction, moe))
        return original(logits, correction, moe)

    monkeypatch.setattr(router, "route", route)
    return found


def mixer_margin(logits: Tensor, moe: MoEConfig) -> Tensor:
    """The same of sparsemixer; also how near logits are to being weighed or not."""
    best = logits.topk(min(3, logits.shape[1])).values
    margin = (best[:, :-1] - best[:, 1:]).amin(1)
    for at in range(2):
        most = best[:, at, None]
        apart = (most - logits) / torch.maximum(logits.abs(), most) - 2 * moe.jitter
        apart = apart.masked_fill(logits >= most, float("inf"))
        margin = torch.minimum(margin, apart.abs().amin(1))
    return margin


def margin_of(logits: Tensor, correction: Tensor | None, moe: MoEConfig) -> Tensor:
    """The last choice, of groups and of experts, ahead of the first that was not chosen, in scores."""
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    choice = logits if moe.chooses_by_logits else scores
    choice = choice if correction is None else choice + correction
    margin = torch.full((len(logits),), float("inf"))
    if moe.top_groups < moe.num_groups:
        grouped = choice.view(len(logits), moe.num_groups, -1)
        best = grouped.topk(2 if moe.group_score == "top2" else 1).values.sum(-1).sort(descending=True).values
        margin = best[:, moe.top_groups - 1] - best[:, moe.top_groups]
        worst = grouped.topk(2 if moe.group_score == "top2" else 1).values.sum(-1)
        outside = worst < best[:, moe.top_groups - 1 : moe.top_groups]
        choice = grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
    if moe.scoring == "sparsemixer":
        return mixer_margin(logits, moe)
    if moe.top_k < moe.top_groups * moe.group_len:
        ranked = choice.sort(descending=True).values
        margin = torch.minimum(margin, ranked[:, moe.top_k - 1] - ranked[:, moe.top_k])
    return margin


@EVERY_SEED
def test_rows_are_alike_alone_in_batches_and_in_eager_steps(seed: int, margins: list[Tensor]) -> None:
    drawn = Drawn(seed)
    looped, rows = drawn.looped, drawn.rows
    # Dynamic stretching raises to powers by libm here and by PyTorch there: a last place, times a position. Numbers
    # that are rounded may become their neighbours.
    limit, least = (1e-3 if drawn.model.rope.kind == "dynamic" else 1e-4, 1e-4) if drawn.is_exact else (0.15, 2e-2)
    with torch.inference_mode():
        for _ in range(STEPS):
            before = drawn.kept()
            got = looped.logits(rows).clone()
            written = drawn.kept()
            drawn.restore(before)
            alone = torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(len(rows))])
            assert torch.equal(alone, got), "each row alone, and in the batch"
            for own, stored in zip(drawn.state(), written, strict=True):
                assert own.view(torch.uint8).equal(stored.view(torch.uint8)), "what rows keep, alone and in the batch"
            drawn.restore(before)
            margins.clear()
            want = drawn.eager.logits(rows)
            # Where another expert is as likely, rounding decides, and the answer is another one.
            is_sure = torch.stack([torch.full((len(rows),), 1.0), *margins]).amin(0) > least
            off = (got - want).abs().amax(1) / want.abs().max()
            assert (off[is_sure] < limit).all(), f"off by {off.tolist()}, margins {is_sure.tolist()}"
            drawn.restore(before)
            looped.step(rows, SamplingNeeds())
    looped.close()


def drafts_of(drawn: Drawn, random: Random) -> list[list[int]]:
    """Tokens for each row to verify: what it would draw, up to a wrong one."""
    before, counters = drawn.kept(), drawn.counters()
    tokens = torch.stack([drawn.looped.step(drawn.rows, drawn.needs).token_ids for _ in range(3)], 1).tolist()
    drawn.restore(before)
    drawn.set_counters(counters)
    room, drafts = MAX_DRAFTED, []
    for row, own in zip(drawn.rows.tolist(), tokens, strict=True):
        rows = drawn.runner.rows
        rings = [own.num_tokens for own in drawn.runner.cache.spec.layers if isinstance(own, Window)]
        most = min([3, room, int(rows.capacity[row] - rows.ring_start[row]) - 1, *(ring - 1 for ring in rings)])
        if drawn.model.latent is not None:  # which are drafted only while a row is not full
            most = min(most, int(rows.capacity[row] - rows.num_tokens[row]) - 1)
        draft = [max(token, 0) for token in own[: random.randint(0, max(most, 0))]]
        if draft and random.random() < 0.5:
            draft[random.randrange(len(draft))] = random.randrange(drawn.model.vocab_size)
        room -= len(draft)
        drafts.append(draft)
    return drafts


@EVERY_SEED
def test_verified_drafts_are_steps_one_after_the_other(seed: int) -> None:
    """The same tokens, log-probabilities, counters and slots, greedy or sampled, whatever was drafted."""
    drawn, random = Drawn(seed), Random(-1 - seed)
    if drawn.runner.config.num_speculative_tokens == 0:
        return  # refused at the start
    params = [
        SamplingParams(temperature=random.choice([0.0, 1.0]), presence_penalty=1.5, logprobs=2) for _ in drawn.rows
    ]
    drawn.needs = random.choice([SamplingNeeds(), SamplingNeeds.of(params)])
    for row, own in zip(drawn.rows.tolist(), params, strict=True):
        drawn.runner.sampling.set_rows([NewRow(row, own, row, (), ())])
    with torch.inference_mode():
        for _ in range(STEPS):
            batch = draft_batch(
                drawn.rows.tolist(), drawn.runner.rows.last_token[drawn.rows].tolist(), drafts_of(drawn, random)
            )
            before, counters = drawn.kept(), drawn.counters()
            backup = SlotBackup(drawn.runner.step_parts, batch)
            got, counts = drawn.looped.verify(batch, drawn.needs)
            backup.restore(batch, counts)
            written, after = drawn.kept(), drawn.counters()
            drawn.restore(before)
            drawn.set_counters(counters)
            want: list[list[Sampled]] = [[] for _ in counts]
            for turn in range(max(counts)):
                own = [index for index, count in enumerate(counts) if count > turn]
                drawn_here = drawn.looped.step(drawn.rows[own], drawn.needs)
                for i, index in enumerate(own):
                    want[index].append(Sampled(*(None if field is None else field[i] for field in drawn_here)))
            flat = [sampled for row in want for sampled in row]
            for field, column in zip(got, zip(*flat, strict=True), strict=True):
                assert field is None or torch.equal(field, torch.stack([own for own in column if own is not None]))
            assert all(map(torch.equal, drawn.counters(), after))
            for own_slots, stored in zip(drawn.state(), written, strict=True):
                assert own_slots.view(torch.uint8).equal(stored.view(torch.uint8))
            ends = zip(batch.starts, (*batch.starts[1:], len(batch.rows)), counts, want, strict=True)
            for start, end, count, row in ends:  # an entry is rejected only if another token was drawn
                if start + count < end:
                    assert int(batch.inputs[start + count]) != int(row[-1].token_ids)
    drawn.looped.close()
