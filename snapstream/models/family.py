"""What a model family is, and config readers that several families share. No torch.

A family is a file (``llama.py``, ``deepseek.py``, ...) with a ``Family`` for each of its architectures: the defaults of
its config.json, and its layer as a ``Recipe`` of existing parts. Tensors (``tensors.py``), layers (``layers.py``,
``latent.py``), the KV cache and the looped executors follow from the recipe. Only a family with other math names
tensors and a layer class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from snapstream.config import DType, KVDType, ModelConfig
from snapstream.config.model import MAX_DIM, LatentConfig, MoEConfig, Multipliers
from snapstream.kv.spec import KVSpec
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.tensors import TensorSpecs, decoder_tensors


class Recipe(TypedDict, total=False):
    """The parts of a layer, and sizes that a family's config.json names differently: fields of ``ModelConfig``.

    Every layer is pre-norm RMSNorm, attention with RoPE, and a SwiGLU or experts; absent fields have the defaults of
    ``ModelConfig``.
    """

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each head of q and k
    rotated_layers: tuple[bool, ...]  # the layers whose heads are rotated
    windows: tuple[int | None, ...]  # by layer, sliding window in tokens
    multipliers: Multipliers
    is_fused: bool  # checkpoints have q | k | v in one tensor, and gate | up
    latent: LatentConfig  # multi-head latent attention
    has_sinks: bool  # a learned attention sink per query head
    moe: MoEConfig | None  # experts instead of the MLP
    num_kv_heads: int
    head_dim: int
    num_mtp_layers: int


def attention_biases(settings: Settings) -> Recipe:
    """The usual meaning of attention_bias: biases of q, k, v and o."""
    has_bias = flag(settings, "attention_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def windows_of_all_layers(settings: Settings) -> Recipe:
    """sliding_window in every layer, unless absent or disabled."""
    window = sliding_window(settings)
    return {} if window is None else {"windows": (window,) * _num_layers(settings)}


def windows_by_type(settings: Settings, is_sliding: Callable[[int], bool]) -> Recipe:
    """sliding_window in the layers that layer_types names; without layer_types, in those with ``is_sliding``."""
    window, types = sliding_window(settings), settings.get("layer_types")
    if window is None:
        return {}
    layers = range(_num_layers(settings))
    has = [is_sliding(layer) if types is None else types[layer] == "sliding_attention" for layer in layers]
    return {"windows": tuple(window if is_windowed else None for is_windowed in has)} if any(has) else {}


def sliding_window(settings: Settings) -> int | None:
    """Window in tokens; None if absent or disabled by use_sliding_window."""
    if settings.get("sliding_window") is None or not flag(settings, "use_sliding_window", default=True):
        return None
    window = whole_number(settings, "sliding_window")
    if window < 1:
        raise ValueError(f"sliding_window is {window}; it must be >= 1")
    return window


def _num_layers(settings: Settings) -> int:
    return min(whole_number(settings, "num_hidden_layers"), MAX_DIM + 1)  # more are refused later


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
    is_partly_rotated: bool = False  # partial_rotary_factor applies
    is_interleaved: bool = False  # checkpoints rotate the pairs (0, 1), (2, 3) ... of a head, not its halves
    tensors: Callable[[ModelConfig], TensorSpecs] = decoder_tensors
    # A models.decoder.Layer, or "module:class" of one; None: the layer of the recipe.
    layer: str | type[Any] | None = None
    kv_spec: Callable[[ModelConfig, DType, KVDType], KVSpec] = KVSpec.of

    def complete(self, settings: Settings) -> Settings:
        """A config.json with defaults for absent keys."""
        return self.rewrite({"rms_norm_eps": 1e-6, "rope_theta": 10000.0, **self.defaults, **settings})


def read_sigmoid_moe(settings: Settings) -> MoEConfig:
    """DeepSeek-V3's routing: sigmoid scores, a correction of the choice, groups, shared experts."""
    return MoEConfig(
        num_experts=whole_number(settings, "n_routed_experts"),
        top_k=whole_number(settings, "num_experts_per_tok"),
        inner=whole_number(settings, "moe_intermediate_size"),
        num_shared=whole_number(settings, "n_shared_experts"),
        first_dense=whole_number(settings, "first_k_dense_replace"),
        scoring="sigmoid",
        num_groups=whole_number(settings, "n_group"),
        top_groups=whole_number(settings, "topk_group"),
        group_score="top2",
        normalise=flag(settings, "norm_topk_prob"),
        scale=number(settings, "routed_scaling_factor", above=0.0),
        has_bias=True,
    )


def num_mtp_layers(settings: Settings) -> int:
    """Multi-token prediction layers: stored in checkpoints after the last layer, not used here."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if settings.get(name) is not None:
            return whole_number(settings, name)
    return 1
