"""The model of a recipe, and the same as a class of transformers, by the architecture that the recipe names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from recipes.hybrid_model import TinyHybridConfig, TinyHybridModel
from recipes.latent_model import TinyLatentConfig, TinyLatentModel
from recipes.model import TinyConfig, TinyModel, TrainedModel

MAX_POSITIONS = 16384
KINDS = {"deepseek_v3": TinyLatentConfig, "lfm2": TinyHybridConfig}  # any other: TinyConfig


def build_config(settings: dict[str, Any], vocab_size: int) -> TinyConfig:
    """Shape of a recipe's ``[model]``."""
    kind = KINDS.get(settings["architecture"], TinyConfig)
    return kind(vocab_size=vocab_size, **settings)


def build_model(config: TinyConfig) -> TrainedModel:
    """The model to train, with its head start."""
    if isinstance(config, TinyHybridConfig):
        return TinyHybridModel(config)
    return TinyLatentModel(config) if isinstance(config, TinyLatentConfig) else TinyModel(config)


def transformers_model(config: TinyConfig, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The same architecture as transformers has it, without the weights."""
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if isinstance(config, TinyLatentConfig):
        latent = DeepseekV3Config(
            q_lora_rank=None,
            kv_lora_rank=config.kv_rank,
            qk_nope_head_dim=config.nope_dim,
            qk_rope_head_dim=config.head_dim,
            v_head_dim=config.value_dim,
            first_k_dense_replace=config.first_dense,
            n_routed_experts=config.num_experts,
            num_experts_per_tok=config.top_k,
            moe_intermediate_size=config.expert_size,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            num_mtp_layers=0,
            **settings,
        )
        latent.dtype = torch.float32
        return DeepseekV3ForCausalLM(latent)
    if isinstance(config, TinyHybridConfig):
        hybrid = Lfm2Config(
            layer_types=list(config.layer_types),
            conv_L_cache=config.conv_taps,
            block_auto_adjust_ff_dim=False,
            norm_eps=config.rms_eps,
            **settings,
        )
        hybrid.dtype = torch.float32
        return Lfm2ForCausalLM(hybrid)
    is_qwen3 = config.architecture == "qwen3"
    plain = (Qwen3Config if is_qwen3 else LlamaConfig)(head_dim=config.head_dim, **settings)
    plain.dtype = torch.float32
    return (Qwen3ForCausalLM if is_qwen3 else LlamaForCausalLM)(plain)


def stacked_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with experts stacked, as transformers' class holds them: ``[X, 2M, D]`` and ``[X, D, M]``."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in state.items():
        prefix, found, rest = name.partition(".mlp.experts.")
        if not found:
            out[name] = tensor
            continue
        index, projection, _ = rest.split(".")
        experts.setdefault(prefix, {}).setdefault(int(index), {})[projection] = tensor
    for prefix, by_index in experts.items():
        own = [by_index[index] for index in sorted(by_index)]
        both = [torch.cat((one["gate_proj"], one["up_proj"])) for one in own]
        out[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(both)
        out[f"{prefix}.mlp.experts.down_proj"] = torch.stack([one["down_proj"] for one in own])
    return out
