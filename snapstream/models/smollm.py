"""SmolLM3: Llama with layers whose heads are not rotated. No torch."""

from __future__ import annotations

from snapstream.config.model import MAX_DIM
from snapstream.models.config_json import Settings, flag, whole_number
from snapstream.models.family import Family, Recipe, attention_biases, windows_by_type


def _recipe(settings: Settings) -> Recipe:
    recipe: Recipe = {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias")}
    rotated = _rotated_layers(settings)
    recipe.update(windows_by_type(settings, lambda layer: not rotated[layer]))
    return recipe if all(rotated) else {**recipe, "rotated_layers": rotated}


def _rotated_layers(settings: Settings) -> tuple[bool, ...]:
    """``no_rope_layers`` has, in spite of its name, a 1 for each layer with rotary embedding."""
    num_layers, given = whole_number(settings, "num_hidden_layers"), settings.get("no_rope_layers")
    if given is not None:
        return tuple(layer == 1 for layer in given[:num_layers])
    interval = whole_number(settings, "no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(min(num_layers, MAX_DIM + 1)))


def _refusals(settings: Settings) -> list[str]:
    num_layers, given = whole_number(settings, "num_hidden_layers"), settings.get("no_rope_layers")
    if given is None:
        interval = whole_number(settings, "no_rope_layer_interval")
        return [] if interval >= 1 else [f"no_rope_layer_interval is {interval}; it must be >= 1"]
    if not isinstance(given, list) or len(given) < num_layers or any(layer not in (0, 1) for layer in given):
        return [f"no_rope_layers is {given!r}; it must be a list with a 0 or a 1 for each of the {num_layers} layers"]
    return []


SMOLLM3 = Family(
    defaults={
        "bos_token_id": 128000, "eos_token_id": 128001, "num_key_value_heads": 4, "rope_theta": 2e6,
        "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4,
    },
    recipe=_recipe,
    refusals=_refusals,
    has_windows=True,
)  # fmt: skip
