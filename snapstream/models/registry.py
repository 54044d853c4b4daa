"""Supported model families, and config.json to ``ModelConfig``. No torch, no transformers.

An unsupported model is refused with every reason; a folder that needs Python code, and a malformed field, with file and
field. Both spellings of the rope settings are read: ``rope_theta`` with ``rope_scaling``, and the
``rope_parameters`` of transformers 5.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from snapstream.config import DType, KVDType, ModelConfig, StoredWeights, as_path
from snapstream.config.values import Registry
from snapstream.kv.spec import KVSpec
from snapstream.models import (
    cohere,
    deepseek,
    falcon,
    gemma,
    gguf,
    gguf_settings,
    glm,
    gpt_oss,
    granite,
    kimi,
    lfm,
    llama,
    mistral,
    mixtures,
    nemotron,
    olmo,
    quantization,
    qwen,
    qwen_next,
)
from snapstream.models.config_json import (
    CODE_FIELD,
    check_file,
    check_folder,
    flag,
    number,
    parse_rope,
    read_object,
    stretched_max_position,
    token_ids,
    whole_number,
)
from snapstream.models.family import Family, layer_kind_refusals, sliding_window
from snapstream.models.gguf_header import is_gguf
from snapstream.models.quantization import fused_experts, has_corrections, has_own_head, stored_weights
from snapstream.models.tensors import (
    PREDICTION,
    TensorSpecs,
    checkpoint_parts,
    in_fp8_blocks,
    in_own_formats,
    name_in_text_part,
    prediction_name,
    prediction_tensors,
)
from snapstream.types import MAX_END_TOKEN_IDS

logger = logging.getLogger(__name__)

# Whose families are supported.
_MODULES = (
    llama, mistral, qwen, qwen_next, deepseek, glm, mixtures, gpt_oss, gemma, cohere, olmo, granite, lfm, nemotron,
    falcon, kimi,
)  # fmt: skip
FAMILIES = Registry[Family]("architecture", {name: one for own in _MODULES for name, one in own.FAMILIES.items()})


def kv_spec_of(config: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
    """What the cache stores per token."""
    return FAMILIES.get(config.architecture).kv_spec(config, dtype, kv_dtype)


@lru_cache(maxsize=64)
def _specs_as_stored(config: ModelConfig) -> TensorSpecs:
    specs = FAMILIES.get(config.architecture).tensors(config)
    return in_own_formats(specs, config.stored, config.num_layers) if config.stored.own else in_fp8_blocks(specs)


def tensor_specs(config: ModelConfig) -> TensorSpecs:
    quantized = config.stored.quantized
    is_cached = bool(config.stored.own) or (quantized is not None and quantized.is_fp8)
    specs = _specs_as_stored(config) if is_cached else FAMILIES.get(config.architecture).tensors(config)
    if config.prediction_of:
        specs = prediction_tensors(config, specs)
    return {**specs, **{name: replace(specs[name], is_float=True) for name in config.float_tensors}}


def own_name(name: str, config: ModelConfig) -> str:
    """What this package calls a tensor of a checkpoint: of a text part as in one of it alone, and see
    ``Family.aliases``.
    """
    for alias, own in FAMILIES.get(config.architecture).aliases.items():
        name = name.replace(alias, own, 1)
    name = name_in_text_part(name) if config.is_text_part else name
    return prediction_name(name, config.prediction_of) if config.prediction_of else name


def prediction_config(folder: Path, model: ModelConfig) -> ModelConfig:
    """The first prediction layer (MTP) of ``model`` as a model of one layer; ValueError if there is none.

    Its input is made of a token's embedding and the hidden state of the token before it (DeepSeek-V3, arXiv 2412.19437,
    section 2.2); the embedding is that of ``model``.
    """
    if not FAMILIES.get(model.architecture).has_predictions:
        known = ", ".join(name for name in FAMILIES.names if FAMILIES.get(name).has_predictions)
        raise ValueError(f"prediction layers of {model.architecture} are not supported; those of {known} are")
    if is_gguf(folder):
        raise ValueError("prediction layers of GGUF files are not read; give the folder of the checkpoint")
    moe = None if model.moe is None else replace(model.moe, first_dense=0, chosen=None)
    config = replace(
        model, num_layers=1, recurrent=None, recurrent_layers=(), moe=moe, num_mtp_layers=0,
        prediction_of=model.num_layers, has_fused_experts=False, has_transposed_experts=False,
    )  # fmt: skip
    shapes = {own_name(name, config): shape for name, shape in quantization.tensor_shapes(folder).items()}
    if shapes and f"{PREDICTION}eh_proj.weight" not in shapes:
        layer = f"model.layers.{model.num_layers}"
        raise ValueError(f"{folder} has no prediction layer: neither mtp.fc.weight nor {layer}.eh_proj.weight")
    if (down := shapes.get(f"{PREDICTION}mlp.experts.down_proj")) is not None and moe is not None:
        is_transposed = moe.inner != model.hidden_size and down[1:] == [moe.inner, model.hidden_size]
        config = replace(config, has_fused_experts=True, has_transposed_experts=is_transposed)
    scales = quantization.SCALES, quantization.FP8_SCALES, quantization.GPTQ_SCALES
    if not any(name.startswith(PREDICTION) and name.endswith(scales) for name in shapes):
        # Floats, whatever the layers are.
        return replace(config, stored=StoredWeights(dtype=model.stored.dtype, tables=model.stored.tables))
    if config.stored.quantized is not None and config.stored.quantized.is_fp8:
        parts = [part for part in checkpoint_parts(tensor_specs(config), 1) if part.name in shapes]
        floats = {part.target for part in parts if f"{part.name}{quantization.FP8_SCALES}" not in shapes}
        config = replace(config, float_tensors=tuple(sorted(floats)))
    return config


@lru_cache(maxsize=4)
def _matrix_names(config: ModelConfig) -> frozenset[str]:
    """Tensors of a checkpoint, by ``own_name``, that are kept in its dtype."""
    specs = tensor_specs(config)
    kept = {name for name, spec in specs.items() if spec.is_matrix and not spec.is_dense}
    return frozenset(part.name for part in checkpoint_parts(specs, config.num_layers) if part.target in kept)


EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)


# Fields of unsupported architectures, and the feature that each means.
UNSUPPORTED_FIELDS = {
    "vision_config": "image inputs (a vision tower)",
    "audio_config": "audio inputs (an audio tower)",
    "sliding_window_pattern": "sliding-window attention layers",
    "linear_num_key_heads": "linear attention layers (Gated DeltaNet)",
    "attention_chunk_size": "chunked attention layers",
    "no_rope_layers": "layers without rotary embedding",
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
}

# In config.json; the loader reads the headers of the files.
DTYPES = ("float64", "float32", "bfloat16", "float16", "auto")


def read_model_config(path: str | Path) -> ModelConfig:
    """Read a checkpoint folder or a config.json, with the end tokens of its generation_config.json, or a GGUF file.

    ValueError, with file and field, for a broken or unsupported model, and one that needs code of the checkpoint.
    """
    file = as_path("the model's folder", path)
    if file.is_dir():
        file = file / "config.json"
    check_file(file)
    if is_gguf(file):
        with _with_path(file):
            return _checked_ends(gguf.config_of(model_config_from_dict(gguf_settings.settings_of(file)), file), file)
    if not file.is_file():
        names = sorted(one.name for one in file.parent.glob("*.gguf")) if file.name == "config.json" else []
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} holds GGUF files; give one of them: {', '.join(names[:3])}{more}")
        raise ValueError(
            f"{file} does not exist; expected a checkpoint folder, a config.json, a GGUF file or the id of a model"
        )
    if file.suffix != ".json":
        raise ValueError(f"{file} is no model; expected a checkpoint folder, a config.json or a GGUF file (.gguf)")
    check_folder(file.parent)
    settings = read_object(file)
    if settings.get(CODE_FIELD):
        logger.warning("%s names code of the checkpoint, which is not run: the model is transformers' own", file)
    with _with_path(file):
        config = model_config_from_dict(settings)
        if config.tie_word_embeddings and has_own_head(file.parent):
            config = replace(config, tie_word_embeddings=False)
        if FAMILIES.get(config.architecture).may_fuse_experts and (shape := fused_experts(file.parent)) is not None:
            moe, hidden = config.moe, config.hidden_size
            is_transposed = moe is not None and moe.inner != hidden and shape[1:] == [moe.inner, hidden]
            config = replace(config, has_fused_experts=True, has_transposed_experts=is_transposed)
        if config.moe and FAMILIES.get(config.architecture).may_lack_corrections and not has_corrections(file.parent):
            config = replace(config, moe=replace(config.moe, has_bias=False))
        stored = stored_weights(file.parent, settings, lambda name: own_name(name, config) in _matrix_names(config))
        config = replace(config, stored=stored)
    inner, generation = settings.get("text_config"), file.parent / "generation_config.json"
    stated = [token for one in (settings, inner) if isinstance(one, dict) for token in token_ids(one, "eos_token_id")]
    if generation.is_file():
        file = generation
        with _with_path(file):
            stated += token_ids(read_object(file), "eos_token_id")
    else:
        stated += config.eos_token_ids  # transformers' default, if none is stated
    return _checked_ends(replace(config, eos_token_ids=tuple(dict.fromkeys(stated))), file)


def _checked_ends(config: ModelConfig, file: Path) -> ModelConfig:
    """``config``; ValueError if it has more end tokens, within the vocabulary, than a row has room for."""
    count = len({token for token in config.eos_token_ids if token < config.vocab_size})
    if count > MAX_END_TOKEN_IDS:
        raise ValueError(f"{file}: eos_token_id names {count:,} tokens; the limit is {MAX_END_TOKEN_IDS}")
    return config


@contextmanager
def _with_path(file: Path) -> Iterator[None]:
    """Prefix ValueErrors with the path."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(file)) else f"{file}: {text}") from None


def model_config_from_dict(settings: Mapping[str, Any]) -> ModelConfig:
    """Config of a parsed config.json. ValueError with every reason why the model is not supported."""
    architecture = _architecture(settings)
    refusals = find_refusals(settings)
    if refusals:
        raise ValueError(f"cannot run {architecture}: " + "; ".join(refusals))
    family = FAMILIES.get(architecture)
    settings = family.complete(settings)
    hidden, heads = whole_number(settings, "hidden_size"), whole_number(settings, "num_attention_heads")
    max_position = whole_number(settings, "max_position_embeddings")
    recipe = family.part_of(settings).recipe(settings)
    if not family.has_rope_by_kind:
        recipe["rope"] = parse_rope(settings, max_position, is_partial=family.is_partly_rotated)
    rope = replace(recipe["rope"], is_interleaved=family.is_interleaved)
    plain: dict[str, Any] = dict(
        architecture=architecture,
        vocab_size=whole_number(settings, "vocab_size"),
        hidden_size=hidden,
        num_layers=whole_number(settings, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=whole_number(settings, "num_key_value_heads", heads),
        head_dim=recipe["head_dim"] if "head_dim" in recipe else _head_dim(settings, hidden, heads),
        intermediate_size=whole_number(settings, "intermediate_size"),
        max_position=stretched_max_position(rope, max_position),
        rms_norm_eps=number(settings, "rms_norm_eps", above=0.0, most=1.0),
        rope=rope,
        tie_word_embeddings=flag(settings, "tie_word_embeddings"),
        bos_token_id=next(iter(token_ids(settings, "bos_token_id")), None),
        eos_token_ids=token_ids(settings, "eos_token_id"),
    )
    values = {**plain, **recipe, "rope": rope, "is_text_part": family.is_text_part}
    windows = recipe.get("windows")
    if (
        windows is not None
        and recipe.get("window_rope") is None
        and max(filter(None, windows), default=values["max_position"]) >= values["max_position"]
    ):
        values["windows"] = None  # they hold the whole context; so a budget applies
    return ModelConfig(**values)


def find_refusals(settings: Mapping[str, Any]) -> list[str]:
    """Every reason why this model is not supported."""
    architecture = _architecture(settings)
    reasons = []
    is_known = architecture in FAMILIES
    if not is_known:
        reasons.append(f"unknown architecture (known: {', '.join(FAMILIES.names)})")
        inner = settings.get("text_config")
        settings = {**settings, **(inner if isinstance(inner, dict) else {})}
        missing = [what for name, what in UNSUPPORTED_FIELDS.items() if settings.get(name)]
        if missing:
            reasons.append(f"not supported: {', '.join(dict.fromkeys(missing))}")
    if flag(settings, "is_encoder_decoder"):
        reasons.append("encoder-decoder models have cross attention, which rows do not hold")
    family = FAMILIES.get(architecture) if is_known else Family()
    settings = family.complete(settings)
    reasons += _layer_type_refusals(settings, family)
    if not family.has_windows and (window := sliding_window(settings)) is not None:
        reasons.append(f"sliding_window is in use ({window}), which is not supported for {architecture}")
    kind = settings.get("model_type")
    if family.text_parts and isinstance(settings.get("text_config"), dict) and str(kind) not in family.text_parts:
        known = " or ".join(map(repr, family.text_parts))
        reasons.append(f"text_config has model_type {kind!r}; only {known} is supported")
    else:
        reasons += family.part_of(settings).refusals(settings)
    if family.has_experts:
        reasons += layer_kind_refusals(settings)
    experts = [name for name in EXPERT_FIELDS if settings.get(name)]
    if experts and is_known and not family.has_experts:
        reasons.append(f"mixture-of-experts layers are not supported ({experts[0]} is {settings[experts[0]]})")
    if settings.get("index_topk") and "indexed_attention" not in family.other_layer_types:
        reasons.append(
            f"a sparse indexer with keys of its own (index_topk is {settings['index_topk']!r}) is not supported"
        )
    reasons += quantization.refusals(settings)
    for name in ("dtype", "torch_dtype"):
        dtype = settings.get(name)
        if dtype is not None and not (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES):
            reasons.append(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    activation = settings.get("hidden_act", "silu")
    if activation != "silu" and not family.has_own_activation:
        reasons.append(f"hidden_act is {activation!r}; only 'silu' is supported")
    return reasons


def _layer_type_refusals(settings: Mapping[str, Any], family: Family) -> list[str]:
    given = settings.get("layer_types")
    if given is None:
        return []
    num_layers = whole_number(settings, "num_hidden_layers")
    if not isinstance(given, list) or len(given) != num_layers or not all(isinstance(kind, str) for kind in given):
        found = f"a list of {len(given)}" if isinstance(given, list) else repr(given)
        return [f"layer_types is {found}; it must be a list that names the kind of each of the {num_layers} layers"]
    kinds = dict.fromkeys(given)
    reasons = []
    if "sliding_attention" in kinds and not family.has_windows:
        reasons.append("layer_types has 'sliding_attention', which is not supported for this architecture")
    elif "sliding_attention" in kinds and sliding_window(settings) is None:
        reasons.append("layer_types has 'sliding_attention', and no sliding_window is in use")
    others = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention", *family.other_layer_types)]
    if others:
        reasons.append(
            f"layer_types has {', '.join(map(repr, others))}; "
            "state-space, linear and other layers without a key-value cache per token are not supported"
        )
    return reasons


def _architecture(settings: Mapping[str, Any]) -> str:
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        known = ", ".join(FAMILIES.names)
        raise ValueError(f"architectures must name one architecture, found {names!r} (known: {known})")
    return names[0]


def _head_dim(settings: Mapping[str, Any], hidden: int, heads: int) -> int:
    if settings.get("head_dim") is not None:
        return whole_number(settings, "head_dim")
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})")
    return hidden // heads
