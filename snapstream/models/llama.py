"""Llama. No torch."""

from __future__ import annotations

from snapstream.models.config_json import Settings, flag
from snapstream.models.family import Family, Recipe, attention_biases


def _recipe(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias")}


LLAMA = Family(defaults={"bos_token_id": 1, "eos_token_id": 2}, recipe=_recipe)
