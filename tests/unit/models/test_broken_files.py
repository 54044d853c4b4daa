"""Broken settings of a checkpoint are ValueErrors with the file's path and the field's name, whatever is wrong."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.models.json_file import read_object
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer, load_tokenizer
from tests.unit.models.test_registry import LLAMA, LLAMA3_ROPE

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


def test_no_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match="has no tokenizer; expected one of tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
