"""``snapstream deploy`` as a process of its own, for benchmarks and tests of replicas on Ray Serve."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapstream.integrations.ray.config import prepare
from snapstream.integrations.ray.replicas import ReplicaRegistry, Report, Route

START_S = 600.0  # for a cluster, and replicas of the tiny model, on a machine that is busy with other things
END_S = 120.0
REPORT_S = 30.0


@dataclass(frozen=True)
class Deployed:
    """A cluster of one machine with our application."""

    process: subprocess.Popen[bytes]
    url: str  # scheme://host:port
    address: str  # of the cluster
    folder: Path  # holds the config and the log

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def again(self, config: Mapping[str, Any]) -> None:
        """Deploy a changed config to the same cluster. CalledProcessError if that is refused."""
        file = write_config(self.folder / "changed.json", {**config, "port": int(self.url.rpartition(":")[2])})
        command = [sys.executable, "-m", "snapstream.cli", "deploy", str(file), "--address", self.address]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)


class ReplicaWatch:
    """Sees each replica by handles of its own, as an ingress does. Close it: it is a client of Ray."""

    def __init__(self, address: str) -> None:
        prepare(address)
        import ray
        from ray import serve

        ray.init(address=address, log_to_driver=False)
        self._handle = serve.get_deployment_handle

    def reports(self, deployment: str = "decode") -> list[Report]:
        """Of every replica of a deployment that answers."""
        registry, handle = ReplicaRegistry(), self._handle(deployment, "snapstream")
        self._ask(handle, registry, "")  # wherever it goes, the registry learns their names
        found = (self._ask(handle, registry, name) for name in registry.names)
        return [report for report in found if report is not None]

    def kill_key_keeper(self) -> None:
        """End the process that tells replicas the keys of rows, as a crash would: Ray starts it again."""
        import ray

        from snapstream.integrations.ray.certificates import NAME, NAMESPACE

        ray.kill(ray.get_actor(NAME, NAMESPACE), no_restart=False)

    def close(self) -> None:
        import ray

        ray.shutdown()

    def _ask(self, handle: Any, registry: ReplicaRegistry, name: str) -> Report | None:
        from ray.exceptions import RayError

        try:
            report: Report = handle.report.remote(Route(registry, to=name)).result(timeout_s=REPORT_S)
        except (RayError, TimeoutError):  # it died a moment ago
            return None
        return report


def write_config(file: Path, config: Mapping[str, Any]) -> Path:
    file.write_text(json.dumps(config))
    return file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def deployed(config: Mapping[str, Any], folder: Path) -> Iterator[Deployed]:
    """``config`` on a cluster of its own, at a free port, once it serves; ended at the end, whatever happened."""
    file = write_config(folder / "deploy.json", {**config, "port": free_port()})
    command = [sys.executable, "-m", "snapstream.cli", "deploy", str(file)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + START_S
        log = folder / "log"
        while not (found := re.search(r"serving .+? at (http://\S+?)/v1", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the deployment did not start:\n{log.read_text()}")
            time.sleep(0.1)
        address = re.search(r"--address (\S+)", log.read_text())
        assert address is not None
        yield Deployed(process, found[1], address[1], folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the processes of its cluster end with it
            process.wait()
