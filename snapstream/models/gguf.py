"""GGUF files as models: their tensors under the names of safetensors. No torch.

Quantized blocks that integers in groups of 32 hold exactly keep their values: Q4_0 as int4; Q8_0, Q5_0, IQ4_NL and Q4_0
beside them as int8; Q4_1 as uint4, which has minimums; K-quants and IQ types as they are. They appear here as
``pack-quantized`` tensors (``checkpoint.py``), experts of gpt-oss as MXFP4. Other types are dequantized, by the
``gguf`` package, whose arithmetic is that of ggml. Files are mapped, and read slice by slice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from snapstream.config import DType, ModelConfig, RopeConfig, StoredWeights, WeightFormat
from snapstream.config.values import num_cores
from snapstream.config.weights import IQ4_NUMBERS, IQ_NUMBERS, IQ_UNITS, K_GROUPS, stack_name
from snapstream.models.gguf_architectures import open_model
from snapstream.models.gguf_header import FLOATS, Tensor, first_file
from snapstream.models.gguf_model import Model
from snapstream.models.gguf_settings import ROPE_TABLES, settings_of

if TYPE_CHECKING:
    import numpy as np

IN_INT4, IN_INT8 = {"Q4_0"}, {"Q4_0", "Q5_0", "Q8_0", "IQ4_NL"}
GROUP = 32
_INT8, _UINT4 = WeightFormat(dtype="int8", group=GROUP), WeightFormat(dtype="uint4", group=GROUP)
OWN = {  # formats that hold the integers of a type
    "Q4_0": WeightFormat(dtype="int4", group=GROUP), "Q4_1": _UINT4, "Q5_0": _INT8, "Q8_0": _INT8, "IQ4_NL": _INT8,
    **{dtype.upper(): WeightFormat(dtype=dtype, group=group) for dtype, group in K_GROUPS.items()},  # type: ignore[arg-type]
}  # fmt: skip
_QKV = "self_attn.qkv_proj"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": _QKV, "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "token_embd_norm": "model.embedding_norm", "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_STREAMS = {"altup_proj.weight": "altup_projections", "altup_unembd_proj.weight": "altup_unembed_projections"}
TABLES = ("model.embed_tokens.weight", "model.embeddings.weight", "lm_head.weight",
          "model.embed_tokens_per_layer.weight")  # fmt: skip
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>[a-z0-9_.]+?)(?:\.(?P<kind>weight|bias))?")
# Matrices in the dtype of the computation, whatever the type of the others.
_DENSE = (".gate.weight", ".router.weight", ".router.layer.weight", ".router.proj.weight", ".modality_router.weight",
          ".prediction_coefs.weight", ".correction_coefs.weight", ".shared_expert_gate.weight", "conv1d.weight",
          ".conv.conv.weight", ".kv_b_proj.weight", ".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight",
          "norm.weight", ".b_proj.weight", ".f_b_proj.weight", ".g_b_proj.weight")  # fmt: skip


def config_of(config: ModelConfig, path: Path) -> ModelConfig:
    """``config``, that of ``settings_of``, with what files of this kind store differently."""
    model = open_model(path)
    is_turned = "rope.dimension_sections" in model.own  # of pictures; GLM-4's rows are halves there
    rope: RopeConfig = replace(config.rope, is_interleaved=model.architecture.is_interleaved and not is_turned)
    is_fused = config.has_fused_gate_up and not model.architecture.has_split_gates
    has_qkv = model.architecture.layer_names.get("attn_qkv", _QKV) == _QKV and model.has("attn_qkv.weight")
    return replace(config, rope=rope, stored=_stored(model), has_fused_gate_up=is_fused, has_fused_qkv=has_qkv)


def _groups(model: Model) -> dict[str, set[str]]:
    """Tensor types of the matrices: of attention, of the rest of the layers, and of the tables."""
    found: dict[str, set[str]] = {"attention": set(), "layers": set(), "tables": set()}
    for stored, name in _names(model).items():
        tensor = model.tensors[stored]
        if _is_matrix(name, tensor):
            found[_group_of(name)].add(tensor.kind)
    return found


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether it has a format like the matrices of layers, or is a table."""
    is_float = name.endswith((*_DENSE, ".attn_k_b.weight", ".attn_v_b.weight")) or ".indexer." in name
    return len(tensor.shape) > 1 and name.endswith("weight") and not is_float


def _group_of(name: str) -> str:
    is_outside = name in TABLES or name.startswith(("altup_", "model.altup_"))
    return "tables" if is_outside else "attention" if ".self_attn." in name else "layers"


def _stored(model: Model) -> StoredWeights:
    """How matrices are read: those of the layers keep their values in one format if all of them can, and so do the
    tables; else those that can keep their values each have one of their own.
    """
    groups = _groups(model)
    if model.architecture.merged:
        return _stored_mxfp4(model, groups)
    layers, attention, tables = (_integers(groups[name]) for name in ("layers", "attention", "tables"))
    if layers is None or attention is None or not _keeps_groups(model):
        layers = attention = None
    tables = _finer(tables)
    kept = {"attention", "layers"} if layers else set()
    kept |= {"tables"} if tables else set()
    rest = set().union(*(kinds for name, kinds in groups.items() if name not in kept))
    own, in_own = _own_formats(model, groups.keys() - kept)
    return StoredWeights(
        own=own, in_own=in_own, dtype=_float_dtype(rest), quantized=layers,
        attention=None if attention == layers else attention, tables=tables,
        dequantized=tuple(sorted(rest - FLOATS.keys())), has_float_dense=layers is not None,
    )  # fmt: skip


def _own_formats(
    model: Model, groups: Collection[str]
) -> tuple[tuple[tuple[WeightFormat, frozenset[str]], ...], tuple[str, ...]]:
    """``StoredWeights.own`` of the matrices of these ``groups``, and its ``in_own``."""
    own, others = _own_types(model, groups)
    by_form: dict[WeightFormat, set[str]] = {}
    for name, kind in own.items():
        form = _UINT4 if kind == "Q4_K" and _moves_columns(model, name) else OWN[kind]
        by_form.setdefault(form, set()).add(name)
    return tuple((form, frozenset(names)) for form, names in by_form.items()), tuple(sorted({*own.values()} - others))


def _moves_columns(model: Model, name: str) -> bool:
    return _orders(model).get(name.split(".", 3)[-1], (None, None))[1] is not None


def _own_types(model: Model, groups: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """Types of the matrices of these ``groups`` that integers hold, by ``stack_name``; and types of the others.

    Others are also parts of what is one matrix here, of too many types (``tensors.in_own_formats``): gate and up must
    have one, q, k and v two of which one follows the other.
    """
    kinds: dict[str, set[str]] = {}
    for name, tensors, _, _ in _tensors(model):
        if _is_matrix(name, tensors[0]) and _group_of(name) in groups:
            kinds.setdefault(stack_name(name), set()).update(tensor.kind for tensor in tensors)
    parts: dict[str, list[str]] = {}  # by the matrix
    for name in kinds if _keeps_groups(model) else ():
        parts.setdefault(_matrix_of(model, name), []).append(name)
    found: dict[str, str] = {}
    for matrix, names in parts.items():
        names.sort(key=lambda name: "qkv".find(name.rpartition("_proj")[0][-1:]))
        changes = sum(kinds[one] != kinds[next_one] for one, next_one in pairwise(names))
        if changes <= matrix.endswith(".qkv"):
            found |= {name: next(iter(kinds[name])) for name in names if len(kinds[name]) == 1}
    found = {
        name: kind
        for name, kind in found.items()
        if kind in OWN and (kind == "Q4_K" or not (OWN[kind].is_k_quant and _moves_columns(model, name)))
    }
    return found, set().union(*(own for name, own in kinds.items() if name not in found))


def _matrix_of(model: Model, name: str) -> str:
    """A name for the matrix of which a tensor of the checkpoint is a part."""
    experts, whole = model.architecture.experts, name.removesuffix(".weight")
    for gate, up in (
        ("gate_proj", "up_proj"), ("w1", "w3"), (experts.gate, experts.up), ("in_proj_qkv", "in_proj_z")
    ):  # fmt: skip
        if whole.endswith((f".{gate}", f".{up}")):
            whole = f"{whole.rpartition('.')[0]}.gate_up"
    if "attention.kv_lora_rank" in model.own:  # q, k and v are those of delta attention, and gates go with queries
        return re.sub(r"self_attn\.([qkvfg]|[fg]_a|q_b)_proj$", "self_attn.delta_in", whole)
    return re.sub(r"(self_attn|mixer)\.[qkv]_proj$", r"\1.qkv", whole)


def _keeps_groups(model: Model) -> bool:
    """Whether columns that change their order move as whole groups."""
    orders = (columns for _, columns in _orders(model).values() if columns is not None)
    return all(
        columns[first] % GROUP == 0 and columns[at] == columns[first] + at - first
        for columns in orders
        for first in range(0, len(columns), GROUP)
        for at in range(first, min(first + GROUP, len(columns)))
    )


def _float_dtype(kinds: set[str]) -> DType | None:
    """In which matrices of these types are read."""
    floats = kinds & FLOATS.keys()
    if kinds - floats and floats <= {"F16"}:
        return "float16"  # of half the bytes of fp32, with a relative error of 2^-12
    return FLOATS[floats.pop()] if len(floats) == 1 and floats == kinds else "float32" if kinds else None


def _stored_mxfp4(model: Model, groups: Mapping[str, set[str]]) -> StoredWeights:
    """Experts as they are stored, which must be MXFP4; attention and tables as integers, or floats."""
    if groups["layers"] != {"MXFP4"}:
        raise ValueError(
            f"{model.header.file}: experts are stored as {', '.join(sorted(groups['layers'])) or 'nothing'}; read of "
            f"{model.architecture.name} is MXFP4"
        )
    attention, tables = (_integers(groups[name]) for name in ("attention", "tables"))
    rest = (set() if attention else groups["attention"]) | (set() if tables else groups["tables"])
    own, in_own = _own_formats(model, () if tables else ("tables",))
    return StoredWeights(
        own=own, in_own=in_own, dtype=_float_dtype(rest), quantized=WeightFormat(dtype="mxfp4", group=GROUP),
        attention=attention, tables=_finer(tables), dequantized=tuple(sorted(rest - FLOATS.keys())),
    )  # fmt: skip


def _integers(kinds: set[str]) -> WeightFormat | None:
    """The format that holds the integers of blocks of these types."""
    if not kinds or not kinds <= IN_INT8:
        return None
    return WeightFormat(dtype="int4" if kinds <= IN_INT4 else "int8", group=GROUP)


def _finer(tables: WeightFormat | None) -> WeightFormat | None:
    """Of an embedding, which is not kept in four bits."""
    return replace(tables, dtype="int8") if tables is not None and tables.dtype == "int4" else tables


def _names(model: Model) -> dict[str, str]:
    """Names as in safetensors by those of the file; those not known stay as they are."""
    layers = {**_LAYER_NAMES, **model.architecture.layer_names}
    outside = {**_OUTER_NAMES, **model.architecture.outer_names}
    predicting = range(model.num_layers, model.own["block_count"])  # several tokens at once: not used here
    found = {}
    for stored in model.tensors:
        if stored in ROPE_TABLES:
            continue
        part = _LAYER_TENSOR.fullmatch(stored)
        if part is not None and int(part["layer"]) in predicting:
            continue
        outer, _, kind = stored.rpartition(".")
        prefix = "" if part is None else f"model.layers.{int(part['layer'])}."
        if part is not None and (own := stored.split(".", 2)[2]) in layers:
            if layers[own]:
                found[stored] = prefix + layers[own]
        elif part is not None and part["part"] in layers and part["kind"]:
            found[stored] = f"{prefix}{layers[part['part']]}.{part['kind']}"
        elif outer in outside and kind in ("weight", "bias"):
            found[stored] = f"{outside[outer]}.{kind}"
        else:
            found[stored] = stored
    return found


Order = Sequence[int] | None
Kind = Literal["numbers", "vector", "number", "latents", "codes", "scales", "shape", "blocks", "exponents", "biases"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """A tensor under a name of safetensors: the numbers of stored ones, or their quantized values."""

    tensors: tuple[Tensor, ...]  # rows of one after those of the other
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    part: Kind = "numbers"
    form: WeightFormat | None = None  # of codes and scales
    expert: int | None = None  # of a stored stack, the only one
    offset: float = 0.0  # what is subtracted
    log_sign: float = 0.0  # the logarithm of numbers of that sign
    number: float = 0.0  # for the part "number", of the metadata
    rows: Order = None  # the stored row of each; None: the same order
    columns: Order = None
    matrix: tuple[int, ...] = ()  # for the part "shape"

    @property
    def tensor(self) -> Tensor:
        """The first."""
        return self.tensors[0]


def views(path: Path) -> dict[str, View]:
    """Every tensor of a model by the name that safetensors have."""
    return _views(open_model(path))


@lru_cache(maxsize=16)
def _views(model: Model) -> dict[str, View]:
    stored, found, orders = _stored(model), _merged(model) | _numbers(model), _orders(model)
    for name, tensors, expert, rows in _tensors(model):
        tensor, (own_rows, columns) = tensors[0], orders.get(name.split(".", 3)[-1], (None, None))
        rows = own_rows if rows is None else rows
        numbers = View(tensors=tensors, shape=(), dtype="F32", expert=expert, rows=rows, columns=columns)
        if len(tensors) > 1 and name.endswith(".kv_b_proj.weight"):
            keys, values = (one.shape for one in tensors)
            found[name] = replace(numbers, shape=(keys[0] * (keys[2] + values[1]), values[2]), part="latents")
            continue
        if len(tensor.shape) == 1 or not name.endswith(".weight") or name.endswith(_VECTORS):
            found[name] = replace(_vector(model, name, tensor), rows=rows)
            continue
        shape = tensor.shape[1:] if expert is not None else tensor.shape
        count = len(rows) if rows is not None else sum(one.shape[-2] for one in tensors)
        shape = (*shape[:-2], count, shape[-1])
        group = _group_of(name)
        form = stored.own_format(name)
        form = form or (stored.tables if group == "tables" else stored.format_of(is_attention=group == "attention"))
        kinds = {one.kind for one in tensors}
        if form is None or len(shape) != 2 or kinds & FLOATS.keys() or name.endswith(_DENSE):
            dtype = tensor.kind if kinds <= {tensor.kind} & FLOATS.keys() else "F32"
            found[name] = replace(numbers, shape=shape, dtype=dtype)
            continue
        own = {
            "_packed": ("codes", (count, shape[1] * form.bits // 32), "I32"),
            "_scale": (
                "scales", (count, *form.scales_shape(shape[1])),
                "I32" if form.is_uint4 else "U8" if form.is_k_quant else "F16",
            ),
            "_shape": ("shape", (2,), "I64"),
        }  # fmt: skip
        for suffix, (part, size, dtype) in own.items():
            found[name + suffix] = replace(
                numbers, shape=size, dtype=dtype, part=part, form=form, matrix=shape,  # type: ignore[arg-type]
            )  # fmt: skip
    return found


_VECTORS = (".norm.weight", "conv1d.weight", ".conv.conv.weight", ".shared_expert_gate.weight")


def _vector(model: Model, name: str, tensor: Tensor) -> View:
    """Norms, biases, kernels of convolutions: read whole, in the shape that safetensors have."""
    size, offset, sign = prod(tensor.shape), 0.0, model.architecture.log_sign if name.endswith(".A_log") else 0.0
    is_plain = name == "model.norm.weight" and model.architecture.has_plain_final_norm
    if name.endswith("norm.weight") and ".linear_attn." not in name and not is_plain:
        offset = model.architecture.norm_offset
    shape: tuple[int, ...] = (size,)
    if name.endswith(("conv1d.weight", ".conv.conv.weight")):
        shape = (size // tensor.shape[-1], 1, tensor.shape[-1])
    elif name.endswith(".self_attn.A_log") and model.has("ssm_f_b.weight"):
        shape = (1, 1, size, 1)
    elif name.endswith((".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")):
        shape = (1, size)
    dtype = tensor.kind if tensor.kind in FLOATS and not (offset or sign) else "F32"
    return View(tensors=(tensor,), shape=shape, dtype=dtype, part="vector", offset=offset, log_sign=sign)


def _merged(model: Model) -> dict[str, View]:
    """Stacks of experts that safetensors hold as one tensor, rows of gate and up by turns: MXFP4, and biases."""
    found: dict[str, View] = {}
    for name, parts in model.architecture.merged.items():
        for stored in model.tensors:
            part = _LAYER_TENSOR.fullmatch(stored)
            if part is None or part["part"] != parts[0]:
                continue
            tensors = tuple(model.tensors[own] for own in (stored.replace(parts[0], part) for part in parts)
                            if own in model.tensors)  # fmt: skip
            first, count = tensors[0], len(tensors)
            if count < len(parts) or len({(one.shape, one.kind) for one in tensors}) > 1:
                raise ValueError(f"{model.header.file}: {stored} and {parts[-1]} must have the same shape and type")
            prefix = f"model.layers.{int(part['layer'])}.mlp.experts.{name}"
            experts, rows, *columns = first.shape
            turns = tuple(which * rows + row for row in range(rows) for which in range(count)) if count > 1 else None
            own = View(tensors=tensors, shape=(experts, rows * count), dtype=first.kind, rows=turns)
            if part["kind"] == "bias":
                found[f"{prefix}_bias"] = replace(own, part="biases")
                continue
            blocks = (experts, rows * count, columns[0] // GROUP)
            found[f"{prefix}_blocks"] = replace(own, part="blocks", shape=(*blocks, 16), dtype="U8")
            found[f"{prefix}_scales"] = replace(own, part="exponents", shape=blocks, dtype="U8")
    return found


def _numbers(model: Model) -> dict[str, View]:
    """Tensors of a number of the metadata for each layer."""
    first, found = next(iter(model.tensors.values())), {}
    for key, name in model.architecture.numbers.items():
        plain = View(tensors=(first,), shape=(1,) if ".alpha_" in name else (), dtype="F32", part="number")
        for layer, number in enumerate(model.header.numbers(key)[: model.num_layers]):
            found[f"model.layers.{layer}.{name}"] = replace(plain, number=number)
    return found


def _tensors(model: Model) -> Iterator[tuple[str, tuple[Tensor, ...], int | None, Order]]:
    """Names as in safetensors, whose rows each has, which expert of a stored stack it is, and which rows of it."""
    names, merged, joined = model.architecture.experts, model.architecture.merged, model.architecture.joined
    projections = {"ffn_gate_exps": names.gate, "ffn_up_exps": names.up, "ffn_down_exps": names.down}
    pairs = {"attn_k_b": ("attn_v_b", "self_attn.kv_b_proj.weight")}
    if model.architecture.name == "Qwen3NextForCausalLM":
        pairs["attn_qkv"] = ("attn_gate", "linear_attn.in_proj_qkvz.weight")
    seconds = [second for second, _ in pairs.values()] + [part for parts in merged.values() for part in parts]
    for stored, name in _names(model).items():
        tensor, part = model.tensors[stored], _LAYER_TENSOR.fullmatch(stored)
        own = "" if part is None else part["part"]
        prefix = "" if part is None else f"model.layers.{int(part['layer'])}"
        if own in pairs:
            second, both = pairs[own]
            yield f"{prefix}.{both}", (tensor, _other(model, stored, stored.replace(own, second))), None, None
        elif own in seconds:
            continue
        elif stored in _STREAMS and len(tensor.shape) == 3:
            for stream in range(tensor.shape[0]):
                yield f"model.{_STREAMS[stored]}.{stream}.weight", (tensor,), stream, None
        elif own in joined and stored.endswith(".weight"):
            rows = tensor.shape[0] // len(joined[own])
            for at, part_name in enumerate(joined[own]):
                yield f"{prefix}.{part_name}.weight", (tensor,), None, range(at * rows, (at + 1) * rows)
        elif own not in (*projections, "ffn_gate_up_exps") or len(tensor.shape) != 3 or not stored.endswith(".weight"):
            yield name, (tensor,), None, None
        else:
            experts, rows, _ = tensor.shape
            places: dict[str, Order] = {projections.get(own, ""): None}
            if own == "ffn_gate_up_exps":
                places = {names.gate: range(rows // 2), names.up: range(rows // 2, rows)}
            for expert in range(experts):
                for projection, place in places.items():
                    yield f"{prefix}.{names.prefix}.experts.{expert}.{projection}.weight", (tensor,), expert, place


def _other(model: Model, stored: str, name: str) -> Tensor:
    """The tensor beside ``stored``, of as many dimensions."""
    first, found = model.tensors[stored], model.tensors.get(name)
    if found is None or len(found.shape) != len(first.shape):
        raise ValueError(f"{first.file}: {stored} needs {name}, of {len(first.shape)} dimensions")
    return found


@lru_cache(maxsize=16)
def _orders(model: Model) -> dict[str, tuple[Order, Order]]:
    """The stored row, and column, of each one of safetensors, by what follows the layer in a name: DeltaNet's heads."""
    architecture, own = model.architecture, model.own
    joined_rows = {tensor.shape[0] for name, tensor in model.tensors.items() if name.endswith(".attn_qkv.weight")}
    if "ssm.time_step_rank" not in own or not joined_rows:
        return {}
    settings = settings_of(model.header.file)
    keys, values, size, value_size = (
        settings[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    each, first = values // keys, 2 * keys * size
    if joined_rows != {first + values * value_size}:
        raise ValueError(
            f"{model.header.file}: attn_qkv.weight has {min(joined_rows):,} rows; the settings ask for "
            f"{first + values * value_size:,}"
        )
    if not architecture.has_tiled_values:
        joined = [
            start + head * length + i
            for head in range(keys)
            for start, length in (
                (0, size), (keys * size, size), (first, each * value_size),
                (first + values * value_size, each * value_size),
            )
            for i in range(length)
        ]  # fmt: skip
        return {"linear_attn.in_proj_qkvz.weight": (joined, None)}
    heads = [at % each * keys + at // each for at in range(values)]
    numbers = [head * value_size + i for head in heads for i in range(value_size)]
    channels = [*range(first), *(first + number for number in numbers)]
    orders: dict[str, tuple[Order, Order]] = {
        "in_proj_qkv.weight": (channels, None), "conv1d.weight": (channels, None), "in_proj_z.weight": (numbers, None),
        "in_proj_b.weight": (heads, None), "in_proj_a.weight": (heads, None), "A_log": (heads, None),
        "dt_bias": (heads, None), "out_proj.weight": (None, numbers),
    }  # fmt: skip
    return {f"linear_attn.{name}": order for name, order in orders.items()} if each > 1 else {}


_ROWS_AT_A_TIME = 2**20  # numbers that are dequantized at once
_BYTES_AT_A_TIME = 2**17  # of blocks whose integers are taken apart at once
_MOST_THREADS = 8  # that do so: between two operations of numpy each needs the interpreter


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
        import numpy

        view = self._views[name]
        kind = view.tensor.kind
        match view.part:
            case "shape":
                return numpy.array(view.matrix, dtype=numpy.int64)[place]
            case "vector":
                return self._vector(view)[place]
            case "number":
                return numpy.full(view.shape, view.number, numpy.float32)  # ranks do not divide it
            case "latents":
                return self._latents(view)[place]
            case "biases":
                return numbers_of(self._rows(view, place), kind)[..., 0]
            case "blocks" | "exponents":
                return self._mxfp4(view, place)
        if len({tensor.kind for tensor in view.tensors}) == 1:
            columns = place[len(view.shape) - 1 :] if view.form is None else place[1:]
            found = self._decoded(view, self._rows(view, place[: -len(columns)]), kind)
            return found[(slice(None),) * (found.ndim - len(columns)) + columns]
        joined = numpy.concatenate([self._decoded(view, self._bytes(own), own.kind) for own in view.tensors])
        return (joined if view.rows is None else joined[numpy.array(view.rows)])[place]

    def _decoded(self, view: View, data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
        """Numbers, scales or codes of rows of bytes; columns in the order of ``view``."""
        import numpy

        if view.part == "numbers":
            numbers = _widened(numbers_of(data, kind)) if view.dtype == "F32" else numbers_of(data, kind)
            return numbers if view.columns is None else numbers[..., view.columns]
        if not len(data):  # the last of several ranks has padding alone
            return self._decoded(view, numpy.zeros((1, data.shape[-1]), numpy.uint8), kind)[:0]
        rows = data.reshape(-1, data.shape[-1])
        step = max(_BYTES_AT_A_TIME // rows.shape[1], 1)
        chunks = [rows[start : start + step] for start in range(0, len(rows), step)]
        with ThreadPoolExecutor(min(num_cores(), _MOST_THREADS, len(chunks))) as pool:
            parts = [*pool.map(partial(self._integers, view, kind), chunks)]
        return numpy.concatenate(parts).reshape(*data.shape[:-1], *parts[0].shape[1:])

    @staticmethod
    def _integers(view: View, kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Scales or codes of ``rows [n, bytes]``, few enough to stay in a cache."""
        import numpy

        assert view.form is not None
        order: Any = slice(None)
        if view.columns is not None:  # whole groups change their places
            order = numpy.array(view.columns)[:: view.form.group] // view.form.group
        if view.part == "scales":
            scales = scales_of(rows, kind)
            return (in_groups(scales) if OWN[kind].is_k_quant and view.form.is_uint4 else scales)[:, order]
        values = values_of(rows, kind)[:, order]
        return packed_codes(values, view.form.bits).reshape(len(rows), -1).view(numpy.int32)

    def _bytes(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Of a tensor, row by row."""
        import numpy

        if tensor.file not in self._data:
            self._data[tensor.file] = numpy.memmap(tensor.file, dtype=numpy.uint8, mode="c")
        own = self._data[tensor.file][tensor.start : tensor.start + tensor.num_bytes]
        return own.reshape(*tensor.shape[:-1], -1)

    def _rows(self, view: View, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Bytes of the rows at ``place``, which counts in the order of ``view.rows``."""
        import numpy

        data = [self._bytes(tensor) for tensor in view.tensors]
        if view.part == "biases":
            data = [own.reshape(*view.tensor.shape, -1) for own in data]
        *stacks, rows = place
        data = [own if view.expert is None else own[view.expert] for own in data]
        if view.rows is None and len(data) == 1:
            return data[0][place]
        joined = (
            numpy.concatenate([own[tuple(stacks)] for own in data], -2) if len(data) > 1 else data[0][tuple(stacks)]
        )
        return joined[..., rows, :] if view.rows is None else joined[..., numpy.array(view.rows)[rows], :]

    def _vector(self, view: View) -> np.ndarray[Any, Any]:
        import numpy

        numbers = numbers_of(self._bytes(view.tensor).reshape(-1), view.tensor.kind)
        numbers = _widened(numbers) if view.dtype == "F32" else numbers
        if view.log_sign:
            with numpy.errstate(all="ignore"):  # what is not finite is refused when all of it is read
                numbers = numpy.log(view.log_sign * numbers)
        if view.rows is not None:
            numbers = numbers.reshape(len(view.rows), -1)[numpy.array(view.rows)]
        return numbers.reshape(view.shape) - numpy.float32(view.offset) if view.offset else numbers.reshape(view.shape)

    def _latents(self, view: View) -> np.ndarray[Any, Any]:
        """Rows that expand a latent, head after head: to a key, of which the file has columns, and to a value."""
        import numpy

        keys, values = (_widened(numbers_of(self._bytes(tensor), tensor.kind)) for tensor in view.tensors)
        return numpy.concatenate((keys.swapaxes(1, 2), values), 1).reshape(view.shape)

    def _mxfp4(self, view: View, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Exponents, or codes in the order of safetensors; a block is an exponent and 32 numbers."""
        import numpy

        data = self._rows(view, place[:2])
        blocks = data.reshape(*data.shape[:2], -1, 17)
        if view.part == "exponents":
            return numpy.ascontiguousarray(blocks[..., 0][..., place[2]])
        nibbles = blocks[..., place[2], 1:]
        codes = numpy.concatenate((nibbles & 15, nibbles >> 4), -1)
        return (codes[..., ::2] | codes[..., 1::2] << 4)[..., place[3]]


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


def _widened(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As fp32; uint16 is bf16."""
    import numpy

    if numbers.dtype == numpy.uint16:
        return (numbers.astype(numpy.uint32) << 16).view(numpy.float32)
    return numbers.astype(numpy.float32, copy=False)


def scales_of(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Scales of rows of bytes as formats of ``kernels/groups.py`` have them: ``[..., n]`` of n groups, of K-quants and
    IQ types ``[..., n, bytes]`` uint8 of n blocks of 256 numbers.
    """
    import numpy

    blocks, form = _blocks(data, kind), OWN[kind]
    if not form.is_k_quant:
        heads = numpy.ascontiguousarray(blocks[..., : form.scale_bytes])
        found: np.ndarray[Any, Any] = heads.view(numpy.int32 if form.is_uint4 else numpy.float16)[..., 0]
        return found
    factors = blocks[..., : form.factor_bytes]
    match kind:
        case "Q2_K":
            scales, factors = blocks[..., :16], blocks[..., 80:] ^ numpy.array((0, 0, 0, 128), numpy.uint8)
        case "Q3_K":
            factors = blocks[..., 108:]
            scales = (_bits(blocks[..., 96:104], 8, 4) | _bits(blocks[..., 104:108], 4, 2) << 4) - numpy.uint8(32)
        case "Q4_K" | "Q5_K":  # of groups 0 to 3: scales, minimums; of the others both
            first, second, last = numpy.split(blocks[..., 4:16], 3, -1)
            minimums = numpy.concatenate((second & 63, last >> 4 | second >> 6 << 4), -1)
            scales = numpy.concatenate((first & 63, last & 15 | first >> 6 << 4, _negative(minimums)), -1)
        case "Q6_K":
            scales, factors = blocks[..., 192:208], blocks[..., 208:]
        case "IQ4_XS":
            scales = (_bits(blocks[..., 4:8], 1, 4) | _bits(blocks[..., 2:4], 1, 2) << 4) - numpy.uint8(32)
        case "IQ2_XXS" | "IQ3_XXS":  # the last four bits of every eight, or four, bytes
            scales = ((blocks[..., 9::8] if kind == "IQ2_XXS" else blocks[..., 69::4]) >> 4) * 2 + numpy.uint8(1)
        case _:
            scales = _bits(blocks[..., -form.block // form.group // 2 :], 1, 4) * 2 + numpy.uint8(1)
    return numpy.concatenate((factors, scales), -1)


def values_of(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Whole numbers ``[..., n, group]`` int8 of rows of n groups. The least is code 0: of Q4_1 -8."""
    import numpy

    blocks, form = _blocks(data, kind), OWN[kind]
    least = 16 if kind == "Q5_0" else 2 ** (form.bits - 1)
    match kind:
        case "Q8_0":
            values: np.ndarray[Any, Any] = blocks[..., 2:].view(numpy.int8)
            return values
        case "Q4_0" | "Q4_1":
            codes = _bits(blocks[..., -16:], 16, 4)
        case "Q5_0":
            codes = _bits(blocks[..., 6:], 16, 4) | _bits(blocks[..., 2:6], 1, 1) << 4
        case "IQ4_NL":
            return numpy.array(IQ4_NUMBERS, dtype=numpy.int8)[_bits(blocks[..., 2:], 16, 4)]
        case "Q2_K":
            codes = _bits(blocks[..., 16:80], 32, 2)
        case "Q3_K":  # a third bit is not set where 4 is subtracted
            codes = _bits(blocks[..., 32:96], 32, 2) | _bits(blocks[..., :32], 32, 1) << 2
        case "Q4_K":
            codes = _bits(blocks[..., 16:], 32, 4)
        case "Q5_K":
            codes = _bits(blocks[..., 48:], 32, 4) | _bits(blocks[..., 16:48], 32, 1) << 4
        case "Q6_K":
            codes = _bits(blocks[..., :128], 64, 4) | _bits(blocks[..., 128:192], 32, 2) << 4
        case "IQ4_XS":
            codes = _bits(blocks[..., 8:], 16, 4)
        case _:
            codes = _places(blocks, kind)
    return codes.reshape(*data.shape[:-1], -1, form.group).view(numpy.int8) - numpy.int8(least)


def _places(blocks: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Codes of an IQ type of two or three bits: numbers of its reference, divided by their scales."""
    import numpy

    form, plain = OWN[kind], blocks.copy()
    plain[..., :2] = numpy.ones(1, numpy.float16).view(numpy.uint8)
    scales = scales_of(plain, kind)[..., 0, form.factor_bytes :] * numpy.float32(IQ_UNITS[form.dtype])
    numbers = numbers_of(plain, kind).reshape(*scales.shape, form.group) / scales[..., None]
    places, table = numpy.zeros(256, numpy.uint8), numpy.array(IQ_NUMBERS[form.dtype], numpy.int8)
    places[table.view(numpy.uint8)] = numpy.arange(len(table))
    return places[numbers.astype(numpy.int8).view(numpy.uint8)]


def _blocks(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Rows of bytes as blocks ``[..., n, bytes]``."""
    import numpy
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return numpy.ascontiguousarray(data).reshape(*data.shape[:-1], -1, size)


def _bits(data: np.ndarray[Any, Any], length: int, bits: int) -> np.ndarray[Any, Any]:
    """Numbers of so many bits ``[..., n]``, those of the lowest bits of ``length`` bytes before those of the next."""
    import numpy

    runs = data.reshape(*data.shape[:-1], -1, length)
    found = numpy.empty((*runs.shape[:-1], 8 // bits, length), numpy.uint8)
    for index in range(8 // bits):
        found[..., index, :] = runs >> numpy.uint8(index * bits) & numpy.uint8(2**bits - 1)
    return found.reshape(*data.shape[:-1], -1)


def _negative(minimums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bytes of what is subtracted, as what is added."""
    import numpy

    return (-minimums.view(numpy.int8)).view(numpy.uint8)


def in_groups(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scales of uint4 ``[..., n]`` of those of Q4_K, rounded to fp16. Infinity where they are beyond it."""
    import numpy

    factors = numpy.ascontiguousarray(scales[..., :4]).view(numpy.float16).astype(numpy.float32)  # [..., blocks, 2]
    own = scales[..., 4:].view(numpy.int8).reshape(*factors.shape, -1)
    with numpy.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused when all of it is read
        lines = (own * factors[..., None]).swapaxes(-1, -2).astype(numpy.float16)
    return numpy.ascontiguousarray(lines).view(numpy.int32).reshape(*scales.shape[:-2], -1)


def packed_codes(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Whole numbers as unsigned codes as ``kernels/groups.py`` packs them, uint8."""
    import numpy

    codes = values.view(numpy.uint8) + numpy.uint8(2 ** (bits - 1))  # modulo 256
    if bits in (2, 3, 5, 6):
        low_bits, count = (2, 4) if bits < 4 else (4, 8 // (bits - 4))
        fours = numpy.ascontiguousarray(codes).view(numpy.uint32).reshape(*codes.shape[:-2], -1, count)
        each = numpy.uint32(0x01010101)  # a byte of a number of 32 bits

        def joined(lines: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
            moved = [lines[..., index] << numpy.uint32(bits * index) for index in range(lines.shape[-1])]
            return cast("np.ndarray[Any, Any]", numpy.bitwise_or.reduce(moved)[..., None])

        low = fours & each * numpy.uint32(2**low_bits - 1)
        if bits == 2:
            return joined(low, 2).view(numpy.uint8)
        high = joined(
            fours >> numpy.uint32(low_bits) & each * numpy.uint32(2 ** (bits - low_bits) - 1), bits - low_bits
        )
        if bits == 3:
            halves = (high | high >> numpy.uint32(12)).astype(numpy.uint16)  # of bytes 0 and 2, and of 1 and 3
            return numpy.concatenate((joined(low, 2).view(numpy.uint8), halves.view(numpy.uint8)), -1)
        pairs = low[..., ::2] | low[..., 1::2] << numpy.uint32(4)
        return numpy.concatenate((pairs, high), -1).view(numpy.uint8)
    if bits == 8:
        return codes
    both = numpy.ascontiguousarray(codes).view(numpy.uint16)  # little-endian: the first in the lower byte
    return (both & 15 | both >> 4).astype(numpy.uint8)
