"""GGUF files as models: settings as in config.json, and tensors under the names of safetensors. No torch.

Quantized blocks that integers in groups of 32 hold exactly keep their values: Q4_0 as int4; Q8_0, Q5_0, IQ4_NL and Q4_0
beside them as int8. They appear here as ``pack-quantized`` tensors (``checkpoint.py``), experts of gpt-oss as MXFP4.
Other types are dequantized, by the ``gguf`` package, whose arithmetic is that of ggml. Files are mapped, and read slice
by slice.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapstream.config import DType, ModelConfig, RopeConfig, StoredWeights, WeightFormat
from snapstream.config.model import MAX_DIM
from snapstream.models.gguf_header import (
    FLOATS,
    Array,
    Header,
    Tensor,
    described,
    first_file,
    read_header,
    split_files,
)
from snapstream.models.tensors import ExpertNames

if TYPE_CHECKING:
    import numpy as np

EXACT_INT4, EXACT_INT8 = {"Q4_0"}, {"Q4_0", "Q5_0", "Q8_0", "IQ4_NL"}
GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp writes the models of an architecture."""

    name: str  # transformers' class
    fields: Mapping[str, str] = field(default_factory=dict)  # config.json's names of its own settings
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the architecture implies
    layer_names: Mapping[str, str] = field(default_factory=dict)  # of its own tensors
    experts: ExpertNames = ExpertNames()
    is_interleaved: bool = False  # files have the rows of q and k so that pairs (0, 1), (2, 3) are rotated
    norm_offset: float = 0.0  # what files have added to the weights of norms
    rope: Mapping[str, Any] = field(default_factory=dict)  # settings of a scaled rope that files do not have
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stacks of experts, rows of two by turns


_EXPERT_FIELDS = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_interleaved=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        fields={"expert_count": "num_experts", **_EXPERT_FIELDS},
        settings={"norm_topk_prob": True},  # llama.cpp computes no other
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        fields={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", is_interleaved=True),
    "granite": Architecture(
        name="GraniteForCausalLM",
        fields={
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
        is_interleaved=True,
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM", layer_names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        fields={
            "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        },
        layer_names={
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
        },
        rope={"truncate": False},
        merged={"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)},
    ),
}  # fmt: skip
_MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    layer_names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2"),
    is_interleaved=True,
)  # arch "llama" too, with experts

_FIELDS = {
    "block_count": "num_hidden_layers",
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
    "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned", "vocab_size",
    "tensor_data_layout", "attention.causal", "expert_count", "use_parallel_residual", "expert_weights_norm",
    "attention.sliding_window_pattern",
}  # fmt: skip
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROPE_FACTORS = "rope_freqs.weight"
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A model in one or several files."""

    header: Header  # of the first, which has the settings
    architecture: Architecture
    tensors: Mapping[str, Tensor]  # of all, by their names in the files


def open_model(path: Path) -> Model:
    """ValueError for a broken file, an architecture that is not supported, and files that do not belong together."""
    return _joined(tuple(read_header(file) for file in split_files(path)))


@lru_cache(maxsize=16)
def _joined(headers: tuple[Header, ...]) -> Model:
    first, tensors = headers[0], dict[str, Tensor]()
    path = first.file
    kind = first.metadata.get("general.architecture")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise ValueError(
            f"{path}: general.architecture is {described(kind)}; GGUF files are read of {', '.join(ARCHITECTURES)}"
        )
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{name[:80]} is in two files: {tensors[name].file.name} and {header.file.name}")
            tensors[name] = tensor
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ValueError(
            f"{path}: split.tensors.count is {described(count)}, and its files hold {len(tensors):,} tensors"
        )
    if kind == "llama" and first.metadata.get("llama.expert_count"):
        known = _MIXTRAL
    return Model(header=first, architecture=known, tensors=tensors)


def settings_of(path: Path) -> dict[str, Any]:
    """The settings of a file as config.json names them. ValueError, with path and key, for those not understood."""
    model = open_model(path)
    metadata, prefix = model.header.metadata, f"{model.header.metadata['general.architecture']}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    fields = {**_FIELDS, **model.architecture.fields}
    unknown = [name for name, value in own.items() if name not in fields and name not in _OTHERS and value]
    if unknown:
        raise ValueError(f"{path}: {prefix}{unknown[0]} is {described(own[unknown[0]])}, which is not supported")
    settings = {name: _plain(model.header, prefix + key) for key, name in fields.items() if key in own}
    missing = [prefix + key for key, name in fields.items() if name not in settings and key in _NEEDED]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]}")
    embed = _tensor(model, "token_embd.weight")
    settings |= {
        "architectures": [model.architecture.name],
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(model.header),
        **model.architecture.settings,
    }
    heads = settings.get("num_attention_heads")
    if "head_dim" not in settings and isinstance(heads, int) and heads > 0:
        settings["head_dim"] = int(settings["hidden_size"]) // heads
    if own.get("expert_weights_norm") is False:
        raise ValueError(f"{path}: {prefix}expert_weights_norm is False, which is not supported")
    _add_rope(model, own, settings)
    if model.architecture.name.startswith("Gemma3"):
        _add_gemma(model, own, settings)
    values = own.get("attention.value_length", settings.get("head_dim"))
    if values != settings.get("head_dim"):
        raise ValueError(
            f"{path}: {prefix}attention.value_length is {described(values)}; keys have {settings['head_dim']}"
        )
    return settings


_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
           "attention.layer_norm_rms_epsilon")  # fmt: skip


def _plain(header: Header, name: str) -> Any:
    """A setting; an array of equal numbers, one for each layer, is that number."""
    value = header.metadata[name]
    if not isinstance(value, Array):
        return value
    found = set(header.numbers(name))
    if len(found) != 1:
        raise ValueError(f"{header.file}: {name} differs from layer to layer, which is not supported")
    return found.pop()


def _tensor(model: Model, name: str) -> Tensor:
    if name not in model.tensors or len(model.tensors[name].shape) != 2:
        raise ValueError(f"{model.header.file} has no matrix {name}")
    return model.tensors[name]


def _add_rope(model: Model, own: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Scaling, and how many numbers of a head are rotated. A tensor of divisors is longrope of equal factors."""
    head_dim, rotated = settings.get("head_dim"), own.get("rope.dimension_count")
    if isinstance(head_dim, int) and isinstance(rotated, int) and head_dim and rotated != head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    if kind == "none" and factor not in (None, 0, 1):
        kind = "linear"
    context, file = settings["max_position_embeddings"], model.header.file
    if ROPE_FACTORS in model.tensors:
        if kind != "none":
            raise ValueError(f"{file}: {ROPE_FACTORS} beside rope.scaling.type {kind!r} is not supported")
        factors = _floats(model.tensors[ROPE_FACTORS])
        settings["rope_scaling"] = {
            "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": factors,
            "long_factor": factors, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": factor, **model.architecture.rope}
        if "rope.scaling.original_context_length" in own:
            scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
        share = own.get("rope.scaling.attn_factor", 1.0)
        if share != 1.0:
            raise ValueError(f"{file}: rope.scaling.attn_factor is {described(share)}; only 1 is supported")
        settings["rope_scaling"] = scaling


def _add_gemma(model: Model, own: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Which layers have windows, and the scale of scores, which follows from the size in 27b alone (62 layers)."""
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, Array):
        flags = model.header.numbers(
            f"{model.header.metadata['general.architecture']}.attention.sliding_window_pattern"
        )
        settings["layer_types"] = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in flags]
    elif pattern is not None:
        settings["sliding_window_pattern"] = pattern
    heads, is_27b = settings["num_attention_heads"], settings["num_hidden_layers"] == 62
    settings["query_pre_attn_scalar"] = settings["hidden_size"] // max(heads, 1) if is_27b else settings["head_dim"]


def _floats(tensor: Tensor) -> list[float]:
    """A short vector of fp32."""
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_DIM:
        raise ValueError(f"{tensor.file}: {tensor.name} is {tensor.kind} {list(tensor.shape)}; it must be a vector")
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes)))


# Tokens that end an answer, by their text, where the metadata does not name them; those of gpt-oss end a message.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
_CONTROL = 3


def end_tokens(header: Header) -> list[int]:
    """End tokens: eos, eot and eom of the metadata, and control tokens that chat templates of these models end with."""
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = [token for token in named if isinstance(token, int)]
    if "tokenizer.ggml.tokens" in metadata and "tokenizer.ggml.token_type" in metadata:
        texts, kinds = header.texts("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
        control = {text: at for at, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind == _CONTROL}
        found += [control[text] for text in _ENDS if text in control and "<|return|>" not in control]
    return list(dict.fromkeys(found))


def config_of(config: ModelConfig, path: Path) -> ModelConfig:
    """``config``, that of ``settings_of``, with what files of this kind store differently."""
    model = open_model(path)
    rope: RopeConfig = replace(config.rope, is_interleaved=model.architecture.is_interleaved)
    return replace(config, rope=rope, stored=_stored(model))


def _groups(model: Model) -> dict[str, set[str]]:
    """Tensor types of the matrices: of attention, of the rest of the layers, and of the tables."""
    found: dict[str, set[str]] = {"attention": set(), "layers": set(), "tables": set()}
    for stored, name in _names(model).items():
        if len(model.tensors[stored].shape) > 1 and name.endswith("weight") and not name.endswith(_ROUTERS):
            found[_group_of(name)].add(model.tensors[stored].kind)
    return found


_ROUTERS = (".gate.weight", ".router.weight")


def _group_of(name: str) -> str:
    return "tables" if name in TABLES else "attention" if ".self_attn." in name else "layers"


def _stored(model: Model) -> StoredWeights:
    """How matrices are read: those of the layers keep their values if all of them can."""
    groups = _groups(model)
    if model.architecture.merged:
        return _stored_mxfp4(model, groups)
    layers, attention, tables = (_exact(groups[name]) for name in ("layers", "attention", "tables"))
    if layers is None or attention is None:
        layers = attention = None
    elif tables is not None:
        tables = WeightFormat(dtype="int8", group=GROUP)
    kept = {"attention", "layers"} if layers else set()
    tables = tables if layers else None
    kept |= {"tables"} if tables else set()
    rest = set().union(*(kinds for name, kinds in groups.items() if name not in kept))
    return StoredWeights(
        dtype=_float_dtype(rest), quantized=layers, attention=None if attention == layers else attention,
        tables=tables, dequantized=tuple(sorted(rest - FLOATS.keys())),
    )  # fmt: skip


def _float_dtype(kinds: set[str]) -> DType | None:
    """In which matrices of these types are read."""
    floats = kinds & FLOATS.keys()
    if kinds - floats and floats <= {"F16"}:
        return "float16"  # of half the bytes of fp32, with a relative error of 2^-12
    return FLOATS[floats.pop()] if len(floats) == 1 and floats == kinds else "float32" if kinds else None


def _stored_mxfp4(model: Model, groups: Mapping[str, set[str]]) -> StoredWeights:
    """Experts as they are stored, which must be MXFP4; the other matrices are floats."""
    if groups["layers"] != {"MXFP4"}:
        raise ValueError(
            f"{model.header.file}: experts are stored as {', '.join(sorted(groups['layers'])) or 'nothing'}; read of "
            f"{model.architecture.name} is MXFP4"
        )
    rest = groups["attention"] | groups["tables"]
    quantized = WeightFormat(dtype="mxfp4", group=GROUP)
    return StoredWeights(dtype=_float_dtype(rest), quantized=quantized, dequantized=tuple(sorted(rest - FLOATS.keys())))


def _exact(kinds: set[str]) -> WeightFormat | None:
    """The format that holds blocks of these types exactly."""
    if not kinds or not kinds <= EXACT_INT8:
        return None
    return WeightFormat(dtype="int4" if kinds <= EXACT_INT4 else "int8", group=GROUP)


def _names(model: Model) -> dict[str, str]:
    """Names as in safetensors by those of the file; those not known stay as they are."""
    layers = {**_LAYER_NAMES, **model.architecture.layer_names}
    found = {}
    for stored in model.tensors:
        if stored == ROPE_FACTORS:
            continue
        part = _LAYER_TENSOR.fullmatch(stored)
        outer, _, kind = stored.rpartition(".")
        if part is not None and part["part"] in layers:
            found[stored] = f"model.layers.{int(part['layer'])}.{layers[part['part']]}.{part['kind']}"
            if part["part"] == "attn_sinks":
                found[stored] = found[stored].removesuffix(".weight")
        elif outer in _OUTER_NAMES and kind == "weight":
            found[stored] = f"{_OUTER_NAMES[outer]}.{kind}"
        else:
            found[stored] = stored
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor under a name of safetensors: the numbers of a stored one, or its quantized values."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    part: Literal["numbers", "codes", "scales", "shape", "blocks", "exponents"] = "numbers"
    bits: int = 0  # of codes
    expert: int | None = None  # of a stored stack, the only one
    offset: float = 0.0  # what is subtracted
    other: Tensor | None = None  # of merged stacks the one with every second row


def views(path: Path) -> dict[str, View]:
    """Every tensor of a model by the name that safetensors have."""
    return _views(open_model(path))


@lru_cache(maxsize=16)
def _views(model: Model) -> dict[str, View]:
    stored, found = _stored(model), _merged(model)
    offset = model.architecture.norm_offset
    for name, tensor, expert in _tensors(model):
        shape = tensor.shape if expert is None else tensor.shape[1:]
        group = _group_of(name)
        form = stored.tables if group == "tables" else stored.format_of(is_attention=group == "attention")
        form = form if len(shape) == 2 and tensor.kind not in FLOATS else None
        if form is None:
            dtype = tensor.kind if tensor.kind in FLOATS else "F32"
            own_offset = offset if name.endswith("norm.weight") else 0.0
            found[name] = View(tensor=tensor, shape=shape, dtype=dtype, expert=expert, offset=own_offset)
            continue
        rows, columns = shape
        own = {
            "_packed": ("codes", (rows, columns * form.bits // 32), "I32"),
            "_scale": ("scales", (rows, columns // GROUP), "F16"),
            "_shape": ("shape", (2,), "I64"),
        }
        for suffix, (part, size, dtype) in own.items():
            found[name + suffix] = View(
                tensor=tensor, shape=size, dtype=dtype, part=part, bits=form.bits, expert=expert  # type: ignore[arg-type]
            )  # fmt: skip
    return found


def _merged(model: Model) -> dict[str, View]:
    """Stacks of experts that safetensors hold as one tensor, rows of gate and up by turns: MXFP4, and biases."""
    found: dict[str, View] = {}
    for name, parts in model.architecture.merged.items():
        for stored in model.tensors:
            part = _LAYER_TENSOR.fullmatch(stored)
            if part is None or part["part"] != parts[0]:
                continue
            tensors = [model.tensors.get(stored.replace(parts[0], own)) for own in parts]
            first, other = tensors[0], tensors[-1] if len(tensors) > 1 else None
            if first is None or None in tensors or len({(one.shape, one.kind) for one in tensors if one}) > 1:
                raise ValueError(f"{model.header.file}: {stored} and {parts[-1]} must have the same shape and type")
            prefix = f"model.layers.{int(part['layer'])}.mlp.experts.{name}"
            experts, rows, *columns = first.shape
            rows *= len(tensors)
            if part["kind"] == "bias":
                found[f"{prefix}_bias"] = View(tensor=first, shape=(experts, rows), dtype=first.kind, other=other)
                continue
            blocks = (experts, rows, columns[0] // GROUP)
            for suffix, kind, shape in (("_blocks", "blocks", (*blocks, 16)), ("_scales", "exponents", blocks)):
                found[prefix + suffix] = View(tensor=first, shape=shape, dtype="U8", part=kind, other=other)  # type: ignore[arg-type]
    return found


def _tensors(model: Model) -> Iterator[tuple[str, Tensor, int | None]]:
    """Names as in safetensors, and which expert of a stored stack each is."""
    names = model.architecture.experts
    projections = {"ffn_gate_exps": names.gate, "ffn_up_exps": names.up, "ffn_down_exps": names.down}
    for stored, name in _names(model).items():
        tensor, part = model.tensors[stored], _LAYER_TENSOR.fullmatch(stored)
        if part is not None and any(part["part"] in parts for parts in model.architecture.merged.values()):
            continue
        if part is None or part["part"] not in projections or len(tensor.shape) != 3 or part["kind"] != "weight":
            yield name, tensor, None
            continue
        for expert in range(tensor.shape[0]):
            prefix = f"model.layers.{int(part['layer'])}.{names.prefix}.experts.{expert}"
            yield f"{prefix}.{projections[part['part']]}.weight", tensor, expert


_ROWS_AT_A_TIME = 2**20  # numbers that are dequantized at once


class Shard:
    """One mapped file, read as ``safetensors.safe_open`` is; numbers are numpy's, bf16 as uint16."""

    def __init__(self, file: Path) -> None:
        self.file, self._views = file, views(first_file(file))
        self._data: dict[Path, np.ndarray[Any, Any]] = {}

    def offset_keys(self) -> list[str]:
        """In the order of the file."""
        own = (name for name, view in self._views.items() if view.tensor.file == self.file)
        return sorted(own, key=lambda name: self._views[name].tensor.start)

    def read(self, name: str, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """A slice of a tensor."""
        import numpy

        view = self._views[name]
        tensor = view.tensor
        if view.part == "shape":
            shape = tensor.shape if view.expert is None else tensor.shape[1:]
            return numpy.array(shape, dtype=numpy.int64)[place]
        if view.other is not None or view.part in ("blocks", "exponents"):
            return self._read_merged(view, place)
        data = self._bytes(tensor)
        data = data if view.expert is None else data[view.expert]
        *rows, columns = place
        data = data[tuple(rows)]
        if view.part == "numbers":
            numbers = numbers_of(data, tensor.kind)[..., columns]
            return numbers - numpy.float32(view.offset) if view.offset else numbers
        scales, values = blocks_of(data, tensor.kind)
        if view.part == "scales":
            return scales[..., columns]
        codes = packed_codes(values, view.bits)
        return codes.reshape(*data.shape[:-1], -1).view(numpy.int32)[..., columns]

    def _bytes(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Of a tensor, row by row."""
        import numpy

        if tensor.file not in self._data:
            self._data[tensor.file] = numpy.memmap(tensor.file, dtype=numpy.uint8, mode="c")
        own = self._data[tensor.file][tensor.start : tensor.start + tensor.num_bytes]
        return own.reshape(*tensor.shape[:-1], -1)

    def _read_merged(self, view: View, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Of the experts of a slice all rows, then the slice of each."""
        import numpy

        experts, *rest = place
        tensors = [view.tensor, *([] if view.other is None else [view.other])]
        data = [self._bytes(tensor)[experts] for tensor in tensors]
        if view.part == "numbers":
            biases = numpy.stack([numbers_of(own, view.tensor.kind) for own in data], -1)
            return biases.reshape(len(biases), -1)[:, rest[0]]
        rows = numpy.stack(data, 2).reshape(len(data[0]), -1, view.shape[2], 17)  # an exponent, 32 numbers
        if view.part == "exponents":
            return numpy.ascontiguousarray(rows[..., 0][(slice(None), *rest)])
        nibbles = rows[..., 1:][(slice(None), *rest[:2])]
        codes = numpy.concatenate((nibbles & 15, nibbles >> 4), -1)
        return codes[..., ::2] | codes[..., 1::2] << 4


def numbers_of(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Rows of bytes ``[..., bytes]`` as floats; bf16 as uint16."""
    import numpy

    if kind in FLOATS:
        dtypes = {"F32": numpy.float32, "F16": numpy.float16, "BF16": numpy.uint16}
        return numpy.ascontiguousarray(data).view(dtypes[kind])
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    own = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[own]
    rows = data.reshape(-1, data.shape[-1])
    columns = data.shape[-1] // block_bytes * block
    out = numpy.empty((len(rows), columns), dtype=numpy.float32)
    step = max(_ROWS_AT_A_TIME // columns, 1)
    with numpy.errstate(all="ignore"):  # what is not finite is refused when all of it is read
        for start in range(0, len(rows), step):
            out[start : start + step] = dequantize(numpy.ascontiguousarray(rows[start : start + step]), own)
    return out.reshape(*data.shape[:-1], columns)


# Values of IQ4_NL by their code.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def blocks_of(data: np.ndarray[Any, Any], kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scales ``[..., n]`` fp16 and whole numbers ``[..., n, 32]`` int8 of rows of n blocks."""
    import numpy

    size = {"Q8_0": 34, "Q4_0": 18, "IQ4_NL": 18, "Q5_0": 22}[kind]
    blocks = numpy.ascontiguousarray(data).reshape(*data.shape[:-1], -1, size)
    scales = numpy.ascontiguousarray(blocks[..., :2]).view(numpy.float16)[..., 0]
    rest = blocks[..., 2:]
    if kind == "Q8_0":
        return scales, rest.view(numpy.int8)
    nibbles = rest[..., -16:]  # the first half of the numbers in the low halves of the bytes
    codes = numpy.concatenate((nibbles & 15, nibbles >> 4), -1)
    if kind == "IQ4_NL":
        return scales, numpy.array(_IQ4_NL, dtype=numpy.int8)[codes]
    if kind == "Q5_0":
        high = numpy.unpackbits(rest[..., :4], axis=-1, bitorder="little")
        return scales, (codes | high << 4).astype(numpy.int8) - numpy.int8(16)
    return scales, codes.astype(numpy.int8) - numpy.int8(8)


def packed_codes(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Whole numbers as unsigned codes in the order of ``kernels/groups.py``, uint8."""
    import numpy

    codes = (values.astype(numpy.int16) + 2 ** (bits - 1)).astype(numpy.uint8)
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
