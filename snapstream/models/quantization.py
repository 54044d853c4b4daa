"""Storage formats of a checkpoint: ``quantization_config`` of config.json, and the headers of the files. No torch.

``pack-quantized`` of compressed-tensors is read and written, for the matrices of the layers: 8 or 4 bits, symmetric, in
groups along the input, weights only (W8A16, W4A16); attention may have another format. Read are also its other groups
(``Packing``), GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978), and FP8 with a scale per block of 128 by 128, as
DeepSeek and Qwen publish it, or per matrix, as Mistral does. Anything else is refused with the reason. Headers give
dtypes, and whether the output embedding is tied; an unreadable one counts as absent here, and ``checkpoint.py`` refuses
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from snapstream.config import DTYPE_BYTES, DType, StoredWeights
from snapstream.config.weights import (
    FP8_BLOCK,
    GROUPS,
    MXFP4_GROUP,
    QUANTIZED_BITS,
    Packing,
    QuantizedDType,
    WeightFormat,
)
from snapstream.models.config_json import read_object
from snapstream.models.tensors import TOWER_PREFIXES, name_in_text_part

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
FP8_METHOD, MXFP4_METHOD, GPTQ_METHOD, AWQ_METHOD = "fp8", "mxfp4", "gptq", "awq"
OTHER_FORMATS: dict[str, Literal["int8", "fp8"]] = {
    "int-quantized": "int8",
    "float-quantized": "fp8",
}  # of compressed-tensors, and their layout
# What stays float beside MXFP4 experts, by the names in the published files.
_MXFP4_FLOATS = {
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
}  # fmt: skip
SCALES = "_scale"  # suffix of the tensor of a matrix's scales
FP8_SCALES = "_scale_inv"  # the same of FP8; numbers are multiplied with it, in spite of the name
INPUT_SCALE = ".activation_scale"  # of inputs that are quantized for an FP8 product, which none is here
GPTQ_SCALES = ".scales"  # of GPTQ and AWQ
_HEADS = ("lm_head", "re:lm_head", "re:.*lm_head", "re:.*lm_head.*")  # as ``ignore`` names it
# The same of routers, and of towers for images or sound.
ROUTER = re.compile(
    r"model\.layers\.\d+\.(mlp|block_sparse_moe)\.gate|re:\.\*\\?\.?((mlp|block_sparse_moe)\\?\.)?gate\$?"
)
_TOWER = re.compile(rf"(re:[.*^]*)?({'|'.join(map(re.escape, TOWER_PREFIXES))})")
LAYERS, ATTENTION = "Linear", r"re:.*\.self_attn\.\w*_proj(_with_mqa)?$"  # targets; a name goes before a class
NO_BLOCKS = "its blocks run across the rows of a matrix, and their scales are quantized too"  # bitsandbytes
CONVERT = "convert the unquantized checkpoint with `snapstream quantize`"

_WIDTHS: dict[int, QuantizedDType] = {8: "int8", 4: "int4"}


def stored_format(settings: Mapping[str, Any]) -> WeightFormat | None:
    """The format of the layers' matrices in a checkpoint with this config.json, which has no ``refusals``; None for
    plain floats.
    """
    quantization = settings.get("quantization_config")
    if not quantization:
        return None
    if quantization["quant_method"] == FP8_METHOD:
        return WeightFormat(dtype="fp8")
    if quantization["quant_method"] == MXFP4_METHOD:
        return WeightFormat(dtype="mxfp4", group=MXFP4_GROUP)
    packing = stored_packing(settings)
    return _form_of_target(quantization, LAYERS) if packing is None else _kept(packing, settings)


def stored_packing(settings: Mapping[str, Any]) -> Packing | None:
    """How the files hold the matrices of the layers, where that is not ``stored_format``; ``settings`` as there."""
    quantization: Mapping[str, Any] = settings.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == GPTQ_METHOD:
        shift = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        return Packing(
            layout="gptq", bits=quantization["bits"], group=max(quantization["group_size"], 0), zero_shift=shift,
            has_zeros=quantization.get("sym") is False, has_order=bool(quantization.get("desc_act")),
        )  # fmt: skip
    if method == AWQ_METHOD:
        names = ("bits", "w_bit"), ("group_size", "q_group_size")
        bits, group = (next(quantization[name] for name in own if name in quantization) for own in names)
        has_zeros = quantization.get("zero_point", True)
        return Packing(layout="awq", bits=bits, group=max(group, 0), has_zeros=has_zeros)
    kind = quantization.get("format")
    if method != METHOD or (kind not in OTHER_FORMATS and not _strict_refusals(quantization["config_groups"])):
        return None
    scheme = next(iter(quantization["config_groups"].values()))
    weights = scheme["weights"]
    return Packing(
        layout=OTHER_FORMATS.get(str(kind), "packed"),
        bits=weights["num_bits"],
        group=weights["group_size"] if weights.get("strategy") in (None, "group") else 0,
        has_zeros=weights.get("symmetric") is False,
        has_order=weights.get("actorder") == "group",
    )


def _kept(packing: Packing, settings: Mapping[str, Any]) -> WeightFormat | None:
    """The format that holds the same numbers; None if they are read as floats.

    4-bit values less their zeros fit in 8 bits, and a group is one or several of the ``GROUPS``.
    """
    if packing.layout == "fp8" or packing.has_order or (packing.bits == 8 and packing.has_zeros):
        return None
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    sizes = [settings[name] for name in names if isinstance(settings.get(name), int)]
    if isinstance(settings.get("head_dim"), int) and isinstance(settings.get("num_attention_heads"), int):
        sizes.append(settings["head_dim"] * settings["num_attention_heads"])
    for group in sorted(GROUPS, reverse=True):
        if packing.group % group == 0 and not any(size % group for size in sizes):
            return WeightFormat(dtype="int4" if packing.bits == 4 and not packing.has_zeros else "int8", group=group)
    return None


def stored_attention(settings: Mapping[str, Any]) -> WeightFormat | None:
    """The format of attention's matrices if the checkpoint names one; ``settings`` as above."""
    quantization = settings.get("quantization_config")
    if not quantization or quantization["quant_method"] != METHOD or stored_packing(settings) is not None:
        return None
    return _form_of_target(quantization, ATTENTION)


def _form_of_target(quantization: Mapping[str, Any], target: str) -> WeightFormat | None:
    found = (group["weights"] for group in quantization["config_groups"].values() if group["targets"] == [target])
    weights = next(found, None)
    return weights and WeightFormat(dtype=_WIDTHS[weights["num_bits"]], group=weights["group_size"])


def refusals(settings: Mapping[str, Any]) -> list[str]:
    """Every reason why the quantization of a checkpoint is not supported."""
    quantization = settings.get("quantization_config")
    if not quantization and not isinstance(quantization, bool):
        return []
    if not isinstance(quantization, Mapping):
        return [f"quantization_config is {quantization!r}; it must be an object"]
    method = quantization.get("quant_method", "unnamed")
    if method == FP8_METHOD:
        return _fp8_refusals(quantization)
    if method == MXFP4_METHOD:
        return _mxfp4_refusals(settings, quantization)
    if method in (GPTQ_METHOD, AWQ_METHOD):
        return _gptq_refusals(quantization) if method == GPTQ_METHOD else _awq_refusals(quantization)
    if method != METHOD:
        why = f" ({NO_BLOCKS})" if method == "bitsandbytes" else ""
        known = ", ".join((METHOD, FP8_METHOD, GPTQ_METHOD, AWQ_METHOD))
        return [f"quantization_config is present ({method}); of quantized weights {known} are read{why}: {CONVERT}"]
    wanted: dict[str, tuple[Any, ...]] = {
        "format": (FORMAT, *OTHER_FORMATS),
        "quantization_status": (None, "compressed"),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    }
    reasons = _unlike(quantization, wanted, "quantization_config")
    tied = settings.get("tie_word_embeddings") is True
    ignored = quantization.get("ignore")
    others = _other_floats(ignored)
    if not isinstance(ignored, list | None) or any(name not in _HEADS for name in others):
        reasons.append(f"quantization_config.ignore is {ignored!r}; every matrix of the layers must be quantized")
    elif not others and not tied:
        reasons.append("quantization_config.ignore does not name lm_head; output embeddings must be floats")
    return reasons + _group_refusals(quantization.get("config_groups"), quantization.get("format"))


def _gptq_refusals(quantization: Mapping[str, Any]) -> list[str]:
    """Of GPTQ as AutoGPTQ, GPTQModel and optimum write it."""
    wanted: dict[str, tuple[Any, ...]] = {
        "bits": (4, 8),
        "sym": (None, True, False),
        "desc_act": (None, True, False),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "lm_head": (None, False),
        "dynamic": (None, {}),  # other formats for some modules
        "is_marlin_format": (None, False),
        "modules_in_block_to_quantize": (None,),
        "pack_dtype": (None, "int32"),
    }
    return _unlike(quantization, wanted, "quantization_config") + _group_size_refusals(quantization.get("group_size"))


def _awq_refusals(quantization: Mapping[str, Any]) -> list[str]:
    """Of AWQ as AutoAWQ and llm-awq write it; routers stay floats."""
    bits, size = "bits" if "bits" in quantization else "w_bit", "group_size"
    wanted: dict[str, tuple[Any, ...]] = {
        bits: (4,), "zero_point": (None, True, False), "version": (None, "gemm", "GEMM"), "format": (None, "gemm"),
    }  # fmt: skip
    kept = quantization.get("modules_to_not_convert") or []
    reasons = _unlike(quantization, wanted, "quantization_config")
    if not isinstance(kept, list) or any(name not in ("gate", *_HEADS) for name in _other_floats(kept)):
        reasons.append(f"quantization_config.modules_to_not_convert is {kept!r}; every matrix must be quantized")
    return reasons + _group_size_refusals(quantization.get(size, quantization.get("q_group_size")))


def _other_floats(kept: Any) -> list[str]:
    """Modules that stay floats, named as in a checkpoint of text alone, but for routers, and towers, which are not
    loaded. A pattern that matches more is found when tensors are compared.
    """
    names = [name_in_text_part(f"{name}.")[:-1] for name in kept] if isinstance(kept, list) else []
    return [name for name in names if not (ROUTER.fullmatch(name) or _TOWER.match(f"{name}."))]


def _group_size_refusals(size: Any, where: str = "quantization_config") -> list[str]:
    if isinstance(size, int) and not isinstance(size, bool) and (size == -1 or 8 <= size <= 2**16):
        return []
    return [f"{where}.group_size is {size!r}; read is -1 (a row) or 8 to {2**16}"]


def _mxfp4_refusals(settings: Mapping[str, Any], quantization: Mapping[str, Any]) -> list[str]:
    """Experts of gpt-oss, and nothing else."""
    architectures, kept = settings.get("architectures"), quantization.get("modules_to_not_convert")
    if architectures != ["GptOssForCausalLM"]:
        return [f"quantization_config is present ({MXFP4_METHOD}), which is read for gpt-oss alone"]
    reasons = _unlike(quantization, {"dequantize": (None, False)}, "quantization_config")
    if not isinstance(kept, list) or set(map(str, kept)) != _MXFP4_FLOATS:
        reasons.append(
            f"quantization_config.modules_to_not_convert is {kept!r}; read is {', '.join(sorted(_MXFP4_FLOATS))}"
        )
    return reasons


def _fp8_refusals(quantization: Mapping[str, Any]) -> list[str]:
    """A scale per block or, as Ministral 3 has it, per matrix. Activations are never quantized here: ``dynamic`` and
    ``static``, of a matrix, describe how an FP8 product would do so.
    """
    is_of_blocks = quantization.get("weight_block_size") is not None
    wanted: dict[str, tuple[Any, ...]] = {
        "weight_block_size": (None, [FP8_BLOCK, FP8_BLOCK]),
        "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic") if is_of_blocks else (None, "dynamic", "static"),
    }
    return _unlike(quantization, wanted, "quantization_config")


def _group_refusals(groups: Any, kind: Any) -> list[str]:
    """Of one group of any scheme that is read, or two of ``pack-quantized``."""
    if isinstance(groups, Mapping) and len(groups) == 1:
        ((name, group),) = groups.items()
        is_attention = isinstance(group, Mapping) and group.get("targets") == [ATTENTION]
        if kind in OTHER_FORMATS or (_strict_refusals(groups) and not is_attention):
            return _packing_refusals(f"config_groups.{name}", group, kind)
    elif kind in OTHER_FORMATS:
        return [f"quantization_config.format is {kind!r}, which is read with one of config_groups"]
    return _strict_refusals(groups)


def _packing_refusals(where: str, group: Any, kind: Any) -> list[str]:
    """Of a scheme for all layers: weights alone, or with activations quantized as they are computed, which is not
    done here.
    """
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return [f"{where} is {group!r}; it must say how weights are quantized"]
    inputs, is_packed = group.get("input_activations"), kind not in OTHER_FORMATS
    is_dynamic = isinstance(inputs, Mapping) and inputs.get("dynamic") is True and not is_packed
    of_group: dict[str, tuple[Any, ...]] = {
        "targets": ([LAYERS],),
        "input_activations": (inputs,) if is_dynamic else (None,),
        "output_activations": (None,),
        "format": (None, kind),
    }
    of_weights: dict[str, tuple[Any, ...]] = {
        "num_bits": tuple(_WIDTHS) if is_packed else (8,),
        "type": ("float",) if kind == "float-quantized" else ("int",),
        "symmetric": (True,) if kind == "float-quantized" else (True, False),
        "strategy": (None, "group", "channel") if is_packed else ("channel",),
        "dynamic": (None, False),
        "actorder": (None, False, "weight", "static", *(["group"] if is_packed else [])),
        "block_structure": (None,),
    }
    reasons = _unlike(group, of_group, where) + _unlike(weights, of_weights, f"{where}.weights")
    by_group = weights.get("strategy") in (None, "group")
    return reasons + (_group_size_refusals(weights.get("group_size"), f"{where}.weights") if by_group else [])


def _strict_refusals(groups: Any) -> list[str]:
    """Why groups are not those of ``WeightFormat``: symmetric, of its sizes."""
    if not isinstance(groups, Mapping) or len(groups) not in (1, 2):
        count = len(groups) if isinstance(groups, Mapping) else repr(groups)
        return [
            f"quantization_config.config_groups is {count}; one group for all layers is read, and one for attention"
        ]
    reasons = [reason for name, group in groups.items() for reason in _scheme_refusals(f"config_groups.{name}", group)]
    if reasons:
        return reasons
    targets = sorted(group["targets"][0] for group in groups.values())
    if targets not in ([LAYERS], [LAYERS, ATTENTION]):
        return [f"config_groups have the targets {targets}; read is {LAYERS!r} once, and {ATTENTION!r} beside it"]
    return []


def _scheme_refusals(where: str, group: Any) -> list[str]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return [f"{where} is {group!r}; it must say how weights are quantized"]
    of_group: dict[str, tuple[Any, ...]] = {
        "targets": ([LAYERS], [ATTENTION]),
        "input_activations": (None,),
        "output_activations": (None,),
        "format": (None, FORMAT),
    }
    of_weights: dict[str, tuple[Any, ...]] = {
        "num_bits": tuple(_WIDTHS),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": (None, "group"),
        "group_size": GROUPS,
        "dynamic": (None, False),
        "actorder": (None, False, "weight", "static"),  # no effect on the stored values
        "block_structure": (None,),
    }
    return _unlike(group, of_group, where) + _unlike(weights, of_weights, f"{where}.weights")


def _unlike(settings: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], where: str) -> list[str]:
    """A reason for each field with another value than the ``wanted`` ones; absent and null are the same."""
    return [
        f"{where}.{name} is {settings.get(name)!r}; read is {' or '.join(_named(value) for value in values)}"
        for name, values in wanted.items()
        if not any(settings.get(name) == value and type(settings.get(name)) is type(value) for value in values)
    ]


def _named(value: Any) -> str:
    return "none" if value is None or value == {} else repr(value)


def quantization_config(
    form: WeightFormat, routers: Sequence[str] = (), attention: WeightFormat | None = None
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint with layers in ``form``, attention in ``attention`` if given;
    ``routers`` are module names, after the prefix of a layer, that stay floats.
    """
    groups = {"group_0": _scheme(LAYERS, form)}
    if attention is not None and attention != form:
        groups["group_1"] = _scheme(ATTENTION, attention)
    return {"quant_method": METHOD, "format": FORMAT, "quantization_status": "compressed",
            "config_groups": groups, "kv_cache_scheme": None,
            "ignore": [_HEADS[0], *(f"re:.*{name}$" for name in routers)]}  # fmt: skip


def _scheme(target: str, form: WeightFormat) -> dict[str, Any]:
    """An entry of ``config_groups``."""
    weights = {"num_bits": QUANTIZED_BITS[form.dtype], "type": "int", "symmetric": True, "strategy": "group",
               "group_size": form.group, "dynamic": False, "actorder": None, "block_structure": None,
               "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
    return {"targets": [target], "weights": weights, "input_activations": None, "output_activations": None}


_NAMES: dict[str, DType] = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_HEADER_BYTES = 100 * 2**20
_COMPARED_BYTES, _MOST_COMPARED_BYTES = 2**20, 2**34  # at a time; of a table, larger ones count as different

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def stored_weights(folder: Path, settings: Mapping[str, Any], is_matrix: Callable[[str], bool]) -> StoredWeights:
    """``settings``: the parsed config.json of ``folder``, which need not hold weights. ``is_matrix``: whether a tensor
    is loaded, and in this dtype; routers, convolutions, towers and layers of multi-token prediction are not.
    """
    inner = settings.get("text_config")
    settings = {**settings, **(inner if isinstance(inner, dict) else {})}
    tensors = {own for file in sorted(folder.glob("*.safetensors")) for own in _dtypes(file)}
    found = {dtype for _, dtype in tensors}
    if len(found) > 1:
        found = {dtype for name, dtype in tensors if is_matrix(name)}
    dtype = found.pop() if len(found) == 1 else "float32" if found else _declared(settings)  # fp32 holds all of them
    quantized, packing = stored_format(settings), stored_packing(settings)
    blocks = (settings.get("quantization_config") or {}).get("weight_block_size")
    return StoredWeights(
        dtype=dtype, quantized=quantized, attention=stored_attention(settings), packing=packing,
        has_one_scale=quantized is not None and quantized.is_fp8 and blocks is None,
        dequantized=(packing.describe(),) if packing is not None and quantized is None else (),
    )  # fmt: skip


def _declared(settings: Mapping[str, Any]) -> DType | None:
    name = settings.get("dtype") or settings.get("torch_dtype")
    plain = name.removeprefix("torch.") if isinstance(name, str) else ""
    plain = "float32" if plain == "float64" else plain
    return cast(DType, plain) if plain in DTYPE_BYTES else None


def has_own_head(folder: Path) -> bool:
    """Whether the files hold an output embedding that differs from the input embedding.

    transformers then ties nothing, whatever tie_word_embeddings says.
    """
    tables: dict[str, tuple[Path, int, int, Any]] = {}
    for file in _weight_files(folder):
        header, start = _read_header(file)
        header = {name_in_text_part(name): tensor for name, tensor in header.items()}
        room = file.stat().st_size - start
        for name in (EMBED, LM_HEAD):
            match header.get(name):
                case {"data_offsets": [int(begin), int(end)], "dtype": dtype, "shape": shape} if (
                    0 <= begin <= end <= room
                ):
                    tables[name] = file, start + begin, end - begin, (dtype, shape)
    if len(tables) < 2:
        return False
    (one, at_one, size, kind), (other, at_other, other_size, other_kind) = tables.values()
    if size != other_size or kind != other_kind or size > _MOST_COMPARED_BYTES:
        return True
    return not _is_same(one, at_one, other, at_other, size)


def fused_experts(folder: Path) -> list[int] | None:
    """The shape of ``down_proj`` where the files hold the experts of a layer in one tensor: ``[X, D, M]``, or ``[X, M,
    D]`` if all are transposed. Prediction layers may have them another way.
    """
    for name, shape in tensor_shapes(folder).items():
        if name.endswith((".experts.down_proj", ".moe.down_proj.weight")) and not name.startswith("mtp."):
            return shape
    return None


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """By name, of all tensors in the files."""
    headers = (_read_header(file)[0].items() for file in _weight_files(folder))
    return {name: list(own.get("shape", ())) for header in headers for name, own in header if isinstance(own, dict)}


def has_corrections(folder: Path) -> bool:
    """Whether the files hold corrections of the choice of experts."""
    return any(
        name.endswith(".e_score_correction_bias") for file in _weight_files(folder) for name in _read_header(file)[0]
    )


def _is_same(one: Path, at_one: int, other: Path, at_other: int, size: int) -> bool:
    """Whether ``size`` bytes of two files are equal."""
    with one.open("rb") as left, other.open("rb") as right:
        left.seek(at_one)
        right.seek(at_other)
        for done in range(0, size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, size - done)
            found = left.read(count)
            if len(found) < count or found != right.read(count):
                return False
    return True


def _weight_files(folder: Path) -> list[Path]:
    """The files that the loader reads."""
    index = folder / INDEX_FILE
    names: Any = [SINGLE_FILE]
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else ()
    own = {name for name in names if isinstance(name, str) and Path(name).name == name and "\0" not in name}
    return [folder / name for name in sorted(own) if (folder / name).is_file()]


def _dtypes(file: Path) -> Iterator[tuple[str, DType]]:
    """Every tensor of floats of two dimensions or more."""
    for name, tensor in _read_header(file)[0].items():
        if isinstance(tensor, dict) and isinstance(tensor.get("shape"), list) and len(tensor["shape"]) > 1:
            dtype = tensor.get("dtype")
            if isinstance(dtype, str) and dtype in _NAMES:
                yield name, _NAMES[dtype]


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= _MOST_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}, 0
    return (header, 8 + size) if isinstance(header, dict) else ({}, 0)
