"""How llama.cpp writes models: names, settings and layouts by architecture. No torch.

An architecture is an entry of ``ARCHITECTURES``. What it does not name is refused, so that nothing is computed that the
file does not mean.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from snapstream.models import gguf_model
from snapstream.models.gguf_header import Header, Tensor, described, read_header, split_files
from snapstream.models.gguf_model import SIGMOID, Architecture, Model, expert_fields
from snapstream.models.tensors import ExpertNames

_WINDOW = {"attention.sliding_window": "sliding_window"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_PER_LAYER_NAMES = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_QWEN_EXPERTS = expert_fields(
    "num_experts", shared_feed_forward_length="shared_expert_intermediate_size", shared_count="", weights_scale="",
    group_count="", group_used_count="", first_dense="",
)  # fmt: skip
_WINDOWED = {  # heads and a rope by kind of layers
    "attention.sliding_window": "sliding_window", "attention.head_count": "", "rope.freq_base_swa": "",
    "rope.dimension_count_swa": "", "leading_dense_block_count": "",
}  # fmt: skip


def _shared(prefix: str) -> dict[str, str]:
    """Names of shared experts."""
    return {f"ffn_{name}_shexp": f"{prefix}.{name}_proj" for name in ("gate", "up", "down")}


_QWEN_SHARED = _shared("mlp.shared_expert")
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_BLOCK_SPARSE = ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")
_PICTURES = {"rope.dimension_sections": "", "n_deepstack_layers": ""}  # by which texts do not differ
_LOG = ".A_log"  # of which files have the exponential, negated
_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz", "ssm_a": f"linear_attn{_LOG}",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", **_QWEN_SHARED,
}  # fmt: skip
_MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_dt.bias": "mamba.dt_bias", "ssm_a": f"mamba{_LOG}",
    "ssm_d": "mamba.D", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
_LFM_NAMES = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj", "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}  # fmt: skip
_LFM = Architecture(
    name="Lfm2ForCausalLM",
    fields={"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"},
    settings={"block_auto_adjust_ff_dim": False, "conv_bias": False},
    layer_names=_LFM_NAMES,
    layer_types=("conv", "full_attention"),
)
_GRANITE_FIELDS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_GRANITE_MOE_FIELDS = {
    **_GRANITE_FIELDS, **_LOCAL_EXPERTS, "expert_shared_feed_forward_length": "shared_intermediate_size",
}  # fmt: skip
_COHERE = Architecture(
    name="CohereForCausalLM",
    fields={**_LAYER_NORM, "logit_scale": "logit_scale"},
    is_interleaved=True,
)
_DEEPSEEK = Architecture(
    name="DeepseekV3ForCausalLM",
    fields={
        **expert_fields(), "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
        "attention.head_count_kv": "", "attention.key_length": "", "attention.key_length_mla": "",
        "attention.value_length_mla": "", "rope.scaling.yarn_log_multiplier": "",
    },
    settings={
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None,
    },
    router=None,
    complete=gguf_model.deepseek,
)  # fmt: skip
_SPARSE = replace(
    _DEEPSEEK,
    name="GlmMoeDsaForCausalLM",
    fields={
        **_DEEPSEEK.fields, "attention.indexer.top_k": "index_topk", "attention.indexer.head_count": "",
        "attention.indexer.key_length": "", "attention.indexer.types": "",
    },
)  # fmt: skip
_DELTA_NET = Architecture(
    name="Qwen3_5ForCausalLM",
    fields={
        "full_attention_interval": "full_attention_interval",
        "attention.recurrent_layers": "",
        **_PICTURES,
    },  # fmt: skip
    layer_names=_DELTA_NAMES,
    norm_offset=1.0,
    has_tiled_values=True,
    complete=gguf_model.delta,
)
_NEMOTRON_H = Architecture(
    name="NemotronHForCausalLM",
    fields={
        **expert_fields(), "attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "moe_latent_size": "moe_latent_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    },
    layer_names={
        "attn_norm": "norm", "ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ssm_dt.bias": "mixer.dt_bias", "ssm_a": f"mixer{_LOG}", "ssm_d": "mixer.D", "ssm_norm": "mixer.norm",
        "ssm_conv1d": "mixer.conv1d", "ssm_in": "mixer.in_proj", "ssm_out": "mixer.out_proj",
        "attn_output": "mixer.o_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj", "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
        **{f"ffn_{name}": f"mixer.{name}_proj" for name in ("up", "down")},
    },
    outer_names={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    experts=ExpertNames(prefix="mixer"),
    router=None,
    layer_types=("mamba", "attention"),
    complete=gguf_model.nemotron_h,
)  # fmt: skip
_KDA = replace(  # attn_q are queries of both kinds of layers
    _DEEPSEEK,
    name="KimiLinearForCausalLM",
    fields={**_DEEPSEEK.fields, "kda.head_dim": ""},
    settings={**_DEEPSEEK.settings, "norm_topk_prob": True},
    layer_names={
        **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"}, "ssm_a": f"self_attn{_LOG}",
        **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj", "ssm_dt.bias": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm",
    },
    experts=ExpertNames(gate="w1", up="w3", down="w2"),
    router=SIGMOID,
    layer_types=("linear_attention", "full_attention"),
    complete=gguf_model.kimi,
)  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_interleaved=True),
    "mistral3": Architecture(
        name="Ministral3ForCausalLM", is_interleaved=True, complete=gguf_model.ministral,
        fields={"attention.temperature_scale": "", "rope.scaling.yarn_log_multiplier": ""},
    ),
    "mistral4": replace(_DEEPSEEK, name="Mistral4ForCausalLM", router=1, complete=gguf_model.mistral4,
                        fields={**_DEEPSEEK.fields, "attention.temperature_scale": ""}),
    "apertus": Architecture(
        name="ApertusForCausalLM",
        layer_names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        numbers={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        name="Qwen2MoeForCausalLM", fields=_QWEN_EXPERTS, layer_names=_QWEN_SHARED, settings={"norm_topk_prob": False}
    ),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM", fields=_QWEN_EXPERTS, settings={"norm_topk_prob": True}
    ),  # llama.cpp computes no other
    "qwen2vl": Architecture(name="Qwen2ForCausalLM", fields=_PICTURES),
    "qwen3vl": Architecture(name="Qwen3ForCausalLM", fields=_PICTURES),
    "qwen3vlmoe": Architecture(
        name="Qwen3MoeForCausalLM", fields={**_QWEN_EXPERTS, **_PICTURES}, settings={"norm_topk_prob": True}
    ),
    "qwen3next": replace(
        _DELTA_NET, name="Qwen3NextForCausalLM", fields={**_DELTA_NET.fields, **_QWEN_EXPERTS},
        settings={"norm_topk_prob": True}, has_tiled_values=False,
    ),
    "qwen35": _DELTA_NET,
    "qwen35moe": replace(_DELTA_NET, name="Qwen3_5MoeForCausalLM", fields={**_DELTA_NET.fields, **_QWEN_EXPERTS}),
    "gemma": Architecture(name="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        fields={
            **_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layer_names={**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        complete=gguf_model.gemma2,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        fields={**_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"},
        layer_names={**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        complete=gguf_model.gemma3,
    ),
    "gemma3n": Architecture(
        name="Gemma3nForCausalLM",
        fields={
            **_WINDOW, "activation_sparsity_scale": "", "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs", "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input", "feed_forward_length": "",
            "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq",
        },
        layer_names={
            **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm", **_PER_LAYER_NAMES,
            "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
            "altup_predict_coef": "altup.prediction_coefs", "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale", "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
        },
        complete=gguf_model.gemma3n,
    ),
    "gemma4": Architecture(
        name="Gemma4ForCausalLM",
        fields={
            **_WINDOW, "attention.head_count_kv": "", "attention.key_length": "", "attention.key_length_swa": "",
            "attention.shared_kv_layers": "num_kv_shared_layers", "attention.value_length_swa": "",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input", "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_used_count": "top_k_experts",
            "feed_forward_length": "", "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base": "",
            "rope.freq_base_swa": "", "rope.dimension_count_swa": "",
        },
        settings={"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        layer_names={
            **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm", "layer_output_scale.weight": "layer_scalar",
            **_PER_LAYER_NAMES, "ffn_gate_inp.weight": "router.proj.weight", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        complete=gguf_model.gemma4,
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM", fields=_WINDOW, complete=gguf_model.phi3,
        layer_names={"ffn_up": "mlp.gate_up_proj"},
    ),
    "arcee": Architecture(name="ArceeForCausalLM", is_interleaved=True),
    "hunyuan-dense": Architecture(
        name="HunYuanDenseV1ForCausalLM",
        layer_names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "granitemoe": Architecture(
        name="GraniteMoeForCausalLM",
        fields=_GRANITE_MOE_FIELDS,
        layer_names={
            "ffn_down_shexp": "shared_mlp.output_linear", "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        is_interleaved=True,
        has_split_gates=True,
        complete=gguf_model.granite_moe,
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM", fields={"attention.layer_norm_epsilon": "norm_epsilon"},
        settings={"sliding_window": 4096},  # of all of them, and not in the files
        layer_names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "phi2": Architecture(
        name="PhiForCausalLM", fields=_LAYER_NORM, outer_names={"output_norm": "model.final_layernorm"},
        layer_names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "stablelm": Architecture(
        name="StableLmForCausalLM", fields={**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        complete=gguf_model.stablelm,
    ),
    "nemotron": Architecture(
        name="NemotronForCausalLM", fields={"attention.layer_norm_epsilon": "norm_eps"}, norm_offset=1.0
    ),
    "jais2": Architecture(name="Jais2ForCausalLM", fields=_LAYER_NORM),
    "olmo": Architecture(  # whose norms have no weights, and one epsilon
        name="OlmoForCausalLM", fields={"attention.layer_norm_epsilon": ""}, is_interleaved=True
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", is_interleaved=True),
    "granite": Architecture(
        name="GraniteForCausalLM", fields=_GRANITE_FIELDS, is_interleaved=True, complete=gguf_model.granite
    ),
    "granite_swa": Architecture(
        name="GraniteSWAForCausalLM",
        fields={**_GRANITE_MOE_FIELDS, **_WINDOW, "attention.rope_pattern": ""},
        layer_names={
            "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        joined={"ffn_up_shexp": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")},
        is_interleaved=True,
        has_split_gates=True,
        complete=gguf_model.granite_swa,
    ),
    "granitehybrid": Architecture(
        name="GraniteMoeHybridForCausalLM",
        fields=_GRANITE_MOE_FIELDS,
        layer_names={
            **_MAMBA_NAMES, "ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        settings={"num_local_experts": 0},
        is_interleaved=True,
        layer_types=("mamba", "attention"),
        has_split_gates=True,
        complete=gguf_model.granite_hybrid,
    ),
    "falcon-h1": Architecture(  # the multipliers of config.json are in the weights
        name="FalconH1ForCausalLM",
        layer_names={
            **_MAMBA_NAMES, **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        outer_names={"output_norm": "model.final_layernorm"},
        complete=gguf_model.mamba,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": _LFM,
    "lfm2moe": replace(
        _LFM, name="Lfm2MoeForCausalLM", experts=ExpertNames(prefix="feed_forward", gate="w1", up="w3", down="w2"),
        fields={**_LFM.fields, **expert_fields("num_experts", first_dense="num_dense_layers")},
        settings={**_LFM.settings, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_expert_bias": True},
        router=SIGMOID,
    ),
    "command-r": _COHERE,
    "cohere2moe": replace(
        _COHERE, name="Cohere2MoeForCausalLM", router=None, complete=gguf_model.cohere_moe,
        fields={
            **_COHERE.fields, **_WINDOW, "feed_forward_length": "prefix_dense_intermediate_size",
            **expert_fields(
                "num_experts", feed_forward_length="intermediate_size", shared_count="num_shared_experts",
                weights_scale="", group_count="", group_used_count="",
            ),
        },
        settings={"norm_topk_prob": False},
    ),
    "cohere2": replace(_COHERE, name="Cohere2ForCausalLM", fields={**_COHERE.fields, **_WINDOW}),
    "chatglm": Architecture(  # the first GLM-4
        name="GlmForCausalLM", layer_names={"ffn_up": "mlp.gate_up_proj"}, is_interleaved=True
    ),
    "glm4": Architecture(
        name="Glm4ForCausalLM", fields=_PICTURES,
        layer_names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        is_interleaved=True,
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM", fields={**expert_fields(), **_PICTURES}, router=SIGMOID,  # and Solar Open
        layer_names=_NORMS_AFTER,
        settings={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 0},
    ),
    "kimi-linear": _KDA,
    "bailingmoe3": replace(
        _KDA, name="BailingHybridForCausalLM", experts=ExpertNames(), log_sign=1.0, complete=gguf_model.ling,
        fields={
            **_KDA.fields, "kda.safe_gate": "", "kda.gate_lower_bound": "", "swiglu_clamp_exp": "",
            "swiglu_clamp_shexp": "",
        },
        layer_names={
            **_KDA.layer_names, "ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj",
            "attn_gate": "self_attn.g_proj",
        },
    ),
    "deepseek2": _DEEPSEEK,
    "deepseek32": replace(_SPARSE, name="DeepseekV32ForCausalLM"),
    "glm-dsa": _SPARSE,
    "mellum": Architecture(
        name="MellumForCausalLM", complete=gguf_model.two_ropes,
        fields={**_WINDOW, "rope.freq_base_swa": "", **_QWEN_EXPERTS},
        settings={"norm_topk_prob": True},
    ),
    "hy_v3": Architecture(
        name="HYV3ForCausalLM",
        fields={**_QWEN_EXPERTS, "expert_weights_scale": "router_scaling_factor", "expert_weights_norm": ""},
        layer_names={
            "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias",
            **_shared("mlp.shared_mlp"),
        },
        settings={"router_scaling_factor": 1.0},
        router=SIGMOID,
        complete=gguf_model.hy3,
    ),
    "dots1": Architecture(
        name="Dots1ForCausalLM", fields=expert_fields(), router=SIGMOID, settings={"sliding_window": None}
    ),
    "minimax-m2": Architecture(
        name="MiniMaxM2ForCausalLM",
        router=SIGMOID,
        fields=_LOCAL_EXPERTS,
        layer_names={
            "ffn_gate_inp": "block_sparse_moe.gate", "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        experts=_BLOCK_SPARSE,
    ),
    "minimax-m3": Architecture(
        name="MiniMaxM3SparseForConditionalGeneration",
        router=SIGMOID,
        fields={
            **_LOCAL_EXPERTS, "feed_forward_length": "dense_intermediate_size", "leading_dense_block_count": "",
            "expert_feed_forward_length": "intermediate_size", "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor", "attention.indexer.top_k": "index_topk_blocks",
            "attention.indexer.block_size": "index_block_size", "attention.indexer.head_count": "",
            "attention.indexer.key_length": "", "attention.indexer.local_blocks": "",
        },
        layer_names={
            "ffn_gate_inp": "block_sparse_moe.gate", "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            **_shared("block_sparse_moe.shared_experts"),
            **{f"indexer.{name}.weight": "" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
        },
        settings={"routed_scaling_factor": 1.0},
        experts=_BLOCK_SPARSE,
        norm_offset=1.0,
        complete=gguf_model.minimax_m3,
    ),
    "mimo2": Architecture(
        name="MiMoV2FlashForCausalLM", router=SIGMOID, complete=gguf_model.mimo,
        fields={
            **_WINDOW, **expert_fields(), "attention.head_count_kv": "", "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale", "rope.freq_base_swa": "",
        },
        settings={
            "attention_value_scale": 1.0, "n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
        layer_names={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", is_interleaved=True),
    "ernie4_5-moe": Architecture(
        name="Ernie4_5_MoeForCausalLM",
        fields=expert_fields(
            "moe_num_experts", used_count="moe_k", shared_count="moe_num_shared_experts",
            first_dense="moe_layer_start_index",
        )
        | {"interleave_moe_layer_step": "moe_layer_interval"},
        layer_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        is_interleaved=True,
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM", fields={**_WINDOW, "rope.freq_base_swa": ""}, layer_names=_NORMS_AFTER,
        complete=gguf_model.olmo,
    ),
    "olmoe": Architecture(
        name="OlmoeForCausalLM", fields={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        settings={"norm_topk_prob": False},
    ),
    "exaone-moe": Architecture(
        name="ExaoneMoeForCausalLM", router=SIGMOID,
        fields={**_WINDOW, **expert_fields("num_experts", shared_count="num_shared_experts")},
        settings={"n_group": 1, "topk_group": 1},
    ),
    "afmoe": Architecture(
        name="AfmoeForCausalLM", router=SIGMOID,
        fields={
            **_WINDOW, **expert_fields("num_experts", shared_count="num_shared_experts", weights_scale="route_scale",
                                  weights_norm="route_norm", first_dense="num_dense_layers"),
        },
        settings={"global_attn_every_n_layers": 4, "mup_enabled": True},
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    "step35": Architecture(
        name="Step3p5ForCausalLM", router=SIGMOID, norm_offset=1.0, complete=gguf_model.step,
        fields={
            **expert_fields(shared_feed_forward_length="share_expert_dim", shared_count="",
                       weights_scale="moe_router_scaling_factor", group_count="", group_used_count=""),
            **_WINDOWED, "swiglu_clamp_exp": "", "swiglu_clamp_shexp": "", "moe_every_n_layers": "",
        },
        layer_names={
            "attn_gate": "self_attn.g_proj", "ffn_gate_inp": "moe.gate", "exp_probs_b.bias": "moe.router_bias",
            **_shared("share_expert"),
        },
    ),
    "laguna": Architecture(
        name="LagunaForCausalLM", router=SIGMOID, complete=gguf_model.laguna,
        fields={**_QWEN_EXPERTS, "expert_weights_scale": "moe_routed_scaling_factor", **_WINDOWED},
        layer_names={
            **_QWEN_SHARED, "attn_gate": "self_attn.g_proj",
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
        },
    ),
    "muse-glimmer": Architecture(
        name="MuseGlimmerForConditionalGeneration", is_interleaved=True, norm_offset=1.0, has_plain_final_norm=True,
        complete=gguf_model.muse,
        fields={
            **_WINDOW, "final_logit_softcapping": "final_logit_softcapping", "logit_scale": "output_multiplier",
            "rope.freq_base_swa": "",
        },
        settings={"post_norm_eps": 1e-8},
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm", "attn_gate": "self_attn.gate_proj",
            "attn_q_norm.weight": "", "attn_k_norm.weight": "",
        },
    ),
    "llama4": Architecture(
        name="Llama4ForCausalLM", router=SIGMOID, complete=gguf_model.llama4,
        fields={
            **_LOCAL_EXPERTS, "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        layer_names={
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            **_shared("feed_forward.shared_expert"),
        },
        experts=ExpertNames(prefix="feed_forward"),
        is_interleaved=True,
    ),
    "hunyuan-moe": Architecture(
        name="HunYuanMoEV1ForCausalLM",
        fields=expert_fields("num_experts", used_count="moe_topk", shared_count="num_shared_expert", weights_scale="",
                        weights_norm="", group_count="", group_used_count="", first_dense=""),
        layer_names={
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **_shared("mlp.shared_mlp"),
        },
    ),
    "exaone4": Architecture(
        name="Exaone4ForCausalLM", fields=_WINDOW, layer_names=_NORMS_AFTER, settings={"sliding_window": None}
    ),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM", layer_names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        fields={
            **_WINDOW, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size",
        },
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
        rope={"truncate": False},
        settings={"rope_scaling": None},
        merged={"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)},
    ),
}  # fmt: skip
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    fields=_LOCAL_EXPERTS,
    layer_names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=_BLOCK_SPARSE,
    is_interleaved=True,
)  # arch "llama" too, with experts


def open_model(path: Path) -> Model:
    """ValueError for a broken file, an architecture that is not supported, and files that do not belong together."""
    return _joined(tuple(read_header(file) for file in split_files(path)))


@lru_cache(maxsize=16)
def _joined(headers: tuple[Header, ...]) -> Model:
    first, tensors = headers[0], dict[str, Tensor]()
    path = first.file
    kind = first.metadata.get("general.architecture")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise ValueError(
            f"{path}: general.architecture is {described(kind)}; GGUF files are read of {', '.join(ARCHITECTURES)}"
        )
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{name[:80]} is in two files: {tensors[name].file.name} and {header.file.name}")
            tensors[name] = tensor
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ValueError(
            f"{path}: split.tensors.count is {described(count)}, and its files hold {len(tensors):,} tensors"
        )
    if kind == "llama" and first.metadata.get("llama.expert_count"):
        known = MIXTRAL
    return Model(header=first, architecture=known, tensors=tensors)
