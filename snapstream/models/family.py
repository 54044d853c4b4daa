"""What a model family is, and config readers that several families share. No torch.

A family is a file (``llama.py``, ``deepseek.py``, ...) with a ``Family`` for each of its architectures: the defaults of
its config.json, and its layer as a ``Recipe`` of existing parts. Tensors (``tensors.py``), layers (``layers.py``,
``latent.py``), the KV cache and the looped executors follow from the recipe. Only a family with other math names
tensors and a layer class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from snapstream.config import DType, KVDType, ModelConfig
from snapstream.config.model import LayerClamps, MoEConfig, SwiGLUClamp
from snapstream.config.recurrent import Recurrent
from snapstream.config.values import MAX_DIM
from snapstream.kv.spec import KVSpec
from snapstream.models.config_json import Settings, flag, number, parse_rope, whole_number
from snapstream.models.tensors import TensorSpecs, decoder_tensors

LINEAR, ATTENTION, WINDOW = "linear_attention", "full_attention", "sliding_attention"  # of layer_types


# The parts of a layer, and sizes that a family's config.json names differently: fields of ``ModelConfig``. A layer is
# attention with RoPE, and a gated MLP or experts, with an RMSNorm before or after each or both, or with ``mlp_layers``
# only one of these parts; absent fields have the defaults of ``ModelConfig``.
Recipe = dict[str, Any]


def attention_biases(settings: Settings) -> Recipe:
    """The usual meaning of attention_bias: biases of q, k, v and o."""
    has_bias = flag(settings, "attention_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def windows_of_all_layers(settings: Settings) -> Recipe:
    """sliding_window in every layer, unless absent or disabled."""
    window = sliding_window(settings)
    return {} if window is None else {"windows": (window,) * num_layers(settings)}


def windows_by_type(settings: Settings, is_sliding: Callable[[int], bool]) -> Recipe:
    """sliding_window in the layers that layer_types names; without layer_types, in those with ``is_sliding``."""
    window, types = sliding_window(settings), settings.get("layer_types")
    if window is None:
        return {}
    layers = range(num_layers(settings))
    has = [is_sliding(layer) if types is None else types[layer] == WINDOW for layer in layers]
    return {"windows": tuple(window if is_windowed else None for is_windowed in has)} if any(has) else {}


def ropes_by_kind(
    settings: Settings, windows: Recipe, full: Settings, window: Settings, *, is_partial: bool = False
) -> Recipe:
    """``windows`` and the rope of layers with sliding windows and of the others, in either spelling of the settings.

    ``full`` and ``window`` are what the settings of each kind are unless rope_parameters says otherwise.
    """
    by_kind = settings.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or any(not isinstance(own or {}, dict) for own in by_kind.values()):
        raise ValueError(f"rope_parameters is {by_kind!r}; it must have the rope settings of each kind of layers")
    max_position = whole_number(settings, "max_position_embeddings")
    own, others = (
        parse_rope({**default, "rope_parameters": by_kind.get(kind)}, max_position, is_partial=is_partial)
        for kind, default in ((WINDOW, window), (ATTENTION, full))
    )  # fmt: skip
    return {**windows, "rope": others, "window_rope": own if windows else None}


def windows_alone_rotated(settings: Settings, is_sliding: Callable[[int], bool]) -> Recipe:
    """``windows_by_type``; layers without a window have no rotary embedding."""
    windows = windows_by_type(settings, is_sliding)
    has = windows.get("windows", (None,) * num_layers(settings))
    return {**windows, "rotated_layers": tuple(window is not None for window in has)}


def layers_of(settings: Settings, *kinds: str) -> tuple[int, ...]:
    """The layers that layer_types says are of one of these kinds."""
    return tuple(index for index, kind in enumerate(settings["layer_types"]) if kind in kinds)


def with_recurrence(
    settings: Settings, recipe: Recipe, read: Callable[[Settings], Recurrent], kind: str = LINEAR
) -> Recipe:
    """``recipe``, with what ``read`` finds in the layers of a kind, if there are any."""
    layers = layers_of(settings, kind)
    return {**recipe, "recurrent": read(settings), "recurrent_layers": layers} if layers else recipe


def refuse_absent_window(settings: Settings) -> list[str]:
    """Refusals of families that give layers with and without sliding windows other rope settings."""
    return [] if settings.get("sliding_window") is not None else ["sliding_window is null; it must be a whole number"]


def cap_of(settings: Settings, name: str) -> float | None:
    return None if settings.get(name) is None else number(settings, name, above=0.0)


def other_values(settings: Settings, known: Settings) -> list[str]:
    """Refusals of fields that must have one value, or be absent: others would change the model."""
    return [
        f"{name} is {settings[name]!r}; of this architecture it must be {value!r}"
        for name, value in known.items()
        if settings.get(name, value) != value
    ]


def unbuilt(settings: Settings, *names: str) -> list[str]:
    """Refusals of parts that only config classes know."""
    return [
        f"{name} is true; no published model of this architecture has it, so it is not built"
        for name in names
        if flag(settings, name)
    ]


def below_one(settings: Settings, *names: str) -> list[str]:
    """Refusals of numbers of layers or tokens, such as the length of a pattern."""
    found = {name: whole_number(settings, name) for name in names}
    return [f"{name} is {value}; it must be >= 1" for name, value in found.items() if value < 1]


def refuse_clipping(settings: Settings) -> list[str]:
    """Refusals of families whose config classes have clip_qkv."""
    limit = settings.get("clip_qkv")
    return [] if limit is None else [f"clip_qkv is {limit!r}; clipped projections are not supported"]


def sliding_window(settings: Settings) -> int | None:
    """Window in tokens; None if absent or disabled by use_sliding_window."""
    if settings.get("sliding_window") is None or not flag(settings, "use_sliding_window", default=True):
        return None
    window = whole_number(settings, "sliding_window")
    if window < 1:
        raise ValueError(f"sliding_window is {window}; it must be >= 1")
    return window


def even_head_dim(settings: Settings) -> int:
    """Of heads that together have hidden_size numbers."""
    return whole_number(settings, "hidden_size") // max(whole_number(settings, "num_attention_heads"), 1)


def num_layers(settings: Settings) -> int:
    """Of a config.json; a bounded number, for lists of layers."""
    return min(whole_number(settings, "num_hidden_layers"), MAX_DIM + 1)  # more are refused later


def filled(settings: Settings, **own: Any) -> dict[str, Any]:
    """``settings`` with these fields where they are absent or null."""
    return {**settings, **{name: value for name, value in own.items() if settings.get(name) is None}}


def with_default_rope(settings: Settings, **rope: Any) -> Settings:
    """``settings`` with the rope that a config class takes where there is none, whatever rope_theta says."""
    has_rope = settings.get("rope_parameters") is not None or settings.get("rope_scaling") is not None
    return settings if has_rope else {**settings, "rope_parameters": rope}


def with_changed_rope(settings: Settings, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Settings:
    """``settings`` whose rope settings, in either spelling, are what ``change`` makes of them."""
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(name)
    return {**settings, name: change(rope)} if isinstance(rope, dict) else settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: how its config.json is read, what is refused, and what it computes."""

    # Values of absent config.json keys, as in the architecture's config class in transformers. A null key gets no
    # default. Absent sizes without a default are refused.
    defaults: Settings = field(default_factory=dict)
    rewrite: Callable[[Settings], Settings] = lambda settings: settings  # of completed settings, to the usual fields
    recipe: Callable[[Settings], Recipe] = lambda settings: {}
    refusals: Callable[[Settings], list[str]] = lambda settings: []  # why a config.json cannot be run faithfully
    has_windows: bool = False  # the recipe supports sliding windows
    has_experts: bool = False  # the recipe supports experts
    may_fuse_experts: bool = False  # checkpoints have a layer's experts in one tensor, or each in its own
    may_lack_corrections: bool = False  # published checkpoints choose experts by plain scores
    aliases: Mapping[str, str] = field(default_factory=dict)  # parts of tensor names in some files: ours
    skipped: tuple[str, ...] = ()  # of tensors that are not loaded: prefixes, or with a dot first parts of names
    other_layer_types: tuple[str, ...] = ()  # of layer_types, that the recipe supports beside attention
    is_partly_rotated: bool = False  # partial_rotary_factor applies
    is_text_part: bool = False  # settings are in text_config; checkpoints also have towers for images
    text_parts: Mapping[str, Family] = field(default_factory=dict)  # the only ones, by model_type of text_config
    has_rope_by_kind: bool = False  # the recipe reads the rope settings, which differ by kind of layers
    has_own_activation: bool = False  # the recipe reads or refuses it; hidden_act does not count
    has_predictions: bool = False  # checkpoints may have prediction layers (MTP) that are as its last layer
    is_interleaved: bool = False  # checkpoints rotate the pairs (0, 1), (2, 3) ... of a head, not its halves
    tensors: Callable[[ModelConfig], TensorSpecs] = decoder_tensors
    # A models.decoder.Layer, or "module:class" of one; None: the layer of the recipe.
    layer: str | type[Any] | None = None
    kv_spec: Callable[[ModelConfig, DType, KVDType], KVSpec] = KVSpec.of

    def complete(self, settings: Settings) -> Settings:
        """A config.json with defaults for absent keys; of a text part its fields over those around it, but embeddings
        that either ties are tied.
        """
        if self.is_text_part and (inner := settings.get("text_config")) is not None:
            if not isinstance(inner, dict):
                raise ValueError(f"text_config is {inner!r}; it must be an object of settings")
            is_tied = settings.get("tie_word_embeddings") is True
            settings = {**settings, **inner, **({"tie_word_embeddings": True} if is_tied else {})}
        own = self.part_of(settings)
        defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, **own.defaults}
        if settings.get("rope_parameters") is not None:  # the other spelling of one dict
            defaults.pop("rope_scaling", None)
        return own.rewrite({**defaults, **settings})

    def part_of(self, settings: Settings) -> Family:
        """The one whose defaults, recipe and refusals count, by its ``text_parts``."""
        return self.text_parts.get(str(settings.get("model_type")), self)


# Sigmoid scores with a correction of the choice; the weights of the chosen experts add up to 1.
CORRECTED: dict[str, Any] = {"scoring": "sigmoid", "normalise": True, "has_bias": True}


_READ: dict[str, Callable[[Settings, str], Any]] = {
    "normalise": flag, "has_bias": flag, "scale": partial(number, above=0.0),
}  # fmt: skip


def read_experts(settings: Settings, num_experts: str = "num_experts", **fields: Any) -> MoEConfig:
    """A mixture of these fields of ``MoEConfig``. Texts in the place of numbers and flags name them in config.json."""
    found = {"num_experts": num_experts, "top_k": "num_experts_per_tok", "inner": "moe_intermediate_size", **fields}
    for name, value in found.items():
        if isinstance(value, str) and name not in ("scoring", "group_score"):
            found[name] = _READ.get(name, whole_number)(settings, value)
    return MoEConfig(**found)


def read_sigmoid_moe(settings: Settings) -> MoEConfig:
    """DeepSeek-V3's routing: sigmoid scores, a correction of the choice, groups, shared experts."""
    return read_experts(
        settings, "n_routed_experts", num_shared="n_shared_experts", first_dense=num_dense(settings),
        scoring="sigmoid", num_groups="n_group", top_groups="topk_group", group_score="top2",
        normalise="norm_topk_prob", scale="routed_scaling_factor", has_bias=True,
    )  # fmt: skip


def oai_clamps(settings: Settings, *, has_mlps: bool = False) -> LayerClamps:
    """The clamped SwiGLU of gpt-oss in the experts of every layer, with ``has_mlps`` in MLPs and shared experts too."""
    limit, count = number(settings, "swiglu_limit", above=0.0), num_layers(settings)
    clamp = SwiGLUClamp(limit, limit, number(settings, "swiglu_alpha", above=0.0), 1.0)
    return LayerClamps((clamp if has_mlps else None,) * count, (clamp,) * count)


def num_mtp_layers(settings: Settings) -> int:
    """Multi-token prediction layers: stored in checkpoints after the last layer, not used here."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if settings.get(name) is not None:
            return whole_number(settings, name)
    return 1


def num_dense(settings: Settings) -> int:
    """How many first layers have no experts, by mlp_layer_types or first_k_dense_replace."""
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return whole_number(settings, "first_k_dense_replace")
    return int(kinds.index("sparse")) if "sparse" in kinds else len(kinds)


def layer_kind_refusals(settings: Settings) -> list[str]:
    """Why mlp_layer_types is not supported: layers without experts must come first."""
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or len(kinds) != whole_number(settings, "num_hidden_layers"):
        return [f"mlp_layer_types is {kinds!r}; it must name the kind of every layer"]
    first = num_dense(settings)
    if kinds == ["dense"] * first + ["sparse"] * (len(kinds) - first):
        return []
    return [f"mlp_layer_types is {kinds!r}; only dense layers first, then sparse ones, are supported"]
