"""How llama.cpp writes models: names, settings and layouts by architecture. No torch.

An architecture is an entry of ``ARCHITECTURES``. What it does not name is refused, so that nothing is computed that the
file does not mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from snapstream.config.values import MAX_DIM
from snapstream.models.gguf_header import Array, Header, Tensor, described
from snapstream.models.tensors import ExpertNames

Settings = dict[str, Any]
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp writes the models of an architecture."""

    name: str  # transformers' class
    # config.json's names of its own settings; "": read elsewhere, or of no effect.
    fields: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # what holds unless a file says otherwise
    # Of its own tensors, by what follows the layer, with the kind (.weight, .bias) or for both; "": not read.
    layer_names: Mapping[str, str] = field(default_factory=dict)
    outer_names: Mapping[str, str] = field(default_factory=dict)  # of tensors outside of the layers
    experts: ExpertNames = ExpertNames()
    is_interleaved: bool = False  # files have the rows of q and k so that pairs (0, 1), (2, 3) are rotated
    norm_offset: float = 0.0  # what files have added to the weights of norms
    has_plain_final_norm: bool = False  # but of the last
    rope: Mapping[str, Any] = field(default_factory=dict)  # settings of a scaled rope that files do not have
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stacks of experts, rows of two by turns
    router: int | None = 1  # the function of its scores: 1 softmax, 2 sigmoid; None: ``complete`` knows
    layer_types: tuple[str, str] | None = None  # of layers without kv heads, and of the others
    has_tiled_values: bool = False  # value heads of DeltaNet: the first of every key head, then the second ...
    has_split_gates: bool = False  # gate and up are two tensors, and one in safetensors
    # Settings that follow from several, or from tensors.
    complete: Callable[[Model, Settings, Settings], Settings] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    header: Header  # of the first, which has the settings
    architecture: Architecture
    tensors: Mapping[str, Tensor]  # of all, by their names in the files

    @property
    def own(self) -> Settings:
        """The settings of the architecture, without its prefix."""
        metadata, prefix = self.header.metadata, f"{self.header.metadata['general.architecture']}."
        return {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}

    @property
    def num_layers(self) -> int:
        """Without those of multi-token prediction, which come last."""
        count, more = self.own.get("block_count"), self.own.get("nextn_predict_layers") or 0
        most = len(self.tensors)
        if not isinstance(count, int) or not isinstance(more, int) or not 1 <= count - more <= count <= most:
            raise ValueError(f"{self.header.file}: block_count is {described(count)}; it has {most:,} tensors")
        return count - more

    def has(self, ending: str) -> bool:
        """Whether any layer has such a tensor."""
        return any(name.endswith(f".{ending}") for name in self.tensors)

    def matrix(self, name: str) -> Tensor:
        if name not in self.tensors or len(self.tensors[name].shape) != 2:
            raise ValueError(f"{self.header.file} has no matrix {name}")
        return self.tensors[name]

    def floats(self, name: str) -> list[float]:
        """A short vector of fp32."""
        if name not in self.tensors:
            raise ValueError(f"{self.header.file} has no {name}")
        tensor = self.tensors[name]
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIM:
            raise ValueError(f"{tensor.file}: {tensor.name} is {tensor.kind} {list(tensor.shape)}; it must be a vector")
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes)))

    def numbers(self, key: str) -> Sequence[float]:
        """Of every layer, from an array of the settings of the architecture."""
        name = f"{self.header.metadata['general.architecture']}.{key}"
        found = self.header.numbers(name)[: self.num_layers]
        if len(found) < self.num_layers:
            raise ValueError(f"{self.header.file}: {name} has {len(found)} numbers for {self.num_layers} layers")
        return found

    def by_layer(self, key: str) -> list[int]:
        """A setting of every layer, whether the file has one number or an array."""
        value = self.own[key]
        return [int(own) for own in self.numbers(key)] if isinstance(value, Array) else [value] * self.num_layers

    def kinds(self, key: str, some: str, none: str) -> list[str]:
        """Of every layer, by whether its number in an array is zero."""
        return [some if number else none for number in self.numbers(key)]


def _experts(count: str = "n_routed_experts", **changes: str) -> dict[str, str]:
    """Fields of a mixture, by default DeepSeek's."""
    names = {
        "count": count, "used_count": "num_experts_per_tok", "feed_forward_length": "moe_intermediate_size",
        "shared_count": "n_shared_experts", "weights_scale": "routed_scaling_factor", "weights_norm": "norm_topk_prob",
        "group_count": "n_group", "group_used_count": "topk_group", "first_dense": "first_k_dense_replace", **changes,
    }  # fmt: skip
    fields = {f"expert_{name}": value for name, value in names.items() if name != "first_dense"}
    fields["leading_dense_block_count"] = names["first_dense"]
    return {name: value for name, value in fields.items() if value}


def _deepseek(model: Model, own: Settings, settings: Settings) -> Settings:
    """Heads as they are before latents are expanded; V2 scores by softmax, V3 by sigmoid with a correction."""
    rotated = own["rope.dimension_count"]
    keys = own.get("attention.key_length_mla", own["attention.key_length"])
    found = {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": keys - rotated, "head_dim": rotated,
        "v_head_dim": own.get("attention.value_length_mla", own["attention.value_length"]),
        "num_key_value_heads": settings["num_attention_heads"], "partial_rotary_factor": 1.0,
    }  # fmt: skip
    is_v3, router = model.has("exp_probs_b.bias"), own.get("expert_gating_func")
    if not model.has("ffn_gate_inp.weight"):
        found |= dict.fromkeys(_experts().values()) | {"architectures": ["YoutuForCausalLM"]}  # no experts
    elif router and (router == _SIGMOID) != is_v3:
        raise ValueError(f"expert_gating_func is {router}; with exp_probs_b.bias it must be 2, without it 1")
    elif not is_v3:
        method = "group_limited_greedy" if settings["n_group"] > 1 else "greedy"
        found |= {"topk_method": method, "architectures": ["DeepseekV2ForCausalLM"]}
    if scaling := settings.get("rope_scaling"):
        share = 10 * own.get("rope.scaling.yarn_log_multiplier", 0.0)
        found["rope_scaling"] = {**scaling, "mscale": share, "mscale_all_dim": share} if share else scaling
    return found


def _delta(model: Model, own: Settings, settings: Settings) -> Settings:
    """Older files have an interval of layers with attention, newer ones a list too."""
    found: Settings = {}
    heads = own["ssm.time_step_rank"]
    if isinstance(own.get("attention.recurrent_layers"), Array):
        found["layer_types"] = model.kinds("attention.recurrent_layers", "linear_attention", "full_attention")
    return found | {
        "linear_conv_kernel_dim": own["ssm.conv_kernel"], "linear_key_head_dim": own["ssm.state_size"],
        "linear_num_key_heads": own["ssm.group_count"], "linear_num_value_heads": heads,
        "linear_value_head_dim": own["ssm.inner_size"] // heads,
    }  # fmt: skip


def _mamba(model: Model, own: Settings, settings: Settings) -> Settings:
    heads = own["ssm.time_step_rank"]
    return {
        "mamba_n_heads": heads, "mamba_d_head": own["ssm.inner_size"] // heads, "mamba_d_ssm": own["ssm.inner_size"],
        "mamba_n_groups": own["ssm.group_count"], "mamba_d_state": own["ssm.state_size"],
        "mamba_d_conv": own["ssm.conv_kernel"], "mamba_conv_bias": model.has("ssm_conv1d.bias"),
        "mamba_proj_bias": model.has("ssm_in.bias"), "mamba_rms_norm": model.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }  # fmt: skip


def _granite_hybrid(model: Model, own: Settings, settings: Settings) -> Settings:
    """``rope.scaling.finetuned`` says here whether heads are rotated."""
    shared = model.tensors.get("blk.0.ffn_gate_shexp.weight") or model.tensors.get("blk.0.ffn_gate.weight")
    return _mamba(model, own, settings) | {
        "mamba_expand": own["ssm.inner_size"] // settings["hidden_size"],
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": shared.shape[0] if shared else settings["intermediate_size"],
    }  # fmt: skip


def _phi3(model: Model, own: Settings, settings: Settings) -> Settings:
    """Divisors of the frequencies for short and for long prompts."""
    found: Settings = {"sliding_window": settings.get("sliding_window") or None}
    if "rope_factors_long.weight" not in model.tensors:
        return found
    factors = {name: model.floats(f"rope_factors_{name}.weight") for name in ("short", "long")}
    original = found["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    found["rope_scaling"] = {
        "rope_type": "longrope", "short_factor": factors["short"], "long_factor": factors["long"],
        "original_max_position_embeddings": original, "attention_factor": own.get("rope.scaling.attn_factor"),
        "factor": max(settings["max_position_embeddings"] / original, 1.0),
    }  # fmt: skip
    return found


def _two_ropes(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers with windows have a rope without scaling."""
    if not settings.get("sliding_window"):
        return {}
    full = {"rope_type": "default", "rope_theta": settings["rope_theta"], **settings.get("rope_scaling", {})}
    windows = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", settings["rope_theta"])}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windows}, "rope_scaling": None}


def _olmo(model: Model, own: Settings, settings: Settings) -> Settings:
    """OLMo 3 has windows."""
    ropes = _two_ropes(model, own, settings)
    return ropes | {"architectures": ["Olmo3ForCausalLM"]} if ropes else {}


def _gemma2(model: Model, own: Settings, settings: Settings) -> Settings:
    """The scale of scores follows from the size in 27b alone: 46 layers in Gemma 2, 62 in Gemma 3."""
    heads, is_27b = settings["num_attention_heads"], settings["num_hidden_layers"] in (46, 62)
    return {"query_pre_attn_scalar": settings["hidden_size"] // max(heads, 1) if is_27b else settings["head_dim"]}


def _gemma3(model: Model, own: Settings, settings: Settings) -> Settings:
    found = _gemma2(model, own, settings)
    if not settings.get("sliding_window"):
        found["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    return found


def _gemma3n(model: Model, own: Settings, settings: Settings) -> Settings:
    """Shares of the gates that are cut are stored as quantiles of a normal distribution."""
    rows = (model.matrix(name).shape[0] for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    quantiles = model.numbers("activation_sparsity_scale")
    normal = NormalDist()
    return {
        **dict(zip(("vocab_size_per_layer_input", "laurel_rank"), rows, strict=True)),
        "activation_sparsity_pattern": [normal.cdf(own) for own in quantiles],
        "intermediate_size": model.by_layer("feed_forward_length"),
    }


def _gemma4(model: Model, own: Settings, settings: Settings) -> Settings:
    """Heads and inner sizes by layer. The rope of layers without a window, which rotates the first numbers of a head,
    is a table of divisors, huge ones for the others.
    """
    kinds, count, size = settings["layer_types"], model.num_layers, own["attention.key_length"]
    windows, full = (kinds.index(kind) if kind in kinds else -1 for kind in ("sliding_attention", "full_attention"))
    heads, inner = model.by_layer("attention.head_count_kv"), model.by_layer("feed_forward_length")
    own_size = own["attention.key_length_swa"]
    if own.get("rope.dimension_count_swa", own_size) != own_size:
        raise ValueError(f"rope.dimension_count_swa is {own['rope.dimension_count_swa']}; heads have {own_size}")
    factors = model.floats(ROPE_FACTORS)
    rotated = factors.count(1.0)
    if 2 * len(factors) != size or any((factor == 1.0) != (at < rotated) for at, factor in enumerate(factors)):
        raise ValueError(f"{ROPE_FACTORS} must divide the first frequencies of {size // 2} by 1, and hide the others")
    keys = (f"blk.{layer}.attn_v.weight" for layer in range(count - settings.get("num_kv_shared_layers", 0)))
    full_rope = {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / size}
    return {
        "attention_k_eq_v": any(key not in model.tensors for key in keys), "head_dim": own_size,
        "enable_moe_block": bool(own.get("expert_count")), "intermediate_size": inner[0], "partial_rotary_factor": None,
        "num_key_value_heads": heads[windows], "use_double_wide_mlp": inner[-1] != inner[0], "rope_scaling": None,
        "per_layer_config": {
            str(layer): {"head_dim": size, "num_key_value_heads": heads[full]}
            for layer, kind in enumerate(kinds) if kind == "full_attention"
        },
        "rope_parameters": {
            "full_attention": full_rope | {"rope_theta": own["rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10000.0)},
        },
        "vocab_size_per_layer_input": settings["vocab_size"],
    }  # fmt: skip


def _granite(model: Model, own: Settings, settings: Settings) -> Settings:
    if own.get("rope.scaling.finetuned") is False:
        raise ValueError("rope.scaling.finetuned is False; heads that are not rotated are read of granitehybrid only")
    return {}


def _granite_moe(model: Model, own: Settings, settings: Settings) -> Settings:
    found, has_shared = _granite(model, own, settings), own.get("expert_shared_feed_forward_length")
    return found | ({"architectures": ["GraniteMoeSharedForCausalLM"]} if has_shared else {})


def _nemotron_h(model: Model, own: Settings, settings: Settings) -> Settings:
    """A layer has kv heads, an inner size or neither."""
    inner, heads = model.by_layer("feed_forward_length"), own["ssm.time_step_rank"]
    has_experts, names = bool(own.get("expert_count")), "".join(model.tensors)
    return {
        "layer_types": [
            ("moe" if has_experts and f"blk.{layer}.ffn_gate_inp.weight" in model.tensors else "mlp") if size else kind
            for layer, (size, kind) in enumerate(zip(inner, settings["layer_types"], strict=False))
        ],
        "intermediate_size": max(inner), "mamba_num_heads": heads, "mamba_head_dim": own["ssm.inner_size"] // heads,
        "n_groups": own["ssm.group_count"], "ssm_state_size": own["ssm.state_size"],
        "conv_kernel": own["ssm.conv_kernel"], "use_conv_bias": "ssm_conv1d.bias" in names,
        "use_bias": "ssm_in.bias" in names, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _stablelm(model: Model, own: Settings, settings: Settings) -> Settings:
    if model.has("attn_q_norm.weight"):
        raise ValueError(f"{model.header.file}: norms of heads (StableLM 2 12B) are read of safetensors only")
    return {"use_qkv_bias": settings["attention_bias"]}


def _hy3(model: Model, own: Settings, settings: Settings) -> Settings:
    dense = sum(f"blk.{layer}.ffn_gate_inp.weight" not in model.tensors for layer in range(model.num_layers))
    shared = own["expert_shared_feed_forward_length"] // own["expert_feed_forward_length"]
    return {"first_k_dense_replace": dense, "num_shared_experts": shared}


def _ministral(model: Model, own: Settings, settings: Settings) -> Settings:
    """Without yarn a Mistral Small 3, which is a Llama."""
    if settings.get("rope_scaling", {}).get("rope_type") != "yarn":
        return {"architectures": ["LlamaForCausalLM"]}
    share = own.get("rope.scaling.yarn_log_multiplier", 0.0)
    more = {"llama_4_scaling_beta": own.get("attention.temperature_scale", 0.0)}
    return {"rope_scaling": {**settings["rope_scaling"], "mscale": share, "mscale_all_dim": share, **more}}


def _laguna(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window have a rope of their own, and may have fewer heads. Gates may be of elements."""
    size, dense = settings["head_dim"], own.get("leading_dense_block_count", 0)
    ropes = {
        kind: {
            "rope_theta": own.get(f"rope.freq_base{suffix}", own["rope.freq_base"]),
            "partial_rotary_factor": own.get(f"rope.dimension_count{suffix}", size) / size,
        }
        for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa"))
    }
    ropes["full_attention"] |= settings.get("rope_scaling") or {}
    heads = model.by_layer("attention.head_count")
    return {
        "gating": "per-head" if model.matrix("blk.0.attn_gate.weight").shape[0] == heads[0] else "per-element",
        "num_attention_heads": heads[0], "num_attention_heads_per_layer": heads, "rope_scaling": None,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(model.num_layers)],
        "rope_parameters": ropes,
    }  # fmt: skip


def _step(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window rotate half of a head; only so many divisors count there."""
    if own.get("moe_every_n_layers", 1) != 1:
        raise ValueError(f"moe_every_n_layers is {own['moe_every_n_layers']}; only 1 is supported")
    size = settings["head_dim"]
    found = _laguna(model, {**own, "rope.dimension_count": size // 2, "rope.dimension_count_swa": size}, settings)
    rope, heads = found["rope_parameters"]["full_attention"], found.pop("num_attention_heads_per_layer")
    for name in {"short_factor", "long_factor"} & set(rope):
        rope[name] = rope[name][: size // 4]
    by_kind = dict(zip(settings["layer_types"], heads, strict=True))
    found["num_sliding_attention_heads"] = by_kind.get("sliding_attention")
    found["num_attention_heads"] = by_kind.get("full_attention", heads[0])
    limits = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
    return found | {name: list(model.numbers(key)) for name, key in limits.items() if key in own}


def _muse(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window are not rotated. Norms of heads have no weights; a scale of queries is in their place."""
    scales = set(model.floats("blk.0.attn_q_norm.weight"))
    if len(scales) != 1:
        raise ValueError("blk.0.attn_q_norm.weight has several numbers; it must be the scale of queries throughout")
    thetas = {"sliding_attention": own["rope.freq_base"]}
    return {
        "qk_scale_factor": scales.pop(), "layer_rope_theta": [thetas.get(kind, 0) for kind in settings["layer_types"]],
    }  # fmt: skip


def _llama4(model: Model, own: Settings, settings: Settings) -> Settings:
    """Scout and Maverick, by their numbers of experts, have what files do not say."""
    has_chunks = own.get("attention.sliding_window") != 0
    kinds = {} if has_chunks else {"layer_types": ["full_attention"] * model.num_layers}
    return {**kinds, "use_qk_norm": own["expert_count"] != 128, "attn_temperature_tuning": has_chunks}


_SIGMOID = 2
_WINDOW = {"attention.sliding_window": "sliding_window"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_PER_LAYER_NAMES = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_QWEN_EXPERTS = _experts(
    "num_experts", shared_feed_forward_length="shared_expert_intermediate_size", shared_count="", weights_scale="",
    group_count="", group_used_count="", first_dense="",
)  # fmt: skip
_WINDOWED = {  # heads and a rope by kind of layers
    "attention.sliding_window": "sliding_window", "attention.head_count": "", "rope.freq_base_swa": "",
    "rope.dimension_count_swa": "", "leading_dense_block_count": "",
}  # fmt: skip
_QWEN_SHARED = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
_PICTURES = {"rope.dimension_sections": "", "n_deepstack_layers": ""}  # by which texts do not differ
_LOG = ".A_log"  # of which files have the negated exponential
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
    **_GRANITE_FIELDS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}  # fmt: skip
_COHERE = Architecture(
    name="CohereForCausalLM",
    fields={**_LAYER_NORM, "logit_scale": "logit_scale"},
    is_interleaved=True,
)
_DEEPSEEK = Architecture(
    name="DeepseekV3ForCausalLM",
    fields={
        **_experts(), "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
        "attention.head_count_kv": "", "attention.key_length": "", "attention.key_length_mla": "",
        "attention.value_length_mla": "", "rope.scaling.yarn_log_multiplier": "",
    },
    settings={
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None,
    },
    router=None,
    complete=_deepseek,
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
    complete=_delta,
)
_NEMOTRON_H = Architecture(
    name="NemotronHForCausalLM",
    fields={
        **_experts(), "attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "",
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
    complete=_nemotron_h,
)  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_interleaved=True),
    "mistral3": Architecture(
        name="Ministral3ForCausalLM", is_interleaved=True, complete=_ministral,
        fields={"attention.temperature_scale": "", "rope.scaling.yarn_log_multiplier": ""},
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
        complete=_gemma2,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        fields={**_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"},
        layer_names={**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        complete=_gemma3,
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
        complete=_gemma3n,
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
        complete=_gemma4,
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM", fields=_WINDOW, complete=_phi3,
        layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
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
        complete=_granite_moe,
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
        complete=_stablelm,
    ),
    "nemotron": Architecture(
        name="NemotronForCausalLM", fields={"attention.layer_norm_epsilon": "norm_eps"}, norm_offset=1.0
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", is_interleaved=True),
    "granite": Architecture(
        name="GraniteForCausalLM", fields=_GRANITE_FIELDS, is_interleaved=True, complete=_granite
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
        complete=_granite_hybrid,
    ),
    "falcon-h1": Architecture(  # the multipliers of config.json are in the weights
        name="FalconH1ForCausalLM",
        layer_names={
            **_MAMBA_NAMES, **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        outer_names={"output_norm": "model.final_layernorm"},
        complete=_mamba,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": _LFM,
    "lfm2moe": replace(
        _LFM, name="Lfm2MoeForCausalLM", experts=ExpertNames(prefix="feed_forward", gate="w1", up="w3", down="w2"),
        fields={**_LFM.fields, **_experts("num_experts", first_dense="num_dense_layers")},
        settings={**_LFM.settings, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_expert_bias": True},
        router=_SIGMOID,
    ),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, name="Cohere2ForCausalLM", fields={**_COHERE.fields, **_WINDOW}),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        layer_names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        is_interleaved=True,
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM", fields=_experts(), router=_SIGMOID, layer_names=_NORMS_AFTER,  # and Solar Open
        settings={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 0},
    ),
    "deepseek2": _DEEPSEEK,
    "deepseek32": replace(_SPARSE, name="DeepseekV32ForCausalLM"),
    "glm-dsa": _SPARSE,
    "mellum": Architecture(
        name="MellumForCausalLM", complete=_two_ropes,
        fields={**_WINDOW, "rope.freq_base_swa": "", **_QWEN_EXPERTS},
        settings={"norm_topk_prob": True},
    ),
    "hy_v3": Architecture(
        name="HYV3ForCausalLM",
        fields={**_QWEN_EXPERTS, "expert_weights_scale": "router_scaling_factor", "expert_weights_norm": ""},
        layer_names={
            "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias",
            **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        },
        settings={"router_scaling_factor": 1.0},
        router=_SIGMOID,
        complete=_hy3,
    ),
    "dots1": Architecture(
        name="Dots1ForCausalLM", fields=_experts(), router=_SIGMOID, settings={"sliding_window": None}
    ),
    "minimax-m2": Architecture(
        name="MiniMaxM2ForCausalLM",
        router=_SIGMOID,
        fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        layer_names={
            "ffn_gate_inp": "block_sparse_moe.gate", "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        experts=ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", is_interleaved=True),
    "ernie4_5-moe": Architecture(
        name="Ernie4_5_MoeForCausalLM",
        fields=_experts(
            "moe_num_experts", used_count="moe_k", shared_count="moe_num_shared_experts",
            first_dense="moe_layer_start_index",
        )
        | {"interleave_moe_layer_step": "moe_layer_interval"},
        layer_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        is_interleaved=True,
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM", fields={**_WINDOW, "rope.freq_base_swa": ""}, layer_names=_NORMS_AFTER, complete=_olmo
    ),
    "olmoe": Architecture(
        name="OlmoeForCausalLM", fields={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        settings={"norm_topk_prob": False},
    ),
    "exaone-moe": Architecture(
        name="ExaoneMoeForCausalLM", router=_SIGMOID,
        fields={**_WINDOW, **_experts("num_experts", shared_count="num_shared_experts")},
        settings={"n_group": 1, "topk_group": 1},
    ),
    "afmoe": Architecture(
        name="AfmoeForCausalLM", router=_SIGMOID,
        fields={
            **_WINDOW, **_experts("num_experts", shared_count="num_shared_experts", weights_scale="route_scale",
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
        name="Step3p5ForCausalLM", router=_SIGMOID, norm_offset=1.0, complete=_step,
        fields={
            **_experts(shared_feed_forward_length="share_expert_dim", shared_count="",
                       weights_scale="moe_router_scaling_factor", group_count="", group_used_count=""),
            **_WINDOWED, "swiglu_clamp_exp": "", "swiglu_clamp_shexp": "", "moe_every_n_layers": "",
        },
        layer_names={
            "attn_gate": "self_attn.g_proj", "ffn_gate_inp": "moe.gate", "exp_probs_b.bias": "moe.router_bias",
            **{f"ffn_{name}_shexp": f"share_expert.{name}_proj" for name in ("gate", "up", "down")},
        },
    ),
    "laguna": Architecture(
        name="LagunaForCausalLM", router=_SIGMOID, complete=_laguna,
        fields={**_QWEN_EXPERTS, "expert_weights_scale": "moe_routed_scaling_factor", **_WINDOWED},
        layer_names={
            **_QWEN_SHARED, "attn_gate": "self_attn.g_proj",
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
        },
    ),
    "muse-glimmer": Architecture(
        name="MuseGlimmerForConditionalGeneration", is_interleaved=True, norm_offset=1.0, has_plain_final_norm=True,
        complete=_muse,
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
        name="Llama4ForCausalLM", router=_SIGMOID, complete=_llama4,
        fields={
            "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step", "attention.sliding_window": "",
        },
        layer_names={
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{name}{suffix}": f"feed_forward.{part}{name}_proj" for name in ("gate", "up", "down")
               for suffix, part in (("", ""), ("_shexp", "shared_expert."))},
        },
        experts=ExpertNames(prefix="feed_forward"),
        is_interleaved=True,
    ),
    "hunyuan-moe": Architecture(
        name="HunYuanMoEV1ForCausalLM",
        fields=_experts("num_experts", used_count="moe_topk", shared_count="num_shared_expert", weights_scale="",
                        weights_norm="", group_count="", group_used_count="", first_dense=""),
        layer_names={
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
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
            **_WINDOW, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
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
    fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    layer_names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2"),
    is_interleaved=True,
)  # arch "llama" too, with experts
