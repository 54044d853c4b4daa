"""Broken settings of a checkpoint are ValueErrors with the file's path and the field's name, whatever is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.stand_ins import checkpoint_of
from snapstream.assets import TINY_MODEL
from snapstream.config import ModelConfig, RopeConfig
from snapstream.config.model import MoEConfig
from snapstream.models.checkpoint import load_weights, read_manifest
from snapstream.models.config_json import read_object
from snapstream.models.registry import FAMILIES, model_config_from_dict, read_model_config
from snapstream.models.sharding import num_parameters
from snapstream.models.tokenizer import find_tokenizer, load_tokenizer
from snapstream.models.weights import DecoderWeights
from tests.unit.models.test_registry import LLAMA, LLAMA3_ROPE, other_values

DEEP = '{"a":' * 100_000
NO_JSON: list[tuple[bytes, str]] = [
    (b"\xff\xfe\x00\x01", "is not text; expected JSON in UTF-8"),
    (b"", "is not valid JSON"),
    (DEEP.encode(), "is not valid JSON: it is nested too deeply"),
    (b'{"architectures": ["Llama', "is not valid JSON"),
    (b"5", "holds a int; expected an object"),
]
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number over 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    ({"quantization_config": True}, "quantization_config is True; it must be an object"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list that names the kind"),
    ({"layer_types": ["full_attention"]}, "layer_types is a list of 1; .* each of the 2 layers"),
    ({"layer_types": [[], {}]}, "layer_types is a list of 2; "),
    ({"layer_types": 5}, "layer_types is 5"),
    ({"eos_token_id": -1}, "eos_token_id is -1; it must be a token id"),
    ({"eos_token_id": 2.0}, "eos_token_id is 2.0"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"eos_token_id": True}, "eos_token_id is True"),
    ({"eos_token_id": [2, [3]]}, r"eos_token_id is \[2, \[3\]\]"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
    ({"bos_token_id": -1}, "bos_token_id is -1"),
    ({"bos_token_id": 1.5}, "bos_token_id is 1.5"),
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; it must be one of float64, float32"),
    ({"torch_dtype": 16}, "torch_dtype is 16"),
    ({"hidden_size": 10**30}, "hidden_size is 1000.*; it must be a whole number"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
    ({"architectures": [5]}, r"architectures must name one architecture, found \[5\]"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"rope_theta": 0}, "rope_theta is 0; it must be a number over 1"),
    ({"rope_scaling": [1]}, r"rope settings .*\[1\]"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
    ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, r"factor is 1e\+300"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast is -1; it must be a number over 0"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": True}},
     "original_max_position_embeddings is True"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), NO_JSON, ids=[reason[:20] for _, reason in NO_JSON])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_are_no_settings(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / name).write_bytes(content)
    read = load_tokenizer if name == "tokenizer.json" else read_model_config
    with pytest.raises(ValueError, match=re.escape(f"{folder / name} ") + reason):
        read(folder)


@pytest.mark.parametrize(("changes", "reason"), FIELDS, ids=[reason[:30] for _, reason in FIELDS])
def test_fields_that_are_not_what_they_must_be(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "config.json")) + ": .*" + reason):
        read_model_config(tmp_path)


def test_numbers_without_end(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA).replace('"vocab_size": 1000', '"vocab_size": 1' + "0" * 5000))
    with pytest.raises(ValueError, match=r"config.json: vocab_size is inf; it must be a whole number"):
        read_model_config(file)


def test_more_end_tokens_than_a_row_has_room_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [*range(16), 1000, 1001]}))
    assert len(read_model_config(tmp_path).eos_token_ids) == 18  # two are outside the vocabulary
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(900))}))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id names 900 tokens; the limit is 16"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("architecture", FAMILIES.names)
def test_any_number_in_any_field_is_read_or_refused(architecture: str) -> None:
    """No division by zero, no root of a negative number, no list of 2^40 heads or experts."""
    settings = other_values(architecture)
    for name in settings:
        for value in (0, -1, 3, 2**40, 0.0, "x", []):
            with suppress(ValueError):
                num_parameters(model_config_from_dict({**settings, name: value}))


def test_end_tokens_of_the_generation_config_are_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = tmp_path / "generation_config.json"
    beside.write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match=re.escape(f"{beside}: eos_token_id is ['</s>']; it must be a token id")):
        read_model_config(tmp_path)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "torch.float16", "auto"])
def test_known_names_of_dtypes_are_taken(dtype: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": dtype}))
    assert read_model_config(tmp_path).hidden_size == 64


def test_what_nobody_reads_may_be_anything(tmp_path: Path) -> None:
    unread = {"time_step_limit": [0.0, float("inf")], "auto_map": None, "foreign": 10**60}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **unread}))
    assert read_model_config(tmp_path).vocab_size == 1000


FILES_OF_A_CHECKPOINT = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json",
    "model.safetensors", "other.safetensors", "model.safetensors.index.json", "chat_template.jinja", "vocab.txt",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES_OF_A_CHECKPOINT)
@pytest.mark.parametrize("kind", ["FIFO", "link to a FIFO", "device", "socket"])
@pytest.mark.parametrize("read", [read_model_config, load_tokenizer, find_tokenizer])
def test_only_regular_files_are_read(read: Callable[[Path], object], kind: str, name: str, tmp_path: Path) -> None:
    """Reading from the others could block for ever."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "link to a FIFO":
        os.mkfifo(tmp_path / "pipe")
        file.symlink_to(tmp_path / "pipe")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(folder):
            made.bind(name)  # an address has room for 107 bytes, and test folders have longer names
    with pytest.raises(ValueError, match=re.escape(f"{file} is not a regular file")):
        read(folder)


LARGE = [("config.json", 2**31), ("tokenizer_config.json", 2**24 + 1), ("tokenizer.json", 2**40),
         ("model.safetensors.index.json", 2**40), ("chat_template.jinja", 2**20 + 1),
         ("additional_chat_templates/a.jinja", 2**40)]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), LARGE)
@pytest.mark.parametrize("read", [read_model_config, load_tokenizer])
def test_large_files_are_not_read(read: Callable[[Path], object], name: str, size: int, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("wb") as file:
        file.truncate(size)  # sparse: it takes no space
    with pytest.raises(ValueError, match=re.escape(f"{folder / name} has {size:,} bytes; the limit is ")):
        read(folder)


def test_large_settings_of_any_folder_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="index.json has 1,099,511,627,776 bytes; the limit is 268,435,456"):
        read_manifest(tmp_path)


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="config.json cannot be read: Is a directory"):
        read_object(tmp_path / "config.json")


TOKENIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("tokenizer.json", {"model": 5}, "tokenizer.json and tokenizer_config.json make no tokenizer: "),
    ("tokenizer.json", {"added_tokens": 5}, "make no tokenizer: "),
    ("tokenizer_config.json", {"tokenizer_class": 5}, "make no tokenizer: "),
    ("tokenizer_config.json", {"extra_special_tokens": 5}, "make no tokenizer: "),
    ("tokenizer_config.json", {"chat_template": 5}, "tokenizer_config.json: chat_template is 5"),
    ("tokenizer_config.json", {"model_max_length": "x"}, "tokenizer_config.json: model_max_length is 'x'"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), TOKENIZERS)
def test_tokenizers_that_are_none(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(str(folder)) + ".*" + reason):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "PreTrainedTokenizerFast"), ("qwen2", "PreTrainedTokenizerFast"), ("qwen3", "Qwen2Tokenizer"),
        ("llama", "LlamaTokenizerFast"), ("phi3", "LlamaTokenizerFast"), ("mistral", "LlamaTokenizer"),
        ("cohere", "CohereTokenizerFast"), ("no-such-type", "GPT2Tokenizer"), ("llama", None),
        (None, "PreTrainedTokenizerFast"),
    ],
)  # fmt: skip
def test_a_named_tokenizer_is_the_one_of_transformers(
    model_type: str | None, named: str | None, tmp_path: Path
) -> None:
    """Whose ``AutoTokenizer`` reads the model's whole configuration to choose it."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    for name, changes in (
        ("config.json", {"model_type": model_type}),
        ("tokenizer_config.json", {"tokenizer_class": named}),
    ):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    own, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "The code is 4821907.<|end|> \u00c4 "
    assert type(own) is type(theirs) and own.encode(text) == theirs.encode(text)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match="has no tokenizer; expected one of tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")


# An index of shards names files of its own folder, and nothing else.

INDEX = "model.safetensors.index.json"
OUTSIDE = ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "sub/x.safetensors", "..", "", "a\\b", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_shards_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (shard,) = write_shards(folder, tensors_of(CONFIG), 1)
    target = folder / name if "\0" not in name else shard
    if name.endswith(".safetensors") and not name.startswith("/"):  # it is there, and whole
        (folder / "sub").mkdir()
        (folder / "a").mkdir()
        shard.rename(target.resolve())
    index = {"weight_map": dict.fromkeys(tensors_of(CONFIG), name)}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(f"{folder / INDEX}: weight_map names {name!r} for model.")):
        load(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"weight_map": {"a": 5}}', "weight_map names int 5 for a; it must be the name of a file"),
        ('{"weight_map": {"a": ["x.safetensors"]}}', "weight_map names list"),
        ('{"weight_map": null}', "is not an index of shards: weight_map is NoneType None"),
        ('{"weight_map": {}}', "is not an index of shards"),
        ("{}", "is not an index of shards"),
        ("[]", "holds a list; expected an object"),
        ('{"weight_map": ' + '{"a":' * 100_000, "is not valid JSON: it is nested too deeply"),
        ('{"weight_map": {', "is not valid JSON"),
    ],
)
def test_broken_indices(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / INDEX)) + r":? " + re.escape(reason)):
        load(tmp_path)


def test_links_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    """Caches of model hubs: a snapshot of links to blobs that lie elsewhere."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    tensors: dict[str, Any] = tensors_of(CONFIG)
    for number, shard in enumerate(write_shards(snapshot, tensors, 2)):
        shard.rename(blobs / f"{number}")
        shard.symlink_to(Path("..") / "blobs" / f"{number}")
    assert torch.equal(load(snapshot).vectors["final_norm"], tensors["model.norm.weight"])


# Checkpoint folders: exact content, one or many shards, every refusal by name, no second copy in memory.

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=11, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, intermediate_size=10, max_position=64, qkv_bias=True, o_bias=True, mlp_bias=True,
    qk_norm=True,
)  # fmt: skip


def tensors_of(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    plan = checkpoint_of(DecoderWeights.empty(config, torch.float32, "meta"))
    return {name: torch.randn(view.shape, generator=generator) for name, view in plan.items()}


def write_shards(folder: Path, tensors: dict[str, Tensor], count: int) -> list[Path]:
    """Write ``count`` shards with an index; tensors are dealt out in turn."""
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    weight_map = {key: names[position % count] for position, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key in tensors if weight_map[key] == name}, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / name for name in names]


def load(folder: Path, config: ModelConfig = CONFIG) -> DecoderWeights:
    return load_weights(folder, config, torch.float32, "cpu", progress=False)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_of_the_stacks(count: int, tmp_path: Path) -> None:
    """q, k, v and gate, up lie one below the other; everything else is stacked as it is."""
    tensors = tensors_of(CONFIG)
    if count:
        write_shards(tmp_path, tensors, count)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path)

    def stacked(*parts: str) -> Tensor:
        layers = [torch.cat([tensors[f"model.layers.{i}.{part}"] for part in parts]) for i in range(2)]
        return torch.stack(layers)

    attention, mlp = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
    want = {
        "embed": tensors["model.embed_tokens.weight"],
        "lm_head": tensors["lm_head.weight"],
        "final_norm": tensors["model.norm.weight"],
        "input_norm": stacked("input_layernorm.weight"),
        "post_norm": stacked("post_attention_layernorm.weight"),
        "qkv": stacked(*(f"{part}.weight" for part in attention)),
        "qkv_bias": stacked(*(f"{part}.bias" for part in attention)),
        "o": stacked("self_attn.o_proj.weight"),
        "o_bias": stacked("self_attn.o_proj.bias"),
        "gate_up": stacked(*(f"{part}.weight" for part in mlp)),
        "gate_up_bias": stacked(*(f"{part}.bias" for part in mlp)),
        "down": stacked("mlp.down_proj.weight"),
        "down_bias": stacked("mlp.down_proj.bias"),
        "q_norm": stacked("self_attn.q_norm.weight"),
        "k_norm": stacked("self_attn.k_norm.weight"),
    }
    assert weights.stored().keys() == want.keys()
    for role, tensor in want.items():
        assert torch.equal(weights.stored()[role], tensor), role


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """Also where the checkpoint repeats it, and where old rotary buffers lie about."""
    config = replace(CONFIG, tie_word_embeddings=True)
    tensors = tensors_of(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, config)
    assert weights.lm_head is weights.embed
    assert torch.equal(weights.embed.dense(), tensors["model.embed_tokens.weight"])


def test_dtype_is_converted(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(CONFIG).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, CONFIG, torch.float16, "cpu", progress=False)
    assert torch.equal(weights.embed.dense(), tensors["model.embed_tokens.weight"].to(torch.float16))


def test_progress_bar_counts_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(tensors_of(CONFIG), tmp_path / "model.safetensors")
    load_weights(tmp_path, CONFIG, torch.float32, "cpu", progress=True)
    count = len(tensors_of(CONFIG))
    assert f"{count}/{count}" in capsys.readouterr().err
    load_weights(tmp_path, CONFIG, torch.float32, "cpu", progress=False)
    assert capsys.readouterr().err == ""


MIXTURE = ModelConfig(
    architecture="Glm4MoeForCausalLM", vocab_size=11, hidden_size=8, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=10, max_position=64, rope=RopeConfig(partial_rotary_factor=0.5), num_mtp_layers=1,
    moe=MoEConfig(num_experts=4, top_k=2, inner=6, num_shared=1, first_dense=1, scoring="sigmoid", has_bias=True),
)  # fmt: skip


def test_experts_are_stacked_and_further_layers_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each expert's matrices come one by one, out of any shard; layers that predict further tokens are left out."""
    tensors = tensors_of(MIXTURE)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(3, 5)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(2, 2)
    write_shards(tmp_path, tensors, 5)
    with caplog.at_level("INFO", logger="snapstream"):
        weights = load(tmp_path, MIXTURE)
    assert "2 tensors of multi-token prediction (layers after the last) are not loaded" in caplog.text
    stored = weights.stored()
    for layer in (1, 2):
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            both = torch.cat((tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"]))
            assert torch.equal(stored["experts_gate_up"][layer - 1, expert], both)
            assert torch.equal(stored["experts_down"][layer - 1, expert], tensors[f"{name}.down_proj.weight"])
        correction = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert torch.equal(stored["router_bias"][layer - 1], correction)
    assert stored["gate_up"].shape == (1, 20, 8)
    again = checkpoint_of(weights)
    assert all(torch.equal(again[name], tensors[name]) for name in again) and len(again) == len(tensors) - 2
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(3, 5)
    write_shards(tmp_path, tensors, 5)
    with pytest.raises(ValueError, match="checkpoint holds model.layers.4.eh_proj.weight, which Glm4Moe"):
        load(tmp_path, MIXTURE)
    del tensors["model.layers.4.eh_proj.weight"], tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    write_shards(tmp_path, tensors, 5)
    with pytest.raises(ValueError, match="checkpoint lacks model.layers.2.mlp.experts.3.up_proj.weight"):
        load(tmp_path, MIXTURE)


def test_heads_rotated_in_part_are_stored_in_another_order(tmp_path: Path) -> None:
    """Of 8 numbers of a head the first 4 turn, in pairs (0, 2) and (1, 3): stored they are pairs (0, 4) and (1, 5)."""
    tensors = tensors_of(MIXTURE)
    save_file(tensors, tmp_path / "model.safetensors")
    qkv = load(tmp_path, MIXTURE).stored()["qkv"][1]
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    name = "model.layers.1.self_attn.{}_proj.weight"
    assert torch.equal(qkv[8:16], tensors[name.format("q")][8:16][order])
    assert torch.equal(qkv[32:40], tensors[name.format("k")][:8][order])
    assert torch.equal(qkv[48:], tensors[name.format("v")])


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[Q_PROJ]


def _misshape(tensors: dict[str, Tensor]) -> None:
    tensors[Q_PROJ] = torch.zeros(8, 24)


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)


def _deepen(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(10, 8)


def _quantize(tensors: dict[str, Tensor]) -> None:
    tensors[Q_PROJ] = torch.zeros(24, 8, dtype=torch.int8)


def _drop_many(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors)[:5]:
        del tensors[name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, f"checkpoint lacks {Q_PROJ}; LlamaForCausalLM needs"),
        (_drop_many, "checkpoint lacks model.embed_tokens.weight, .* and 2 more"),
        (_misshape, rf"{Q_PROJ} in model.safetensors has shape \[8, 24\]; the config asks for \[24, 8\]"),
        (_add, "holds model.layers.1.self_attn.sinks, which LlamaForCausalLM does not use"),
        (_deepen, "holds model.layers.2.mlp.up_proj.weight, which"),
        (_quantize, f"{Q_PROJ} in model.safetensors is stored as I8"),
    ],
)
def test_wrong_tensors_are_named(spoil: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_untied_head_is_needed(tmp_path: Path) -> None:
    tensors = tensors_of(replace(CONFIG, tie_word_embeddings=True))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="checkpoint lacks lm_head.weight"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [4, 0.5, -1])
def test_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    """Cut in the header, in the middle, and by its last byte."""
    first, second = write_shards(tmp_path, tensors_of(CONFIG), 2)
    content = second.read_bytes()
    second.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else int(keep)])
    with pytest.raises(ValueError, match=f"{second.name} is not a whole safetensors file"):
        load(tmp_path)


def test_corrupt_header_is_named(tmp_path: Path) -> None:
    save_file(tensors_of(CONFIG), tmp_path / "model.safetensors")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[8:16] = b"garbage!"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        load(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, tensors_of(CONFIG), 4)
    shards[2].unlink()
    with pytest.raises(ValueError, match=f"1 of 4 shards missing: {shards[2].name}"):
        load(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    first, second = write_shards(tmp_path, tensors, 2)
    save_file({**load_file(second), "model.embed_tokens.weight": torch.zeros(11, 8)}, second)
    with pytest.raises(ValueError, match=f"embed_tokens.weight is in two shards: {first.name} and {second.name}"):
        load(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only as pytorch_model.bin"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match="is not an index of shards"):
        load(tmp_path)


CLEAR = Path("/proc/self/clear_refs")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


LOADER_LARGE = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=2000, hidden_size=768, num_layers=5, num_heads=12,
    num_kv_heads=12, head_dim=64, intermediate_size=2048, max_position=64,
)  # fmt: skip
LARGE_MIXTURE = replace(LOADER_LARGE, architecture="Qwen3MoeForCausalLM", num_layers=4, qk_norm=True,
                        moe=MoEConfig(num_experts=48, top_k=4, inner=256))  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="needs Linux's record of a process's peak memory")
@pytest.mark.parametrize("config", [LOADER_LARGE, LARGE_MIXTURE], ids=["dense", "experts"])
def test_peak_memory_is_model_plus_one_shard(config: ModelConfig, tmp_path: Path) -> None:
    """150 MB of weights in eight shards: neither a second copy nor a second mapped shard at any time."""
    tensors = tensors_of(config)
    shards = write_shards(tmp_path, tensors, 8)
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shard_bytes = max(shard.stat().st_size for shard in shards)
    del tensors
    load(tmp_path, config)  # warm: allocator, imports
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier tests freed must not serve this load unseen
    before = _status_bytes("VmRSS")
    CLEAR.write_text("5")  # the peak counts from here; the kernel misses none, as a thread that polls would
    weights = load(tmp_path, config)
    peak = _status_bytes("VmHWM")
    assert weights.num_bytes == model_bytes
    assert 0.9 * model_bytes < peak - before < model_bytes + shard_bytes + 2**22


@pytest.mark.parametrize(
    ("value", "dtype", "what"),
    [
        (float("nan"), torch.float32, "NaN"),
        (float("inf"), torch.float32, "infinity as float32"),
        (float("-inf"), torch.bfloat16, "infinity as bfloat16"),
        (1e5, torch.float16, "infinity as float16"),  # finite as it is stored
    ],
)
def test_weights_that_are_not_finite(value: float, dtype: torch.dtype, what: str, tmp_path: Path) -> None:
    tensors, name = tensors_of(CONFIG), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 1] = value
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {name} holds {what}; weights must be finite .1 of"):
        load_weights(tmp_path, CONFIG, dtype, "cpu", progress=False)
