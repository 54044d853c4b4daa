"""``snapstream deploy``: a config on a Ray cluster, or on one of this machine alone that ends with the command.

Invariant: a cluster that this command started has ended when it returns; one that was there is left running, with the
application in it. Deploying again to a running cluster replaces what has changed, replica by replica.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from snapstream.integrations.ray.application import application_of
from snapstream.integrations.ray.config import DeployConfig

log = logging.getLogger(__name__)

APPLICATION = "snapstream"
KEEP_ALIVE_S = 75  # of an idle connection, as in ``server/run.py``
OBJECT_STORE_BYTES = 100 * 2**20  # of a cluster of our own: nothing of ours is so large that Ray puts it there
CONNECT_S = 10.0
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|EngineDead): (.+)$", re.MULTILINE)  # the last line of a traceback


class CannotDeploy(RuntimeError):
    """Ray could not start what the config says."""


def deploy(config: DeployConfig, address: str | None) -> None:
    """Deploy to the cluster at ``address``, or to one of our own until a signal. CannotDeploy, ValueError, OSError."""
    application = application_of(config)  # refused before anything is started
    if address is None:
        check_free(config.host, config.port)
    with _cluster(address), _told() as told:  # Ray sets handlers of its own when it starts
        options = HTTPOptions(
            host=config.host, port=config.port, keep_alive_timeout_s=KEEP_ALIVE_S, location="EveryNode"
        )
        try:
            serve.start(http_options=options)
            serve.run(application, name=APPLICATION, route_prefix="/")
        except (RuntimeError, RayError, RayServeException) as error:
            raise CannotDeploy(_told_by_replicas() or str(error)) from None
        check_served(config.host, config.port)
        log.info("serving %s at http://%s:%d/v1", ", ".join(config.names), config.host, config.port)
        if address is None:
            told.wait()
            log.info("draining for at most %g s", config.drain_timeout)
            serve.delete(APPLICATION)
            serve.shutdown()


def check_free(host: str, port: int) -> None:
    """OSError unless a server could listen there: Ray would only say so in a log."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family):
        pass


def check_served(host: str, port: int) -> None:
    """CannotDeploy if nobody listens there: Serve was running in that cluster before, at an address of its own."""
    try:
        with socket.create_connection((_reached(host), port), CONNECT_S):
            return
    except OSError:
        raise CannotDeploy(
            f"the application runs, but not at {host}:{port}: Serve was started in this cluster before, with another "
            "address, which only `serve shutdown` and a new start can change"
        ) from None


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    if address is None:
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
        log.info("a Ray cluster of this machine alone: --address %s", ray.get_runtime_context().gcs_address)
    else:
        ray.init(address=address)
    try:
        yield
    finally:
        ray.shutdown()


class Told:
    """SIGTERM and SIGINT: while everything starts they break it off, afterwards they are waited for."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._is_up = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_up:
            raise KeyboardInterrupt
        self._stop.set()

    def wait(self) -> None:
        self._is_up = True
        self._stop.wait()


@contextmanager
def _told() -> Iterator[Told]:
    """Signals go there; what handled them before does so again afterwards."""
    told = Told()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, told.note) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reached(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _told_by_replicas() -> str:
    """Why replicas did not start: the last lines of their tracebacks, which Ray hands on as texts."""
    try:
        application = serve.status().applications.get(APPLICATION)
    except (RayError, RayServeException, RuntimeError):
        return ""
    deployments = {} if application is None else application.deployments
    found = {name: ERROR.findall(status.message) for name, status in deployments.items()}
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in found.items() if lines)
