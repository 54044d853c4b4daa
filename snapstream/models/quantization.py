"""What config.json says of codes in the files: read strictly, and written. No torch.

``pack-quantized`` of compressed-tensors is read and written, for the matrices of the layers: 8 or 4 bits, symmetric, in
groups along the input, activations as they are (W8A16, W4A16), and those around attention may have codes of their own.
FP8 in blocks of 128 by 128, as DeepSeek and Qwen publish it, is read. Anything else is refused with the reason.
``packed.py`` has the tensors of both forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.config.weights import CODE_BITS, FP8_BLOCK, GROUPS, CodeWidth, WeightForm

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
FP8_METHOD = "fp8"
SCALES = "_scale"  # behind the name of a matrix: the tensor of its scales
FP8_SCALES = "_scale_inv"  # the same of FP8 blocks; a number is times its scale, in spite of the name
LM_HEAD = ("lm_head", "re:lm_head", "re:.*lm_head", "re:.*lm_head.*")  # how its exception is written
# How that of routers is, which stay floats too. A pattern that leaves out more is found where tensors are compared.
ROUTER = re.compile(
    r"model\.layers\.\d+\.(mlp|block_sparse_moe)\.gate|re:\.\*\\?\.?((mlp|block_sparse_moe)\\?\.)?gate\$?"
)
LAYERS, ATTENTION = "Linear", r"re:.*\.self_attn\.\w*_proj(_with_mqa)?$"  # targets; a name goes before a class
CONVERT = "convert the unquantized checkpoint with `snapstream quantize`"

_WIDTHS: dict[int, CodeWidth] = {8: "int8", 4: "int4"}


def stored_form(settings: Mapping[str, Any]) -> WeightForm | None:
    """The form of the layers' matrices in a checkpoint with this config.json; None where they are plain floats.

    ``settings`` without ``refusals``.
    """
    quantization = settings.get("quantization_config")
    if not quantization:
        return None
    if quantization["quant_method"] == FP8_METHOD:
        return WeightForm(width="fp8")
    return _form_of_target(quantization, LAYERS)


def stored_attention(settings: Mapping[str, Any]) -> WeightForm | None:
    """The form of the matrices around attention where the checkpoint names one for them; ``settings`` as above."""
    quantization = settings.get("quantization_config")
    if not quantization or quantization["quant_method"] == FP8_METHOD:
        return None
    return _form_of_target(quantization, ATTENTION)


def _form_of_target(quantization: Mapping[str, Any], target: str) -> WeightForm | None:
    found = (group["weights"] for group in quantization["config_groups"].values() if group["targets"] == [target])
    weights = next(found, None)
    return weights and WeightForm(width=_WIDTHS[weights["num_bits"]], group=weights["group_size"])


def refusals(settings: Mapping[str, Any]) -> list[str]:
    """Every reason why codes of a checkpoint cannot be read."""
    quantization = settings.get("quantization_config")
    if not quantization and not isinstance(quantization, bool):
        return []
    if not isinstance(quantization, Mapping):
        return [f"quantization_config is {quantization!r}; it must be an object"]
    method = quantization.get("quant_method", "unnamed")
    if method == FP8_METHOD:
        return _fp8_refusals(quantization)
    if method != METHOD:
        return [
            f"quantization_config is present ({method}); of quantized weights only {METHOD} and {FP8_METHOD} are read: "
            f"{CONVERT}"
        ]
    wanted: dict[str, tuple[Any, ...]] = {
        "format": (FORMAT,),
        "quantization_status": (None, "compressed"),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    }
    reasons = _unlike(quantization, wanted, "quantization_config")
    tied = settings.get("tie_word_embeddings") is True
    ignored = quantization.get("ignore")
    names = ignored if isinstance(ignored, list) else []
    others = [name for name in names if not (isinstance(name, str) and ROUTER.fullmatch(name))]
    if (ignored is not None and ignored != names) or any(name not in LM_HEAD for name in others):
        reasons.append(f"quantization_config.ignore is {ignored!r}; every matrix of the layers must be quantized")
    elif not others and not tied:
        reasons.append("quantization_config.ignore does not name lm_head; output embeddings must be floats")
    return reasons + _group_refusals(quantization.get("config_groups"))


def _fp8_refusals(quantization: Mapping[str, Any]) -> list[str]:
    """FP8 with one scale per matrix or per row, or of activations that are rounded by fixed scales, is another form.

    Activations are not rounded here, whatever the scheme: ``dynamic`` says how a product in FP8 would do so.
    """
    wanted: dict[str, tuple[Any, ...]] = {
        "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
        "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic"),
    }
    return _unlike(quantization, wanted, "quantization_config")


def _group_refusals(groups: Any) -> list[str]:
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
        "actorder": (None, False, "weight", "static"),  # these change how codes were found, not what they mean
        "block_structure": (None,),
    }
    return _unlike(group, of_group, where) + _unlike(weights, of_weights, f"{where}.weights")


def _unlike(settings: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], where: str) -> list[str]:
    """The fields that have none of the wanted values; absent and null are the same."""
    return [
        f"{where}.{name} is {settings.get(name)!r}; read is {' or '.join(_named(value) for value in values)}"
        for name, values in wanted.items()
        if not any(settings.get(name) == value and type(settings.get(name)) is type(value) for value in values)
    ]


def _named(value: Any) -> str:
    return "none" if value is None or value == {} else repr(value)


def quantization_config(
    form: WeightForm, routers: Sequence[str] = (), attention: WeightForm | None = None
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose layers' matrices are codes of ``form``, those around attention
    of ``attention`` if it is given; ``routers`` are names of modules, behind the prefix of a layer, that are floats.
    """
    groups = {"group_0": _scheme(LAYERS, form)}
    if attention is not None and attention != form:
        groups["group_1"] = _scheme(ATTENTION, attention)
    return {"quant_method": METHOD, "format": FORMAT, "quantization_status": "compressed",
            "config_groups": groups, "kv_cache_scheme": None,
            "ignore": [LM_HEAD[0], *(f"re:.*{name}$" for name in routers)]}  # fmt: skip


def _scheme(target: str, form: WeightForm) -> dict[str, Any]:
    """An entry of ``config_groups``."""
    weights = {"num_bits": CODE_BITS[form.width], "type": "int", "symmetric": True, "strategy": "group",
               "group_size": form.group, "dynamic": False, "actorder": None, "block_structure": None,
               "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
    return {"targets": [target], "weights": weights, "input_activations": None, "output_activations": None}
