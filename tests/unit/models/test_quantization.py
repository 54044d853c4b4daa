"""What config.json may say of codes, and every refusal with its field, value and what is read."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from snapstream.config import WeightFormat
from snapstream.models.quantization import ATTENTION, quantization_config, refusals, stored_attention, stored_format
from snapstream.models.registry import find_refusals

INT4 = WeightFormat(dtype="int4", group=128)


def changed(path: str, value: Any) -> dict[str, Any]:
    """A config.json that says int4, but for one field."""
    settings: dict[str, Any] = {"quantization_config": copy.deepcopy(quantization_config(INT4))}
    *parts, last = path.split("/")
    inner = settings
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return settings


def mixed() -> dict[str, Any]:
    """A config.json that says int4, and int8 around attention."""
    return {"quantization_config": quantization_config(INT4, ["mlp.gate"], WeightFormat(dtype="int8", group=32))}


def test_attention_may_have_codes_of_its_own() -> None:
    settings = mixed()
    assert refusals(settings) == [] and stored_format(settings) == INT4
    assert stored_attention(settings) == WeightFormat(dtype="int8", group=32)
    groups = settings["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], [ATTENTION]]
    groups["group_1"]["targets"] = ["Linear"]
    assert "config_groups have the targets ['Linear', 'Linear']; read is 'Linear' once" in refusals(settings)[0]
    groups["group_1"]["weights"]["symmetric"] = False
    assert "config_groups.group_1.weights.symmetric is False" in refusals(settings)[0]
    del groups["group_0"]
    groups["group_1"] = mixed()["quantization_config"]["config_groups"]["group_1"]
    assert f"have the targets [{ATTENTION!r}]" in refusals(settings)[0]
    groups |= {"a": {}, "b": {}}
    assert "config_groups is 3; one group for all layers is read" in refusals(settings)[0]


@pytest.mark.parametrize(
    ("name", "is_attention"),
    [
        ("model.layers.3.self_attn.q_proj", True),
        ("model.layers.3.self_attn.o_proj", True),
        ("model.layers.3.self_attn.qkv_proj", True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", True),
        ("model.layers.3.self_attn.q_norm", False),
        ("model.layers.3.self_attn", False),
        ("model.layers.3.mlp.down_proj", False),
        ("model.layers.3.mlp.experts.7.up_proj", False),
    ],
)
def test_which_modules_are_around_attention(name: str, is_attention: bool) -> None:
    """As readers of the file match names: from the first character."""
    assert (re.match(ATTENTION.removeprefix("re:"), name) is not None) == is_attention


def test_what_is_written_is_read() -> None:
    for form in (INT4, WeightFormat(dtype="int8", group=32)):
        settings = {"quantization_config": quantization_config(form)}
        assert refusals(settings) == [] and stored_format(settings) == form
        assert stored_attention(settings) is None
        assert quantization_config(form, attention=form) == settings["quantization_config"]
    assert (
        stored_format({}) is None
        and stored_attention({}) is None
        and refusals({"quantization_config": None}) == refusals({}) == []
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quantization_config/ignore", ["re:.*lm_head"]),
        ("quantization_config/ignore", ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe\\.gate"]),
        ("quantization_config/ignore", ["model.layers.0.mlp.gate", "model.layers.17.mlp.gate", "lm_head"]),
        ("quantization_config/ignore", ["lm_head", "visual.blocks.0.attn.qkv", "model.visual.merger", "re:visual.*"]),
        ("quantization_config/ignore", ["re:.*vision_tower.*", "re:multi_modal_projector.*", "language_model.lm_head"]),
        ("quantization_config/ignore", ["re:.*lm_head", "model.language_model.layers.0.mlp.gate"]),
        ("quantization_config/global_compression_ratio", 1.5),
        ("quantization_config/config_groups/group_0/weights/actorder", "static"),
        ("quantization_config/config_groups/group_0/weights/observer", "mse"),
        ("quantization_config/config_groups/group_0/weights/group_size", 64),
        ("quantization_config/sparsity_config", {}),
        ("quantization_config/config_groups/group_1", mixed()["quantization_config"]["config_groups"]["group_1"]),
    ],
)
def test_what_does_not_change_the_meaning_is_read(path: str, value: Any) -> None:
    assert refusals(changed(path, value)) == []


GROUP = "quantization_config/config_groups/group_0"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("quantization_config", True, "quantization_config is True; it must be an object"),
        (
            "quantization_config/quant_method",
            "hqq",
            "present (hqq); of quantized weights compressed-tensors, fp8, gptq",
        ),
        ("quantization_config/quant_method", "bitsandbytes", "present (bitsandbytes)"),
        (
            "quantization_config/format",
            "marlin-24",
            "format is 'marlin-24'; read is 'pack-quantized' or 'int-quantized'",
        ),
        ("quantization_config/quantization_status", "frozen", "quantization_status is 'frozen'; read is none or 'comp"),
        ("quantization_config/kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is {'num_bits': 8}; read is none"),
        ("quantization_config/transform_config", {"config_groups": {}}, "transform_config is"),
        ("quantization_config/sparsity_config", {"format": "dense"}, "sparsity_config is"),
        ("quantization_config/ignore", ["lm_head", "model.layers.0.mlp.down_proj"], "every matrix of the layers must"),
        ("quantization_config/ignore", ["re:.*mlp.gate$"], "ignore does not name lm_head"),
        ("quantization_config/ignore", ["lm_head", "re:.*mlp.*"], "every matrix of the layers must"),
        ("quantization_config/ignore", ["lm_head", "visuals"], "every matrix of the layers must"),
        ("quantization_config/ignore", ["lm_head", 7], "every matrix of the layers must"),
        ("quantization_config/ignore", "lm_head", "ignore is 'lm_head'; every matrix"),
        ("quantization_config/ignore", [], "ignore does not name lm_head"),
        ("quantization_config/config_groups", {}, "config_groups is 0; one group for all layers"),
        ("quantization_config/config_groups", None, "config_groups is None; one group for all layers"),
        (GROUP, ["Linear"], "config_groups.group_0 is ['Linear']; it must say how weights are quantized"),
        (f"{GROUP}/targets", ["re:.*q_proj"], "targets is ['re:.*q_proj']; read is ['Linear']"),
        (f"{GROUP}/input_activations", {"num_bits": 8}, "input_activations is {'num_bits': 8}; read is none"),
        (f"{GROUP}/weights", None, "it must say how weights are quantized"),
        (f"{GROUP}/weights/num_bits", 3, "weights.num_bits is 3; read is 8 or 4"),
        (f"{GROUP}/weights/num_bits", 8.0, "weights.num_bits is 8.0; read is 8 or 4"),
        (f"{GROUP}/weights/type", "float", "weights.type is 'float'; read is 'int'"),
        (f"{GROUP}/weights/symmetric", "no", "weights.symmetric is 'no'; read is True or False"),
        (f"{GROUP}/weights/strategy", "tensor", "weights.strategy is 'tensor'; read is none or 'group' or 'channel'"),
        (f"{GROUP}/weights/group_size", 4, "weights.group_size is 4; read is -1 (a row) or 8 to 65536"),
        (f"{GROUP}/weights/dynamic", True, "weights.dynamic is True; read is none or False"),
        (f"{GROUP}/weights/actorder", "row", "weights.actorder is 'row'; read is none or False or 'weight'"),
    ],
)
def test_what_is_refused(path: str, value: Any, words: str) -> None:
    (reason,) = refusals(changed(path, value))
    assert words in reason
    architecture = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    assert reason in find_refusals(architecture | changed(path, value))


def test_tied_embeddings_need_no_exception() -> None:
    assert refusals(changed("quantization_config/ignore", []) | {"tie_word_embeddings": True}) == []
