"""The files of ``deploy/``: they name metrics, options and paths that exist, and their tools accept them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from configparser import ConfigParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.server_process import ServerProcess, served
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.kernels.cpu.looped.build import VARIABLE
from snapstream.server.engine.api import EngineStats
from snapstream.server.engine.process import STOP_S
from snapstream.server.http.lifecycle import LAST_FRAMES_S
from snapstream.server.telemetry import Metrics
from tests.waiting import HANG_S, HTTP, until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "snapstream.service"
WORKER = DEPLOY / "systemd" / "worker.conf"
DASHBOARD = json.loads((DEPLOY / "grafana" / "snapstream.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def series() -> set[str]:
    """Names of all series on /metrics."""
    page = Metrics(lambda: "m", EngineStats, has_vllm_names=True).render().decode()
    return {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}


def metrics_of(query: str) -> set[str]:
    return set(re.findall(r"(?:snapstream|vllm):\w+", query))


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_queried_metric_exists(query: str, series: set[str]) -> None:
    assert metrics_of(query) or "up{" in query
    assert metrics_of(query) <= series
    assert all(query.count(left) == query.count(right) for left, right in ("()", "{}", "[]"))
    if "histogram_quantile" in query:
        assert "_bucket" in query and "by (le" in query
    for metric in metrics_of(query):
        is_counter = metric.endswith(("_total", "_bucket"))
        assert is_counter == bool(re.search(rf"(?:rate|increase)\({metric}\b", query)), "rates of counters only"


def test_every_metric_of_ours_is_on_the_dashboard(series: set[str]) -> None:
    shown = {name for query in QUERIES for name in metrics_of(query)}
    ours = {name for name in series if name.startswith("snapstream:") and not name.endswith(("_sum", "_count"))}
    assert ours <= shown


def test_the_dashboard_is_well_formed() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"] and DASHBOARD["title"]
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "model"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one, two in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        assert one["x"] + one["w"] <= 24 and not overlap(one, two), (one, two)


def overlap(one: dict[str, int], two: dict[str, int]) -> bool:
    is_beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
    is_above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
    return not is_beside and not is_above


def test_the_scrape_example_loads_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["scrape_configs"][0]["job_name"] in RULES[0]["expr"]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in RULES)


def unit() -> ConfigParser:
    parser = ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def takes_options(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> Any:
    """What the command line makes of them."""
    seen: list[Any] = []
    monkeypatch.setattr("snapstream.server.run.serve", lambda *given: seen.extend(given))
    monkeypatch.setattr("snapstream.server.http.lifecycle.set_up_log", lambda kind: seen.append(kind))
    monkeypatch.delenv("SNAPSTREAM_API_KEY", raising=False)
    assert main(options) == 0
    return seen


def test_the_unit_gives_a_drain_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = unit()["Service"]
    program, *options = shlex.split(service["ExecStart"])
    assert Path(program).name == "snapstream" and options.pop() == "$SNAPSTREAM_OPTIONS"
    kind, _, _, serve_options = takes_options(monkeypatch, options)
    assert kind == "json"
    assert int(service["TimeoutStopSec"]) > serve_options.drain_timeout + LAST_FRAMES_S + STOP_S
    assert (service["KillMode"], service["LimitCORE"], service["DynamicUser"]) == ("mixed", "0", "yes")


def test_the_unit_has_a_folder_for_compiled_code() -> None:
    """Its user has no home, and the file system is read-only."""
    service = unit()["Service"]
    folder = f"%C/{service['CacheDirectory']}"
    assert service["Environment"].split() == [f"{VARIABLE}={folder}", f"TRITON_CACHE_DIR={folder}/triton"]
    assert service["CacheDirectoryMode"] == "0700"  # code in it is run


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/snapstream/bin/snapstream", sys.executable))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=HANG_S)
    said = [line for line in result.stderr.splitlines() if UNIT.name in line]
    assert said == [] and result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit_of_ranks(tmp_path: Path) -> None:
    """Whatever a worker's exit code was, it is started again."""
    for file in (UNIT, WORKER):
        copy = tmp_path / (file.name if file is UNIT else f"{UNIT.name}.d/{file.name}")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(file.read_text().replace("/opt/snapstream/bin/snapstream", sys.executable))
    command = ["systemd-analyze", "verify", str(tmp_path / UNIT.name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    said = [line for line in result.stderr.splitlines() if UNIT.name in line or WORKER.name in line]
    assert said == [] and result.returncode == 0, result.stderr
    text = WORKER.read_text()
    assert "\nExecStart=\n" in text and "\nRestart=always\nRestartPreventExitStatus=\n" in text


def test_compose_brings_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test starts it. Prometheus and Grafana are in the server's network, so they see its files' 127.0.0.1."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server, prometheus, grafana = (compose["services"][name] for name in ("snapstream", "prometheus", "grafana"))
    [command] = server["command"]
    assert server["volumes"][0].endswith(f":{Path(command).parent}:ro")
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    *_, options = takes_options(monkeypatch, ["serve", "--host", "0.0.0.0", str(TINY_MODEL)])
    assert server["ports"][0] == f"127.0.0.1:{options.port}:{options.port}"
    assert {prometheus["network_mode"], grafana["network_mode"]} == {"service:snapstream"}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{options.port}"]}]
    listened = prometheus["command"][1].removeprefix("--web.listen-address=")
    source, provider = (yaml.safe_load(compose["configs"][one["source"]]["content"]) for one in grafana["configs"])
    assert source["datasources"][0]["url"] == f"http://{listened}"
    mounted = dict(volume.removesuffix(":ro").split(":")[::-1] for volume in prometheus["volumes"] + grafana["volumes"])
    assert mounted[provider["providers"][0]["options"]["path"]] == "./grafana"
    assert (DEPLOY / mounted["/etc/prometheus"] / "prometheus.yml").is_file()


def test_the_image_is_made_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never built by a test: there is no engine to build it with."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = set("FROM ARG WORKDIR COPY RUN ENV USER EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT".split())
    assert {word for word, _ in lines} <= known
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [part for word, rest in lines if word == "COPY" and "--from" not in rest for part in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, source
    (entry,) = [json.loads(rest) for word, rest in lines if word == "ENTRYPOINT"]
    kind, spec, settings, options = takes_options(monkeypatch, entry[1:])
    assert (kind, options.host, settings.allowed_hosts) == ("json", "0.0.0.0", ())
    assert any(f"{options.port}/health/live'" in rest for word, rest in lines if word == "HEALTHCHECK")


# Every metric that a panel or an alert of ``deploy/`` asks for moves on a real server when what it counts happens.

ASKED = {
    name for query in (*QUERIES, *(rule["expr"] for rule in RULES)) for name in re.findall(r"snapstream:\w+", query)
}
CONSTANT = {"snapstream:prefix_store_blocks"}  # the size of something
COMPRESS = {"prompt_compression": {"keep": 0.3}}


class Watched:
    """All values that each series has had, as scrapes saw them; a thread scrapes on and on."""

    def __init__(self, server: ServerProcess) -> None:
        self.values: defaultdict[str, set[float]] = defaultdict(set)
        self._url, self._ends = server.url, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def moved(self, name: str) -> bool:
        return len(self.values[name]) > 1

    def close(self) -> None:
        self._ends.set()
        self._thread.join(HANG_S)

    def _watch(self) -> None:
        while not self._ends.is_set():
            sums: defaultdict[str, float] = defaultdict(float)
            for line in HTTP.get(f"{self._url}/metrics", timeout=HANG_S).text.splitlines():
                if line.startswith("snapstream:"):
                    sums[re.split(r"[{ ]", line)[0]] += float(line.rsplit(" ", 1)[1])
            for name, value in sums.items():
                self.values[name].add(value)
            time.sleep(0.02)


def ask(server: ServerProcess, prompt: str, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
    return HTTP.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S).status_code


def come_in_a_crowd(server: ServerProcess) -> None:
    """More requests than rows, at once; long enough that a scrape sees them."""
    crowd = [threading.Thread(target=ask, args=(server, f"word {n}"), kwargs={"max_tokens": 600}) for n in range(6)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(HANG_S)


@pytest.mark.slow
def test_every_metric_of_a_panel_or_an_alert_moves(tmp_path: Path) -> None:
    options = ["--max-rows", "2", "--budget", "128", "--draft", str(TINY_MODEL), "--prompt-threshold", "64"]
    options += ["--prefix-store", "4MiB", "--stall-timeout", "5"]
    with served([str(TINY_MODEL), *options], tmp_path / "log") as server:
        watched = Watched(server)
        silent = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        long = "The gate of the north tower is closed at night. " * 200
        assert [ask(server, long), ask(server, long), ask(server, long, **COMPRESS)] == [
            200
        ] * 3  # evicts, hits, compresses
        for number in range(200):  # until the prefix store is full
            if watched.moved("snapstream:prefix_evicted_blocks_total"):
                break
            assert ask(server, f"{number} {long}", max_tokens=1) == 200
        until(lambda: come_in_a_crowd(server) or watched.moved("snapstream:rows_used"))
        assert ask(server, "a", temperature=-1) == 400
        until(lambda: watched.moved("snapstream:connections_closed_total"))  # of the silent client
        os.kill(server.engine_pid, signal.SIGSTOP)
        until(lambda: watched.moved("snapstream:engine_restarts_total"))
        until(lambda: HTTP.get(f"{server.url}/health", timeout=HANG_S).status_code == 200)
        until(lambda: watched.moved("snapstream:rows_free"))
        watched.close()
        silent.close()
        still = sorted(name for name in ASKED - CONSTANT if not watched.moved(name))
        assert still == [], "these exist and never change, or do not exist"
        assert all(max(watched.values[name]) > 0 for name in ASKED)
