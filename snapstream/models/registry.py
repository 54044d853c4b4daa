"""From config.json to a ``ModelConfig``; what cannot be run faithfully is refused, with every reason.

Neither torch nor transformers is imported, so ``snapstream plan`` answers at once. Both spellings of the rope
settings are read: ``rope_theta`` beside ``rope_scaling``, and the ``rope_parameters`` of transformers 5. Rope
is parsed in ``rope_config.py``; a new architecture is a row of ``FAMILIES`` (``families.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapstream.config import ModelConfig
from snapstream.models.families import FAMILIES, Family
from snapstream.models.rope_config import parse_rope, stretched_window

EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)


def read_model_config(path: str | Path) -> ModelConfig:
    """Read a checkpoint folder or a config.json, and the end tokens of a generation_config.json beside it."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; expected a checkpoint folder or a config.json")
    settings = _read_json(file)
    config = model_config_from_dict(settings)
    beside = file.parent / "generation_config.json"
    if not beside.is_file():
        return config
    extra = _token_ids(_read_json(beside).get("eos_token_id"))
    merged = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return model_config_from_dict({**settings, "eos_token_id": list(merged)})


def model_config_from_dict(settings: Mapping[str, Any]) -> ModelConfig:
    """Config of a parsed config.json. Raises ValueError with every reason why the model cannot be run."""
    architecture = _architecture(settings)
    refusals = find_refusals(settings)
    if refusals:
        raise ValueError(f"cannot run {architecture}: " + "; ".join(refusals))
    family = FAMILIES.get(architecture)
    hidden, heads = _integer(settings, "hidden_size"), _integer(settings, "num_attention_heads")
    window = _integer(settings, "max_position_embeddings")
    rope = parse_rope(settings, window)
    has_attention_bias = family.reads_attention_bias and bool(settings.get("attention_bias"))
    head_dim = settings.get("head_dim") or family.head_dim
    return family.config_class(
        **family.read_more(settings),
        architecture=architecture,
        vocab_size=_integer(settings, "vocab_size"),
        hidden_size=hidden,
        num_layers=_integer(settings, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(settings, "num_key_value_heads", heads),
        head_dim=_integer({"head_dim": head_dim}, "head_dim") if head_dim else _split(hidden, heads),
        intermediate_size=_integer(settings, "intermediate_size"),
        max_position=stretched_window(rope, window),
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(settings.get("mlp_bias")),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(_token_ids(settings.get("bos_token_id"))), None),
        eos_token_ids=_token_ids(settings.get("eos_token_id")),
    )


def find_refusals(settings: Mapping[str, Any]) -> list[str]:
    """Every reason why this model would not be computed faithfully; empty when it can run."""
    architecture = _architecture(settings)
    reasons = []
    if architecture not in FAMILIES:
        reasons.append(f"unknown architecture (known: {', '.join(FAMILIES.names)})")
    if settings.get("is_encoder_decoder"):
        reasons.append("encoder-decoder models have cross attention, which rows do not hold")
    if settings.get("model_type") == "gpt_oss" or "GptOss" in architecture:
        reasons.append("learned attention sinks (gpt-oss) are not supported")
    reasons += _layer_type_refusals(settings)
    unknown = Family(has_window_switch="use_sliding_window" in settings)
    window = _sliding_window(settings, FAMILIES.get(architecture) if architecture in FAMILIES else unknown)
    if window is not None:
        reasons.append(f"sliding_window is in use ({window}); only full attention layers are supported")
    experts = [name for name in EXPERT_FIELDS if settings.get(name)]
    if experts:
        reasons.append(f"mixture-of-experts layers are not supported ({experts[0]} is {settings[experts[0]]})")
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method", "unnamed")
        reasons.append(f"quantization_config is present ({method}); weights must be fp32, bf16 or fp16")
    activation = settings.get("hidden_act", "silu")
    if activation != "silu":
        reasons.append(f"hidden_act is {activation!r}; only 'silu' is supported")
    return reasons


def _layer_type_refusals(settings: Mapping[str, Any]) -> list[str]:
    kinds = dict.fromkeys(settings.get("layer_types") or ())
    reasons = []
    if "sliding_attention" in kinds:
        reasons.append("layer_types has 'sliding_attention'; only full attention layers are supported")
    others = [str(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if others:
        reasons.append(
            f"layer_types has {', '.join(map(repr, others))}; "
            "state-space, linear and other layers without a key-value cache per token are not supported"
        )
    return reasons


def _sliding_window(settings: Mapping[str, Any], family: Family) -> int | None:
    """The window, if any layer would use it. Qwen models name one and switch it on separately."""
    if family.has_window_switch and not settings.get("use_sliding_window"):
        return None
    window: int | None = settings.get("sliding_window", family.sliding_window)
    return window


def _architecture(settings: Mapping[str, Any]) -> str:
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(
            f"config.json must name one architecture, found {names!r} (known: {', '.join(FAMILIES.names)})"
        )
    return str(names[0])


def _split(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})")
    return hidden // heads


def _integer(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}; it must be a whole number")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; expected an object of settings")
    return content
