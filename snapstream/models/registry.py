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

from snapstream.config import DType, KVDType, ModelConfig, as_path
from snapstream.config.values import Registry
from snapstream.kv.spec import KVSpec
from snapstream.models import gguf, gguf_settings, quantization
from snapstream.models.cohere import COHERE, COHERE2, COHERE2_MOE, JAIS2, NEMOTRON, PHI, PHIMOE, STABLELM, STARCODER2
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
from snapstream.models.deepseek import AXK1, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K25, YOUTU
from snapstream.models.falcon import FALCON_H1
from snapstream.models.family import Family, sliding_window
from snapstream.models.gemma import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT_PART,
    GEMMA3N,
    GEMMA3N_TEXT_PART,
    GEMMA4,
    GEMMA4_TEXT_PART,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_TEXT_PART,
    MUSE_GLIMMER,
    VAULT_GEMMA,
)
from snapstream.models.gguf_header import is_gguf
from snapstream.models.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM4V, GLM4V_MOE, GLM_MOE_DSA, SOLAR_OPEN
from snapstream.models.gpt_oss import GPT_OSS
from snapstream.models.granite import (
    BAMBA,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
    HYPERCLOVA_X,
)
from snapstream.models.kimi import KIMI_LINEAR, LING3
from snapstream.models.lfm import LFM2, LFM2_MOE, LFM2_TEXT_PART, LFM3, LFM3_TEXT_PART
from snapstream.models.llama import (
    APERTUS,
    ARCEE,
    CWM,
    ERNIE4_5,
    HELIUM,
    HUNYUAN_DENSE,
    INTERNLM3,
    IQUEST_CODER,
    LLAMA,
    LLAMA4,
    LLAMA4_TEXT_PART,
    NANOCHAT,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from snapstream.models.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3_TEXT_PART, MISTRAL4, MIXTRAL
from snapstream.models.mixtures import (
    AFMOE,
    DOTS1,
    ERNIE4_5_MOE,
    EXAONE_MOE,
    FLINT,
    HUNYUAN_MOE,
    HY_V3,
    KOLIBRI1,
    LAGUNA,
    MELLUM,
    MINIMAX_M2,
    MINIMAX_M3,
    OLMOE,
    STEP3,
)
from snapstream.models.nemotron import NEMOTRON_H
from snapstream.models.olmo import EXAONE4, EXAONE4_5_TEXT_PART, OLMO, OLMO2, OLMO3, OLMO_HYBRID
from snapstream.models.quantization import fused_experts, has_corrections, has_own_head, stored_weights
from snapstream.models.qwen import QWEN2, QWEN2_MOE, QWEN2_VL, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE
from snapstream.models.qwen_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT_PART,
    QWEN3_5_TEXT_PART,
    QWEN3_NEXT,
)
from snapstream.models.tensors import TensorSpecs, in_own_formats
from snapstream.types import MAX_END_TOKEN_IDS

logger = logging.getLogger(__name__)

FAMILIES: Registry[Family] = Registry(
    "architecture",
    {
        "DeepseekV2ForCausalLM": DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": DEEPSEEK_V3,
        "DeepseekV32ForCausalLM": DEEPSEEK_V32,
        "AXK1ForCausalLM": AXK1,
        "KimiK25ForConditionalGeneration": KIMI_K25,  # as published, and as transformers has it
        "Kimi_K25ForConditionalGeneration": KIMI_K25,
        "YoutuForCausalLM": YOUTU,
        "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
        "GlmMoeDsaForCausalLM": GLM_MOE_DSA,
        "GptOssForCausalLM": GPT_OSS,
        "LlamaForCausalLM": LLAMA,
        "Llama4ForCausalLM": LLAMA4,
        "Llama4ForConditionalGeneration": LLAMA4_TEXT_PART,
        "MistralForCausalLM": MISTRAL,
        "MinistralForCausalLM": MINISTRAL,
        "Ministral3ForCausalLM": MINISTRAL3,
        "Mistral4ForCausalLM": MISTRAL4,
        "Mistral3ForConditionalGeneration": MISTRAL3_TEXT_PART,
        "Qwen2ForCausalLM": QWEN2,
        "Qwen3ForCausalLM": QWEN3,
        "Qwen3MoeForCausalLM": QWEN3_MOE,
        "Qwen2MoeForCausalLM": QWEN2_MOE,
        "Qwen2VLForConditionalGeneration": QWEN2_VL,
        "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
        "Qwen3VLForConditionalGeneration": QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
        "MixtralForCausalLM": MIXTRAL,
        "MiniMaxM2ForCausalLM": MINIMAX_M2,
        "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
        "Dots1ForCausalLM": DOTS1,
        "Ernie4_5_MoeForCausalLM": ERNIE4_5_MOE,
        "OlmoeForCausalLM": OLMOE,
        "HYV3ForCausalLM": HY_V3,
        "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
        "MellumForCausalLM": MELLUM,
        "ExaoneMoeForCausalLM": EXAONE_MOE,
        "Kolibri1ForCausalLM": KOLIBRI1,
        "SolarOpenForCausalLM": SOLAR_OPEN,
        "FlintForCausalLM": FLINT,
        "AfmoeForCausalLM": AFMOE,
        "LagunaForCausalLM": LAGUNA,
        "Step3p5ForCausalLM": STEP3,
        "Step3p7ForConditionalGeneration": STEP3,
        "Glm4MoeForCausalLM": GLM4_MOE,
        "Glm4vForConditionalGeneration": GLM4V,
        "Glm46VForConditionalGeneration": GLM4V,
        "Glm4vMoeForConditionalGeneration": GLM4V_MOE,
        "SmolLM3ForCausalLM": SMOLLM3,
        "CohereForCausalLM": COHERE,
        "Cohere2ForCausalLM": COHERE2,
        "Cohere2MoeForCausalLM": COHERE2_MOE,
        "NanoChatForCausalLM": NANOCHAT,
        "SeedOssForCausalLM": SEED_OSS,
        "InternLM3ForCausalLM": INTERNLM3,
        "HeliumForCausalLM": HELIUM,
        "IQuestCoderForCausalLM": IQUEST_CODER,
        "CwmForCausalLM": CWM,
        "ArceeForCausalLM": ARCEE,
        "ApertusForCausalLM": APERTUS,
        "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
        "Ernie4_5ForCausalLM": ERNIE4_5,
        "Exaone4ForCausalLM": EXAONE4,
        "Exaone4_5_ForConditionalGeneration": EXAONE4_5_TEXT_PART,
        "GemmaForCausalLM": GEMMA,
        "Gemma2ForCausalLM": GEMMA2,
        "VaultGemmaForCausalLM": VAULT_GEMMA,
        "Gemma3ForCausalLM": GEMMA3,
        "Gemma3ForConditionalGeneration": GEMMA3_TEXT_PART,
        "Gemma3nForCausalLM": GEMMA3N,
        "Gemma3nForConditionalGeneration": GEMMA3N_TEXT_PART,
        "Gemma4ForCausalLM": GEMMA4,
        "Gemma4ForConditionalGeneration": GEMMA4_TEXT_PART,
        "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
        "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED_TEXT_PART,
        "MuseGlimmerForConditionalGeneration": MUSE_GLIMMER,
        "GlmForCausalLM": GLM,
        "Glm4ForCausalLM": GLM4,
        "Qwen3NextForCausalLM": QWEN3_NEXT,
        "Qwen3_5ForCausalLM": QWEN3_5,
        "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
        "Qwen3_5ForConditionalGeneration": QWEN3_5_TEXT_PART,
        "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_TEXT_PART,
        "KimiLinearForCausalLM": KIMI_LINEAR,
        "BailingHybridForCausalLM": LING3,
        "Lfm2ForCausalLM": LFM2,
        "Lfm2MoeForCausalLM": LFM2_MOE,
        "Lfm3ForCausalLM": LFM3,
        "Lfm2VlForConditionalGeneration": LFM2_TEXT_PART,
        "Lfm3VlForConditionalGeneration": LFM3_TEXT_PART,
        "FalconH1ForCausalLM": FALCON_H1,
        "BambaForCausalLM": BAMBA,
        "HyperCLOVAXForCausalLM": HYPERCLOVA_X,
        "GraniteForCausalLM": GRANITE,
        "GraniteSWAForCausalLM": GRANITE_SWA,
        "GraniteMoeForCausalLM": GRANITE_MOE,
        "GraniteMoeSharedForCausalLM": GRANITE_MOE,
        "GraniteMoeSWAForCausalLM": GRANITE_MOE_SWA,
        "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
        "NemotronHForCausalLM": NEMOTRON_H,
        "Starcoder2ForCausalLM": STARCODER2,
        "StableLmForCausalLM": STABLELM,
        "PhiForCausalLM": PHI,
        "PhimoeForCausalLM": PHIMOE,
        "PhiMoEForCausalLM": PHIMOE,  # as published
        "NemotronForCausalLM": NEMOTRON,
        "Jais2ForCausalLM": JAIS2,
        "OlmoForCausalLM": OLMO,
        "Olmo2ForCausalLM": OLMO2,
        "Olmo3ForCausalLM": OLMO3,
        "OlmoHybridForCausalLM": OLMO_HYBRID,
        "Phi3ForCausalLM": PHI3,
    },
)


def kv_spec_of(config: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
    """What the cache stores per token."""
    return FAMILIES.get(config.architecture).kv_spec(config, dtype, kv_dtype)


@lru_cache(maxsize=64)
def _specs_in_own_formats(config: ModelConfig) -> TensorSpecs:
    specs = FAMILIES.get(config.architecture).tensors(config)
    return in_own_formats(specs, config.stored, config.num_layers)


def tensor_specs(config: ModelConfig) -> TensorSpecs:
    specs = _specs_in_own_formats(config) if config.stored.own else FAMILIES.get(config.architecture).tensors(config)
    return {**specs, **{name: replace(specs[name], is_float=True) for name in config.float_tensors}}


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
        config = replace(model_config_from_dict(settings), stored=stored_weights(file.parent, settings))
        if config.tie_word_embeddings and has_own_head(file.parent):
            config = replace(config, tie_word_embeddings=False)
        if FAMILIES.get(config.architecture).may_fuse_experts and (shape := fused_experts(file.parent)) is not None:
            moe, hidden = config.moe, config.hidden_size
            is_transposed = moe is not None and moe.inner != hidden and shape[1:] == [moe.inner, hidden]
            config = replace(config, has_fused_experts=True, has_transposed_experts=is_transposed)
        if config.moe and FAMILIES.get(config.architecture).may_lack_corrections and not has_corrections(file.parent):
            config = replace(config, moe=replace(config.moe, has_bias=False))
    generation = file.parent / "generation_config.json"
    if not generation.is_file():
        return _checked_ends(config, file)
    stated = token_ids(settings, "eos_token_id")  # transformers' default counts only without a generation_config.json
    with _with_path(generation):
        extra = token_ids(read_object(generation), "eos_token_id")
    return _checked_ends(replace(config, eos_token_ids=tuple(dict.fromkeys(stated + extra))), generation)


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
    recipe = family.recipe(settings)
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
    reasons += family.refusals(settings)
    experts = [name for name in EXPERT_FIELDS if settings.get(name)]
    if experts and is_known and not family.has_experts:
        reasons.append(f"mixture-of-experts layers are not supported ({experts[0]} is {settings[experts[0]]})")
    if settings.get("index_topk") and "indexed_attention" not in family.other_layer_types:
        reasons.append(
            f"a sparse indexer with keys of its own (index_topk is {settings['index_topk']!r}) is not supported"
        )
    reasons += _number_refusals(settings)
    activation = settings.get("hidden_act", "silu")
    if activation != "silu" and not family.has_own_activation:
        reasons.append(f"hidden_act is {activation!r}; only 'silu' is supported")
    return reasons


def _number_refusals(settings: Mapping[str, Any]) -> list[str]:
    reasons = quantization.refusals(settings)
    for name in ("dtype", "torch_dtype"):
        dtype = settings.get(name)
        if dtype is not None and not (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES):
            reasons.append(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}")
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
