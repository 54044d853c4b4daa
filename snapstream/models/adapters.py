"""LoRA adapters in the format of PEFT (arXiv 2106.09685): what a folder holds, and what a model supports. No torch.

A projection W ``[out, in]`` becomes ``W + s B A``, with A ``[r, in]`` and B ``[out, r]``. Adapters are for the
projections of attention and of dense MLPs; ``lora.py`` computes them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from snapstream.config import EngineOptions, ModelConfig
from snapstream.config.engine import Adapter
from snapstream.config.model import Multipliers
from snapstream.models.config_json import flag, number, read_object, whole_number
from snapstream.models.hub import local_folder
from snapstream.models.registry import FAMILIES, own_name, tensor_specs
from snapstream.models.tensors import base_name, part_shape

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PRODUCTS = ("qkv", "o", "gate_up", "down")  # stored matrices that adapters change
MOST_RANK = 512
_PREFIX, _SIDES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("F64", "F32", "BF16", "F16")
# Fields of adapter_config.json that change what is computed, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "modules_to_save": ([],),
    "fan_in_fan_out": (False,), "layer_replication": (), "trainable_token_indices": (), "target_parameters": ([],),
    "use_qalora": (False,), "alora_invocation_tokens": (), "arrow_config": (), "use_bdlora": (False,),
    # Others also change the weights of the model.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


class Projection(NamedTuple):
    """A projection of one layer, among those that are stored as one matrix."""

    layer: int
    product: str  # of PRODUCTS
    first: int  # its first row in the stored matrix
    shape: tuple[int, ...]  # [out, in], in the checkpoint
    order: Sequence[int] | None  # the checkpoint's row of each stored one
    widths: tuple[int, int] | None  # see ``TensorSpec.narrow``


class Pair(NamedTuple):
    """A and B of one projection, by their names in the file."""

    projection: Projection
    rank: int
    scale: float
    names: tuple[str, str]


def projections(model: ModelConfig) -> dict[str, Projection]:
    """Those that adapters may have, by the names of their modules in a checkpoint of safetensors."""
    # GGUF files have the rows of heads in other orders.
    is_interleaved = FAMILIES.get(model.architecture).is_interleaved
    rope = replace(model.rope, is_interleaved=is_interleaved)
    window_rope = model.window_rope and replace(model.window_rope, is_interleaved=is_interleaved)
    specs = tensor_specs(replace(model, rope=rope, window_rope=window_rope))
    found: dict[str, Projection] = {}
    num_rows: dict[tuple[int, str], int] = {}  # of matrices of several formats, one below the other
    for name, spec in specs.items():
        product = base_name(name)
        if product not in PRODUCTS:
            continue
        for layer in spec.layers_of(model.num_layers):
            first = num_rows.get((layer, product), 0)
            num_rows[layer, product] = first + spec.shape[0]
            for part, place in spec.parts.items():
                start = place[0].indices(spec.shape[0])[0] if place and isinstance(place[0], slice) else 0
                found[f"model.layers.{layer}.{part.removesuffix('.weight')}"] = Projection(
                    layer, product, first + start, part_shape(spec, part), spec.row_order.get(part),
                    spec.narrow.get(part),
                )  # fmt: skip
    return found


def with_loras(model: ModelConfig, options: EngineOptions) -> EngineOptions:
    """The options with what is known of their adapters. ValueError with every reason for one that is not supported."""
    read = [own if isinstance(own, Adapter) else read_adapter(own[0], own[1], model) for own in options.loras]
    return replace(options, loras=tuple(read))


def read_adapter(name: str, path: str, model: ModelConfig) -> Adapter:
    """What is known of an adapter before its numbers are read."""
    folder = local_folder(path, wanted=CONFIG_FILE)
    pairs = read_pairs(name, folder, model)
    ranks: dict[tuple[int, str], int] = {}
    for own in pairs:
        key = own.projection.layer, own.projection.product
        ranks[key] = ranks.get(key, 0) + own.rank
    inputs = {(own.projection.layer, own.projection.product): own.projection.shape[1] for own in pairs}
    shapes = [(rank, inputs[key]) for key, rank in ranks.items()]
    shapes += [(num_rows(own.projection), own.rank) for own in pairs]
    digest = hashlib.sha256()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / file).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return Adapter(
        name=name, folder=str(folder), digest=digest.hexdigest()[:32], shapes=tuple(shapes), rank=max(ranks.values())
    )


def num_rows(projection: Projection) -> int:
    """Rows of its output as stored."""
    if projection.widths is None:
        return projection.shape[0]
    given, stored = projection.widths
    return projection.shape[0] // given * stored


def read_pairs(name: str, folder: Path, model: ModelConfig) -> list[Pair]:
    """The pairs of an adapter, in the order of layers and rows. ValueError with every reason for one that is not
    supported.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"lora {name!r}: {folder} has no {WEIGHTS_FILE}; files of other formats are not read")
    settings, problems = read_object(folder / CONFIG_FILE), list(model_problems(model))
    problems += _settings_problems(settings)
    pairs = [] if problems else list(_pairs(settings, _header(folder / WEIGHTS_FILE), model, problems))
    if not problems and not pairs:
        problems.append(f"{WEIGHTS_FILE} holds no tensors")
    if problems:
        raise ValueError(f"lora {name!r} ({folder}) is not supported for {model.architecture}: {'; '.join(problems)}")
    return sorted(pairs, key=lambda own: own.projection[:3])


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes by name."""
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: (tuple(own.get_shape()), own.get_dtype()) for name, own in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Why a model can have no adapters."""
    if model.latent is not None:
        yield "its attention keeps latents"
    if model.altup is not None or model.hyper is not None:
        yield "it has several residual streams"
    if FAMILIES.get(model.architecture).layer is not None:
        yield "its layers are of a class of their own"
    if model.has_norm_biases:
        yield "its norms have biases, which are part of the next product"
    if model.has_parallel_recurrence and model.multipliers == Multipliers():  # as GGUF files of Falcon-H1
        yield "the multipliers of its projections are part of its weights"


def _settings_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    kind = settings.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {kind!r}; only 'LORA' is supported"
    for name, values in _NEUTRAL.items():
        value = settings.get(name)
        if value is not None and value not in values:
            yield f"{name} is {value!r}, which is not supported"
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, dict):
            yield f"{name} is {settings[name]!r}; it must be an object"


def _pairs(
    settings: Mapping[str, Any], header: Mapping[str, tuple[tuple[int, ...], str]], model: ModelConfig,
    problems: list[str],
) -> Iterator[Pair]:  # fmt: skip
    """What is wrong is appended to ``problems``."""
    known = projections(model)
    modules = {name.removesuffix(side) for name in header for side in _SIDES if name.endswith(side)}
    unknown = [name for name in header if not name.endswith(_SIDES)]
    for module in sorted(modules):
        path = module.removeprefix(_PREFIX)
        projection = known.get(own_name(f"{path}.weight", model).removesuffix(".weight"))
        names = module + _SIDES[0], module + _SIDES[1]
        if projection is None or not module.startswith(_PREFIX):
            unknown += [name for name in names if name in header]
        elif missing := [name for name in names if name not in header]:
            problems.append(f"{missing[0]} is missing")
        else:
            try:
                yield _pair(settings, header, (path, projection), names)
            except ValueError as problem:
                problems.append(str(problem))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        problems.append(
            f"{', '.join(sorted(unknown)[:3])}{more}: adapters are for the projections of attention and of dense MLPs"
        )


def _pair(
    settings: Mapping[str, Any], header: Mapping[str, tuple[tuple[int, ...], str]], target: tuple[str, Projection],
    names: tuple[str, str],
) -> Pair:  # fmt: skip
    path, projection = target
    sizes = {"r": _of_pattern(settings, "rank_pattern", path, "r"),
             "lora_alpha": _of_pattern(settings, "alpha_pattern", path, "lora_alpha")}  # fmt: skip
    rank, alpha = whole_number(sizes, "r"), number(sizes, "lora_alpha")
    if not 1 <= rank <= MOST_RANK:
        raise ValueError(f"the rank of {path} is {rank}; it must be from 1 to {MOST_RANK}")
    rows, columns = projection.shape
    for name, expected in zip(names, ((rank, columns), (rows, rank)), strict=True):
        shape, dtype = header[name]
        if shape != expected:
            raise ValueError(f"{name} has the shape {list(shape)}; it must be {list(expected)}")
        if dtype not in _DTYPES:
            raise ValueError(f"{name} has the dtype {dtype}; it must be one of {', '.join(_DTYPES)}")
    scale = alpha / (math.sqrt(rank) if flag(settings, "use_rslora") else rank)
    return Pair(projection, rank, scale, names)


def _of_pattern(settings: Mapping[str, Any], pattern: str, path: str, name: str) -> Any:
    """A setting of one module: that of the first key of ``pattern`` that its path ends in, else the general one."""
    for key, value in (settings.get(pattern) or {}).items():
        # Nested or many repetitions can take exponential time to match.
        if len(re.findall(r"[*+{]", key)) > 4 or re.search(r"\)[*+{]", key):
            raise ValueError(f"{pattern} has the key {key!r}, which repeats more than 4 times, or a group")
        try:
            if re.match(rf"(.*\.)?({key})$", path):
                return value
        except re.error as error:
            raise ValueError(f"{pattern} has the key {key!r}, no regular expression: {error}") from None
    return settings.get(name)
