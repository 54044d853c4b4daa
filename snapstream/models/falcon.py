"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in each layer, multipliers around both. No torch."""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import LayerNorms, Multipliers
from snapstream.config.recurrent import Mamba2
from snapstream.models.config_json import Settings, flag, number
from snapstream.models.family import Family, Recipe, num_layers, unbuilt
from snapstream.models.granite import MAMBA_DEFAULTS, bamba_tensors, mamba2, step_refusals
from snapstream.models.tensors import TensorSpecs

HYBRID = "hybrid"


def _numbers(settings: Settings, name: str, count: int) -> tuple[float, ...]:
    """A list of that many numbers over 0; ones where it is null."""
    given = settings.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise ValueError(f"{name} is {given!r}; it must be a list of {count} numbers")
    return tuple(number({name: one}, name, above=0.0) for one in given)


def _mamba2(settings: Settings) -> Mamba2:
    scale = number(settings, "ssm_in_multiplier", above=0.0)
    return replace(
        mamba2(settings), has_norm=flag(settings, "mamba_rms_norm"),
        in_multipliers=tuple(scale * own for own in _numbers(settings, "ssm_multipliers", 5)),
    )  # fmt: skip


def _recipe(settings: Settings) -> Recipe:
    """Queries, keys and values are times the multiplier of the input; scores have two of these and that of keys."""
    of = {name: number(settings, f"{name}_multiplier", above=0.0)
          for name in ("embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_out")}  # fmt: skip
    gate, down = _numbers(settings, "mlp_multipliers", 2)
    return {
        "norms": LayerNorms(before_mlp="pre_ff_layernorm"), "recurrent": _mamba2(settings),
        "recurrent_layers": tuple(range(num_layers(settings))), "has_parallel_recurrence": True,
        "multipliers": Multipliers(
            embedding=of["embedding"], logits=of["lm_head"], attention=of["attention_in"] ** 2 * of["key"],
            attention_out=of["attention_in"] * of["attention_out"], recurrent_out=of["ssm_out"], mlp_gate=gate,
            mlp_out=down,
        ),
    }  # fmt: skip


def _refusals(settings: Settings) -> list[str]:
    reasons = unbuilt(settings, "attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
    reasons += step_refusals(settings)
    if flag(settings, "mamba_rms_norm") and flag(settings, "mamba_norm_before_gate"):
        reasons.append("mamba_norm_before_gate is true; only norms behind the gate are supported")
    kinds = settings.get("layer_types")
    if kinds is not None and set(kinds) != {HYBRID}:
        reasons.append(f"layer_types is {kinds!r}; all layers must be {HYBRID!r}")
    return reasons


def _tensors(config: ModelConfig) -> TensorSpecs:
    """The multiplier of gates is part of the norm before the MLP."""
    specs = bamba_tensors(config)
    post = replace(specs["post_norm"], factor=config.multipliers.mlp_gate, dtype="float32")
    return {**specs, "post_norm": post}


FALCON_H1 = Family(
    defaults={
        **MAMBA_DEFAULTS, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "bos_token_id": 1,
        "embedding_multiplier": 1.0, "eos_token_id": 2, "key_multiplier": 1.0, "lm_head_multiplier": 1.0,
        "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
    },
    recipe=_recipe,
    refusals=_refusals,
    tensors=_tensors,
    other_layer_types=(HYBRID,),
)  # fmt: skip

FAMILIES = {
    "FalconH1ForCausalLM": FALCON_H1,
}
