"""Mistral, Ministral and Mixtral. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from snapstream.config.model import MoEConfig
from snapstream.models.config_json import Settings, whole_number
from snapstream.models.family import Family, Recipe, windows_by_type, windows_of_all_layers
from snapstream.models.tensors import ExpertNames, decoder_tensors

_DEFAULTS: Settings = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8}
_MIXTRAL_NAMES = ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")


def _mixtral(settings: Settings) -> Recipe:
    """Softmax over all experts; the weights of the chosen ones add up to 1."""
    moe = MoEConfig(
        num_experts=whole_number(settings, "num_local_experts"),
        top_k=whole_number(settings, "num_experts_per_tok"),
        inner=whole_number(settings, "intermediate_size"),
        normalise=True,
    )
    return {"moe": moe, **windows_of_all_layers(settings)}


MISTRAL = Family(defaults={**_DEFAULTS, "sliding_window": 4096}, recipe=windows_of_all_layers, has_windows=True)


def _text_part_refusals(settings: Settings) -> list[str]:
    kind = settings.get("model_type")
    if not isinstance(settings.get("text_config"), dict) or kind == "mistral":
        return []
    return [f"text_config has model_type {kind!r}; only 'mistral' (Mistral Small 3.1 and 3.2) is supported"]


# The text part of Mistral Small 3.1 and 3.2.
MISTRAL3_TEXT_PART = replace(MISTRAL, refusals=_text_part_refusals, is_text_part=True)
MINISTRAL = Family(
    defaults={**_DEFAULTS, "sliding_window": 4096},
    recipe=lambda settings: windows_by_type(settings, lambda layer: True),
    has_windows=True,
)
MIXTRAL = Family(
    defaults={
        **_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    },
    recipe=_mixtral,
    has_experts=True,
    has_windows=True,
    tensors=partial(decoder_tensors, names=_MIXTRAL_NAMES),
)  # fmt: skip
