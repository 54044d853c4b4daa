"""config.json to ModelConfig: both spellings, defaults of each architecture, every refusal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapstream.config import ModelConfig, RopeConfig
from snapstream.config.engine import ParallelConfig
from snapstream.config.model import AltUp, HeadSizes, LatentConfig, LengthScale, Multipliers
from snapstream.config.recurrent import Mamba2
from snapstream.kv.spec import KVSpec
from snapstream.models.registry import FAMILIES, model_config_from_dict, read_model_config
from snapstream.models.sharding import Share, active_parameters, cuts_of, num_parameters, rank_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 1000,
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096,
         "use_sliding_window": False, "max_window_layers": 2}  # fmt: skip
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LATENTS: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                           "v_head_dim": 12, "first_k_dense_replace": 2}  # fmt: skip
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5}
KIMI = {**LLAMA, **LATENTS, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
APERTUS = {**LLAMA, "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
MUSE = {**LLAMA, "architectures": ["MuseGlimmerForConditionalGeneration"]}
NANOCHAT = {**LLAMA, "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "hidden_act": "relu2"}
PHI = {**LLAMA, "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"}
PHIMOE = {**LLAMA, "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}
LLAMA4 = {**LLAMA, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
LAGUNA = {**LLAMA, "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "num_experts": 4}
LING = {**LLAMA, **LATENTS, "architectures": ["BailingHybridForCausalLM"], "q_lora_rank": None}
NEMOTRON = {**LLAMA, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
            "hybrid_override_pattern": "ME*-"}  # fmt: skip
DEEPSEEK = {**LLAMA, **LATENTS, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "num_key_value_heads": 8, "n_routed_experts": 4, "num_nextn_predict_layers": 1}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512}  # fmt: skip


def test_llama_without_scaling() -> None:
    assert model_config_from_dict(LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=160,
        max_position=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_what_the_architectures_add() -> None:
    biased = {"attention_bias": True, "mlp_bias": True}
    llama, mistral, qwen2, qwen3 = (model_config_from_dict({**d, **biased}) for d in (LLAMA, MISTRAL, QWEN2, QWEN3))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias, mistral.qk_norm) == (
        False,
        False,
        False,
        False,
    )
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    assert not model_config_from_dict(QWEN3).qkv_bias
    assert [config.head_dim for config in (llama, mistral, qwen2, qwen3)] == [8, 8, 8, 128]
    assert model_config_from_dict({**QWEN3, "head_dim": 16}).head_dim == 16


# The fields of published config.json files that decide shapes, and the number of parameters.
GEMMA4_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144,
    "sliding_window": 1024,
}  # fmt: skip
LLAMA4_SIZES: dict[str, Any] = {
    "attention_bias": False, "attention_chunk_size": 8192, "attn_temperature_tuning": 4, "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "vocab_size": 202048,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "LFM2-1.2B": (
        {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288,
         "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "norm_eps": 1e-05, "num_attention_heads": 32,
         "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536},
        1_170_340_608,
    ),
    "Apertus-8B-2509": (
        {"architectures": ["ApertusForCausalLM"], "hidden_act": "xielu", "hidden_size": 4096,
         "intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
         "rope_theta": 12000000, "vocab_size": 131072, "rope_scaling": {
             "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
             "rope_type": "llama3", "type": "llama3"}},
        8_053_338_240,  # with four numbers of each layer's activation
    ),
    "Muse-Glimmer-30B": (  # as the config classes of transformers have it
        {"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": {
            "final_logit_softcapping": 20.0, "head_dim": 128, "hidden_size": 6656, "intermediate_size": 19968,
            "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 52,
            "num_key_value_heads": 2, "post_norm_eps": 1e-8, "rms_norm_eps": 1e-5, "sliding_window": 2048,
            "vocab_size": 202048}},
        27_854_780_928,
    ),
    "starcoder2-3b": (
        {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
         "intermediate_size": 12288, "max_position_embeddings": 16384, "norm_epsilon": 1e-5, "num_attention_heads": 24,
         "num_hidden_layers": 30, "num_key_value_heads": 2, "rope_theta": 999999.4420358813, "sliding_window": 4096,
         "use_bias": True, "vocab_size": 49152},
        3_030_371_328,
    ),
    "stablelm-2-1_6b": (
        {"architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
         "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 24,
         "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "qk_layernorm": False, "rope_theta": 10000,
         "use_parallel_residual": False, "use_qkv_bias": True, "vocab_size": 100352},
        1_644_515_328,
    ),
    "phi-2": (
        {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "hidden_size": 2560,
         "intermediate_size": 10240, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
         "vocab_size": 51200},
        2_779_683_840,
    ),
    "Phi-3.5-MoE-instruct": (
        {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "hidden_size": 4096, "intermediate_size": 6400,
         "lm_head_bias": True, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5,
         "original_max_position_embeddings": 4096, "rope_scaling": {
             "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122, "short_factor": [1.0] * 64,
             "short_mscale": 1.243163121016122, "original_max_position_embeddings": 4096, "type": "longrope"},
         "rope_theta": 10000.0, "router_jitter_noise": 0.01, "sliding_window": 131072, "vocab_size": 32064},
        41_873_153_344,
    ),
    "Minitron-4B-Base": (
        {"architectures": ["NemotronForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "relu2",
         "hidden_size": 3072, "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": False,
         "norm_eps": 1e-5, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "partial_rotary_factor": 0.5, "rope_theta": 10000, "vocab_size": 256000},
        4_190_509_056,
    ),
    "Llama-4-Scout-17B-16E": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {
            **LLAMA4_SIZES, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760, "no_rope_layers": [],
            "num_local_experts": 16, "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "use_qk_norm": True}},
        107_769_861_120,
    ),
    "Llama-4-Maverick-17B-128E": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {
            **LLAMA4_SIZES, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576,
            "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False}},
        400_711_848_960,
    ),
    "Laguna-XS.2": (
        {"architectures": ["LagunaForCausalLM"], "attention_bias": False, "gating": True, "head_dim": 128,
         "hidden_size": 2048, "intermediate_size": 8192, "layer_types": [
             "full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(40)],
         "max_position_embeddings": 131072, "moe_intermediate_size": 512, "moe_routed_scaling_factor": 2.5,
         "num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_experts": 256,
         "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 8,
         "partial_rotary_factor": 0.5, "rope_parameters": {
             "full_attention": {"beta_fast": 64.0, "beta_slow": 1.0, "factor": 32.0, "partial_rotary_factor": 0.5,
                                "original_max_position_embeddings": 4096, "rope_theta": 500000.0, "rope_type": "yarn"},
             "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"}},
         "shared_expert_intermediate_size": 512, "sliding_window": 512, "vocab_size": 100352},
        33_442_617_088,  # with the corrections of the routers
    ),
    "Step-3.5-Flash": (
        {"architectures": ["Step3p5ForCausalLM"], "att_impl_type": "GQA", "attention_other_setting": {
             "attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
             "num_attention_heads": 96, "true_head_dim": 128},
         "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11264,
         "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12, "max_position_embeddings": 262144,
         "max_seq_len": 262144, "moe_intermediate_size": 1280, "moe_layers_enum": ",".join(map(str, range(3, 45))),
         "moe_num_experts": 288, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8,
         "need_fp32_gate": True, "norm_expert_weight": True, "num_attention_groups": 8, "num_attention_heads": 64,
         "num_hidden_layers": 45, "num_nextn_predict_layers": 3, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
         "rms_norm_eps": 1e-05, "rope_scaling": {
             "factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
             "original_max_position_embeddings": 131072, "rope_type": "llama3"},
         "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12, "share_expert_dim": 1280, "sink": False,
         "sliding_window": 512, "swiglu_limits": [0.0] * 43 + [7, 7, 0.0, 0.0, 0.0],
         "swiglu_limits_shared": [0.0] * 44 + [16, 0.0, 0.0, 0.0], "use_head_wise_attn_gate": True,
         "use_moe": True, "use_moe_router_bias": True, "use_qk_norm": True, "use_rope_layers": [], "vocab_size": 128896,
         "yarn_only_types": ["full_attention"]},
        196_956_130_368,
    ),
    "MiMo-V2-Flash": (
        {"architectures": ["MiMoV2FlashForCausalLM"], "add_full_attention_sink_bias": False,
         "add_swa_attention_sink_bias": True, "attention_bias": False, "attention_value_scale": 0.707, "head_dim": 192,
         "hidden_size": 4096, "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
         "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
         "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256,
         "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
         "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
         "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
         "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000,
         "swa_v_head_dim": 128, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 152576},
        308_778_780_864,  # with the corrections of the routers
    ),
    "MiniMax-M3": (  # without its indexers
        {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": {
            "attention_output_gate": False, "dense_intermediate_size": 12288, "head_dim": 128,
            "hidden_act": "swigluoai", "hidden_size": 6144, "intermediate_size": 3072,
            "max_position_embeddings": 1048576, "moe_layer_freq": [0] * 3 + [1] * 57,
            "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 60,
            "num_key_value_heads": 4, "num_local_experts": 128, "partial_rotary_factor": 0.5,
            "qk_norm_type": "per_head", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
            "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": 3072,
            "sparse_attention_config": {
                "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_block_size": 128, "sparse_index_dim": 128,
                "sparse_init_block": 0, "sparse_local_block": 1, "sparse_num_index_heads": 4,
                "sparse_score_type": "max", "sparse_topk_blocks": 16, "use_sparse_attention": True},
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "use_gemma_norm": True, "use_qk_norm": True,
            "use_routing_bias": True, "vocab_size": 200064}},
        425_950_425_216,
    ),
    "Ling-3.0-Flash": (  # as the config class of transformers has it
        {"architectures": ["BailingHybridForCausalLM"], "first_k_dense_replace": 2, "head_dim": 128,
         "hidden_size": 2560, "intermediate_size": 6144, "kda_lower_bound": -5.0, "kda_safe_gate": True,
         "layer_group_size": 6, "model_max_length": 262144, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_experts": 512, "num_experts_per_token": 8, "num_hidden_layers": 42, "num_shared_experts": 1,
         "rope_theta": 6000000, "short_conv_kernel_size": 4, "vocab_size": 157184},
        124_414_211_552,  # with the corrections of the routers
    ),
    "LFM2-8B-A1B": (
        {"architectures": ["Lfm2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 7168,
         "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
         "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536,
         "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
        8_339_930_560,  # with the corrections of the routers
    ),
    "LFM3-1.7B": (
        {"architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "conv_L_cache": 7, "conv_bias": False,
         "head_dim": 128, "hidden_size": 2048, "intermediate_size": 7680, "layer_types": [
             "conv", "conv", "full_attention", "conv",
             *["sliding_attention", "conv", "full_attention", "conv"] * 5],
         "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 16, "num_hidden_layers": 24,
         "num_key_value_heads": 4, "rope_parameters": {
             "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
             "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
         "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True, "use_sandwich_norm": True,
         "vocab_size": 128000},
        1_728_801_536,
    ),
    "LFM2-VL-1.6B": (
        {"architectures": ["Lfm2VlForConditionalGeneration"], "image_token_id": 396, "text_config": {
            "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536},
         "vision_config": {"model_type": "siglip2_vision_model"}},
        1_170_340_608,
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 3584, "intermediate_size": 18944,
         "max_position_embeddings": 128000, "max_window_layers": 28, "model_type": "qwen2_5_vl",
         "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
         "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
         "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
         "vision_config": {"depth": 32, "model_type": "qwen2_5_vl"}, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen3-VL-8B-Instruct": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {
            "attention_bias": False, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "vocab_size": 151936},
         "tie_word_embeddings": False, "vision_config": {"depth": 27, "model_type": "qwen3_vl"}},
        8_190_735_360,
    ),
    "Qwen3-VL-30B-A3B-Instruct": (
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": {
            "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "tie_word_embeddings": False, "vocab_size": 151936},
         "tie_word_embeddings": False, "vision_config": {"depth": 27, "model_type": "qwen3_vl_moe"}},
        30_532_122_624,
    ),
    "cwm": (
        {"architectures": ["CwmForCausalLM"], "head_dim": 128, "hidden_size": 6144, "intermediate_size": 21504,
         "max_position_embeddings": 131072, "num_attention_heads": 48, "num_hidden_layers": 64,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {
             "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
             "rope_type": "llama3"},
         "rope_theta": 1000000.0, "sliding_window": 8192, "vocab_size": 128256},
        32_581_097_472,
    ),
    "glm-4-9b-chat-hf": (
        {"architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_size": 4096,
         "intermediate_size": 13696, "max_position_embeddings": 131072, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
         "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "vocab_size": 151552},
        9_399_951_360,
    ),
    "granite-swash-2b": (
        {"architectures": ["GraniteSWAForCausalLM"], "hidden_size": 2560, "intermediate_size": 8192,
         "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(24)],
         "max_position_embeddings": 8192, "num_attention_heads": 20, "num_hidden_layers": 24,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "sliding_window": 128, "vocab_size": 100352},
        2_144_463_840,
    ),
    "granite-3.1-3b-a800m-instruct": (
        {"architectures": ["GraniteMoeForCausalLM"], "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
         "hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
         "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "num_local_experts": 40, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_theta": 10000000.0,
         "tie_word_embeddings": True, "vocab_size": 49155},
        3_298_793_472,
    ),
    "Phi-4-mini-instruct": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072,
         "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
         "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
         "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True},
        3_836_021_760,
    ),
    "granite-3.3-8b-instruct": (
        {"architectures": ["GraniteForCausalLM"], "hidden_size": 4096, "intermediate_size": 12800,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159,
         "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
         "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "residual_multiplier": 0.22,
         "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True},
        8_170_864_640,
    ),
    **{
        name: (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "embedding_multiplier": 12,
             "hidden_size": hidden, "intermediate_size": inner, "layer_types": [
                 "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
             "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
             "mamba_n_groups": 1, "mamba_n_heads": hidden // 32, "mamba_proj_bias": False,
             "max_position_embeddings": 131072, "num_attention_heads": heads, "num_experts_per_tok": chosen,
             "num_hidden_layers": 40, "num_key_value_heads": kv_heads, "num_local_experts": experts,
             "position_embedding_type": "nope", "rms_norm_eps": 1e-05, "shared_intermediate_size": shared,
             "tie_word_embeddings": True, "vocab_size": 100352},
            parameters,
        )
        for name, hidden, inner, shared, experts, chosen, heads, kv_heads, parameters in (
            ("granite-4.0-h-micro", 2048, 8192, 8192, 0, 0, 32, 8, 3_191_396_096),
            ("granite-4.0-h-tiny", 1536, 512, 1024, 64, 6, 12, 4, 6_939_037_248),
            ("granite-4.0-h-small", 4096, 768, 1536, 72, 10, 32, 8, 32_207_337_984),
        )
    },
    **{
        name: (
            {"architectures": ["NemotronHForCausalLM"], "attention_bias": False, "conv_kernel": 4, "head_dim": 128,
             "hidden_size": hidden, "hybrid_override_pattern": pattern, "intermediate_size": inner,
             "layer_norm_epsilon": 1e-05, "mamba_head_dim": mamba_dim, "mamba_hidden_act": "silu",
             "mamba_num_heads": mamba_heads, "max_position_embeddings": context, "mlp_bias": False,
             "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": heads, "num_hidden_layers": len(pattern),
             "num_key_value_heads": kv_heads, "ssm_state_size": 128, "tie_word_embeddings": False, "use_bias": False,
             "use_conv_bias": True, "vocab_size": 131072, **more},
            parameters,
        )
        for name, hidden, inner, mamba_dim, mamba_heads, heads, kv_heads, context, pattern, more, parameters in (
            ("Nemotron-H-8B", 4096, 21504, 64, 128, 32, 8, 8192,
             "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", {}, 8_100_852_736),
            ("Nemotron-Nano-9B-v2", 4480, 15680, 80, 128, 40, 8, 131072,
             "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", {}, 8_888_227_328),
            ("Nemotron-3-Nano-30B-A3B", 2688, 1856, 64, 64, 32, 2, 262144,
             "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
             {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
              "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 6,
              "routed_scaling_factor": 2.5, "topk_group": 1}, 31_577_940_288),  # with the corrections of the routers
        )
    },
    "Kimi-Linear-48B-A3B-Instruct": (
        {"architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304,
         "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
             "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
             "kda_layers": [layer for layer in range(1, 27) if layer % 4], "short_conv_kernel_size": 4},
         "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
         "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
         "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
         "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
         "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840},
        49_122_681_728,
    ),
    **{
        name: (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
             "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
             "max_position_embeddings": 8192, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
             **own},
            count,
        )
        for name, count, own in (
            ("gemma-2-2b-it", 2_614_341_888,
             {"head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
              "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}),
            ("gemma-2-9b-it", 9_241_705_984,
             {"head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
              "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256}),
            ("gemma-2-27b-it", 27_227_128_320,
             {"head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
              "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144}),
        )
    },
    "gemma-3-1b-it": (
        {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None,
         "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
         "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
         "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144},
        999_885_952,
    ),
    "gemma-3-4b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
         "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}},
        3_880_263_168,
    ),
    **{
        name: (
            {"architectures": ["Gemma3nForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {
                "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10), "altup_active_idx": 0,
                "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4, "attention_bias": False,
                "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 2048, "hidden_size_per_layer_input": 256, "intermediate_size": [inner] * layers,
                "laurel_rank": 64, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * (layers // 5),
                "max_position_embeddings": 32768, "model_type": "gemma3n_text", "num_attention_heads": 8,
                "num_hidden_layers": layers, "num_key_value_heads": 2, "num_kv_shared_layers": layers - 20,
                "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
                "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144},
             "audio_config": {"model_type": "gemma3n_audio"}, "vision_config": {"model_type": "gemma3n_vision"}},
            parameters,
        )
        for name, layers, inner, parameters in (
            ("gemma-3n-E2B-it", 30, 8192, 4_435_182_688), ("gemma-3n-E4B-it", 35, 16384, 6_835_235_568)
        )
    },
    **{
        name: (
            {"architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {
                "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 30.0,
                "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "model_type": "gemma4_text",
                "num_attention_heads": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06, "rope_parameters": {
                    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                                       "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "layer_types": (["sliding_attention"] * (step - 1) + ["full_attention"]) * (layers // step),
                "num_hidden_layers": layers, "sliding_window": 512, "tie_word_embeddings": True,
                "use_bidirectional_attention": None, "use_double_wide_mlp": False, "vocab_size": 262144,
                "vocab_size_per_layer_input": 262144, **changes},
             "vision_config": {"model_type": "gemma4_vision"}},
            parameters,
        )
        for name, step, layers, changes, parameters in (
            ("gemma-4-E2B-it", 5, 35,
             {"hidden_size": 1536, "intermediate_size": 6144, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
              "use_double_wide_mlp": True}, 4_628_569_379),
            ("gemma-4-E4B-it", 6, 42,
             {"hidden_size": 2560, "intermediate_size": 10240, "num_key_value_heads": 2, "num_kv_shared_layers": 18},
             7_463_013_418),
            ("gemma-4-26B-A4B-it", 6, 30,
             {**GEMMA4_LARGE, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
              "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "top_k_experts": 8,
              "num_global_key_value_heads": 2, "num_key_value_heads": 8}, 25_233_141_790),
            ("gemma-4-31B-it", 6, 60,
             {**GEMMA4_LARGE, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
              "num_global_key_value_heads": 4, "num_key_value_heads": 16}, 30_697_345_340),
        )
    },
    "Mistral-Small-3.1-24B-Instruct-2503": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
            "sliding_window": None, "vocab_size": 131072},
         "vision_config": {"hidden_size": 1024, "model_type": "pixtral"}},
        23_572_403_200,
    ),
    "Llama-3.1-8B-Instruct": (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
         "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {
             "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
             "rope_type": "llama3"},
         "rope_theta": 500000.0, "vocab_size": 128256},
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
         "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
         "vocab_size": 32000},
        7_241_732_096,
    ),
    "Qwen2.5-7B-Instruct": (
        {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
         "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
         "use_sliding_window": False, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
         "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "sliding_window": None,
         "use_sliding_window": False, "vocab_size": 151936},
        8_190_735_360,
    ),
    "SmolLM3-3B": (
        {"architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
         "max_position_embeddings": 65536, "no_rope_layer_interval": 4, "num_attention_heads": 16,
         "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0,
         "tie_word_embeddings": True, "vocab_size": 128256},
        3_075_098_624,
    ),
    "Seed-OSS-36B-Instruct": (
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
         "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
         "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
         "rope_theta": 10000000.0, "vocab_size": 155136},
        36_151_104_512,
    ),
    "GLM-4-9B-0414": (
        {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_size": 4096,
         "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "vocab_size": 151552},
        9_400_279_040,
    ),
    "phi-4": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920,
         "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40,
         "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-05,
         "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352},
        14_659_507_200,
    ),
    "Olmo-Hybrid-7B": (  # as transformers' config class
        {"architectures": ["OlmoHybridForCausalLM"], "hidden_size": 3840, "intermediate_size": 11008,
         "max_position_embeddings": 65536, "num_attention_heads": 30, "num_hidden_layers": 32,
         "vocab_size": 100352},
        7_430_870_688,
    ),
    "Olmo-3-7B-Instruct": (
        {"architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": {
             "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
             "original_max_position_embeddings": 8192, "rope_type": "yarn"},
         "rope_theta": 500000, "sliding_window": 4096, "vocab_size": 100278},
        7_298_011_136,
    ),
    "gemma-2b-it": (
        {"architectures": ["GemmaForCausalLM"], "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
         "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18,
         "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000},
        2_506_172_416,
    ),
    "Qwen1.5-MoE-A2.7B-Chat": (
        {"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
         "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
         "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1000000.0,
         "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False,
         "vocab_size": 151936},
        14_315_784_192,
    ),
    "OLMoE-1B-7B-0924-Instruct": (
        {"architectures": ["OlmoeForCausalLM"], "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
         "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
         "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "vocab_size": 50304},
        6_919_161_856,
    ),
    "dots.llm1.inst": (
        {"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
         "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62,
         "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 128,
         "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
         "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
         "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None, "topk_group": 1,
         "vocab_size": 152064},
        142_774_381_696,
    ),
    "MiniMax-M2": (
        {"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_size": 3072,
         "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
         "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
         "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
         "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True,
         "vocab_size": 200064},
        228_689_764_864,
    ),
    "K-EXAONE-236B-A23B": (
        {"architectures": ["ExaoneMoeForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 6144,
         "intermediate_size": 18432, "max_position_embeddings": 262144, "moe_intermediate_size": 2048, "n_group": 1,
         "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
         "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1, "rms_norm_eps": 1e-05,
         "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
         "sliding_window": 128, "sliding_window_pattern": "LLLG", "topk_group": 1, "vocab_size": 153600,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12},
        236_571_156_352,
    ),
    "Kolibri-1": (
        {"architectures": ["Kolibri1ForCausalLM"], "head_dim": 128, "hidden_size": 2560,
         "max_position_embeddings": 262144, "moe_intermediate_size": 512, "norm_topk_prob": False,
         "num_attention_heads": 48, "num_experts": 384, "num_experts_per_tok": 6, "num_hidden_layers": 50,
         "num_key_value_heads": 4, "shared_expert_intermediate_size": 512, "sliding_window": 513,
         "vocab_size": 128000},
        78_103_074_560,
    ),
    "Solar-Open-100B": (
        {"architectures": ["SolarOpenForCausalLM"], "head_dim": 128, "hidden_size": 4096,
         "max_position_embeddings": 131072, "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
         "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
         "routed_scaling_factor": 1.0, "topk_group": 1, "vocab_size": 196608},
        102_651_799_552,
    ),
    "flint": (
        {"architectures": ["FlintForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
         "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [0, 1],
         "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 256,
         "num_experts_per_tok": 6, "num_hidden_layers": 49, "num_key_value_heads": 4,
         "shared_expert_intermediate_size": 1024, "sliding_window": 513, "vocab_size": 150144},
        39_785_287_456,
    ),
    "A.X-K1": (
        {"architectures": ["AXK1ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
         "max_position_embeddings": 32768, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 192,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
         "num_hidden_layers": 61, "num_key_value_heads": 64, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "rope_theta": 10000.0, "routed_scaling_factor": 2.5, "topk_group": 4,
         "v_head_dim": 128, "vocab_size": 163840},
        518_983_063_808,
    ),
    "Hunyuan-A13B-Instruct": (
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
         "intermediate_size": 3072, "max_position_embeddings": 32768, "moe_intermediate_size": [3072] * 32,
         "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "tie_word_embeddings": True,
         "use_cla": False, "vocab_size": 128167},
        80_393_183_232,
    ),
    "ERNIE-4.5-21B-A3B-PT": (
        {"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
         "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": -1,
         "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
         "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424},
        21_825_437_888,
    ),
    "internlm3-8b-instruct": (
        {"architectures": ["InternLM3ForCausalLM"], "bias": False, "head_dim": 128, "hidden_size": 4096,
         "intermediate_size": 10240, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 48, "num_key_value_heads": 2, "qkv_bias": False, "rms_norm_eps": 1e-05,
         "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000, "vocab_size": 128512},
        8_804_241_408,
    ),
    "Ministral-3-8B-Instruct-2512": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
            "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn"},
            "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072},
         "vision_config": {"hidden_size": 1024, "model_type": "pixtral"}},
        8_489_553_920,
    ),
    "Mistral-Small-4-119B-2603": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {
            "first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "kv_lora_rank": 256, "max_position_embeddings": 1048576, "model_type": "mistral4",
            "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
            "num_key_value_heads": 32, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn"},
            "routed_scaling_factor": 1.0, "topk_group": 1, "v_head_dim": 128, "vocab_size": 131072},
         "vision_config": {"hidden_size": 1024, "model_type": "pixtral"}},
        118_972_826_624,
    ),
    "c4ai-command-r-plus": (
        {"architectures": ["CohereForCausalLM"], "hidden_size": 12288, "intermediate_size": 33792,
         "layer_norm_eps": 1e-5, "logit_scale": 0.8333333333333334, "max_position_embeddings": 131072,
         "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 75000000.0,
         "use_qk_norm": True, "vocab_size": 256000},
        103_810_674_688,
    ),
    "c4ai-command-r-v01": (
        {"architectures": ["CohereForCausalLM"], "hidden_size": 8192, "intermediate_size": 22528,
         "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192, "num_attention_heads": 64,
         "num_hidden_layers": 40, "num_key_value_heads": 64, "rope_theta": 8000000.0, "use_qk_norm": False,
         "vocab_size": 256000},
        34_980_831_232,
    ),
    "c4ai-command-r7b-12-2024": (
        {"architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
         "intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 132096,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 50000,
         "sliding_window": 4096, "sliding_window_pattern": 4, "vocab_size": 256000},
        8_028_033_024,
    ),
    "OLMo-2-1124-7B": (
        {"architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
         "rms_norm_eps": 1e-06, "rope_theta": 500000, "vocab_size": 100352},
        7_298_617_344,
    ),
}  # fmt: skip
# Of transformers' config classes, with its number of parameters.
DEFAULTS: dict[str, tuple[dict[str, Any], int]] = {
    "Cohere2MoeConfig": (
        {"architectures": ["Cohere2MoeForCausalLM"], "hidden_size": 8192, "intermediate_size": 22528,
         "max_position_embeddings": 8192, "num_attention_heads": 64, "num_hidden_layers": 40, "vocab_size": 256000},
        190_004_928_512,
    ),
    "Bamba-9.8b-2.2T": (  # its layers of attention as published
        {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27], "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 262144, "num_attention_heads": 32,
         "num_hidden_layers": 32, "vocab_size": 128000},
        9_808_584_064,
    ),
    "HyperCLOVAXConfig": (
        {"architectures": ["HyperCLOVAXForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000},
        6_738_677_760,
    ),
    "HYV4Config": (  # without its indexer
        {"architectures": ["HYV4ForCausalLM"], "hidden_size": 2816, "intermediate_size": 6912,
         "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 34, "vocab_size": 120832},
        58_242_686_701,
    ),
    "Glm5NextConfig": (  # the same
        {"architectures": ["Glm5NextForConditionalGeneration"], "hidden_size": 4096, "intermediate_size": 12288,
         "max_position_embeddings": 1048576, "num_attention_heads": 64, "num_hidden_layers": 45, "vocab_size": 154880},
        313_244_621_374,
    ),
    "AfmoeConfig": (
        {"architectures": ["AfmoeForCausalLM"], "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
         "max_position_embeddings": 16384, "moe_intermediate_size": 1408, "num_attention_heads": 16,
         "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 32,
         "num_key_value_heads": 16, "num_shared_experts": 2, "sliding_window": 1024, "vocab_size": 200192},
        19_232_600_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLISHED, *DEFAULTS])
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    settings, count = (PUBLISHED | DEFAULTS)[name]
    assert num_parameters(model_config_from_dict(settings)) == count


@pytest.mark.parametrize("name", [*PUBLISHED, *DEFAULTS])
def test_every_model_is_split_over_two_ranks(name: str) -> None:
    model = model_config_from_dict((PUBLISHED | DEFAULTS)[name][0])
    ranks = [Share.of(model, ParallelConfig(size=2), rank) for rank in range(2)]
    assert all(cuts_of(share) for share in ranks)
    assert num_parameters(ranks[0].own) < num_parameters(model)


def test_experts_of_one_tensor_are_not_padded() -> None:
    model = replace(model_config_from_dict(PUBLISHED["Mistral-Small-4-119B-2603"][0]), has_fused_experts=True)
    assert model.moe is not None
    halves, moe = rank_config(model, ParallelConfig(size=2)), replace(model.moe, inner=model.moe.inner - 1)
    assert halves.moe is not None and 2 * halves.moe.inner == model.moe.inner
    model = replace(model, moe=moe)
    with pytest.raises(
        ValueError, match="of 2047 rows each, which are not split evenly over 2 ranks; use experts 'ep'"
    ):
        rank_config(model, ParallelConfig(size=2))
    assert rank_config(model, ParallelConfig(size=2, experts="ep")).moe is not None


def test_a_row_of_phi_4_mini_has_a_budget_in_spite_of_its_window() -> None:
    """Its sliding_window, 262,144, is longer than its context."""
    spec = KVSpec.of(model_config_from_dict(PUBLISHED["Phi-4-mini-instruct"][0]), "bfloat16")
    assert spec.row_bytes(4096) == 512 * 2**20


def test_a_window_with_a_rope_of_its_own_stays_one() -> None:
    model = model_config_from_dict({**PUBLISHED["gemma-3-1b-it"][0], "sliding_window": 65536})
    assert model.layer_windows[0] == 65536 and model.window_rope is not None


def test_the_context_of_gemma_3_is_what_its_config_says() -> None:
    assert model_config_from_dict(PUBLISHED["gemma-3-4b-it"][0]).max_position == 131_072


def test_gemma_3n_shares_keys_and_values_over_residual_streams() -> None:
    model = model_config_from_dict(PUBLISHED["gemma-3n-E2B-it"][0])
    assert model.altup == AltUp(num_streams=4, laurel_rank=64, sparsities=(0.95,) * 10 + (0.0,) * 20)
    assert (model.stream_size, model.per_layer_lines, model.max_position) == (8192, 262_144, 32_768)
    assert model.kv_sources == (*range(20), *((18,) * 4 + (19,)) * 2)
    assert (model.rope.theta, model.window_rope) == (1e6, RopeConfig(theta=1e4))
    assert model.full_layers == (4, 9, 14, 19)
    with pytest.raises(ValueError, match="cuts the 8191 gates of an MLP by how they spread; .* evenly over 2 ranks"):
        rank_config(replace(model, intermediate_size=8191), ParallelConfig(size=2))


def test_gemma_2_caps_scores_in_windows_of_every_second_layer() -> None:
    model = model_config_from_dict(PUBLISHED["gemma-2-27b-it"][0])
    assert model.layer_windows == (4096, None) * 23
    assert (model.score_cap, model.logit_cap) == (50.0, 30.0)
    assert model.multipliers.attention == pytest.approx(math.sqrt(128 / 144))
    with pytest.raises(ValueError, match=r"score_cap is -1\.0; it must be over 0"):
        replace(model, score_cap=-1.0)


FALCON: dict[str, Any] = {
    **LLAMA, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_rms_norm": False,
    "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5, "key_multiplier": 0.25, "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.75, "ssm_multipliers": [0.5, 1.0, 1.5, 2.0, 2.5], "mlp_multipliers": [0.5, 3.0],
    "embedding_multiplier": 4.0, "lm_head_multiplier": 0.125,
}  # fmt: skip


def test_falcon_h1_has_slots_and_a_state_in_every_layer() -> None:
    model = model_config_from_dict(FALCON)
    assert model.recurrent is not None and isinstance(model.recurrent, Mamba2)
    assert model.recurrent.in_multipliers == (1.0, 2.0, 3.0, 4.0, 5.0) and not model.recurrent.has_norm
    assert model.multipliers == Multipliers(
        embedding=4.0, logits=0.125, attention=1.0, attention_out=1.0, recurrent_out=0.75, mlp_gate=0.5, mlp_out=3.0
    )
    spec = KVSpec.of(model, "float32")
    state = 4 * (3 * (96 + 2 * 256) + 96 * 256)
    assert len(spec.slot_layer_indices) == 2 and spec.state_bytes == 2 * state
    assert spec.row_bytes(100) == 2 * (100 * 4 * 2 * 2 * 8 + state)
    with pytest.raises(ValueError, match="needs Mamba-2 in all layers"):
        replace(model, recurrent_layers=(0,))


def test_llama_4_sees_chunks_and_scales_queries_elsewhere() -> None:
    model = model_config_from_dict(PUBLISHED["Llama-4-Scout-17B-16E"][0])
    assert (
        model.layer_windows == (8192, 8192, 8192, None) * 12 and model.rotated_layers == (True, True, True, False) * 12
    )
    assert model.length_scale == LengthScale(0.1, 8192, is_unrotated=True)
    assert KVSpec.of(model, "float32").describe() == (
        "chunked attention: 36 of 48 layers keep a chunk of 8,192 tokens; the budget applies to the other 12"
    )
    other = model_config_from_dict(PUBLISHED["Llama-4-Maverick-17B-128E"][0])
    assert other.moe is not None and other.moe.chosen == tuple(range(1, 48, 2)) and not other.qk_norm


def test_lfm3_keeps_windows_states_and_what_the_budget_holds() -> None:
    model = model_config_from_dict(PUBLISHED["LFM3-1.7B"][0])
    assert model.window_rope == RopeConfig(theta=10000.0) and (model.rope.kind, model.rope.share) == (
        "proportional",
        0.5,
    )
    assert (model.gate_dim, model.norms.has_outputs, model.full_layers) == (1, True, (2, 6, 10, 14, 18, 22))
    assert KVSpec.of(model, "float32").describe() == (
        "recurrent states: 13 of 24 layers keep a state of constant size; "
        "sliding windows: 5 of 24 layers keep the last 256 tokens; the budget applies to the other 6"
    )
    alone = {**PUBLISHED["LFM3-1.7B"][0], "num_hidden_layers": 2, "layer_types": ["conv", "sliding_attention"]}
    assert KVSpec.of(model_config_from_dict(alone), "float32").describe().endswith("256 tokens; no budget applies")


def test_gemma_3_rotates_layers_with_windows_otherwise() -> None:
    settings = PUBLISHED["gemma-3-1b-it"][0]
    model = model_config_from_dict({**settings, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert model.layer_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert model.window_rope == RopeConfig(theta=10000.0)
    assert (model.rope.kind, model.rope.theta, model.rope.factor) == ("linear", 1e6, 8.0)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_sparse_attention_has_a_name_in_each_version_of_transformers(architecture: str) -> None:
    settings = {**DEEPSEEK, "architectures": [architecture]}
    settings.pop("layer_types", None)
    count, expected = settings["num_hidden_layers"], model_config_from_dict(settings)
    assert expected.index_topk == 2048
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        assert model_config_from_dict({**settings, "layer_types": [kind] * count}) == expected
        with pytest.raises(ValueError, match=f"layer_types has '{kind}'"):
            model_config_from_dict({**DEEPSEEK, "layer_types": [kind] * count})


def test_layers_without_rope() -> None:
    assert model_config_from_dict(SMOLLM3).rotated_layers == (True, True, True, False, True)
    assert model_config_from_dict({**SMOLLM3, "no_rope_layer_interval": 9}).rotated_layers is None
    listed = model_config_from_dict({**SMOLLM3, "no_rope_layers": [0, 1, 1, 1, 0], "no_rope_layer_interval": 2})
    assert listed.rotated_layers == (False, True, True, True, False)


WINDOWS: list[tuple[dict[str, Any], tuple[int | None, ...] | None]] = [
    ({**MISTRAL, "sliding_window": 512}, (512, 512)),
    (  # as Mistral 7B v0.1 and Zephyr
        {key: MISTRAL[key] for key in MISTRAL if key != "sliding_window"} | {"max_position_embeddings": 4097},
        (4096, 4096),
    ),
    ({**MISTRAL, "sliding_window": 4096}, None),  # holds the whole context
    (MISTRAL, None),
    (QWEN2, None),
    ({**QWEN2, "use_sliding_window": True}, None),  # from layer max_window_layers on, and there is none
    (
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4095},
        (None, 4095),
    ),
    ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, None),
    ({**QWEN3, "use_sliding_window": True, "sliding_window": 64}, None),
    ({**QWEN3, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64)),
    (
        {
            **QWEN2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (9, None),
    ),
    ({**SMOLLM3, "use_sliding_window": True, "sliding_window": 64}, (None, None, None, 64, None)),
    ({**SMOLLM3, "sliding_window": 64}, None),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "windows"), WINDOWS)
def test_sliding_windows_by_layer(settings: dict[str, Any], windows: tuple[int | None, ...] | None) -> None:
    model = model_config_from_dict(settings)
    assert model.windows == windows and model.layer_windows == (windows or (None,) * model.num_layers)


def test_absent_and_null_keys() -> None:
    sparse = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rope_theta")}
    config = model_config_from_dict({**sparse, "head_dim": None, "rope_scaling": None, "eos_token_id": None})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (8, 8, 10000.0)
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


def test_latent_attention() -> None:
    """A row keeps one latent for all heads, whatever the config says of kv heads and of the size of a head."""
    config = model_config_from_dict({**DEEPSEEK, "head_dim": 8, "rope_scaling": YARN})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_dim) == (8, 1, 40, 8)
    assert config.max_position == 163_840 and config.num_mtp_layers == 1
    growth = 0.1 * math.log(40) + 1
    assert config.latent == LatentConfig(
        q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=12, softmax_scale=24**-0.5 * growth**2
    )
    plain = model_config_from_dict({**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False})
    assert plain.latent == LatentConfig(
        q_rank=None, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=12, softmax_scale=24**-0.5, is_interleaved=False
    )


def test_a_share_of_heads_in_two_places() -> None:
    """transformers 5.17 also writes partial_rotary_factor outside the rope settings, even its default; these decide."""
    settings = {name: value for name, value in PUBLISHED["glm-4-9b-chat-hf"][0].items() if name != "rope_theta"}
    for share, default in ((0.5, 0.5), (0.25, 0.5)):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
        config = model_config_from_dict(settings | {"partial_rotary_factor": default, "rope_parameters": rope})
        assert config.rope == RopeConfig(theta=10000.0, partial_rotary_factor=share, is_interleaved=True)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_rope_agree(key: str) -> None:
    old = model_config_from_dict({**LLAMA, "rope_scaling": {key: "llama3", **LLAMA3_ROPE}})
    settings = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_ROPE}
    assert model_config_from_dict({**settings, "rope_parameters": parameters}) == old
    assert old.rope == RopeConfig(
        kind="llama3",
        theta=500000.0,
        factor=8.0,
        original_max_position=512,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


@pytest.mark.parametrize(
    ("rope", "max_position"),
    [
        ({"type": "llama3", **LLAMA3_ROPE}, 4096),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_max_position_after_stretching(rope: dict[str, Any], max_position: int) -> None:
    assert model_config_from_dict({**LLAMA, "rope_scaling": rope}).max_position == max_position


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim", "beta_fast", "beta_slow"])
def test_0_counts_as_absent_in_yarn(name: str) -> None:
    rope = {"type": "yarn", "factor": 4.0, "mscale": 1.0}
    less = {key: value for key, value in rope.items() if key != name}
    zero = model_config_from_dict({**LLAMA, "rope_scaling": {**rope, name: 0}})
    assert zero == model_config_from_dict({**LLAMA, "rope_scaling": less})


def test_original_max_position_at_the_top_level_wins() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = model_config_from_dict({**LLAMA, "rope_scaling": rope, "original_max_position_embeddings": 2048})
    assert config.rope.original_max_position == 2048


def test_end_tokens_of_the_generation_config_join(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [7, 2]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_model_config(tmp_path / "config.json").eos_token_ids == (7, 2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 2, 11)
    (tmp_path / "config.json").write_text(json.dumps({key: LLAMA[key] for key in LLAMA if key != "eos_token_id"}))
    assert read_model_config(tmp_path).eos_token_ids == (11,)  # as transformers generates, without Llama's own 2


def test_end_tokens_of_a_text_part(tmp_path: Path) -> None:
    """Those in text_config and those around it, with a generation_config.json that has none and without one."""
    around = {"architectures": ["Qwen3VLForConditionalGeneration"], "eos_token_id": [7, 2]}
    sizes = {name: value for name, value in LLAMA.items() if name not in ("architectures", "eos_token_id")}
    for text, ends in (({}, (7, 2)), ({"eos_token_id": None}, (7, 2)), ({"eos_token_id": 3}, (7, 2, 3))):
        (tmp_path / "config.json").write_text(json.dumps({**around, "text_config": {**sizes, **text}}))
        assert read_model_config(tmp_path).eos_token_ids == ends
        (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
        assert read_model_config(tmp_path).eos_token_ids == ends
        (tmp_path / "generation_config.json").unlink()


# The published config.json files; 120b differs in the number of layers and of experts.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
}  # fmt: skip


def test_clamps_of_some_layers() -> None:
    """A limit of ``silu(gate)`` is one of the gate; MLPs, shared experts and experts have limits of their own."""
    model = model_config_from_dict(STEP)
    assert model.clamps is not None and [layer for layer, own in enumerate(model.clamps.mlps) if own] == [44]
    assert [layer for layer, own in enumerate(model.clamps.experts) if own] == [43, 44]
    for clamp in filter(None, model.clamps.mlps + model.clamps.experts):
        assert clamp.most_gate / (1.0 + math.exp(-clamp.most_gate)) == pytest.approx(clamp.most_up, rel=1e-12)
    assert (model.num_heads, model.full_heads) == (96, HeadSizes(8, 128, 64)) and model.num_mtp_layers == 3
    sparse = model_config_from_dict(M3)
    assert sparse.index_topk == 2048 and sparse.clamps == (((7.0, 7.0, 1.702, 1.0),) * 60,) * 2


def test_gpt_oss() -> None:
    """20b has 20.9B parameters and activates 3.6B, 120b 116.8B and 5.1B (arXiv 2508.10925, table 1)."""
    small, large = model_config_from_dict(GPT_OSS_20B), model_config_from_dict(GPT_OSS_120B)
    assert num_parameters(small) == 20_914_757_184
    assert num_parameters(large) == 116_829_156_672
    assert [active_parameters(model) / 1e9 for model in (small, large)] == pytest.approx([3.61, 5.13], abs=0.03)
    assert small.layer_windows == (128, None) * 12
    assert small.max_position == 131_072 and not small.rope.truncate
    assert small.has_sinks and small.qkv_bias and small.o_bias
    assert small.clamps == ((None,) * 24, ((7.0, 7.0, 1.702, 1.0),) * 24)
    old = {name: value for name, value in GPT_OSS_20B.items() if name not in ("rope_scaling", "layer_types")}
    assert model_config_from_dict(old) == small  # as the config class of transformers fills them in
    scaling = {"rope_theta": 150000, **GPT_OSS_20B["rope_scaling"]}
    assert model_config_from_dict(old | {"rope_parameters": scaling}) == small  # as transformers 5 writes it
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert model_config_from_dict(old | {"rope_parameters": plain}).rope == RopeConfig(theta=10000.0)


GEMMA4: dict[str, Any] = {
    **LLAMA, "architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": LLAMA["vocab_size"],
    "hidden_size_per_layer_input": 32, "global_head_dim": 16,
}  # fmt: skip
GEMMA3N: dict[str, Any] = {
    **LLAMA, "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 2, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
STEP = PUBLISHED["Step-3.5-Flash"][0]
M3 = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], **PUBLISHED["MiniMax-M3"][0]["text_config"]}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {**LLAMA, "architectures": ["Gemma9ForCausalLM"]},
        "unknown architecture .*LlamaForCausalLM, Llama4ForCausalLM",
    ),
    ({**PUBLISHED["MiniMax-M2"][0], "scoring_func": "softmax"}, "scoring_func is 'softmax'; .*it must be 'sigmoid'"),
    ({**PUBLISHED["MiniMax-M2"][0], "shared_intermediate_size": 8}, "shared_intermediate_size is 8; .* must be 0"),
    ({**PUBLISHED["MiniMax-M2"][0], "attn_type_list": [0, 1]}, r"attn_type_list is \[0, 1\]; only softmax attention"),
    ({**PUBLISHED["ERNIE-4.5-21B-A3B-PT"][0], "use_bias": True}, "use_bias is true"),
    ({**PUBLISHED["ERNIE-4.5-21B-A3B-PT"][0], "moe_layer_end_index": 9}, r"moe_layer_end_index is 9; .*layer \(27\)"),
    ({**PUBLISHED["ERNIE-4.5-21B-A3B-PT"][0], "moe_layer_interval": 2}, "moe_layer_interval is 2"),
    ({**PUBLISHED["ERNIE-4.5-21B-A3B-PT"][0], "moe_norm_min": 0.1}, "moe_norm_min is 0.1; it must be <= 1e-06"),
    ({**PUBLISHED["Solar-Open-100B"][0], "use_qk_norm": True}, "use_qk_norm is True; .*it must be False"),
    ({**PUBLISHED["Solar-Open-100B"][0], "first_k_dense_replace": 1}, "first_k_dense_replace is 1; .*it must be 0"),
    ({**PUBLISHED["K-EXAONE-236B-A23B"][0], "layer_types": None}, "sliding_window_pattern is 'LLLG'; without layer_"),
    (
        {**PUBLISHED["Hunyuan-A13B-Instruct"][0], "moe_topk": [*[8] * 31, 4]},
        r"moe_topk is \[8, .*4\]; it must be the same in every layer",
    ),
    ({**PUBLISHED["Hunyuan-A13B-Instruct"][0], "use_cla": True}, "use_cla is True; .*it must be False"),
    (
        {**PUBLISHED["Hunyuan-A13B-Instruct"][0], "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope yarn, .*not supported with norms of queries and keys after the rotation",
    ),
    ({**DEFAULTS["AfmoeConfig"][0], "route_norm": False}, "route_norm is False; .*it must be True"),
    ({**DEFAULTS["AfmoeConfig"][0], "attention_bias": True}, "attention_bias is True; .*it must be False"),
    ({**DEFAULTS["AfmoeConfig"][0], "global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0; it must be"),
    ({**PUBLISHED["flint"][0], "decoder_sparse_step": 2}, r"decoder_sparse_step is 2; .*mlp_only_layers \(1\)"),
    ({**PUBLISHED["flint"][0], "mlp_only_layers": "all"}, "mlp_only_layers is 'all'; it must be a list of layers"),
    ({**PUBLISHED["A.X-K1"][0], "moe_layer_freq": 2}, "moe_layer_freq is 2; of this architecture it must be 1"),
    ({**PUBLISHED["Kolibri-1"][0], "sliding_window": None}, "sliding_window is null; it must be a whole number"),
    (
        {**DEFAULTS["Cohere2MoeConfig"][0], "expert_selection_fn": "tanh"},
        "expert_selection_fn is 'tanh'; it must be 'softmax' or 'sigmoid'",
    ),
    (
        {**DEFAULTS["Cohere2MoeConfig"][0], "shared_expert_combination_strategy": "max"},
        "shared_expert_combination_strategy is 'max'; it must be 'average' or 'sum'",
    ),
    (
        {**DEFAULTS["Cohere2MoeConfig"][0], "prefix_dense_sliding_window_pattern": 0},
        "prefix_dense_sliding_window_pattern is 0; it must be >= 1",
    ),
    ({**PUBLISHED["OLMoE-1B-7B-0924-Instruct"][0], "clip_qkv": 8.0}, "clip_qkv is 8.0; clipped projections"),
    ({**LLAMA, "architectures": ["IQuestCoderForCausalLM"], "clip_qkv": 1.0}, "clip_qkv is 1.0; clipped projections"),
    ({**PUBLISHED["internlm3-8b-instruct"][0], "bias": True}, "qkv_bias is False and bias is True; only both or none"),
    ({**PUBLISHED["gemma-2b-it"][0], "hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu_pytorch"),
    (
        {**PUBLISHED["gemma-2b-it"][0], "use_bidirectional_attention": True},
        "use_bidirectional_attention is true; only causal",
    ),
    ({**PUBLISHED["Qwen1.5-MoE-A2.7B-Chat"][0], "decoder_sparse_step": 2}, "decoder_sparse_step is 2; only models"),
    (
        {**LLAMA, "architectures": ["Ministral3ForCausalLM"], "rope_scaling": YARN},
        "llama_4_scaling_beta is None; it must be a number",
    ),
    (
        {
            **PUBLISHED["Mistral-Small-4-119B-2603"][0]["text_config"],
            "architectures": ["Mistral4ForCausalLM"],
            "topk_method": "greedy",
            "scoring_func": "sigmoid",
        },
        "scoring_func is 'sigmoid'; .*topk_method is 'greedy'; .* must be absent",
    ),
    ({**PUBLISHED["c4ai-command-r7b-12-2024"][0], "sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must"),
    ({**LLAMA, "architectures": None}, "must name one architecture, found None"),
    ({**LLAMA, "sliding_window": 512}, r"sliding_window is in use \(512\), which is not supported for Llama"),
    ({**MISTRAL, "sliding_window": 0}, "sliding_window is 0; it must be >= 1"),
    ({**MISTRAL, "sliding_window": "all"}, "sliding_window is 'all'; it must be a whole number"),
    (
        {**QWEN2, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention', and no sliding_window is in use",
    ),
    ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention', which is not supported"),
    ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'; state-space"),
    ({**LLAMA, "layer_types": ["mamba", "full_attention"]}, "'mamba'; state-space"),
    ({**GPT_OSS_20B, "swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be a number over 0"),
    ({**GPT_OSS_20B, "num_experts_per_tok": 33}, "top_k is 33; it must be <= 32"),
    (
        {**LLAMA, "quantization_config": {"quant_method": "quip"}},
        r"_config is present \(quip\); of quantized weights compressed-tensors, fp8, gptq, awq are read",
    ),
    ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 4.0}}, "short_factor is None; it must be a list"),
    (
        {**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}},
        "rope longrope: long_factors has 3 numbers; 4 pairs are rotated",
    ),
    (
        {**LLAMA, "architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        "logits_scaling is 0; it must be a number over",
    ),
    (
        {**GEMMA4, "num_kv_shared_layers": 2, "attention_bias": True, "use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all'; only causal.*attention_bias is true",
    ),
    (
        {**GEMMA3N, "altup_active_idx": 1, "altup_correct_scale": False},
        "altup_active_idx is 1; of this architecture it must be 0; altup_correct_scale is Fa",
    ),
    (
        {**GEMMA3N, "intermediate_size": [32, 64]},
        r"intermediate_size is \[32, 64\]; it must be one size, or an equ",
    ),
    ({**GEMMA3N, "activation_sparsity_pattern": [0.5]}, "sparsity is given for 1 of 2 layers"),
    ({**GEMMA3N, "activation_sparsity_pattern": "all"}, "activation_sparsity_pattern is all; it must be a list of num"),
    ({**GEMMA3N, "activation_sparsity_pattern": [1.0, 0.0]}, "activation sparsity is 1.0; it must be >= 0 and < 1"),
    ({**GEMMA3N, "altup_num_inputs": 1}, "1 residual streams are not supported; 2 to 16 are"),
    ({**GEMMA3N, "laurel_rank": 0}, "laurel_rank is 0; it must be 1 to"),
    ({**GEMMA3N, "hidden_size_per_layer_input": 0}, "residual streams need embeddings per layer"),
    ({**GEMMA3N, "num_kv_shared_layers": 1}, "num_kv_shared_layers is 1 of 2 layers; none before them is of the kind"),
    ({**GEMMA4, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2 of 2 layers; none before them is of the kind"),
    (
        {**GEMMA4, "hidden_size_per_layer_input": 48},
        "embeddings per layer have 48 numbers; it must be a multiple of 32",
    ),
    ({**GEMMA4, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9; it must be vocab_size"),
    ({**GEMMA4, "per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config is .*it must give head_dim and"),
    (
        {**PUBLISHED["gemma-3-1b-it"][0], "final_logit_softcapping": 30.0, "use_bidirectional_attention": True},
        "final_logit_softcapping is 30.0; only models without soft caps.*only causal attention",
    ),
    (
        {**LLAMA, "architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral9"}},
        "text_config has model_type 'mistral9'; only 'mistral' or 'ministral3' or 'mistral4'",
    ),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 5}, "text_config is 5; it must be an object"),
    (
        {
            **PUBLISHED["gemma-2-2b-it"][0],
            "sliding_window": None,
            "hidden_activation": "gelu",
            "use_bidirectional_attention": True,
        },
        "sliding_window is null.*only causal attention.*hidden_activation is 'gelu'; .* it must be 'gelu_pytorch_tanh'",
    ),
    (
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_proj_bias": True},
        "mamba_proj_bias is true.*mamba_norm_before_gate is true; only norms behind the gate",
    ),
    ({**FALCON, "ssm_multipliers": [1.0]}, r"ssm_multipliers is \[1.0\]; it must be a list of 5 numbers"),
    ({**FALCON, "mamba_d_head": 7}, r"mamba_n_heads \(6\) times mamba_d_head \(7\) is not mamba_d_ssm \(96\)"),
    ({**PUBLISHED["gemma-2-2b-it"][0], "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0.*over 0"),
    ({**PUBLISHED["gemma-3-1b-it"][0], "hidden_activation": "silu"}, "hidden_activation is 'silu'; .* be 'gelu_py"),
    ({**PUBLISHED["gemma-3-1b-it"][0], "sliding_window": None}, "sliding_window is null"),
    ({**PUBLISHED["gemma-3-1b-it"][0], "rope_parameters": {"full_attention": 3}}, "rope settings of each kind"),
    (
        {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG", "sliding_window": 8},
        "sliding_window_pattern is 'LLLG'; without layer_types",
    ),
    ({**LLAMA, "rope_scaling": {"type": "spiral"}}, "rope type 'spiral' is not supported .*default, linear"),
    ({**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope_section"),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor is None; it must be a number"),
    ({**LLAMA, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 512}}, "yarn: factor is missing"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, r"factor is 0.5; it must be >= 1"),
    ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    (
        {**LLAMA, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 0.5}},
        r"high_freq_factor \(0.5\) is below low_freq_factor \(1.0\)",
    ),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    (
        {**LLAMA, "num_local_experts": 8},
        r"mixture-of-experts layers are not supported \(num_local_experts is 8\)",
    ),
    ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
    ({**DEEPSEEK, "attention_bias": True}, "attention_bias is true; no published model"),
    (
        {**DEEPSEEK, "index_topk": 2048},
        "sparse indexer.*2048",
    ),
    ({**DEEPSEEK, "rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "only yarn has it"),
    ({**LING, "q_lora_rank": 24}, "q_lora_rank is 24; of this architecture it must be None"),
    ({**LING, "score_function": "softmax"}, "score_function is 'softmax'; of this architecture it must be 'sigmoid'"),
    ({**LING, "kda_lower_bound": 1.0}, "kda_lower_bound is 1.0; it must be a number up to 0"),
    ({**KIMI, "mla_use_nope": False}, "mla_use_nope is False; of this architecture it must be True"),
    ({**KIMI, "moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
    ({**KIMI, "linear_attn_config": [4]}, r"linear_attn_config is \[4\]; it must be an object"),
    (
        {**PUBLISHED["LFM3-1.7B"][0], "attention_bias": True},
        "gates of attention have 1 numbers a head; there must be 128",
    ),
    (
        {**PUBLISHED["granite-swash-2b"][0], "layer_rope_theta": [1e4, 1e4, 5e5, 1e4] * 6},
        "apart from 0, layers with a sliding window may have one base, and the others one",
    ),
    ({**PUBLISHED["granite-swash-2b"][0], "layer_rope_theta": [1e4]}, "it must be a list of 24 numbers"),
    (
        {"architectures": ["Lfm2VlForConditionalGeneration"], "text_config": {"model_type": "lfm2_moe"}},
        "text_config has model_type 'lfm2_moe'; only 'lfm2' is supported",
    ),
    ({**LLAMA, "architectures": ["ArceeForCausalLM"]}, "hidden_act is 'silu'; of this architecture it must be 'relu2'"),
    ({**APERTUS, "hidden_act": "silu"}, "hidden_act is 'silu'; of this architecture it must be 'xielu'"),
    ({**APERTUS, "post_norm": True}, "post_norm is True; of this architecture it must be False"),
    ({**APERTUS, "qk_norm": False}, "qk_norm is False; of this architecture it must be True"),
    ({**APERTUS, "mlp_bias": True}, "mlp_bias is True; of this architecture it must be False"),
    (
        {**MUSE, "layer_rope_theta": [0, 1e4]},
        r"layer_rope_theta is \[0, 10000.0\]; it must be a list of 0 and rope_theta",
    ),
    ({**MUSE, "layer_rope_theta": 7}, "layer_rope_theta is 7; it must be a list"),
    ({**MUSE, "tie_word_embeddings": True}, "tie_word_embeddings is True; of this architecture it must be False"),
    ({**MUSE, "hidden_activation": "gelu"}, "hidden_activation is 'gelu'; of this architecture it must be 'silu'"),
    ({**NANOCHAT, "tie_word_embeddings": True}, "tie_word_embeddings is True; of this architecture it must be False"),
    ({**NANOCHAT, "rope_scaling": YARN}, "rope yarn.* not supported with norms of queries and keys after the rotation"),
    ({**LLAMA, "architectures": ["OlmoForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0; clipped projections"),
    ({**STEP, "moe_router_activation": "softmax"}, "moe_router_activation is 'softmax'; of this architecture it must"),
    ({**STEP, "query_pre_attn_scalar": 64}, r"query_pre_attn_scalar is 64; it must be head_dim \(128\)"),
    ({**STEP, "use_rope_layers": [1, 0] * 24}, "use_rope_layers has layers without rotary embedding"),
    ({**STEP, "swiglu_limits": [7.0] * 44}, "swiglu_limits has 44 values; there are 45 layers"),
    ({**STEP, "swiglu_limits": ["high"] * 45}, "swiglu_limits is 'high'; it must be a number"),
    (
        {**STEP, "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 4}},
        "num_attention_groups is 4; of this architecture it must be 8",
    ),
    ({**M3, "hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'swigluoai' or 'silu' is supported"),
    ({**M3, "qk_norm_type": "per_layer"}, "qk_norm_type is 'per_layer'; of this architecture it must be 'per_head'"),
    ({**M3, "sparse_attention_config": [1]}, r"sparse_attention_config is \[1\]; it must be an object of settings"),
    ({**M3, "swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be a number over 0"),
    ({**DEFAULTS["HYV4Config"][0], "hc_mult": 1}, "1 residual streams are not supported; 2 to 16 are"),
    ({**DEFAULTS["HYV4Config"][0], "hc_eps": 0}, "hc_eps is 0; it must be a number over 0"),
    ({**DEFAULTS["HYV4Config"][0], "attention_bias": True}, "attention_bias is true"),
    ({**DEFAULTS["Glm5NextConfig"][0], "hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0; it must be >= 1"),
    ({**DEFAULTS["Glm5NextConfig"][0], "hc_sinkhorn_iters": 5000}, "hc_sinkhorn_iters is 5000; it must be 0 to 1000"),
    (
        {**DEFAULTS["Glm5NextConfig"][0], "qk_rope_head_dim": 64},
        "qk_rope_head_dim is 64; of this architecture it must be 0",
    ),
    (
        {**DEFAULTS["Glm5NextConfig"][0], "linear_attn_config": 3},
        "linear_attn_config is 3; it must be an object of settings",
    ),
    ({**PUBLISHED["MiMo-V2-Flash"][0], "hybrid_layer_pattern": "x"}, "layer_types is 'x'; it must be a list"),
    (
        {**PUBLISHED["MiMo-V2-Flash"][0], "hybrid_layer_pattern": [0, 1]},
        "layer_types is a list of 2; it must be a list",
    ),
    (
        {**PUBLISHED["MiMo-V2-Flash"][0], "moe_layer_freq": 1},
        "mlp_layer_types is 1; it must name the kind of every layer",
    ),
    ({**PUBLISHED["MiMo-V2-Flash"][0], "moe_layer_freq": [1, 0] * 24}, "only dense layers first, then sparse ones"),
    (
        {**PUBLISHED["MiMo-V2-Flash"][0], "swa_head_dim": 128},
        "swa_head_dim is 128; of this architecture it must be 192",
    ),
    (
        {**PUBLISHED["MiMo-V2-Flash"][0], "v_head_dim": 200, "swa_v_head_dim": 200},
        "values have 200 numbers; it must be 2 to 192",
    ),
    (
        {**PUBLISHED["MiMo-V2-Flash"][0], "rope_scaling": {"type": "yarn", "factor": 2}},
        "rope_scaling is .*; of this architecture it must be None",
    ),
    ({**LAGUNA, "gating_types": ["per_head", "none"]}, r"gating_types is \['per_head', 'none'\]; of this architecture"),
    ({**LAGUNA, "norm_topk_prob": False}, "norm_topk_prob is False; of this architecture it must be True"),
    ({**LAGUNA, "gating": "per-element"}, "gating is 'per-element'; only a gate for each head"),
    ({**LAGUNA, "moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping is 30.0; .* it must be 0.0"),
    (
        {**LAGUNA, "num_attention_heads_per_layer": [8, 6]},
        r"is \[8, 6\]; it must be a list, of one number for all layers",
    ),
    ({**LAGUNA, "num_attention_heads_per_layer": [8]}, r"is \[8\]; it must be a list"),
    ({**LAGUNA, "num_attention_heads_per_layer": 8}, "is 8; it must be a list"),
    ({**LAGUNA, "mlp_layer_types": ["sparse", "dense"]}, "only dense layers first, then sparse ones"),
    ({**LLAMA4, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0; it must be >= 1"),
    ({**LLAMA4, "moe_layers": "all"}, "moe_layers is 'all'; it must be a list of the layers that have experts"),
    ({**LLAMA4, "attn_temperature_tuning": 0.5}, "attn_temperature_tuning is 0.5; it must be true or false"),
    ({**LLAMA4, "floor_scale": 0}, "original must be >= 1"),
    ({**LLAMA4, "attention_chunk_size": None}, "attention_chunk_size is None; it must be a whole number"),
    ({**LLAMA4, "attention_chunk_size": 0}, "attention_chunk_size is 0; it must be >= 1"),
    ({**LLAMA4, "rope_scaling": YARN}, "rope yarn is not supported with norms after the rotation .use_qk_norm."),
    ({**LLAMA4, "layer_types": ["sliding_attention", "full_attention"]}, "layer_types has 'sliding_attention'"),
    ({**LLAMA4, "no_rope_layers": [1]}, r"no_rope_layers is \[1\]; it must be a list with a 0 or a 1 for each"),
    ({**PHIMOE, "num_experts_per_tok": 3}, "num_experts_per_tok is 3; of this architecture it must be 2"),
    ({**PHIMOE, "rope_scaling": YARN}, "rope yarn is not supported for this architecture"),
    (
        {**PHIMOE, "rope_scaling": {"type": "longrope", "short_mscale": 1.0, "long_mscale": 1.2}},
        "long_mscale is 1.2 and short_mscale 1.0; they must be equal",
    ),
    ({**PHI, "qk_layernorm": True}, "qk_layernorm is True; of this architecture it must be False"),
    ({**PHI, "hidden_act": "gelu"}, "hidden_act is 'gelu'; of this architecture it must be 'gelu_new'"),
    (
        {**PHI, "architectures": ["Starcoder2ForCausalLM"], "hidden_act": "relu"},
        "hidden_act is 'relu'; of this architecture it must be 'gelu_pytorch_tanh'",
    ),
    (
        {**PHI, "architectures": ["NemotronForCausalLM"], "hidden_act": "silu"},
        "hidden_act is 'silu'; of this architecture it must be 'relu2'",
    ),
    ({**NEMOTRON, "moe_latent_size": 65}, r"moe_latent_size is 65; it must be from 1 to hidden_size \(\d+\)"),
    ({**NEMOTRON, "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; of this architecture it must be 'relu2'"),
    ({**NEMOTRON, "mlp_bias": True}, "mlp_bias is true; no published model"),
    ({**NEMOTRON, "time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]; only"),
    ({**NEMOTRON, "hybrid_override_pattern": "M-M-"}, "layers of Mamba-2 and of attention are needed"),
    ({**NEMOTRON, "hybrid_override_pattern": "MX*-"}, "layer_types has 'X'"),
    ({**SMOLLM3, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be >= 1"),
    ({**SMOLLM3, "no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; .* for each of the 5 layers"),
    ({**SMOLLM3, "no_rope_layers": [1, 0, 1, 2, 1]}, "a list with a 0 or a 1"),
    ({**SMOLLM3, "num_hidden_layers": 2**40}, "num_layers is 1099511627776; it must be <= 65536"),
    ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank is None; it must be a whole number"),
    ({**DEEPSEEK, "qk_rope_head_dim": 7}, "rope_dim is 7; rotary embedding needs an even size"),
    ({**DEEPSEEK, "kv_lora_rank": 33}, r"kv_rank \(33\) \+ rope_dim \(8\) is 41; latents need an even size"),
    ({**DEEPSEEK, "qk_nope_head_dim": -8}, "nope_dim is -8; it must be >= 1"),
    ({**LLAMA, "num_attention_heads": 0}, r"hidden_size \(64\) is not a multiple of num_attention_heads \(0\)"),
    ({**LLAMA, "hidden_size": None}, "hidden_size is None; it must be a whole number"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_layers is 0; it must be >= 1"),
    ({**LLAMA, "num_key_value_heads": 3}, r"num_heads \(8\) is not a multiple of num_kv_heads \(3\)"),
    ({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7}, r"hidden_size \(64\) is not a multiple"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSALS, ids=[reason[:30] for _, reason in REFUSALS])
def test_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings)


def test_all_reasons_are_given_at_once() -> None:
    settings = {**QWEN2, "architectures": ["Llama9ForCausalLM"], "model_type": "llama9",
                "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    with pytest.raises(ValueError, match="Llama9") as caught:
        model_config_from_dict(settings)
    for reason in (
        "unknown architecture",
        "sliding_attention",
    ):
        assert reason in str(caught.value)
    assert "mixture-of-experts" not in str(caught.value)  # other architectures have them
    assert "sliding_window is in use" not in str(caught.value)  # use_sliding_window is False


TEXT = {"num_hidden_layers": 2, "num_experts": 4}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma9nForConditionalGeneration", {"vision_config": {"a": 1}, "text_config": {"sliding_window_pattern": 6}},
     "image inputs .a vision tower., sliding-window attention layers"),
    ("OlmoNextForCausalLM", {"linear_num_key_heads": 16, **TEXT}, "linear attention layers .Gated DeltaNet."),
    ("Qwen9ForConditionalGeneration",
     {"vision_config": {"a": 1}, "text_config": {"layer_types": ["linear_attention", "full_attention"], **TEXT}},
     "image inputs .*'linear_attention'"),
    ("Llama9ForConditionalGeneration",
     {"vision_config": {"a": 1}, "text_config": {"attention_chunk_size": 8192, "no_rope_layers": [1, 0], **TEXT}},
     "image inputs .*, chunked attention layers, layers without rotary embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "settings", "reason"), UNKNOWN)
def test_what_unknown_architectures_have(architecture: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"unknown architecture .*{reason}") as caught:
        model_config_from_dict({"architectures": [architecture], **settings})
    assert "mixture-of-experts" not in str(caught.value)


def test_absent_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; expected a checkpoint folder, a config.json, a GGUF file or"):
        read_model_config(tmp_path / "model")


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json does not exist"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        read_model_config(tmp_path)


# Every published config.json has them, so an absent one is refused.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "max_position_embeddings"}  # fmt: skip
# Values that differ from the defaults and go with the defaults of the others.
OTHER_VALUES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 768, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 96,
    "num_key_value_heads": 48, "max_position_embeddings": 512, "head_dim": 12, "hidden_act": "silu",
    "rms_norm_eps": 1e-3, "rope_theta": 5e4, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    "attention_bias": True, "mlp_bias": True, "use_qk_norm": True, "use_sliding_window": False, "sliding_window": None,
    "bos_token_id": 7, "eos_token_id": 8, "kv_lora_rank": 34, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False, "n_routed_experts": 80, "num_local_experts": 80,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 4, "first_k_dense_replace": 2,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"], "n_group": 16, "topk_group": 10,
    "topk_method": "group_limited_greedy", "norm_topk_prob": True, "routed_scaling_factor": 3.5,
    "no_rope_layers": [1, 0, 1, 1, 0], "no_rope_layer_interval": 3, "attention_out_bias": True, "use_bias": True,
    "query_pre_attn_scalar": 24,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 8.0,
    "num_nextn_predict_layers": 0, "decoder_sparse_step": 1, "mlp_only_layers": [], "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 18, "linear_value_head_dim": 22, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "shared_expert_intermediate_size": 88, "num_experts": 80, "full_attention_interval": 2, "conv_L_cache": 5,
    "conv_bias": True, "norm_eps": 1e-3, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.5,
    "block_auto_adjust_ff_dim": True, "num_dense_layers": 1, "use_expert_bias": False,
}  # fmt: skip
TEXT_CONFIGS = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
TEXT_NAMES = ("Llama4", "Qwen3_5", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Gemma4Unified", "Gemma3n", "MuseGlimmer",
              "Glm4v", "Glm5Next", "MiniMaxM3VL", "Step3p7")  # fmt: skip
WINDOW_NAMES = ("Exaone4ForCausalLM", "Gemma2ForCausalLM", "Cohere2ForCausalLM", *TEXT_CONFIGS, "Olmo3ForCausalLM",
                "Exaone4_5_ForConditionalGeneration", "ExaoneMoeForCausalLM", "Kolibri1ForCausalLM",
                "Cohere2MoeForCausalLM", "FlintForCausalLM", "AfmoeForCausalLM", "VaultGemmaForCausalLM")  # fmt: skip
LATENT_NAMES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM",
                "Mistral4ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "AXK1ForCausalLM",
                "KimiLinearForCausalLM", "BailingHybridForCausalLM", "KimiK25ForConditionalGeneration",
                "Kimi_K25ForConditionalGeneration", "HYV4ForCausalLM", "Glm5NextForConditionalGeneration")  # fmt: skip


BIASED = {"Starcoder2ForCausalLM": "gelu_pytorch_tanh", "StableLmForCausalLM": "silu", "PhiForCausalLM": "gelu_new",
          "NemotronForCausalLM": "relu2", "Jais2ForCausalLM": "relu2"}  # fmt: skip


def config_class_of(architecture: str) -> Any:
    from tests.parity.checkpoints import class_of_transformers  # loads torch

    name = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    names = {"Mistral3": "Mistral", "Exaone4_5_": "Exaone4", "Lfm2Vl": "Lfm2", "Lfm3Vl": "Lfm3",
             "Glm46V": "Glm4v", "KimiK25": "DeepseekV3", "Kimi_K25": "DeepseekV3",
             "PhiMoE": "Phimoe", "MiniMaxM3Sparse": "MiniMaxM3VL", "Step3p5": "Step3p7"}  # fmt: skip
    name = names.get(name, name)  # that of its text_config
    is_text = architecture in TEXT_CONFIGS or name.startswith(TEXT_NAMES)
    return class_of_transformers(name + ("TextConfig" if is_text else "Config"))


def other_values(architecture: str) -> dict[str, Any]:
    """The fields of ``OTHER_VALUES`` that the config class of the architecture has, and the rope settings."""
    known = {*config_class_of(architecture)().to_dict(), "rope_theta"}
    known -= {"partial_rotary_factor"}  # which 5.23 moves into the rope settings, 5.17 leaves
    known |= {"partial_rotary_factor"} if architecture in ("Glm4MoeForCausalLM", "Phi3ForCausalLM") else set()
    settings = {name: value for name, value in OTHER_VALUES.items() if name in known}
    settings["norm_topk_prob"] = architecture in (
        "Qwen3MoeForCausalLM",
        "Dots1ForCausalLM",
        "OlmoeForCausalLM",
    ) or architecture.startswith("Qwen3_5Moe")
    if architecture == "GptOssForCausalLM":
        settings |= {"sliding_window": 77, "swiglu_alpha": 1.5, "swiglu_limit": 5.0}  # layer_types has windows
        settings.pop("rope_theta")  # without rope settings its config class ignores it
    if architecture == "InternLM3ForCausalLM":  # whose config class wants all biases or none
        settings |= {"attention_bias": False, "mlp_bias": False}
    if architecture == "Ernie4_5_MoeForCausalLM":
        settings |= {"use_bias": False, "moe_k": 4, "moe_num_experts": 72, "moe_layer_start_index": 2,
                     "moe_num_shared_experts": 3}  # fmt: skip
    if architecture == "GemmaForCausalLM":
        settings["hidden_act"] = "gelu_pytorch_tanh"
    if architecture == "Dots1ForCausalLM":
        settings |= {"sliding_window": 77, "max_window_layers": 3}
    if "linear_key_head_dim" in known:
        settings["head_dim"] = 16  # of which a quarter is rotated
    if architecture == "GraniteMoeHybridForCausalLM":
        settings |= {"layer_types": ["linear_attention", *["full_attention"] * (settings["num_hidden_layers"] - 1)],
                     "mamba_n_heads": 32, "mamba_n_groups": 4, "mamba_d_state": 24, "mamba_d_conv": 3,
                     "mamba_conv_bias": False, "mamba_proj_bias": True, "shared_intermediate_size": 40}  # fmt: skip
    if architecture == "OlmoHybridForCausalLM":
        settings |= {"layer_types": ["linear_attention"] * 4 + ["full_attention"], "linear_allow_neg_eigval": False}
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]  # whatever the file says
    if architecture == "BambaForCausalLM":
        settings |= {"attn_layer_indices": [1, 4], "mamba_n_heads": 32, "mamba_n_groups": 4, "mamba_d_state": 24,
                     "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True}  # fmt: skip
    if architecture == "HyperCLOVAXForCausalLM":
        settings["use_post_norm"] = False
    if architecture == "BailingHybridForCausalLM":
        settings |= {"q_lora_rank": None, "tie_word_embeddings": False, "n_group": 16, "num_local_experts": 80,
                     "num_experts_per_tok": 3, "n_shared_experts": 4, "short_conv_kernel_size": 3,
                     "layer_group_size": 2, "kda_lower_bound": -3.0, "max_position_embeddings": 512}  # fmt: skip
        for name in ("layer_types", "mlp_layer_types", "n_routed_experts", "num_experts"):
            settings.pop(name, None)
    if architecture == "KimiLinearForCausalLM":
        settings |= {
            "linear_head_dim": 24,
            "linear_num_heads": 6,
            "tie_word_embeddings": False,
            "n_group": 16,
            "max_position_embeddings": 512,
            "num_experts_per_tok": 3,
            "n_shared_experts": 4,
            "layer_types": ["full_attention", *["linear_attention"] * (settings["num_hidden_layers"] - 1)],
        }
    if architecture.startswith(("HYV4", "Glm5Next")):
        settings |= {"hc_mult": 3, "hc_magnitude": 1.5, "hc_eps": 0.01, "hc_sinkhorn_iters": 7, "swiglu_limit": 5.0,
                     "index_topk": 512}  # fmt: skip
    if architecture.startswith("Glm5Next"):
        settings |= {"linear_head_dim": 24, "linear_num_heads": 6, "linear_lower_bound": -3.0, "qk_rope_head_dim": 0,
                     "tie_word_embeddings": False, "num_attention_heads": 64, "num_key_value_heads": 64,
                     "layer_types": ["full_attention", *["linear_attention"] * 4]}  # fmt: skip
    if architecture == "NemotronHForCausalLM":
        settings |= {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "n_groups": 4,
                     "layers_block_type": ["moe", "mamba", "mlp", "attention", "linear_attention"],
                     "layer_norm_epsilon": 1e-3, "mamba_num_heads": 12, "mamba_head_dim": 20, "ssm_state_size": 24,
                     "conv_kernel": 3, "use_conv_bias": False, "num_hidden_layers": 5,
                     "moe_shared_expert_intermediate_size": 56}  # fmt: skip
    if architecture == "FalconH1ForCausalLM":
        settings |= {
            "attention_bias": False, "mlp_bias": False, "mamba_d_ssm": 2048, "mamba_n_heads": 64, "mamba_n_groups": 4,
            "mamba_d_state": 24, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_rms_norm": True,
            "mamba_norm_before_gate": False, "lm_head_multiplier": 0.5, "key_multiplier": 0.3,
            "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "mlp_multipliers": [1.1, 0.4],
        }  # fmt: skip
    if architecture == "HYV3ForCausalLM":
        settings |= {"mlp_bias": False, "num_shared_experts": 3, "router_scaling_factor": 1.5}
    if architecture.startswith("Lfm3"):
        settings |= {"attention_bias": False, "use_sandwich_norm": False, "sliding_window": 77}
    if "SWA" in architecture:
        settings |= {"sliding_window": 77, "layer_rope_theta": [5e4, 1e4, 0, 1e4, 5e4]}
    if architecture == "CwmForCausalLM":
        settings |= {"sliding_window": 77, "attention_bias": False}
        settings.pop("rope_theta")  # without rope settings its config class ignores it
    if "Gemma4Unified" in architecture:
        settings |= {"sliding_window": 77, "attention_bias": False}
    if "Gemma3n" in architecture:
        settings |= {"sliding_window": 77, "attention_bias": False, "num_kv_shared_layers": 0, "altup_num_inputs": 3,
                     "laurel_rank": 12, "rope_local_base_freq": 3e4, "final_logit_softcapping": 7.0,
                     "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 900,
                     "num_attention_heads": 64, "num_key_value_heads": 32}  # fmt: skip
    if architecture == "LagunaForCausalLM":
        settings |= {"attention_bias": False, "sliding_window": 77, "moe_routed_scaling_factor": 2.5,
                     "norm_topk_prob": True}  # fmt: skip
        for name in ("rope_theta", "layer_types", "mlp_layer_types"):  # with lists it wants the number of layers
            settings.pop(name, None)
    if architecture.startswith("MiMo"):
        settings |= {"sliding_window": 77, "head_dim": 48, "v_head_dim": 20, "attention_value_scale": 0.5}
        for name in ("rope_theta", "layer_types", "mlp_layer_types"):  # as of Laguna
            settings.pop(name, None)
    if "MiniMaxM3" in architecture:
        settings |= {"swiglu_alpha": 1.5, "swiglu_limit": 5.0, "index_topk_blocks": 5,
                     "index_block_size": 16, "dense_intermediate_size": 112, "shared_intermediate_size": 40,
                     "layer_types": ["full_attention", *["minimax_m3_sparse"] * 4]}  # fmt: skip
    if "Step3" in architecture:
        settings |= {"attention_bias": False, "mlp_bias": False, "sliding_window": 77, "query_pre_attn_scalar": None,
                     "share_expert_dim": 40, "moe_router_scaling_factor": 2.5, "num_attention_groups": 48}  # fmt: skip
        settings.pop("mlp_layer_types")  # with the list it wants the number of layers
    if "Llama4" in architecture:
        settings |= {"attention_chunk_size": 77, "attn_scale": 0.3, "attn_temperature_tuning": False, "floor_scale": 60,
                     "interleave_moe_layer_step": 2, "intermediate_size_mlp": 112, "use_qk_norm": False}  # fmt: skip
    if "MuseGlimmer" in architecture:
        settings |= {"sliding_window": 77, "attention_bias": False, "tie_word_embeddings": False, "post_norm_eps": 0.1,
                     "final_logit_softcapping": 7.0, "output_multiplier": 0.3, "qk_scale_factor": 2.0,
                     "num_attention_heads": 64, "num_key_value_heads": 32}  # fmt: skip
    if architecture in BIASED:
        settings["hidden_act"] = BIASED[architecture]
        for name in {"layer_norm_eps", "norm_eps", "norm_epsilon"} & known:
            settings[name] = 1e-3
        if architecture == "StableLmForCausalLM":
            settings |= {"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True}
    if architecture == "ArceeForCausalLM":
        settings |= {"hidden_act": "relu2", "mlp_bias": False}
    if architecture == "NanoChatForCausalLM":
        settings |= {"hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False,
                     "final_logit_softcapping": 7.0}  # fmt: skip
    if architecture == "ApertusForCausalLM":
        settings["hidden_act"] = "xielu"
        settings.pop("rope_theta")  # without rope settings its config class ignores it
    if architecture in ("PhimoeForCausalLM", "PhiMoEForCausalLM"):
        settings |= {"lm_head_bias": True, "num_experts_per_tok": 2, "router_jitter_noise": 0.2}
    if architecture.startswith("Cohere"):
        settings |= {"layer_norm_eps": 1e-3, "logit_scale": 0.5}
    if architecture in WINDOW_NAMES:
        settings["sliding_window"] = 77
    if architecture == "AfmoeForCausalLM":
        settings |= {"attention_bias": False, "num_shared_experts": 3, "route_scale": 2.5, "mup_enabled": True}
    if architecture in TEXT_CONFIGS:
        settings |= {"sliding_window_pattern": 3, "rope_local_base_freq": 3e4}
    if architecture in LATENT_NAMES:
        settings["attention_bias"] = False
        settings.pop("head_dim", None)  # of these, another name of qk_rope_head_dim
    return {"architectures": [architecture], **settings}


def read(settings: dict[str, Any]) -> ModelConfig | str:
    """Our reading of the settings, or the reason for the refusal."""
    try:
        return model_config_from_dict(settings)
    except ValueError as error:
        return str(error)


def filled_in(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with every field that transformers fills in."""
    full: dict[str, Any] = config_class_of(settings["architectures"][0])(**settings).to_dict()
    if settings["architectures"][0] in LATENT_NAMES:
        full.pop("head_dim", None)
    return full


@pytest.mark.parametrize("architecture", FAMILIES.names)
def test_absent_keys_have_the_value_of_the_config_class(architecture: str) -> None:
    """Each key left out in turn, then all of them: we read what transformers fills in, or refuse for its reason."""
    settings = other_values(architecture)
    assert isinstance(read(settings), ModelConfig)
    assert read(settings) == read(filled_in(settings))
    optional = [name for name in settings if name not in SIZES and name != "architectures"]
    for name in optional:
        less = {key: value for key, value in settings.items() if key != name}
        assert read(less) == read(filled_in(less)), name
    least = {key: value for key, value in settings.items() if key not in optional}
    assert read(least) == read(filled_in(least))
    for name in SIZES:
        less = {key: value for key, value in settings.items() if key != name}
        if name in FAMILIES.get(architecture).defaults:
            assert read(less) == read(filled_in(less))
        else:
            assert f"{name} is None" in str(read(less))


def test_torch_and_transformers_are_not_imported() -> None:
    code = (
        "import sys, snapstream.models.registry, snapstream.models.sharding;"
        "sys.exit(','.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
