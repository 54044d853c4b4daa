"""Llama, and families that differ from it in biases or in the order of rotated pairs. No torch."""

from __future__ import annotations

from snapstream.models.config_json import Settings, flag
from snapstream.models.family import Family, Recipe, attention_biases


def _llama(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias")}


def _seed_oss(settings: Settings) -> Recipe:
    """The bias of the output projection has a field of its own."""
    return {
        "qkv_bias": flag(settings, "attention_bias"),
        "o_bias": flag(settings, "attention_out_bias"),
        "mlp_bias": flag(settings, "mlp_bias"),
    }


def _ernie(settings: Settings) -> Recipe:
    has_bias = flag(settings, "use_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": has_bias}


LLAMA = Family(defaults={"bos_token_id": 1, "eos_token_id": 2}, recipe=_llama)
SEED_OSS = Family(
    defaults={
        "attention_bias": True, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 8,
    },
    recipe=_seed_oss,
)  # fmt: skip
ERNIE4_5 = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    recipe=_ernie,
    is_interleaved=True,
)  # fmt: skip
