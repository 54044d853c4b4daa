"""The files of ``deploy/ray``: they parse, and say what the command and Ray take. No test starts what they describe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapstream.integrations.ray.config import DeployConfig, config_of, read_config

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
    assert f":{config.port}/health" in COMPOSE["healthcheck"]["test"][-1]
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
