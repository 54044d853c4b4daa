"""What a deployment's file may say, and what it says where it may not; without ray."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapstream.assets import TINY_MODEL
from snapstream.calibration import FILE
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


def test_replicas_that_transfer_rows_have_equal_heads() -> None:
    config = config_of({"engine": {"heads": "auto"}, "prefill": {}})
    assert config.prefill is not None and config.engine.heads == "auto"
    assert config.options_of(config.prefill).heads is None and config.options_of(config.decode).heads is None
    alone = config_of({"engine": {"heads": "auto"}})
    assert alone.options_of(alone.decode).heads == "auto"
    with pytest.raises(ValueError, match="heads is given"):
        config_of({"engine": {"heads": str(TINY_MODEL / FILE)}, "prefill": {}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": "x"}, "'modle' is not a setting; the settings are host, port, api_key_file, "),
        ({"engine": {"budgets": 1}}, "engine: 'budgets' is not a setting; "),
        ({"decode": {"replica": 2}}, "decode: 'replica' is not a setting; the settings are replicas, max_replicas"),
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
        ({"model": 7}, "model is 7; it must be a string"),
        ({"port": 0}, "port is 0; it must be a whole number from 1 to 65535"),
        ({"drain_timeout": "long"}, "drain_timeout is 'long'; it must be a number from 0 to 86399"),
        ({"served_model_name": ["a", ""]}, "served_model_name is ['a', '']; it must be a list of strings"),
        ({"engine": {"prefix_dir": "x"}, "decode": {"replicas": 2}}, "engine: prefix_dir is one folder, "),
        ({"prefill": {"replicas": 0}}, "prefill: replicas is 0; it must be a whole number from 1 to 10000"),
        ({"prefill": {"rows_in_use": 0.5}}, "prefill: 'rows_in_use' is not a setting; "),
        ({"prefill": {}, "decode": {"queued_tokens": 5}}, "decode: queued_tokens is for replicas that prefill; "),
        ({"prefill": {"replicas": 2}, "engine": {"prefix_dir": "x"}}, "engine: prefix_dir is one folder, "),
        ({"prefill": {"tensor_parallel": 0}}, "prefill: tensor_parallel is 0; it must be a whole number >= 1"),
        (
            {"prefill": {"tensor_parallel": 1}, "engine": {"tensor_parallel": 2, "attention": "dp"}},
            "prefill: attention is 'dp' and experts 'tp', and there is one rank",
        ),
        (
            {"engine": {"tensor_parallel": 2, "local_ranks": 1, "master_addr": "10.0.0.1:7000"}},
            "engine: master_addr is '10.0.0.1:7000' and local_ranks 1; Ray decides",
        ),
        ([], "the file is []; it must be a table of settings"),
        (None, "the file is None; it must be a table of settings"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config_of(given)
    assert str(caught.value).startswith(message)


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
    with pytest.raises(ValueError) as caught:
        read_config(written(tmp_path, name, text))
    assert str(caught.value).startswith(f"{tmp_path / name}: ") and message in str(caught.value)


def test_the_command_refuses_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    file = written(tmp_path, "a.toml", "port = 70000")
    assert main(["deploy", str(file)]) == 2
    assert main(["deploy", str(tmp_path / "none.toml")]) == 2
    assert main(["deploy", str(written(tmp_path, "b.toml", "model = 'nowhere'"))]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line[:5] for line in lines] == ["error"] * 3
    assert "port is 70000" in lines[0] and "none.toml" in lines[1] and "nowhere" in lines[2]


# The files of ``deploy/ray``: they parse, and say what the command and Ray take. No test starts what they describe.

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy" / "ray"
COMPOSE = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]["snapstream"]
SERVICE = yaml.safe_load((FILES / "rayservice.yaml").read_text())
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
LAST_S = 15  # for last frames, and for an engine to end


def application() -> tuple[dict[str, Any], DeployConfig]:
    [found] = SERVE["applications"]
    return found, config_of(found["args"])


def groups() -> list[dict[str, Any]]:
    cluster = SERVICE["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_example_can_be_deployed() -> None:
    config = read_config(FILES / "deploy.toml")
    assert config.decode.replicas == 2 and config.host == "0.0.0.0"


def test_compose_runs_the_example() -> None:
    config = read_config(FILES / "deploy.toml")
    command, given, file = COMPOSE["command"]
    assert (command, given) == ("snapstream", "deploy")
    mounted = dict(volume.removesuffix(":ro").rsplit(":", 1)[::-1] for volume in COMPOSE["volumes"])
    assert mounted[file] == "./deploy.toml" and Path(config.model).parent == Path("/models")
    assert "/models" in mounted and COMPOSE["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert int(COMPOSE["stop_grace_period"].rstrip("s")) >= config.drain_timeout + LAST_S
    assert f":{config.port}/health/ready'" in COMPOSE["healthcheck"]["test"][-1]
    assert (FILES / COMPOSE["build"]["context"]).resolve() == ROOT
    assert (ROOT / COMPOSE["build"]["dockerfile"]).is_file()


def test_the_ray_service_says_what_the_command_takes() -> None:
    found, config = application()
    assert SERVICE["kind"] == "RayService" and found["route_prefix"] == "/"
    assert (SERVE["http_options"]["host"], SERVE["http_options"]["port"]) == (config.host, config.port)
    ports = [port["containerPort"] for port in groups()[0]["template"]["spec"]["containers"][0]["ports"]]
    assert config.port in ports


def test_workers_have_room_for_a_replica_and_time_for_its_drain() -> None:
    _, config = application()
    [worker] = groups()[1:]
    pod = worker["template"]["spec"]
    requests = pod["containers"][0]["resources"]["requests"]
    assert int(requests["cpu"]) >= config.decode.cpus
    assert config.engine.device == "cuda" and requests["nvidia.com/gpu"] == "1"
    assert worker["minReplicas"] == config.decode.replicas and worker["maxReplicas"] == config.decode.max_replicas
    assert pod["terminationGracePeriodSeconds"] >= config.drain_timeout + LAST_S
    for group in groups():
        spec = group["template"]["spec"]
        [mount] = spec["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == str(Path(config.model).parent)
        assert [volume["name"] for volume in spec["volumes"]] == [mount["name"]]


def test_versions_of_ray_are_one() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-" in (FILES / "Dockerfile").read_text()


def test_the_image_is_made_of_what_is_there() -> None:
    text = (FILES / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [part for line in re.findall(r"^COPY --\S+ (.+)$", text, re.MULTILINE) for part in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_serve_takes_the_config() -> None:
    """Ray's own reading of what KubeRay hands it."""
    pytest.importorskip("ray")
    from ray.serve.schema import ServeDeploySchema

    assert ServeDeploySchema.model_validate(SERVE).applications[0].name == "snapstream"
