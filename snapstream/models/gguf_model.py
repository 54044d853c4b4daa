"""A model in GGUF files, and settings that follow from several of a file's own or from its tensors. No torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from snapstream.config.values import MAX_DIM
from snapstream.models.gguf_header import Array, Header, Tensor, described
from snapstream.models.tensors import ExpertNames

Settings = dict[str, Any]
ROPE_FACTORS = "rope_freqs.weight"
SIGMOID = 2  # of ``expert_gating_func``


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
    log_sign: float = -1.0  # what files have multiplied the exponential of A_log by
    has_plain_final_norm: bool = False  # but of the last
    rope: Mapping[str, Any] = field(default_factory=dict)  # settings of a scaled rope that files do not have
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stacks of experts, rows of two by turns
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tensors that are several, of as many rows
    numbers: Mapping[str, str] = field(default_factory=dict)  # tensors of one number that are arrays of the metadata
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

    def dense_first(self, count: int) -> list[str]:
        """``mlp_layer_types`` of a model whose first layers have no experts."""
        return ["dense" if layer < count else "sparse" for layer in range(self.num_layers)]

    def layers_with(self, ending: str) -> list[bool]:
        """Whether each layer has such a tensor."""
        return [f"blk.{layer}.{ending}" in self.tensors for layer in range(self.num_layers)]

    def kinds(self, key: str, some: str, none: str) -> list[str]:
        """Of every layer, by whether its number in an array is zero."""
        return [some if number else none for number in self.numbers(key)]


def expert_fields(count: str = "n_routed_experts", **changes: str) -> dict[str, str]:
    """Fields of a mixture, by default DeepSeek's."""
    names = {
        "count": count, "used_count": "num_experts_per_tok", "feed_forward_length": "moe_intermediate_size",
        "shared_count": "n_shared_experts", "weights_scale": "routed_scaling_factor", "weights_norm": "norm_topk_prob",
        "group_count": "n_group", "group_used_count": "topk_group", "first_dense": "first_k_dense_replace", **changes,
    }  # fmt: skip
    fields = {f"expert_{name}": value for name, value in names.items() if name != "first_dense"}
    fields["leading_dense_block_count"] = names["first_dense"]
    return {name: value for name, value in fields.items() if value}


def _latents(own: Settings, settings: Settings) -> Settings:
    """Heads as they are before latents are expanded, and what YaRN does to the scale of scores."""
    rotated = own["rope.dimension_count"]
    keys, values = (
        own[name] if (name := f"attention.{kind}_length_mla") in own else own[f"attention.{kind}_length"]
        for kind in ("key", "value")
    )
    found: Settings = {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": keys - rotated, "head_dim": rotated, "v_head_dim": values,
        "num_key_value_heads": settings["num_attention_heads"], "partial_rotary_factor": 1.0,
    }  # fmt: skip
    if scaling := settings.get("rope_scaling"):
        share = 10 * own.get("rope.scaling.yarn_log_multiplier", 0.0)
        found["rope_scaling"] = {**scaling, "mscale": share, "mscale_all_dim": share} if share else scaling
    return found


def deepseek(model: Model, own: Settings, settings: Settings) -> Settings:
    """V2 scores by softmax, V3 by sigmoid with a correction."""
    found, is_v3, router = _latents(own, settings), model.has("exp_probs_b.bias"), own.get("expert_gating_func")
    if not model.has("ffn_gate_inp.weight"):
        return found | dict.fromkeys(expert_fields().values()) | {"architectures": ["YoutuForCausalLM"]}  # no experts
    if router and (router == SIGMOID) != is_v3:
        raise ValueError(f"expert_gating_func is {router}; with exp_probs_b.bias it must be 2, without it 1")
    if is_v3:
        return found
    method = "group_limited_greedy" if settings["n_group"] > 1 else "greedy"
    return found | {"topk_method": method, "architectures": ["DeepseekV2ForCausalLM"]}


def mistral4(model: Model, own: Settings, settings: Settings) -> Settings:
    """Files lack the scale of queries in long contexts: that of the published model and of transformers' default."""
    found = _latents(own, settings)
    return found | {
        "rope_scaling": {**found["rope_scaling"], "llama_4_scaling_beta": own.get("attention.temperature_scale", 0.1)}
    }


def kimi(model: Model, own: Settings, settings: Settings) -> Settings:
    return _latents(own, settings) | {
        "linear_conv_kernel_dim": own["ssm.conv_kernel"], "linear_head_dim": own["kda.head_dim"],
        "linear_num_heads": settings["num_attention_heads"],
    }  # fmt: skip


def ling(model: Model, own: Settings, settings: Settings) -> Settings:
    """Decays without a floor and clamps of experts are refused; an array of zeros clamps nothing."""
    if own.get("kda.safe_gate", True) is not True:
        raise ValueError(f"{model.header.file}: kda.safe_gate is {own['kda.safe_gate']!r}; it must be true")
    for key in {"swiglu_clamp_exp", "swiglu_clamp_shexp"} & set(own):
        if any(model.numbers(key)):
            raise ValueError(f"{model.header.file}: {key} has other numbers than 0, which is not supported")
    return kimi(model, own, settings) | {
        "kda_lower_bound": own["kda.gate_lower_bound"], "short_conv_kernel_size": own["ssm.conv_kernel"],
    }  # fmt: skip


def delta(model: Model, own: Settings, settings: Settings) -> Settings:
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


def mamba(model: Model, own: Settings, settings: Settings) -> Settings:
    heads = own["ssm.time_step_rank"]
    return {
        "mamba_n_heads": heads, "mamba_d_head": own["ssm.inner_size"] // heads, "mamba_d_ssm": own["ssm.inner_size"],
        "mamba_n_groups": own["ssm.group_count"], "mamba_d_state": own["ssm.state_size"],
        "mamba_d_conv": own["ssm.conv_kernel"], "mamba_conv_bias": model.has("ssm_conv1d.bias"),
        "mamba_proj_bias": model.has("ssm_in.bias"), "mamba_rms_norm": model.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }  # fmt: skip


def granite_hybrid(model: Model, own: Settings, settings: Settings) -> Settings:
    """``rope.scaling.finetuned`` says here whether heads are rotated."""
    shared = model.tensors.get("blk.0.ffn_gate_shexp.weight") or model.tensors.get("blk.0.ffn_gate.weight")
    return mamba(model, own, settings) | {
        "mamba_expand": own["ssm.inner_size"] // settings["hidden_size"],
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": shared.shape[0] if shared else settings["intermediate_size"],
    }  # fmt: skip


def phi3(model: Model, own: Settings, settings: Settings) -> Settings:
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


def two_ropes(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers with windows have a rope without scaling."""
    if not settings.get("sliding_window"):
        return {}
    full = {"rope_type": "default", "rope_theta": settings["rope_theta"], **settings.get("rope_scaling", {})}
    windows = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", settings["rope_theta"])}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windows}, "rope_scaling": None}


def olmo(model: Model, own: Settings, settings: Settings) -> Settings:
    """OLMo 3 has windows."""
    ropes = two_ropes(model, own, settings)
    return ropes | {"architectures": ["Olmo3ForCausalLM"]} if ropes else {}


def gemma2(model: Model, own: Settings, settings: Settings) -> Settings:
    """The scale of scores follows from the size in 27b alone: 46 layers in Gemma 2, 62 in Gemma 3."""
    heads, is_27b = settings["num_attention_heads"], settings["num_hidden_layers"] in (46, 62)
    return {"query_pre_attn_scalar": settings["hidden_size"] // max(heads, 1) if is_27b else settings["head_dim"]}


def gemma3(model: Model, own: Settings, settings: Settings) -> Settings:
    found = gemma2(model, own, settings)
    if not settings.get("sliding_window"):
        found["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    return found


def gemma3n(model: Model, own: Settings, settings: Settings) -> Settings:
    """Shares of the gates that are cut are stored as quantiles of a normal distribution."""
    rows = (model.matrix(name).shape[0] for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    quantiles = model.numbers("activation_sparsity_scale")
    normal = NormalDist()
    return {
        **dict(zip(("vocab_size_per_layer_input", "laurel_rank"), rows, strict=True)),
        "activation_sparsity_pattern": [normal.cdf(own) for own in quantiles],
        "intermediate_size": model.by_layer("feed_forward_length"),
    }


def gemma4(model: Model, own: Settings, settings: Settings) -> Settings:
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


def granite(model: Model, own: Settings, settings: Settings) -> Settings:
    if own.get("rope.scaling.finetuned") is False:
        raise ValueError("rope.scaling.finetuned is False; heads that are not rotated are read of granitehybrid only")
    return {}


def granite_moe(model: Model, own: Settings, settings: Settings) -> Settings:
    found, has_shared = granite(model, own, settings), own.get("expert_shared_feed_forward_length")
    return found | ({"architectures": ["GraniteMoeSharedForCausalLM"]} if has_shared else {})


def nemotron_h(model: Model, own: Settings, settings: Settings) -> Settings:
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


def stablelm(model: Model, own: Settings, settings: Settings) -> Settings:
    if model.has("attn_q_norm.weight"):
        raise ValueError(f"{model.header.file}: norms of heads (StableLM 2 12B) are read of safetensors only")
    return {"use_qkv_bias": settings["attention_bias"]}


def hy3(model: Model, own: Settings, settings: Settings) -> Settings:
    dense = model.layers_with("ffn_gate_inp.weight").count(False)
    shared = own["expert_shared_feed_forward_length"] // own["expert_feed_forward_length"]
    return {"first_k_dense_replace": dense, "num_shared_experts": shared}


def ministral(model: Model, own: Settings, settings: Settings) -> Settings:
    """Without yarn a Mistral Small 3, which is a Llama."""
    if settings.get("rope_scaling", {}).get("rope_type") != "yarn":
        return {"architectures": ["LlamaForCausalLM"]}
    share = own.get("rope.scaling.yarn_log_multiplier", 0.0)
    more = {"llama_4_scaling_beta": own.get("attention.temperature_scale", 0.0)}
    return {"rope_scaling": {**settings["rope_scaling"], "mscale": share, "mscale_all_dim": share, **more}}


def _ropes(own: Settings, size: int) -> dict[str, Settings]:
    """Of layers with a window, and of the others, for heads of a size."""
    return {
        kind: {
            "rope_theta": own.get(f"rope.freq_base{suffix}", own["rope.freq_base"]),
            "partial_rotary_factor": own.get(f"rope.dimension_count{suffix}", size) / size,
        }
        for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa"))
    }


def laguna(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window have a rope of their own, and may have fewer heads. Gates may be of elements."""
    ropes, dense = _ropes(own, settings["head_dim"]), own.get("leading_dense_block_count", 0)
    ropes["full_attention"] |= settings.get("rope_scaling") or {}
    heads = model.by_layer("attention.head_count")
    return {
        "gating": "per-head" if model.matrix("blk.0.attn_gate.weight").shape[0] == heads[0] else "per-element",
        "num_attention_heads": heads[0], "num_attention_heads_per_layer": heads, "rope_scaling": None,
        "mlp_layer_types": model.dense_first(dense), "rope_parameters": ropes,
    }  # fmt: skip


def step(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window rotate half of a head; only so many divisors count there."""
    if own.get("moe_every_n_layers", 1) != 1:
        raise ValueError(f"moe_every_n_layers is {own['moe_every_n_layers']}; only 1 is supported")
    size = settings["head_dim"]
    found = laguna(model, {**own, "rope.dimension_count": size // 2, "rope.dimension_count_swa": size}, settings)
    rope, heads = found["rope_parameters"]["full_attention"], found.pop("num_attention_heads_per_layer")
    for name in {"short_factor", "long_factor"} & set(rope):
        rope[name] = rope[name][: size // 4]
    by_kind = dict(zip(settings["layer_types"], heads, strict=True))
    found["num_sliding_attention_heads"] = by_kind.get("sliding_attention")
    found["num_attention_heads"] = by_kind.get("full_attention", heads[0])
    limits = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
    return found | {name: list(model.numbers(key)) for name, key in limits.items() if key in own}


def muse(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers without a window are not rotated. Norms of heads have no weights; a scale of queries is in their place."""
    scales = set(model.floats("blk.0.attn_q_norm.weight"))
    if len(scales) != 1:
        raise ValueError("blk.0.attn_q_norm.weight has several numbers; it must be the scale of queries throughout")
    thetas = {"sliding_attention": own["rope.freq_base"]}
    return {
        "qk_scale_factor": scales.pop(), "layer_rope_theta": [thetas.get(kind, 0) for kind in settings["layer_types"]],
    }  # fmt: skip


def llama4(model: Model, own: Settings, settings: Settings) -> Settings:
    """Scout and Maverick, by their numbers of experts, have what files do not say."""
    has_chunks = own.get("attention.sliding_window") != 0
    kinds = {} if has_chunks else {"layer_types": ["full_attention"] * model.num_layers}
    return {**kinds, "use_qk_norm": own["expert_count"] != 128, "attn_temperature_tuning": has_chunks}


def mimo(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers with a window have other kv heads and another base of the rope."""
    heads, kinds = model.by_layer("attention.head_count_kv"), settings["layer_types"]
    of = dict(zip(kinds, heads, strict=True))
    if [of[kind] for kind in kinds] != heads:
        raise ValueError(f"attention.head_count_kv is {heads}; layers of a kind must have the same number")
    rotated = own["rope.dimension_count"]
    return {
        "num_key_value_heads": of.get("full_attention", heads[0]),
        "swa_num_key_value_heads": of.get("sliding_attention"),
        "mlp_layer_types": ["sparse" if has else "dense" for has in model.layers_with("ffn_gate_inp.weight")],
        "rope_parameters": _ropes({**own, "rope.dimension_count_swa": rotated}, settings["head_dim"]),
    }  # fmt: skip


def minimax_m3(model: Model, own: Settings, settings: Settings) -> Settings:
    """Layers with an indexer are sparse; shared experts are as large as that many others."""
    return {
        "layer_types": [
            "minimax_m3_sparse" if has else "full_attention" for has in model.layers_with("indexer.q_proj.weight")
        ],
        "mlp_layer_types": model.dense_first(own.get("leading_dense_block_count", 0)),
        "shared_intermediate_size": own["expert_shared_count"] * own["expert_feed_forward_length"],
    }


def granite_swa(model: Model, own: Settings, settings: Settings) -> Settings:
    """Some layers may have no rotary embedding."""
    found, theta = granite(model, own, settings), settings["rope_theta"]
    if "attention.rope_pattern" in own:
        found["layer_rope_theta"] = [theta if rotated else 0 for rotated in model.numbers("attention.rope_pattern")]
    return found | ({"architectures": ["GraniteMoeSWAForCausalLM"]} if own.get("expert_count") else {})


def cohere_moe(model: Model, own: Settings, settings: Settings) -> Settings:
    """llama.cpp averages shared experts and the others."""
    function = {1: "softmax", SIGMOID: "sigmoid"}[own.get("expert_gating_func", SIGMOID)]
    return {"expert_selection_fn": function, "shared_expert_combination_strategy": "average"}
