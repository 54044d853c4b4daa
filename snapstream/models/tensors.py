"""The stored tensors of a model: the shape of each, and the checkpoint tensors that fill it. No torch.

A stored tensor is a stack: ``qkv`` of all layers is ``[L, (H+2G)E, D]``, ``experts_down`` of the layers with experts
``[L', X, D, M]``. Storage (``weights.py``), reading (``checkpoint.py``), shards and bytes (``sharding.py``) follow from
this list. The router stays in fp32: it is small, and a rounded score changes the choice of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from snapstream.config import DType, ModelConfig, StoredWeights, WeightFormat
from snapstream.config.model import AltUp, HyperConnections, LatentConfig
from snapstream.config.weights import FP8_BLOCK

# Of checkpoints whose model is a text part: prefixes of its tensors with what takes their place, and of the others.
TEXT_PREFIXES = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
}  # fmt: skip
TOWER_PREFIXES = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.", "model.mm_projector.",
    "model.vision_tower.", "model.multi_modal_projector.",
    "model.visual.", "model.vision_embedder.", "model.vision_adapter.", "model.vision_projection.",
    "model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "patch_merge_mlp.", "vit_large_projector.",
    "model.vision_model.", "model.vit_large_projector.",
)  # fmt: skip

NO_SINK = -1e30  # the score of a learned sink whose share of attention is 0

ATTENTION_NAMES = "self_attn.", "mixer.q_proj.", "mixer.o_proj."  # of a layer's attention

Place = int | slice  # of a checkpoint tensor along the leading dimensions of the stored one


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One stored tensor of a model; of one layer if ``per_layer``."""

    shape: tuple[int, ...]  # of one layer: [out, in], [experts, out, in], [D] ...
    # Names in the checkpoint, after the prefix of the layer, and the part that each fills; () is all of it. Without any
    # all numbers are ``offset``.
    parts: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    per_layer: bool = True
    layers: Sequence[int] | None = None  # those that have it, ascending; None: all
    missing: float | None = None  # what the stack holds of the other layers; None: it has no place for them
    is_matrix: bool = True  # a ``Matrix``, possibly in low precision; the others are plain tensors
    dtype: DType | None = None  # of a plain tensor; None: the model's
    per_expert: bool = False  # the first dimension counts experts, of which a token reads top_k
    # If rows are stored in another order than the checkpoint's: by name, the checkpoint's row of each stored one.
    row_order: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Of checkpoint tensors with rows of several kinds, such as q | k | v: how many of each; ranks split each kind.
    segments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # The checkpoint has one tensor for all layers, whose parts lie side by side along this dimension.
    joined_dim: int | None = None
    is_table: bool = False  # rows are looked up, never multiplied
    # Of one layer: the dimension that ranks split, each of the parts separately; None: each rank holds all of it.
    shard_dim: int | None = None
    # Shards along shard_dim are whole quantization groups: the last ranks' may be partly or all zeros.
    is_padded: bool = False
    is_float: bool = False  # not quantized on this rank, because its shard cuts through quantization groups
    # The checkpoint has the matrices transposed, [.., in, out]; ``row_order`` and ``shard_dim`` count as stored here.
    is_transposed: bool = False
    # By name, numbers of a head in the rows of the checkpoint and in those stored, which have zeros behind them.
    narrow: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    offset: float = 0.0  # what is added to the numbers of the checkpoint
    factor: float = 1.0  # what the sum is multiplied by
    row_eps: float | None = None  # rows are divided by their root mean square, with this epsilon
    is_dense: bool = False  # a matrix in the dtype of the computation, whatever the format of the others
    form: WeightFormat | None = None  # of ``StoredWeights.own``
    crosses_blocks: bool = False  # ``row_order`` splits the FP8 blocks of the checkpoint: floats, as tables are

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """The layers that have it."""
        return range(num_layers) if self.layers is None else self.layers

    def stack(self, num_layers: int) -> Sequence[int]:
        """The layers that the stack has a place for."""
        return self.layers_of(num_layers) if self.missing is None else range(num_layers)

    @property
    def is_attention(self) -> bool:
        return self.per_layer and any(name.startswith(ATTENTION_NAMES) for name in self.parts)

    @property
    def is_quantized(self) -> bool:
        """Whether a quantized checkpoint has quantized values for it: the matrices of the layers."""
        return self.per_layer and self.is_matrix and not self.is_table and self.joined_dim is None


TensorSpecs = Mapping[str, TensorSpec]


class Part(NamedTuple):
    """A checkpoint tensor and where it goes."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    target: str  # name of the stored tensor
    place: tuple[Place, ...]  # in the stored tensor
    row_order: Sequence[int] | None  # the checkpoint's row of each stored one; None: the same order
    row_dim: int = 0  # of the stored tensor: the dimension of its rows
    is_transposed: bool = False
    segments: tuple[int, ...] = ()  # rows that ranks split separately


def name_in_text_part(name: str) -> str:
    """The name of a tensor in a checkpoint of the text part alone."""
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else TEXT_PREFIXES[prefix] + name.removeprefix(prefix)


PREDICTION, ELSEWHERE = "model.layers.0.", "elsewhere."
# Of a prediction layer, its tensors in Qwen's checkpoints; in DeepSeek's it is a layer behind the last.
_PREDICTION_NAMES = {
    "mtp.layers.0.": PREDICTION, "mtp.norm.": "model.norm.", "mtp.fc.": f"{PREDICTION}eh_proj.",
    "mtp.pre_fc_norm_embedding.": f"{PREDICTION}enorm.", "mtp.pre_fc_norm_hidden.": f"{PREDICTION}hnorm.",
}  # fmt: skip


def prediction_name(name: str, behind: int) -> str:
    """What a tensor is called in the model of the prediction layer behind so many others; those of other layers and of
    the model itself are ``ELSEWHERE``, but for its embeddings.
    """
    layer = f"model.layers.{behind}."
    names = {
        **_PREDICTION_NAMES, f"{layer}shared_head.norm.": "model.norm.", f"{layer}shared_head.": ELSEWHERE,
        f"{layer}embed_tokens.": ELSEWHERE, layer: PREDICTION, "lm_head.": "lm_head.",
        "model.embed_tokens.": "model.embed_tokens.",
    }  # fmt: skip
    prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
    return ELSEWHERE + name if prefix is None else names[prefix] + name.removeprefix(prefix)


def prediction_tensors(config: ModelConfig, specs: TensorSpecs) -> TensorSpecs:
    """Of a prediction layer: ``specs`` of a model of one layer, without embeddings of tokens, and what makes its input.
    It has an output embedding of its own, in fewer bits: most of what a draft reads.
    """
    hidden = config.hidden_size
    return {
        **{name: spec for name, spec in specs.items() if name != "embed"},
        "lm_head": specs["embed" if config.tie_word_embeddings else "lm_head"],
        "token_norm": norm(config, hidden, "enorm.weight"),
        "hidden_norm": norm(config, hidden, "hnorm.weight"),
        "join": TensorSpec(shape=(hidden, 2 * hidden), parts={"eh_proj.weight": ()}),
    }


def stacked_shape(spec: TensorSpec, num_layers: int) -> tuple[int, ...]:
    """Shape of the storage."""
    return (len(spec.stack(num_layers)), *spec.shape) if spec.per_layer else spec.shape


def checkpoint_parts(specs: TensorSpecs, num_layers: int) -> Iterator[Part]:
    """Every checkpoint tensor of a model."""
    for name, spec in specs.items():
        for part, place in spec.parts.items():
            shape, order, segments = part_shape(spec, part), spec.row_order.get(part), spec.segments.get(part, ())
            if (dim := spec.joined_dim) is not None:
                shape = (*shape[:dim], shape[dim] * num_layers, *shape[dim + 1 :])
            is_stack = spec.per_expert or (not spec.is_matrix and len(spec.shape) == 2)  # of experts or heads
            row_dim = 1 if is_stack and len(shape) == len(spec.shape) else 0  # all in one tensor
            if not spec.per_layer or spec.joined_dim is not None:
                yield Part(part, shape, name, place, order)
                continue
            stack = spec.stack(num_layers)
            for layer in spec.layers_of(num_layers):
                own_name, own_place = f"model.layers.{layer}.{part}", (stack.index(layer), *place)
                yield Part(own_name, shape, name, own_place, order, row_dim, spec.is_transposed, segments)


def part_shape(spec: TensorSpec, part: str) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that fills ``part``."""
    place = spec.parts[part]
    sizes = [size if dim >= len(place) else place[dim] for dim, size in enumerate(spec.shape)]
    shape = tuple(
        len(range(*size.indices(spec.shape[dim]))) if isinstance(size, slice) else size
        for dim, size in enumerate(sizes)
        if dim >= len(place) or isinstance(size, slice)
    )
    if (sizes_of_head := spec.narrow.get(part)) is not None:
        given, stored = sizes_of_head
        shape = (shape[0] // stored * given, *shape[1:])
    return (*shape[:-2], shape[-1], shape[-2]) if spec.is_transposed else shape


def vector(size: int, name: str, **others: Any) -> TensorSpec:
    """A norm or a bias of each layer; ``others``: fields of ``TensorSpec``."""
    return TensorSpec(shape=(size,), parts={name: ()}, is_matrix=False, **others)


def in_fp32(name: str, *shape: int, **others: Any) -> TensorSpec:
    """A small tensor of each layer that is read and computed with in fp32; ``others`` as above."""
    return TensorSpec(shape=shape, parts={name: ()}, is_matrix=False, dtype="float32", **others)


def norm(config: ModelConfig, size: int, name: str) -> TensorSpec:
    """The weight of an RMSNorm; with an offset in fp32, as the sum is computed."""
    return vector(size, name, offset=config.norm_offset, dtype="float32" if config.norm_offset else None)


def without_norm_weights(specs: TensorSpecs, names: Sequence[str] | None = None) -> TensorSpecs:
    """``specs`` whose norms of these names, or all of them, are 1."""
    norms = [name for name in specs if name.endswith("norm")] if names is None else names
    return {**specs, **{name: replace(specs[name], parts={}, row_order={}, offset=1.0) for name in norms}}


def gate_up_parts(prefix: str, kind: str, inner: int, *, has_gate: bool = True) -> dict[str, tuple[Place, ...]]:
    """Gate and up projection of an MLP as one matrix, or up alone."""
    if not has_gate:
        return {f"{prefix}.up_proj.{kind}": ()}
    return {f"{prefix}.gate_proj.{kind}": (slice(inner),), f"{prefix}.up_proj.{kind}": (slice(inner, None),)}


def outer_tensors(config: ModelConfig) -> TensorSpecs:
    """Embeddings and norms. A tied ``lm_head`` is ``embed`` itself."""
    hidden = config.hidden_size
    lines = config.vocab_size if config.table_lines is None else config.table_lines

    def table(name: str) -> TensorSpec:
        shape = (lines, hidden)
        return TensorSpec(shape=shape, parts={name: ()}, per_layer=False, shard_dim=0, is_padded=True)

    names = "input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"
    norms: dict[str, TensorSpec] = {}
    kinds = ((config.norms, None),) if config.recurrent_norms is None else (
        (config.norms, config.attention_layers), (config.recurrent_norms, config.recurrent_layers),
    )  # fmt: skip
    for own, layers in kinds:
        for name, part in zip(names, own, strict=True):
            if part is not None:
                norms[name] = replace(norm(config, hidden, f"{part}.weight"), layers=layers)
    specs = {
        "embed": table("model.embed_tokens.weight"),
        **norms,
        "final_norm": replace(norm(config, hidden, "model.norm.weight"), per_layer=False),
    }
    if config.has_norm_biases:
        for name, spec in [*norms.items(), ("final_norm", specs["final_norm"])]:
            part = next(iter(spec.parts)).removesuffix("weight") + "bias"
            specs[f"{name}_bias"] = replace(spec, parts={part: ()}, offset=0.0, dtype=None)
    if config.has_norm_biases or config.has_head_bias:
        specs["lm_head_bias"] = TensorSpec(
            shape=(lines,), parts={"lm_head.bias": ()} if config.has_head_bias else {}, per_layer=False,
            is_matrix=False, shard_dim=0, is_padded=True,
        )  # fmt: skip
    if config.norms_experts_alone and config.moe is not None:
        specs["mlp_out_norm"] = replace(specs["mlp_out_norm"], layers=config.moe.layers(config.num_layers))
    if not config.tie_word_embeddings:
        specs["lm_head"] = table("lm_head.weight")
    return specs


def kind_of(config: ModelConfig, layer: int) -> str:
    """What sets the tensors of a layer apart from those of others of the same name: the end of their stored names."""
    differs = config.full_heads is not None or config.keys_are_values
    if (own := config.window_rope) is not None:
        differs |= own.partial_rotary_factor != config.rope.partial_rotary_factor
    full = ".full" if differs and config.layer_windows[layer] is None else ""
    return full + (".shared" if config.source_of(layer) != layer else "")


def base_name(name: str) -> str:
    """A stored name without what sets it apart by kind of layers."""
    return name.partition(".")[0]


def attention_tensors(config: ModelConfig) -> TensorSpecs:
    """Grouped-query attention of the layers that have it, by kind of layers (``kind_of``)."""
    kinds: dict[str, list[int]] = {}
    for layer in range(config.num_layers):
        kinds.setdefault(kind_of(config, layer), []).append(layer)
    if list(kinds) == [""]:
        return _attention_tensors(config)
    specs = {}
    for kind, layers in kinds.items():
        heads, head_dim, num_heads = config.heads_of(layers[0])
        rope = config.rope if config.layer_windows[layers[0]] is None else config.window_rope or config.rope
        own = replace(
            config, num_heads=num_heads, num_kv_heads=heads, head_dim=head_dim, full_heads=None, keys_are_values=False,
            rope=rope,
        )  # fmt: skip
        for name, spec in _attention_tensors(own).items():
            specs[name + kind] = replace(spec, layers=layers)
        if "sinks" in specs:
            specs["sinks"] = replace(specs["sinks"], missing=NO_SINK)
            specs.pop("sinks.full", None)
        qkv, queries = specs[f"qkv{kind}"], num_heads * head_dim
        parts: tuple[str, ...]
        if ".shared" in kind:
            rows, parts = queries, ("self_attn.q_proj.weight",)
            del specs[f"k_norm{kind}"]
        elif ".full" in kind and config.keys_are_values:
            rows, parts = queries + heads * head_dim, ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
        else:
            continue
        cuts = {part: place for part, place in qkv.parts.items() if part in parts}
        # The last part ends where the matrix does.
        cuts[parts[-1]] = (slice(rows - (queries if len(parts) == 1 else heads * head_dim), None),)
        specs[f"qkv{kind}"] = replace(qkv, shape=(rows, config.hidden_size), parts=cuts)
    return specs


def _attention_tensors(config: ModelConfig) -> TensorSpecs:
    """Of layers of equal shape; see ``head_orders`` for partly rotated heads."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    gates = config.num_heads * config.gate_dim  # before queries, of which they may be a part, keys and values
    first = gates + queries
    cuts = {"q": slice(first), "k": slice(first, first + keys), "v": slice(first + keys, None)}
    orders, size = head_orders(config), first + 2 * keys
    if config.gate_dim == 1:
        cuts = {"g": slice(gates), **cuts, "q": slice(gates, first)}
    elif gates:
        orders["q"] = gated_order(config, orders.get("q"))

    def qkv(kind: str) -> dict[str, tuple[Place, ...]]:
        if config.has_fused_qkv:
            return {f"self_attn.qkv_proj.{kind}": ()}
        return {f"self_attn.{name}_proj.{kind}": (cut,) for name, cut in cuts.items()}

    def ordered(kind: str) -> Mapping[str, Sequence[int]]:
        if config.has_fused_qkv and orders:
            keys_order = tuple(queries + row for row in orders["k"])
            return {f"self_attn.qkv_proj.{kind}": (*orders["q"], *keys_order, *range(queries + keys, size))}
        return {f"self_attn.{name}_proj.{kind}": order for name, order in orders.items()}

    def segments(kind: str) -> Mapping[str, tuple[int, ...]]:
        return {f"self_attn.qkv_proj.{kind}": (queries, keys, keys)} if config.has_fused_qkv else {}

    def narrow(kind: str) -> Mapping[str, tuple[int, int]]:
        value_dim = config.value_dim
        return {} if value_dim is None else {f"self_attn.v_proj.{kind}": (value_dim, head_dim)}

    outputs = config.num_heads * (config.value_dim or head_dim)
    specs = {
        "qkv": TensorSpec(
            shape=(size, hidden),
            parts=qkv("weight"),
            row_order=ordered("weight"),
            narrow=narrow("weight"),
            shard_dim=0,
            segments=segments("weight"),
        ),
        "o": TensorSpec(shape=(hidden, outputs), parts={"self_attn.o_proj.weight": ()}, shard_dim=1),
    }
    if config.qkv_bias or config.has_norm_biases:
        parts = qkv("bias") if config.qkv_bias else {}
        specs["qkv_bias"] = TensorSpec(
            shape=(size,),
            parts=parts,
            is_matrix=False,
            row_order=ordered("bias"),
            narrow=narrow("bias"),
            shard_dim=0,
            segments=segments("bias"),
        )
    if config.o_bias:
        specs["o_bias"] = vector(hidden, "self_attn.o_proj.bias")
    if config.has_sinks:
        specs["sinks"] = in_fp32("self_attn.sinks", config.num_heads, shard_dim=0)
    if config.qk_norm:
        turned = head_orders(config)
        for name in ("q", "k"):
            part = f"self_attn.{name}_norm.weight"
            order = {part: turned[name][:head_dim]} if turned else {}
            specs[f"{name}_norm"] = replace(norm(config, head_dim, part), row_order=order)
            if config.norms_heads_apart:
                count = config.num_heads if name == "q" else config.num_kv_heads
                specs[f"{name}_norm"] = replace(specs[f"{name}_norm"], shape=(count, head_dim), shard_dim=0)
    if config.has_whole_qk_norm:
        for name, rows in (("q", queries), ("k", keys)):
            part = f"self_attn.{name}_norm.weight"
            order = {part: orders[name]} if orders else {}
            specs[f"{name}_norm"] = replace(norm(config, rows, part), row_order=order, shard_dim=0)
    return specs


def gated_order(config: ModelConfig, order: Sequence[int] | None) -> tuple[int, ...]:
    """Rows of a projection that has, head after head, a query and its gate: first all gates, then all queries, in
    ``order`` of a projection of queries alone.
    """
    size, heads = config.head_dim, config.num_heads
    places = [(row // size, row % size) for row in order or range(heads * size)]
    gates = (2 * size * head + size + i for head in range(heads) for i in range(size))
    return (*gates, *(2 * size * head + i for head, i in places))


def with_gates_apart(config: ModelConfig, specs: TensorSpecs) -> TensorSpecs:
    """``specs`` of checkpoints where gates of whole heads have a projection of their own."""
    gates = config.num_heads * config.head_dim
    parts = {
        "self_attn.gate_proj.weight": (slice(gates),), **specs["qkv"].parts,
        "self_attn.q_proj.weight": (slice(gates, 2 * gates),),
    }  # fmt: skip
    orders = {f"self_attn.{name}_proj.weight": order for name, order in head_orders(config).items()}
    return {**specs, "qkv": replace(specs["qkv"], parts=parts, row_order=orders)}


def renamed(specs: TensorSpecs, names: Mapping[str, str]) -> TensorSpecs:
    """``specs`` with the parts of checkpoint names in ``names`` replaced."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return {
        own: replace(
            spec,
            parts={rename(name): place for name, place in spec.parts.items()},
            row_order={rename(name): order for name, order in spec.row_order.items()},
            segments={rename(name): sizes for name, sizes in spec.segments.items()},
            narrow={rename(name): sizes for name, sizes in spec.narrow.items()},
        )
        for own, spec in specs.items()
    }


def named(names: Mapping[str, str], experts: ExpertNames | None = None) -> Callable[[ModelConfig], TensorSpecs]:
    """``Family.tensors`` of checkpoints with other names."""
    return lambda config: renamed(decoder_tensors(config, experts), names)


def mlp_tensors(config: ModelConfig) -> TensorSpecs:
    """The MLP of the layers that have one: all, or those without experts."""
    if config.has_wide_mlps:
        kinds: dict[int, list[int]] = {}
        for layer in range(config.num_layers):
            kinds.setdefault(config.inner_of(layer), []).append(layer)
        found = {}
        for inner, own in kinds.items():
            kind = ".wide" if inner > config.intermediate_size else ""
            for name, spec in mlp_tensors(replace(config, intermediate_size=inner, has_wide_mlps=False)).items():
                found[name + kind] = replace(spec, layers=own)
        return found
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.dense_layers
    if not layers:
        return {}
    specs = {
        "gate_up": TensorSpec(
            shape=((1 + config.has_gate) * inner, hidden),
            parts={"mlp.gate_up_proj.weight": ()}
            if config.has_fused_gate_up
            else gate_up_parts("mlp", "weight", inner, has_gate=config.has_gate),
            layers=layers,
            segments={"mlp.gate_up_proj.weight": (inner, inner)} if config.has_fused_gate_up else {},
            shard_dim=0,
            is_padded=True,
        ),
        "down": TensorSpec(
            shape=(hidden, inner), parts={"mlp.down_proj.weight": ()}, layers=layers, shard_dim=1, is_padded=True
        ),
    }
    if config.activation == "xielu":  # as stored: alpha_p, alpha_n, beta, eps
        names = {f"mlp.act_fn.alpha_{side}": (slice(at, at + 1),) for at, side in enumerate("pn")}
        specs["xielu"] = TensorSpec(
            shape=(4,), parts={**names, "mlp.act_fn.beta": (2,), "mlp.act_fn.eps": (3,)}, layers=layers,
            is_matrix=False, dtype="float32",
        )  # fmt: skip
    if config.mlp_bias or config.has_norm_biases:
        parts = gate_up_parts("mlp", "bias", inner, has_gate=config.has_gate) if config.mlp_bias else {}
        specs["gate_up_bias"] = TensorSpec(
            shape=((1 + config.has_gate) * inner,), parts=parts, layers=layers, is_matrix=False, shard_dim=0,
            is_padded=True,
        )  # fmt: skip
    if config.mlp_bias:
        specs["down_bias"] = vector(hidden, "mlp.down_proj.bias", layers=layers)
    return specs


def head_orders(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Order of the rows of the q and k projections; empty if whole heads are rotated, by halves.

    The first r numbers of a head are rotated in pairs (i, i + r/2), interleaved (2i, 2i + 1), and the kernels rotate
    pairs (i, i + E/2): so the first numbers of the pairs are stored at the start of the head, the second ones at its
    middle. Products of q and k do not depend on the order.
    """
    head_dim, rotated = config.head_dim, config.rope.rotary_dim(config.head_dim)
    if rotated == head_dim and not config.rope.is_interleaved:
        return {}
    half, middle = rotated // 2, (rotated + head_dim) // 2
    firsts, seconds = range(half), range(half, rotated)
    if config.rope.is_interleaved:
        firsts, seconds = range(0, rotated, 2), range(1, rotated, 2)
    one = (*firsts, *range(rotated, middle), *seconds, *range(middle, head_dim))

    def heads(count: int) -> tuple[int, ...]:
        return tuple(head * head_dim + i for head in range(count) for i in one)

    return {"q": heads(config.num_heads), "k": heads(config.num_kv_heads)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of the parts of a layer's experts in a family's checkpoints."""

    prefix: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_tensors(config: ModelConfig, names: ExpertNames | None = None) -> TensorSpecs:
    """Router, experts and shared experts. ValueError for a model without experts."""
    moe, names = config.moe, names or ExpertNames()
    if moe is None:
        raise ValueError(f"{config.architecture} has no experts")
    hidden, inner, layers = config.hidden_size, moe.inner, moe.layers(config.num_layers)
    gate_up: dict[str, tuple[Place, ...]] = {}
    down: dict[str, tuple[Place, ...]] = {}
    gates = inner if config.has_gate else 0  # rows of a gate, before those of up
    for at, expert in enumerate(moe.own):
        prefix = f"{names.prefix}.experts.{expert}"
        if gates:
            gate_up[f"{prefix}.{names.gate}.weight"] = (at, slice(gates))
        gate_up[f"{prefix}.{names.up}.weight"] = (at, slice(gates, None))
        down[f"{prefix}.{names.down}.weight"] = (at,)
    segments: dict[str, tuple[int, ...]] = {}
    if config.has_fused_experts:
        gate_up, down = {f"{names.prefix}.experts.gate_up_proj": ()}, {f"{names.prefix}.experts.down_proj": ()}
        segments = {f"{names.prefix}.experts.gate_up_proj": (gates, inner)}
    width = moe.latent or hidden  # of what the experts that are routed to read and give
    stack = partial(
        TensorSpec, layers=layers, per_expert=True, is_padded=True, is_transposed=config.has_transposed_experts
    )
    specs = {
        "router": in_fp32(f"{names.prefix}.gate.weight", moe.num_experts, hidden, layers=layers),
        "experts_gate_up": stack(
            shape=(len(moe.own), gates + inner, width), parts=gate_up, segments=segments, shard_dim=1
        ),
        "experts_down": stack(shape=(len(moe.own), width, inner), parts=down, shard_dim=2),
    }
    if moe.latent:
        for name, shape, part in (("in", (width, hidden), "fc1"), ("out", (hidden, width), "fc2")):
            parts: dict[str, tuple[Place, ...]] = {f"{names.prefix}.{part}_latent_proj.weight": ()}
            specs[f"latent_{name}"] = TensorSpec(shape=shape, parts=parts, layers=layers)
    if moe.has_bias:
        correction = f"{names.prefix}.gate.e_score_correction_bias"
        specs["router_bias"] = in_fp32(correction, moe.num_experts, layers=layers)
    if config.has_norm_biases:
        specs["router_logit_bias"] = replace(specs["router"], shape=(moe.num_experts,), parts={})
        specs["experts_gate_up_bias"] = TensorSpec(
            shape=(len(moe.own), gates + inner), layers=layers, per_expert=True, is_matrix=False, shard_dim=1,
            is_padded=True,
        )  # fmt: skip
    if moe.num_shared:
        shared, prefix = moe.shared_inner, f"{names.prefix}.shared_experts"
        specs["shared_gate_up"] = TensorSpec(
            shape=((1 + config.has_gate) * shared, hidden),
            parts=gate_up_parts(prefix, "weight", shared, has_gate=config.has_gate),
            layers=layers,
            shard_dim=0,
            is_padded=True,
        )
        if moe.has_shared_gate:
            specs["shared_gate"] = in_fp32(f"{names.prefix}.shared_expert_gate.weight", 1, hidden, layers=layers)
        specs["shared_down"] = TensorSpec(
            shape=(hidden, shared), parts={f"{prefix}.down_proj.weight": ()}, layers=layers, shard_dim=1, is_padded=True
        )
    return specs


def latent_attention_tensors(config: ModelConfig, latent: LatentConfig) -> TensorSpecs:
    """``q_a`` only if queries are projected in two steps. ``kv_b [H (N_o + U), R]`` holds, head after head, the rows
    that expand a latent to a key and to a value.
    """
    hidden, num_heads = config.hidden_size, config.num_heads
    q_rows, q_name = num_heads * latent.query_dim, "q_proj" if latent.q_rank is None else "q_b_proj"
    kv_b_rows = num_heads * (latent.nope_dim + latent.value_dim)

    def matrix(rows: int, columns: int, name: str, *, head_rows: int = 0, shard_dim: int | None = None) -> TensorSpec:
        part = f"self_attn.{name}.weight"
        order = {part: _halves(rows, head_rows, latent.rope_dim)} if head_rows and latent.is_interleaved else {}
        return TensorSpec(shape=(rows, columns), parts={part: ()}, row_order=order, shard_dim=shard_dim)

    queries = matrix(q_rows, latent.q_rank or hidden, q_name, head_rows=latent.query_dim, shard_dim=0)
    specs = {
        "q": queries,
        "kv_a": matrix(latent.latent_dim, hidden, "kv_a_proj_with_mqa", head_rows=latent.latent_dim),
        "kv_a_norm": vector(latent.kv_rank, "self_attn.kv_a_layernorm.weight"),
        # Decode multiplies with parts of it, head by head.
        "kv_b": TensorSpec(
            shape=(kv_b_rows, latent.kv_rank), parts={"self_attn.kv_b_proj.weight": ()}, is_dense=True, shard_dim=0
        ),
        "o": matrix(hidden, num_heads * latent.value_dim, "o_proj", shard_dim=1),
    }
    if latent.q_rank is not None:
        specs["q_a"] = matrix(latent.q_rank, hidden, "q_a_proj")
        specs["q_a_norm"] = vector(latent.q_rank, "self_attn.q_a_layernorm.weight")
    if config.gate_dim:
        specs["gates"] = matrix(num_heads * config.gate_dim, hidden, "g_proj", shard_dim=0)
    if config.has_sinks:
        specs["sinks"] = in_fp32("self_attn.sinks", num_heads, shard_dim=0)
    return specs


@lru_cache(maxsize=64)
def _halves(num_rows: int, head_rows: int, rope_rows: int) -> tuple[int, ...]:
    """Order of the rows of a projection: the last ``rope_rows`` of each head, which the checkpoint rotates in pairs
    (0, 1), (2, 3) ..., are stored as halves.
    """
    start = head_rows - rope_rows
    one = (*range(start), *range(start, head_rows, 2), *range(start + 1, head_rows, 2))
    return tuple(first + row for first in range(0, num_rows, head_rows) for row in one)


def per_layer_tensors(config: ModelConfig) -> TensorSpecs:
    """Embeddings for each layer, and the scalars of layers (Gemma 4)."""
    hidden, size, specs = config.hidden_size, config.per_layer_dim, {}
    if config.has_layer_scalars:
        specs["layer_scalar"] = in_fp32("layer_scalar", 1)
    if not size:
        return specs
    lines = config.per_layer_lines or config.vocab_size
    joined = {"embed_per_layer": ((lines, size), "model.embed_tokens_per_layer.weight", 1),
              "per_layer_in": ((size, hidden), "model.per_layer_model_projection.weight", 0)}  # fmt: skip
    for name, (shape, part, dim) in joined.items():
        specs[name] = TensorSpec(
            shape=shape, parts={part: ()}, joined_dim=dim, is_table=name == "embed_per_layer"
        )  # fmt: skip
    return {
        **specs,
        "per_layer_in_norm": replace(norm(config, size, "model.per_layer_projection_norm.weight"), per_layer=False),
        "per_layer_gate": TensorSpec(shape=(size, hidden), parts={"per_layer_input_gate.weight": ()}),
        "per_layer_out": TensorSpec(shape=(hidden, size), parts={"per_layer_projection.weight": ()}),
        "per_layer_norm": norm(config, hidden, "post_per_layer_input_norm.weight"),
    }


def stream_tensors(config: ModelConfig, altup: AltUp) -> TensorSpecs:
    """Projections of residual streams, what predicts and corrects them, and the low-rank branch (Gemma 3n)."""
    hidden, count, rank = config.hidden_size, altup.num_streams, altup.laurel_rank

    def projections(shape: tuple[int, int], parts: Mapping[str, tuple[Place, ...]]) -> TensorSpec:
        names = {f"model.altup_{name}.weight": place for name, place in parts.items()}
        return TensorSpec(shape=shape, parts=names, per_layer=False)

    rows = {f"projections.{i}": (slice(i * hidden, (i + 1) * hidden),) for i in range(count - 1)}
    outs = {f"streams_out.{i}": {f"unembed_projections.{i}": ()} for i in range(count - 1)}
    return {
        "streams_in": projections(((count - 1) * hidden, hidden), rows),
        **{name: projections((hidden, hidden), parts) for name, parts in outs.items()},
        "stream_router": in_fp32("altup.modality_router.weight", count, hidden),
        "stream_router_norm": norm(config, hidden, "altup.router_norm.weight"),
        "stream_prediction": in_fp32("altup.prediction_coefs.weight", count * count, count),
        "stream_correction": in_fp32("altup.correction_coefs.weight", count, count),
        "stream_scale": vector(hidden, "altup.correct_output_scale"),
        "laurel_in": TensorSpec(shape=(rank, hidden), parts={"laurel.linear_left.weight": ()}),
        "laurel_out": TensorSpec(shape=(hidden, rank), parts={"laurel.linear_right.weight": ()}),
        "laurel_norm": norm(config, hidden, "laurel.post_laurel_norm.weight"),
    }  # fmt: skip


def connection_tensors(config: ModelConfig, hyper: HyperConnections) -> TensorSpecs:
    """What decides how layers read and add to residual streams (``streams.Connection``)."""
    count, width, specs = hyper.num_shares, config.stream_size, {}
    scales = 3 if hyper.iterations else 2
    for half, name in (("attention", "attn"), ("mlp", "ffn")):
        specs[f"hyper_{half}_weights"] = in_fp32(f"{name}_hc.fn", count, width)
        specs[f"hyper_{half}_base"] = in_fp32(f"{name}_hc.base", count)
        specs[f"hyper_{half}_scale"] = in_fp32(f"{name}_hc.scale", scales)
    if hyper.has_head:
        sizes = {"weights": ("fn", (hyper.num_streams, width)), "base": ("base", (hyper.num_streams,)),
                 "scale": ("scale", (1,))}  # fmt: skip
        for part, (name, shape) in sizes.items():
            specs[f"hyper_head_{part}"] = in_fp32(f"model.hc_head.hc_{name}", *shape, per_layer=False)
    return specs


def decoder_tensors(config: ModelConfig, names: ExpertNames | None = None) -> TensorSpecs:
    latent = config.latent
    attention = attention_tensors(config) if latent is None else latent_attention_tensors(config, latent)
    if len(config.attention_layers) < config.num_layers:
        attention = {name: replace(spec, layers=config.attention_layers) for name, spec in attention.items()}
    specs = {**outer_tensors(config), **attention, **mlp_tensors(config), **per_layer_tensors(config)}
    if config.altup is not None:
        specs |= stream_tensors(config, config.altup)
    if config.hyper is not None:
        specs |= connection_tensors(config, config.hyper)
    return specs if config.moe is None else {**specs, **expert_tensors(config, names)}


def in_own_formats(specs: TensorSpecs, stored: StoredWeights, num_layers: int) -> TensorSpecs:
    """``specs`` with the formats that single matrices have in the checkpoint (``StoredWeights.own``).

    A stack of several formats becomes one for each, with the layers that have it. Where only some rows of ``qkv`` have
    a format, two stacks have the same layers, rows of one below those of the other. Other matrices whose parts differ
    get none.
    """
    found = {}
    for name, spec in specs.items():
        if not spec.is_matrix or spec.is_dense:
            found[name] = spec
        elif not spec.per_layer or spec.joined_dim is not None:
            found[name] = replace(spec, form=stored.own_format(next(iter(spec.parts))))
        else:
            found |= _by_format(name, spec, stored, num_layers)
    return found


def in_fp8_blocks(specs: TensorSpecs) -> TensorSpecs:
    """``specs`` of a checkpoint in FP8 blocks; see ``TensorSpec.crosses_blocks``."""
    return {
        name: replace(
            spec,
            crosses_blocks=spec.is_quantized
            and (bool(spec.narrow) or not all(map(keeps_blocks, spec.row_order.values()))),
        )
        for name, spec in specs.items()
    }


def keeps_blocks(order: Sequence[int] | None) -> bool:
    """Whether rows that share FP8 scales in the checkpoint are stored together in this order."""
    return order is None or all(
        row // FP8_BLOCK == order[at - at % FP8_BLOCK] // FP8_BLOCK for at, row in enumerate(order)
    )


def _by_format(name: str, spec: TensorSpec, stored: StoredWeights, num_layers: int) -> dict[str, TensorSpec]:
    kinds: dict[tuple[tuple[WeightFormat | None, tuple[str, ...]], ...], list[int]] = {}
    for layer in spec.layers_of(num_layers):
        runs: list[tuple[WeightFormat | None, list[str]]] = []
        for part in spec.parts:
            form = stored.own_format(f"model.layers.{layer}.{part}")
            if not runs or runs[-1][0] != form:
                runs.append((form, []))
            runs[-1][1].append(part)
        if len(runs) > (2 if base_name(name) == "qkv" else 1):
            runs = [(None, list(spec.parts))]
        kinds.setdefault(tuple((form, tuple(parts)) for form, parts in runs), []).append(layer)
    found = {}
    for runs_of, layers in kinds.items():
        words = ["other" if form is None else f"{form.dtype}-{form.group}" for form, _ in runs_of]
        of_kind = spec if len(kinds) == 1 else replace(spec, layers=layers)
        if len(runs_of) == 1:
            form = runs_of[0][0]
            own_name = name if len(kinds) == 1 or form is None else f"{name}.{words[0]}"
            found[own_name] = replace(of_kind, form=form)
            continue
        kind = "+".join(word for word, (_, parts) in zip(words, runs_of, strict=True) for _ in parts)
        for at, (form, parts) in enumerate(runs_of):
            found[f"{name}.{kind}.{at}"] = replace(_rows_of(of_kind, parts), form=form)
    return found


def _rows_of(spec: TensorSpec, parts: Sequence[str]) -> TensorSpec:
    """The rows that some neighboring ``parts`` of a matrix fill."""
    places = [range(*spec.parts[part][0].indices(spec.shape[0])) for part in parts]  # type: ignore[union-attr]
    first = places[0].start
    own = {part: (slice(rows.start - first, rows.stop - first),) for part, rows in zip(parts, places, strict=True)}
    return replace(spec, shape=(places[-1].stop - first, *spec.shape[1:]), parts=own)
