"""The metadata of GGUF files as settings of config.json, under the names of transformers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapstream.models.gguf_architectures import open_model
from snapstream.models.gguf_header import Array, Header, described
from snapstream.models.gguf_model import ROPE_FACTORS, Model, Settings

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Read below, or without an effect on a model that is read: sizes that follow from tensors, and notes of the converter.
_OTHERS = {
    "block_count", "nextn_predict_layers", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
    "ssm.inner_size", "vocab_size", "tensor_data_layout", "attention.causal", "expert_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_gating_func", "expert_weights_norm",
    "use_parallel_residual", "attention.sliding_window_pattern",
}  # fmt: skip
_NEEDED = (
    "block_count", "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
ROPE_TABLES = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")


def settings_of(path: Path) -> Settings:
    """The settings of a file as config.json names them. ValueError, with path and key, for those not understood."""
    model = open_model(path)
    metadata, prefix = model.header.metadata, f"{model.header.metadata['general.architecture']}."
    architecture, own = model.architecture, model.own
    fields = {**_FIELDS, **architecture.fields}
    unknown = [name for name, value in own.items() if name not in fields and name not in _OTHERS and value]
    if unknown:
        raise ValueError(f"{path}: {prefix}{unknown[0]} is {described(own[unknown[0]])}, which is not supported")
    needed = (*_NEEDED, "expert_used_count" if own.get("expert_count") else "feed_forward_length")
    missing = [name for name in needed if name not in own and name.replace("rms_", "") not in own]
    if missing:
        raise ValueError(f"{path} lacks {prefix}{missing[0]}")
    if own.get("attention.causal") is False:
        raise ValueError(f"{path}: {prefix}attention.causal is False; only causal attention is supported")
    settings: Settings = {**architecture.settings, "num_hidden_layers": model.num_layers}
    settings |= {name: _plain(model, key) for key, name in fields.items() if key in own and name}
    embed = model.matrix("token_embd.weight")
    has_bias = model.has("attn_q.bias") or model.has("attn_qkv.bias")
    settings |= {
        "architectures": [architecture.name],
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": has_bias,
        "attention_out_bias": model.has("attn_output.bias"),
        "mlp_bias": model.has("ffn_up.bias"),
        "use_bias": has_bias,
        "use_qk_norm": model.has("attn_q_norm.weight"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(model.header),
    }
    heads = settings.get("num_attention_heads")
    settings.setdefault("num_key_value_heads", heads)
    if "head_dim" not in settings and isinstance(heads, int) and heads > 0:
        settings["head_dim"] = int(settings["hidden_size"]) // heads
    for tensor in model.tensors.values():
        if tensor.name.endswith("_exps.weight") and tensor.shape[0] != (count := own.get("expert_count")):
            raise ValueError(
                f"{path}: {prefix}expert_count is {described(count)}; {tensor.name} has {tensor.shape[0]:,}"
            )
    if own.get("expert_weights_norm") is False and settings.get("norm_topk_prob") is not False:
        raise ValueError(f"{path}: {prefix}expert_weights_norm is False, which is not supported")
    router = own.get("expert_gating_func") or architecture.router
    if architecture.router not in (router, None):
        raise ValueError(f"{path}: {prefix}expert_gating_func is {router}; it must be {architecture.router}")
    _add_rope(model, own, settings)
    _add_layer_types(model, own, settings)
    values = own.get("attention.value_length", settings.get("head_dim"))
    has_one_size = fields.get("attention.key_length") and "attention.value_length" not in fields
    if "attention.key_length" in own and has_one_size and values != settings.get("head_dim"):
        raise ValueError(
            f"{path}: {prefix}attention.value_length is {described(values)}; keys have {settings['head_dim']}"
        )
    if architecture.complete is not None:
        try:
            settings |= architecture.complete(model, own, settings)
        except (KeyError, TypeError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"{path}: settings of {prefix[:-1]} are missing or wrong: {error}") from None
    return settings


def _plain(model: Model, key: str) -> Any:
    """A setting; an array of equal numbers, one for each layer, is that number. Layers without kv heads have states."""
    header, name = model.header, f"{model.header.metadata['general.architecture']}.{key}"
    value = header.metadata[name]
    if not isinstance(value, Array):
        return value
    found = set(header.numbers(name))
    if key == "attention.head_count_kv" and model.architecture.layer_types is not None:
        found.discard(0)
    if len(found) != 1:
        raise ValueError(f"{header.file}: {name} differs from layer to layer, which is not supported")
    return found.pop()


def _add_rope(model: Model, own: Mapping[str, Any], settings: Settings) -> None:
    """Scaling, and how many numbers of a head are rotated. A tensor of divisors is longrope of equal factors."""
    head_dim = settings.get("head_dim")
    rotated = own.get("rope.dimension_count") or head_dim
    if isinstance(head_dim, int) and isinstance(rotated, int) and head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    if kind == "none" and factor not in (None, 0, 1):
        kind = "linear"
    context, file = settings["max_position_embeddings"], model.header.file
    if ROPE_FACTORS in model.tensors:
        if kind != "none":
            raise ValueError(f"{file}: {ROPE_FACTORS} beside rope.scaling.type {kind!r} is not supported")
        factors = model.floats(ROPE_FACTORS)
        settings["rope_scaling"] = {
            "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": factors,
            "long_factor": factors, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": factor, **model.architecture.rope}
        for key, name in _SCALING.items():
            if f"rope.scaling.{key}" in own:
                scaling[name] = own[f"rope.scaling.{key}"]
        share = own.get("rope.scaling.attn_factor", 1.0)
        if share != 1.0:
            raise ValueError(f"{file}: rope.scaling.attn_factor is {described(share)}; only 1 is supported")
        settings["rope_scaling"] = scaling


_SCALING = {
    "original_context_length": "original_max_position_embeddings", "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def _add_layer_types(model: Model, own: Mapping[str, Any], settings: Settings) -> None:
    """Which layers have windows, and which have a state: those without kv heads."""
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, Array):
        settings["layer_types"] = model.kinds("attention.sliding_window_pattern", "sliding_attention", "full_attention")
    elif pattern is not None:
        settings["sliding_window_pattern"] = pattern
    if model.architecture.layer_types is not None:
        state, attention = model.architecture.layer_types
        is_list = isinstance(own.get("attention.head_count_kv"), Array)
        settings["layer_types"] = (
            model.kinds("attention.head_count_kv", attention, state) if is_list else [attention] * model.num_layers
        )


# Tokens that end an answer, by their text, where the metadata does not name them; those of gpt-oss end a message. After
# a tool call Gemma 4 begins the tool's answer, with a token that files show to parsers.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
         "<turn|>")  # fmt: skip
_SHOWN_END = "<|tool_response>"
_CONTROL, _USER_DEFINED = 3, 4


def end_tokens(header: Header) -> list[int]:
    """End tokens: eos, eot and eom of the metadata, and control tokens that chat templates of these models end with."""
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = [token for token in named if isinstance(token, int)]
    if "tokenizer.ggml.tokens" in metadata and "tokenizer.ggml.token_type" in metadata:
        texts, kinds = header.texts("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
        control = {
            text: at for at, (text, kind) in enumerate(zip(texts, kinds, strict=False))
            if kind == _CONTROL or (kind == _USER_DEFINED and text == _SHOWN_END)
        }  # fmt: skip
        found += [control[text] for text in (*_ENDS, _SHOWN_END) if text in control and "<|return|>" not in control]
    return list(dict.fromkeys(found))
