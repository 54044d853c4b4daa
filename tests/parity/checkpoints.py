"""Small random-weight checkpoints of every supported architecture, written with transformers, and its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

VOCAB = 199
# Before 5.23 (5.17 at least) classes of transformers ignore what models define: gpt-oss its swiglu_limit (see below),
# Mamba-2 the groups of its gated norm; Gemma 3n fails for ids beyond its table of inputs per layer.
IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
GROUPS = 1 if IS_OLDER else 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.25,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_expand": 3, "mamba_d_state": 20, "mamba_n_groups": 1,
    "mamba_d_conv": 3, "mamba_chunk_size": 16, "shared_intermediate_size": 56, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 2.0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

FALCON: dict[str, Any] = {
    "mamba_d_ssm": 120, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_d_state": 12, "mamba_n_groups": 1,
    "mamba_d_conv": 3, "mamba_chunk_size": 16, "mamba_rms_norm": False, "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.7, 0.8, 1.4],
    "mlp_multipliers": [0.7, 1.6],
}  # fmt: skip

NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 12, "n_groups": 2, "conv_kernel": 3, "chunk_size": 16,
    "head_dim": 20, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5, "time_step_min": 1e-30,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4, "logits_scaling": 1.7,
}  # fmt: skip
GRANITE_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
GEMMA4: dict[str, Any] = {
    "sliding_window": 21, "head_dim": 20, "global_head_dim": 40, "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA3N: dict[str, Any] = {
    "sliding_window": 21,
    "head_dim": 20,
    "hidden_size_per_layer_input": 32,
    "tie_word_embeddings": True,
}

# name -> (config class, what differs from SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-gqa-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 64,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                             "original_max_position_embeddings": 64}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"use_sliding_window": False, "head_dim": 20}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "attention_bias": True}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 20, "attention_out_bias": True, "num_key_value_heads": 1}),
    "ernie": ("Ernie4_5Config", {"head_dim": 20, "use_bias": True, "num_attention_heads": 6}),
    "ministral": (
        "MinistralConfig",
        {"head_dim": 16, "sliding_window": 33,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (  # beyond 32 tokens queries are scaled
        "Ministral3Config",
        {"head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
                             "original_max_position_embeddings": 32}},
    ),
    "granite": (
        "GraniteConfig",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "num_attention_heads": 6, "tie_word_embeddings": True},
    ),
    "hyperclova-x": (  # norms of outputs, times a multiplier
        "HyperCLOVAXConfig",
        {**GRANITE, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "granite-swa": (  # a base of rope for each kind of layers, or none
        "GraniteSWAConfig",
        {**GRANITE, "sliding_window": 21, "num_hidden_layers": 6, "num_attention_heads": 6, "mlp_bias": True,
         "layer_rope_theta": [500000.0, 0, 10000.0, 10000.0, 0, 10000.0]},
    ),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, **GRANITE_EXPERTS, "num_key_value_heads": 1}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig", {**GRANITE, **GRANITE_EXPERTS, "shared_intermediate_size": 40, "attention_bias": True}
    ),
    "granite-moe-swa": (  # one rope
        "GraniteMoeSWAConfig",
        {**GRANITE, **GRANITE_EXPERTS, "sliding_window": 33, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3-window": ("Phi3Config", {"sliding_window": 21, "num_key_value_heads": 1}),
    "phi3-longrope": (
        "Phi3Config",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "original_max_position_embeddings": 64,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                             "original_max_position_embeddings": 64, "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7],
                             "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]}},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.4, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "cohere-plus": (  # norms of heads, with weights for each
        "CohereConfig",
        {"logit_scale": 0.4, "use_qk_norm": True, "layer_norm_eps": 0.1, "head_dim": 20, "hidden_size": 80},
    ),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.4, "num_attention_heads": 6, "num_key_value_heads": 1, "sliding_window": 21,
         "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 5},
    ),
    "cohere2-panels": (
        "Cohere2Config",
        {"logit_scale": 0.4, "sliding_window": 40, "intermediate_size": 64, "hidden_size": 64,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "cwm": ("CwmConfig", {"sliding_window": 21, "head_dim": 20, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "arcee": ("ArceeConfig", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "apertus": ("ApertusConfig", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "apertus-panels": (
        "ApertusConfig",
        {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    ),
    "glm": ("GlmConfig", {"head_dim": 20, "num_attention_heads": 6}),
    "glm4": ("Glm4Config", {"head_dim": 16, "num_key_value_heads": 1, "num_attention_heads": 6}),
    "olmo": ("OlmoConfig", {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True}),
    "olmo2": ("Olmo2Config", {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": 21, "num_hidden_layers": 4, "num_key_value_heads": 1,
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
             "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                                "original_max_position_embeddings": 64}}},
    ),
    "olmo-hybrid": (  # keys of other sizes than values, beta up to 2
        "OlmoHybridConfig",
        {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 2,
         "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    ),
    "olmo-hybrid-nope": (  # published: without rotary embedding
        "OlmoHybridConfig",
        {"num_hidden_layers": 3, "linear_allow_neg_eigval": False, "linear_value_head_dim": 20,
         "linear_key_head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 33, "sliding_window_pattern": 2, "num_key_value_heads": 1}),
    "gemma2": (  # caps that scores and logits reach
        "Gemma2Config",
        {"sliding_window": 21, "head_dim": 20, "num_key_value_heads": 1, "query_pre_attn_scalar": 12,
         "tie_word_embeddings": True, "num_hidden_layers": 4, "attn_logit_softcapping": 4.0,
         "final_logit_softcapping": 5.0},
    ),
    "gemma2-full": (
        "Gemma2Config",
        {"head_dim": 20, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0, "final_logit_softcapping": None,
         "layer_types": ["full_attention"] * 3},
    ),
    "gemma2-panels": (
        "Gemma2Config",
        {"sliding_window": 40, "head_dim": 32, "intermediate_size": 64, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 48, "tie_word_embeddings": True},
    ),
    "vaultgemma": (  # Gemma 2 without norms of outputs
        "VaultGemmaConfig",
        {"sliding_window": 21, "head_dim": 20, "num_key_value_heads": 1, "query_pre_attn_scalar": 12,
         "tie_word_embeddings": True, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 21, "head_dim": 20, "num_key_value_heads": 1, "query_pre_attn_scalar": 12,
         "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
             "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}}},
    ),
    "gemma3-panels": (
        "Gemma3TextConfig",
        {"sliding_window": 40, "head_dim": 32, "intermediate_size": 64, "tie_word_embeddings": True,
         "sliding_window_pattern": 3},
    ),
    "muse-glimmer": (  # gates of attention, an epsilon of norms of outputs, full layers without rotary embedding
        "MuseGlimmerTextConfig",
        {"sliding_window": 21, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 54,
         "num_hidden_layers": 5, "final_logit_softcapping": 5.0, "post_norm_eps": 0.3, "output_multiplier": 0.7},
    ),
    "muse-glimmer-panels": (
        "MuseGlimmerTextConfig",
        {"sliding_window": 40, "head_dim": 32, "intermediate_size": 64, "hidden_size": 64, "num_key_value_heads": 1,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "layer_rope_theta": [10000.0, 10000.0, 0]},
    ),
    "gemma3n": (  # residual streams; of six layers the last two have the keys and values of others
        "Gemma3nTextConfig",
        {**GEMMA3N, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "num_key_value_heads": 1, "laurel_rank": 12,
         "final_logit_softcapping": 5.0, "vocab_size_per_layer_input": VOCAB if IS_OLDER else VOCAB - 20,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                         "full_attention", "sliding_attention"],
         "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.7, 0.6, 0.0]},
    ),
    "gemma3n-panels": (  # a rank larger than D, three streams, a share under a half
        "Gemma3nTextConfig",
        {**GEMMA3N, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "sliding_window": 40,
         "num_hidden_layers": 3, "num_kv_shared_layers": 0, "altup_num_inputs": 3, "laurel_rank": 96,
         "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 5.0,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "activation_sparsity_pattern": [0.3, 0.0, 0.95]},
    ),
    "gemma4": (  # heads that differ by kind of layers; one projection of keys and values in layers without a window
        "Gemma4TextConfig",
        {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
         "num_attention_heads": 6, "num_key_value_heads": 3, "final_logit_softcapping": 5.0},
    ),
    "gemma4-shared": (  # of six layers the last three have the keys and values of others
        "Gemma4TextConfig",
        {**GEMMA4, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 32, "final_logit_softcapping": 5.0,
         "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma4-panels": (
        "Gemma4TextConfig",
        {**GEMMA4, "head_dim": 32, "global_head_dim": 64, "sliding_window": 40, "hidden_size": 64,
         "intermediate_size": 64, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64,
         "num_key_value_heads": 1,
         "num_hidden_layers": 5, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gemma4-moe": (  # experts beside every MLP
        "Gemma4TextConfig",
        {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
         "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 4, "intermediate_size": 24, "head_dim": 20,
         "num_attention_heads": 6, "sliding_window": 21, "swiglu_limit": 1.5, "num_hidden_layers": 4},
    ),
    "gpt-oss-full": (  # with neither windows nor biases around attention
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16, "swiglu_limit": 1.0,
         "attention_bias": False, "layer_types": ["full_attention"] * 3},
    ),
    "gpt-oss-panels": (
        "GptOssConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 64,
         "num_key_value_heads": 1, "sliding_window": 40, "swiglu_limit": 2.0, "num_hidden_layers": 2,
         "attention_bias": False, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 5, "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
         "conv_bias": True, "block_multiple_of": 8},
    ),
    "lfm2-all": (  # by the first layers' indices; a convolution longer than many prompts
        "Lfm2Config",
        {"num_hidden_layers": 4, "full_attn_idxs": [2], "conv_L_cache": 7, "block_auto_adjust_ff_dim": False,
         "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1,
         "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "routed_scaling_factor": 1.5},
    ),
    "lfm3": (  # windows beside convolutions, a rope for each kind of layers, gates of heads
        "Lfm3Config",
        {"num_hidden_layers": 6, "sliding_window": 21, "head_dim": 20, "num_key_value_heads": 1, "conv_bias": True},
    ),
    "lfm3-plain": (
        "Lfm3Config",
        {"num_hidden_layers": 4, "sliding_window": 40, "head_dim": 16, "use_sandwich_norm": False, "hidden_size": 64,
         "intermediate_size": 64, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "conv", "full_attention", "sliding_attention"]},
    ),
    "lfm3-panels": (  # neither gates nor full attention
        "Lfm3Config",
        {"num_hidden_layers": 3, "sliding_window": 33, "head_dim": 32, "use_attention_gate": False,
         "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True,
         "layer_types": ["conv", "sliding_attention", "conv"]},
    ),
    "granite-hybrid": (  # one MLP, groups of heads, heads and states of odd sizes
        "GraniteMoeHybridConfig",
        {**MAMBA, "num_hidden_layers": 5, "mamba_n_groups": GROUPS, "num_local_experts": 0, "num_key_value_heads": 1},
    ),
    "granite-hybrid-moe": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24,
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
         "mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "bamba": (  # half of a head rotated
        "BambaConfig",
        {"num_hidden_layers": 4, "attn_layer_indices": [1, 2], "num_key_value_heads": 1, "mamba_n_heads": 6,
         "mamba_expand": 3, "mamba_d_state": 20, "mamba_n_groups": GROUPS, "mamba_d_conv": 3, "mamba_chunk_size": 16,
         "attention_bias": True, "mlp_bias": True},
    ),
    "falcon-h1": (  # attention and Mamba-2 side by side, all multipliers
        "FalconH1Config",
        {**FALCON, "num_key_value_heads": 1, "mamba_conv_bias": True},
    ),
    "falcon-h1-norm": (
        "FalconH1Config",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "head_dim": 20,
         "tie_word_embeddings": True, "mamba_conv_bias": False},
    ),
    "falcon-h1-panels": (
        "FalconH1Config",
        {**FALCON, "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": "auto",
         "mlp_multipliers": None, "ssm_multipliers": None},
    ),
    "granite-4-dense": (  # without Mamba-2 a Granite with rotated heads
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron-h": (  # two Mamba-2 layers in a row, the first and the last layer an MLP
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "-MM*M-", "use_bias": True, "num_key_value_heads": 1},
    ),
    "nemotron-3": (
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "MEM*EE-*", "use_conv_bias": False, "n_group": 2, "topk_group": 1},
    ),
    "nemotron-panels": (
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "ME*-", "intermediate_size": 96, "moe_intermediate_size": 96,
         "moe_shared_expert_intermediate_size": 160, "n_groups": 1},
    ),
    "nemotron-super": (  # experts between projections
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "ME*E", "moe_latent_size": 36},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**DELTA, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA, "num_hidden_layers": 5, "head_dim": 20, "num_key_value_heads": 1}),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**DELTA, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "head_dim": 16,
         "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 40},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "head_dim": 16},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 20,
         "num_attention_heads": 6, "num_key_value_heads": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 1,
         "shared_expert_intermediate_size": 40},
    ),
    "dots1": (
        "Dots1Config",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
         "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "head_dim": 20,
         "first_k_dense_replace": 1, "max_window_layers": 2, "sliding_window": 33},
    ),
    "ernie-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 16, "moe_num_shared_experts": 2,
         "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "num_attention_heads": 6,
         "num_key_value_heads": 3, "attention_bias": True},
    ),
    "hy3": (
        "HYV3Config",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 2,
         "head_dim": 20, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mellum": (
        "MellumConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 20,
         "num_key_value_heads": 1, "sliding_window": 21, "norm_topk_prob": False,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
             "full_attention": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0,
                                "original_max_position_embeddings": 64}}},
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 2,
         "n_group": 2, "topk_group": 1, "head_dim": 20, "sliding_window": 33, "sliding_window_pattern": 2},
    ),
    "kolibri": (  # norms of the outputs of experts, which are chosen by logits
        "Kolibri1Config",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
         "head_dim": 20, "sliding_window": 21, "num_key_value_heads": 1, "norm_topk_prob": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "kolibri-panels": (
        "Kolibri1Config",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
         "head_dim": 32, "hidden_size": 64, "sliding_window": 40, "num_hidden_layers": 5},
    ),
    "solar-open": (
        "SolarOpenConfig",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 16, "attention_bias": True,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                             "original_max_position_embeddings": 64}, "num_hidden_layers": 2},
    ),
    "cohere2-moe": (  # experts beside attention, the first layer an MLP, rotated without a window
        "Cohere2MoeConfig",
        {"logit_scale": 0.4, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16, "head_dim": 20,
         "num_shared_experts": 2, "sliding_window": 21, "sliding_window_pattern": 2, "num_hidden_layers": 4,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "prefix_dense_intermediate_size": 56,
         "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "cohere2-moe-rms": (
        "Cohere2MoeConfig",
        {"logit_scale": 0.4, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 32,
         "hidden_size": 64, "num_shared_experts": 1, "sliding_window": 40, "rms_norm_eps": 1e-5,
         "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "num_key_value_heads": 1},
    ),
    "flint": (  # sinks beside norms of heads, a layer with an MLP between experts
        "FlintConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
         "head_dim": 20, "sliding_window": 21, "num_attention_heads": 6, "num_hidden_layers": 5,
         "mlp_only_layers": [0, 3]},
    ),
    "flint-panels": (
        "FlintConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
         "head_dim": 32, "hidden_size": 64, "sliding_window": 40, "norm_topk_prob": False, "attention_bias": True,
         "mlp_only_layers": [], "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "hunyuan-dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 20, "num_key_value_heads": 1,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "afmoe": (  # gates of attention with a projection of their own
        "AfmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 2,
         "head_dim": 20, "sliding_window": 21, "num_attention_heads": 6, "num_key_value_heads": 3, "route_scale": 1.7,
         "mup_enabled": True, "global_attn_every_n_layers": 2},
    ),
    "afmoe-panels": (
        "AfmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
         "head_dim": 32, "hidden_size": 64, "sliding_window": 40, "num_dense_layers": 0},
    ),
    "laguna": (  # fewer query heads in full layers, where half of a head is rotated; a gate per head
        "LagunaConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
         "head_dim": 20, "sliding_window": 21, "num_hidden_layers": 5, "moe_routed_scaling_factor": 1.7,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention"],
         "num_attention_heads": 4, "num_attention_heads_per_layer": [4, 6, 6, 4, 6],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "partial_rotary_factor": 0.5,
                                "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}},
    ),
    "laguna-panels": (  # more heads in full layers, as many experts in every layer
        "LagunaConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
         "head_dim": 32, "hidden_size": 64, "sliding_window": 40, "num_key_value_heads": 1, "gating": "per-head",
         "mlp_layer_types": ["sparse"] * 3, "num_attention_heads_per_layer": [5, 2, 5],
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "laguna-full": (
        "LagunaConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
         "head_dim": 20},
    ),
    "mimo-v2": (  # values are smaller than keys; layers with a window have more kv heads, and learned sinks
        "MiMoV2FlashConfig",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_attention_heads": 12,
         "num_key_value_heads": 3, "head_dim": 36, "v_head_dim": 20, "sliding_window": 21, "num_hidden_layers": 5,
         "routed_scaling_factor": 1.7, "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
         "attention_bias": True,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention"]},
    ),
    "mimo-v2-panels": (
        "MiMoV2FlashConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64,
         "num_key_value_heads": 1, "head_dim": 48, "v_head_dim": 32, "sliding_window": 40,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mimo-v2-full": (
        "MiMoV2FlashConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12,
         "v_head_dim": 8, "layer_types": ["full_attention"] * 3},
    ),
    "minimax-m3": (  # clamped activations; an indexer that chooses among more tokens than tests have
        "MiniMaxM3VLTextConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "dense_intermediate_size": 56,
         "shared_intermediate_size": 40, "head_dim": 20, "rotary_dim": 12, "swiglu_limit": 0.7,
         "num_attention_heads": 6, "num_key_value_heads": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 3,
         "index_head_dim": 20,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}},
    ),
    "minimax-m3-panels": (
        "MiniMaxM3VLTextConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "dense_intermediate_size": 96,
         "shared_intermediate_size": 32, "head_dim": 32, "hidden_size": 64, "rotary_dim": 16, "swiglu_limit": 1.0,
         "num_key_value_heads": 1, "mlp_layer_types": ["dense", "dense", "sparse"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "step3.7": (  # fewer query heads in full layers, where half of a head is rotated; clamps in some layers
        "Step3p7TextConfig",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "share_expert_dim": 24,
         "head_dim": 20, "sliding_window": 21, "num_hidden_layers": 5, "moe_router_scaling_factor": 1.7,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention"],
         "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
         "swiglu_limits": [0.0, 0.0, 0.0, 0.3, 0.5], "swiglu_limits_shared": [0.0, 0.4, 0.0, 0.6, 0.2],
         "rope_parameters": {
             "full_attention": {**LLAMA3, "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}},
    ),
    "step3.7-panels": (
        "Step3p7TextConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "share_expert_dim": 32,
         "head_dim": 32, "hidden_size": 64, "sliding_window": 40, "num_key_value_heads": 1, "num_attention_heads": 2,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_sliding_attention_heads": 5,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [0.0, 0.8, 0.5],
         "swiglu_limits_shared": [0.3, 0.0, 0.9],
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}},
    ),
    "llama4": (  # chunks; layers without rotary embedding, norms and chunks; experts in every second layer
        "Llama4TextConfig",
        {"attention_chunk_size": 38, "floor_scale": 16, "attn_scale": 0.6, "interleave_moe_layer_step": 2,
         "intermediate_size": 24, "intermediate_size_mlp": 56, "num_local_experts": 6, "head_dim": 20,
         "no_rope_layer_interval": 3, "num_hidden_layers": 4, "attention_bias": True},
    ),
    "llama4-panels": (
        "Llama4TextConfig",
        {"attention_chunk_size": 22, "intermediate_size": 64, "num_local_experts": 4, "head_dim": 32, "hidden_size": 64,
         "num_key_value_heads": 1, "num_experts_per_tok": 2, "no_rope_layer_interval": 2, "floor_scale": 40,
         "use_qk_norm": False, "tie_word_embeddings": True},
    ),
    "hunyuan-moe": (  # norms of heads after the rotation
        "HunYuanMoEV1Config",
        {"num_experts": 6, "moe_topk": 3, "intermediate_size": 24, "head_dim": 20, "attention_bias": True,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe-panels": (
        "HunYuanMoEV1Config",
        {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32, "head_dim": 32, "hidden_size": 64,
         "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 20, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "starcoder2-panels": ("Starcoder2Config", {"hidden_size": 64, "intermediate_size": 96, "sliding_window": None}),
    "starcoder2": ("Starcoder2Config", {"num_key_value_heads": 1, "sliding_window": 41, "tie_word_embeddings": True}),
    "starcoder2-plain": ("Starcoder2Config", {"use_bias": False, "norm_epsilon": 0.1}),
    "stablelm": ("StableLmConfig", {"num_key_value_heads": 1, "hidden_size": 96, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLmConfig",
        {"hidden_size": 64, "intermediate_size": 96, "use_parallel_residual": True, "num_key_value_heads": 4},
    ),
    "stablelm-norms": (
        "StableLmConfig",
        {"qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 1, "hidden_size": 96,
         "layer_norm_eps": 0.1},
    ),
    "phi": (
        "PhiConfig",
        {"num_key_value_heads": 4, "hidden_size": 80,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}},
    ),
    "phi-panels": ("PhiConfig", {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}),
    "phimoe": (  # logits so near that some are weighed together
        "PhimoeConfig",
        {"num_local_experts": 6, "intermediate_size": 24, "lm_head_bias": True, "attention_bias": True,
         "router_jitter_noise": 0.2, "num_key_value_heads": 1},
    ),
    "phimoe-panels": (
        "PhimoeConfig",
        {"num_local_experts": 4, "intermediate_size": 32, "hidden_size": 64, "sliding_window": 41,
         "rope_parameters": {
             "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, "factor": 2.0,
             "short_factor": [1.0, 1.2, 1.5, 2.0, 2.0, 2.0, 2.5, 3.0], "long_factor": [1.0, 2.0] * 4,
             "short_mscale": 1.24, "long_mscale": 1.24}},
    ),
    "minitron": ("NemotronConfig", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "minitron-panels": (
        "NemotronConfig",
        {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1, "norm_eps": 0.1},
    ),
    "jais2": ("Jais2Config", {"head_dim": 20, "num_key_value_heads": 1}),
    "internlm3": ("InternLM3Config", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "helium": ("HeliumConfig", {"head_dim": 12, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "nanochat": (  # no norm has weights; turned backwards
        "NanoChatConfig",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 60, "final_logit_softcapping": 5.0},
    ),
    "nanochat-panels": ("NanoChatConfig", {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1}),
    "iquest-coder": ("IQuestCoderConfig", {"head_dim": 20, "num_key_value_heads": 1}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 16, "attention_bias": True,
         "use_qk_norm": True, "num_hidden_layers": 2, "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "rms_norm_eps": 1e-2,  # so that the 1e-6 of the norms inside the attention shows
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3,
                        "original_max_position_embeddings": 64},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
KDA: dict[str, Any] = {
    **{name: value for name, value in LATENTS.items() if name != "rope_parameters"}, "linear_head_dim": 20,
    "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "num_local_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
ARCHITECTURES |= {
    "deepseek-v3": ("DeepseekV3Config", {**LATENTS, **EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 1}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**LATENTS, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        {**LATENTS, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 0, "topk_method": "greedy"},
    ),
    "kimi-k2": (
        "DeepseekV3Config",
        {**LATENTS, **EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "axk1": (  # norms of the outputs of experts alone
        "AXK1Config",
        {**LATENTS, **EXPERTS, "q_lora_rank": 20, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm4-lite": (
        "Glm4MoeLiteConfig",
        {**LATENTS, **EXPERTS, "q_lora_rank": 20, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek-v3.2": (  # its indexer chooses all tokens of such short prompts
        "DeepseekV32Config",
        {
            **LATENTS,
            **EXPERTS,
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "index_topk": 256,
            "index_head_dim": 24,
            "index_n_heads": 3,
        },
    ),
    "glm-5": (
        "GlmMoeDsaConfig",
        {
            **LATENTS,
            **EXPERTS,
            "q_lora_rank": 20,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 256,
            "index_head_dim": 24,
            "index_n_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **LATENTS,
            **EXPERTS,
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "rope_parameters": {
                **LATENTS["rope_parameters"],
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **KDA,
            "num_hidden_layers": 5,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        },
    ),
    "kimi-linear-48b": (  # published: attention after every third, no low rank of queries
        "KimiLinearConfig",
        {
            **KDA,
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "num_heads": 3,
                "head_dim": 12,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "ling3": (  # gates of heads of latent attention, decays with a floor; sizes of its own in recurrent layers
        "BailingHybridConfig",
        {
            **LATENTS,
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
            "head_dim": 20,
            "short_conv_kernel_size": 3,
            "first_k_dense_replace": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
        },
    ),
    "ling3-unsafe": (  # decays without a floor, every third layer of attention
        "BailingHybridConfig",
        {
            **LATENTS,
            "layer_group_size": 3,
            "head_dim": 12,
            "kda_safe_gate": False,
            "first_k_dense_replace": 0,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "hy-v4": (  # hyper-connections that do not mix, gates of numbers, sinks; three streams
        "HYV4Config",
        {
            **LATENTS,
            **EXPERTS,
            "q_lora_rank": 20,
            "hc_mult": 3,
            "swiglu_limit": 0.5,
            "index_topk": 256,
            "index_head_dim": 24,
            "index_n_heads": 3,
        },
    ),
    "glm-5.3-flash": (  # hyper-connections that mix, latents without a rotated part
        "Glm5NextTextConfig",
        {
            **{name: value for name, value in KDA.items() if name != "num_local_experts"},
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "indexed_attention"] * 2 + ["linear_attention"],
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 0,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "hc_sinkhorn_iters": 5,
            "swiglu_limit": 0.5,
            "index_topk": 256,
            "index_head_dim": 24,
            "index_n_heads": 3,
            "indexer_types": ["full"] * 5,
        },
    ),
    "youtu": ("YoutuConfig", {**LATENTS, "q_lora_rank": 20}),
    "deepseek-v3-dense": ("DeepseekV3Config", {**LATENTS, "q_lora_rank": 20, "first_k_dense_replace": 3}),
    "deepseek-v3-halves": (
        "DeepseekV3Config",
        {
            **LATENTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 3,
            "rope_interleave": False,
            "v_head_dim": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


HYBRIDS = (
    "lfm",
    "qwen3-next",
    "qwen3.5",
    "granite-hybrid",
    "nemotron",
    "kimi-linear",
    "ling3",
    "glm-5.3",
    "falcon",
    "olmo-hybrid",
    "bamba",
)
RECURRENT = [name for name in ARCHITECTURES if name.startswith(HYBRIDS)]


if IS_OLDER:
    made = GptOssExperts.__init__

    def with_limit(experts: Any, config: Any) -> None:
        made(experts, config)
        experts.limit = config.swiglu_limit  # 7.0, as published, whatever the config says

    GptOssExperts.__init__ = with_limit  # type: ignore[method-assign]


def class_of_transformers(name: str) -> Any:
    """That class; a version of transformers that lacks it skips the test."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


_TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
TOWERS: dict[str, tuple[str, str, dict[str, int], dict[str, int]]] = {
    "MuseGlimmerTextConfig": ("MuseGlimmerConfig", "MuseGlimmerForConditionalGeneration", _TOWER,
                              {"out_hidden_size": 32, "projector_hidden_size": 8}),
    "MiniMaxM3VLTextConfig": ("MiniMaxM3VLConfig", "MiniMaxM3SparseForConditionalGeneration",
                              {**_TOWER, "image_size": 28}, {"projector_hidden_size": 48}),
    "Step3p7TextConfig": ("Step3p7Config", "Step3p7ForConditionalGeneration",
                          {"width": 8, "layers": 1, "heads": 1, "image_size": 28}, {}),
    "Glm5NextTextConfig": ("Glm5NextConfig", "Glm5NextForConditionalGeneration",
                           {**_TOWER, "depth": 1, "num_heads": 1, "out_hidden_size": 32, "image_size": 28}, {}),
}  # fmt: skip


def causal_lm(class_name: str, changes: dict[str, Any]) -> Any:
    """A model of that config class, with fresh weights; also of a class that AutoModelForCausalLM does not know."""
    config = class_of_transformers(class_name)(**changes)
    if class_name == "Mistral4Config":
        return transformers.Mistral4ForCausalLM(config)
    if class_name in TOWERS:  # has no class without a tower
        outer, model, tower, others = TOWERS[class_name]
        around = getattr(transformers, outer)(text_config=config, vision_config=tower, **others)
        return getattr(transformers, model)(around)
    own = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}  # sdpa has no cap
    return transformers.AutoModelForCausalLM.from_config(config, **own)


def make_model(name: str, **sizes: Any) -> Any:
    """A transformers model with random weights, fp32, evaluation mode, the same every time; of other ``sizes``."""
    class_name, changes = ARCHITECTURES[name]
    torch.manual_seed(len(name))
    model = causal_lm(class_name, {**SIZES, **changes, **sizes}).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith(
                ("bias", "sinks", "A_log", ".D")
            ):  # made with constants: random ones show whether they are used
                value.copy_(1.0 * ("norm" in key) + 0.3 * torch.randn_like(value))
        randomise_corrections(model)
    return model


def randomise_corrections(model: Any) -> None:
    """Corrections of routers are made as zeros, scales and scalars as ones: random ones show whether they are used."""
    for key, value in (*model.named_buffers(), *model.named_parameters()):
        if key.endswith(("query_layernorm.weight", "key_layernorm.weight")):  # of one sign, see turned_scale
            value.detach().abs_()
        if key.endswith(("hc.fn", "hc_fn", "hc.base", "hc_base")):  # of hyper-connections
            with torch.no_grad():
                value.copy_((0.1 if key.endswith("fn") else 0.5) * torch.randn_like(value))
        if key.endswith("modality_router.weight"):  # whose products are divided by D
            with torch.no_grad():
                value.mul_(5.0)
        if ".act_fn." in key:  # xIELU of each layer
            numbers = {"alpha_p": -0.5, "alpha_n": 0.5, "beta": 0.6, "eps": -0.4}  # published: beta 0.5, eps -1e-6
            with torch.no_grad():
                value.copy_(numbers[key.rpartition(".")[2]] + 0.3 * torch.rand_like(value))
        if key.endswith(
            ("layer_scalar", "router.scale", "per_expert_scale", "correct_output_scale", "hc.scale", "hc_scale")
        ):
            with torch.no_grad():
                value.copy_(1.0 + 0.3 * torch.rand_like(value))
    for key, buffer in model.named_buffers():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.3 * torch.randn_like(buffer))


def save(model: Any, folder: Path) -> Path:
    """Write a checkpoint folder."""
    model.save_pretrained(folder)
    if model.config.model_type == "olmo_hybrid":  # published: a kernel for each of q, k, v; transformers saves thirds
        file, own = folder / "model.safetensors", model.config
        tensors, keys = load_file(file), own.linear_num_key_heads * own.linear_key_head_dim
        for first in [name for name in tensors if ".q_conv1d." in name]:
            names = [first.replace(".q_", f".{kind}_") for kind in "qkv"]
            kernel = torch.cat([tensors[name] for name in names])
            parts = kernel.split((keys, keys, len(kernel) - 2 * keys))
            tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
        save_file(tensors, file, {"format": "pt"})
    return folder


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own ``generate``, end token ignored."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_along(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token of transformers' model at each place of ``answer``: ``answer`` itself where it is greedy.

    One forward pass, many times faster than ``greedy``; only frequencies that follow the length are asked step by step,
    because a cache keeps the keys of earlier steps.
    """
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        return greedy(model, prompt, len(answer))
    logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()
