"""What a deployment's file may say, and what it says where it may not; without ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.integrations.ray.config import DeployConfig, config_of, read_config

TOML = """
model = "models/Qwen3-0.6B"
served_model_name = ["qwen3"]
port = 8100

[engine]
budget = 4096
max_rows = 16
prefix_store = "2GiB"

[decode]
replicas = 2
max_replicas = 8
cpus = 4

[front]
cors_origins = ["https://example.com"]
"""
YAML = """
model: models/Qwen3-0.6B
served_model_name: [qwen3]
port: 8100
engine: {budget: 4096, max_rows: 16, prefix_store: 2GiB}
decode: {replicas: 2, max_replicas: 8, cpus: 4}
front: {cors_origins: ["https://example.com"]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "a.toml", TOML))
    assert config == read_config(written(tmp_path, "a.yaml", YAML))
    assert (config.names, config.engine.budget, config.decode.max_replicas) == (("qwen3",), 4096, 8)
    assert config.engine.max_waiting == 128  # as ``serve`` has it, not as ``LLM``


def test_nothing_need_be_said() -> None:
    config = config_of({})
    assert config == DeployConfig() and config.model == str(TINY_MODEL)
    assert config.engine.prefix_store == "auto"


def test_replicas_of_each_kind_have_ranks_of_their_own() -> None:
    config = config_of({"engine": {"tensor_parallel": 2}, "prefill": {"tensor_parallel": 4}})
    assert config.prefill is not None
    reading, answering = config.options_of(config.prefill), config.options_of(config.decode)
    assert (reading.tensor_parallel, answering.tensor_parallel) == (4, 2)
    assert (reading.prefix_store, answering.prefix_store) == ("auto", None)
    alone = config_of({})
    assert alone.options_of(alone.decode) == alone.engine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": "x"}, "'modle' is no setting; the settings are model, "),
        ({"engine": {"budgets": 1}}, "engine: 'budgets' is no setting; "),
        ({"decode": {"replica": 2}}, "decode: 'replica' is no setting; the settings are replicas, max_replicas"),
        ({"decode": {"replicas": 0}}, "decode: replicas is 0; it must be a whole number from 1 to 10000"),
        ({"decode": {"replicas": True}}, "decode: replicas is True; it must be a whole number"),
        ({"decode": {"replicas": 4, "max_replicas": 2}}, "decode: max_replicas is 2; it must be a whole number from 4"),
        ({"decode": {"cpus": 1.5}}, "decode: cpus is 1.5; it must be a whole number"),
        ({"decode": {"rows_in_use": 80}}, "decode: rows_in_use is 80; it must be a number from 0.05 to 1"),
        ({"decode": {"stall_timeout": -1}}, "decode: stall_timeout is -1; it must be a number from 1 to 86400"),
        ({"decode": [2]}, "decode is [2]; it must be a table of settings"),
        ({"front": {"reasoning_parser": "qwen"}}, "front: reasoning_parser is 'qwen'; it must be one of auto, "),
        ({"front": {"responses_store": 8, "replicas": 2}}, "front: responses_store is 8 and replicas is 2; "),
        ({"front": {"allowed_hosts": "example.com"}}, "front: allowed_hosts is 'example.com'; it must be a list"),
        ({"engine": {"budget": 0}}, "engine: budget is 0; it must be a whole number >= 1"),
        ({"engine": {"prefix_store": "much"}}, "engine: prefix_store is 'much'; "),
        ({"model": ""}, "model is empty; it must be a checkpoint folder"),
        ({"model": 7}, "model is 7; it must be a text"),
        ({"port": 0}, "port is 0; it must be a whole number from 1 to 65535"),
        ({"drain_timeout": "long"}, "drain_timeout is 'long'; it must be a number from 0 to 86399"),
        ({"served_model_name": ["a", ""]}, "served_model_name is ['a', '']; it must be a list of texts"),
        ({"engine": {"prefix_dir": "x"}, "decode": {"replicas": 2}}, "engine: prefix_dir is one folder, "),
        ({"prefill": {"replicas": 0}}, "prefill: replicas is 0; it must be a whole number from 1 to 10000"),
        ({"prefill": {"rows_in_use": 0.5}}, "prefill: 'rows_in_use' is no setting; "),
        ({"prefill": {}, "decode": {"queued_tokens": 5}}, "decode: queued_tokens is for replicas that read prompts; "),
        ({"prefill": {"replicas": 2}, "engine": {"prefix_dir": "x"}}, "engine: prefix_dir is one folder, "),
        ({"prefill": {"tensor_parallel": 0}}, "prefill: tensor_parallel is 0; it must be a whole number >= 1"),
        (
            {"prefill": {"tensor_parallel": 1}, "engine": {"tensor_parallel": 2, "attention": "dp"}},
            "prefill: attention is 'dp' and experts 'tp', and there is one rank",
        ),
        (
            {"engine": {"tensor_parallel": 2, "local_ranks": 1, "leader_address": "10.0.0.1:7000"}},
            "engine: leader_address is '10.0.0.1:7000' and local_ranks 1; Ray decides",
        ),
        ([], "the file is []; it must be a table of settings"),
        (None, "the file is None; it must be a table of settings"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as told:
        config_of(given)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "model = ", "Invalid value"),
        ("a.yaml", "model: [", "while parsing"),
        ("a.json", "{", "Expecting property name"),
        ("a.ini", "", "its name ends in '.ini'; it must end in .toml, .yaml, .yml or .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError) as told:
        read_config(written(tmp_path, name, text))
    assert str(told.value).startswith(f"{tmp_path / name}: ") and message in str(told.value)


def test_the_command_refuses_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    file = written(tmp_path, "a.toml", "port = 70000")
    assert main(["deploy", str(file)]) == 2
    assert main(["deploy", str(tmp_path / "none.toml")]) == 2
    assert main(["deploy", str(written(tmp_path, "b.toml", "model = 'nowhere'"))]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line[:5] for line in lines] == ["error"] * 3
    assert "port is 70000" in lines[0] and "none.toml" in lines[1] and "nowhere" in lines[2]
