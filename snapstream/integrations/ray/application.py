"""From a config to a Serve application, and ``snapstream deploy``, which runs it on a Ray cluster. Ray's own command:

    serve run snapstream.integrations.ray.application:build config=deploy.toml

Invariants: equal configs make equal deployments, so redeploying what runs replaces nothing, and a change is rolled out
replica by replica. A cluster that ``deploy`` started has ended when it returns; one that was there is left running,
with the application in it.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

from snapstream.integrations.ray.actors import EngineReplica, Ingress
from snapstream.integrations.ray.config import DecodeSettings, DeployConfig, ReplicaSettings, config_of, read_config
from snapstream.integrations.ray.replicas import Route, ScaleByLoad
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import rank_config
from snapstream.server.engine.api import EngineSpec
from snapstream.server.http.lifecycle import listen
from snapstream.server.options import ServeOptions, ServerSettings, all_keys, answered_hosts
from snapstream.server.run import KEEP_ALIVE_S, check_models, most_requests


class RegistryRouter(RequestRouter):
    """Sends each call where the registry of its route says. Ray's API for this is alpha, so this is minimal.

    Ray makes a router for each handle, on a thread of the ingress; a request's ``Route`` is still the ingress's own
    object there, and so has the ingress's registry.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank: Ray takes the first that has room for another call."""
        route = None if pending_request is None else _route_of(pending_request)
        if route is None or route.registry is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in route.registry.rank(by_name, route)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        route = _route_of(pending_request)
        if route is not None and route.on_taken is not None:
            route.on_taken(replica_id.unique_id)


def _route_of(pending_request: PendingRequest) -> Route | None:
    return next((arg for arg in pending_request.args if isinstance(arg, Route)), None)


QUIET = LoggingConfig(enable_access_log=False)  # the server logs requests itself, and reports are frequent
MAX_FAILED_STARTS = 3  # of all replicas of a deployment, before it is given up; a load can take minutes
SPARE_CALLS = 64  # for reports and health checks, besides requests
DRAIN_POLL_S = 0.2  # between two checks whether a replica has drained


def build(args: Mapping[str, Any]) -> Application:
    """The application of ``config=FILE``, or of the settings themselves (``args`` of a Serve config file)."""
    return application_of(read_config(Path(args["config"])) if set(args) == {"config"} else config_of(args))


def application_of(config: DeployConfig) -> Application:
    """ValueError for a config that cannot be served."""
    settings = _settings(config)
    check_models(EngineSpec(model=config.model, options=config.engine), ServeOptions())
    decode_spec = _spec(config, config.decode)
    decode = _replicas(config, "decode", config.decode)
    if config.prefill is None:
        bound = decode.bind(decode_spec, config.decode.stall_timeout)
    else:
        prefill_spec = _spec(config, config.prefill)
        prefill = _replicas(config, "prefill", config.prefill).bind(
            prefill_spec, config.prefill.stall_timeout, "prefill"
        )
        bound = decode.bind(decode_spec, config.decode.stall_timeout, "decode", prefill)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=config.front.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=settings.max_requests + SPARE_CALLS,
        max_constructor_retry_count=MAX_FAILED_STARTS,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        logging_config=QUIET,
        max_surge_percent=100,  # the next one answers before the last one drains
    )
    return ingress.bind(config, settings, bound)


def _spec(config: DeployConfig, own: ReplicaSettings) -> EngineSpec:
    """ValueError where the model cannot be split over so many ranks."""
    options = config.options_of(own)
    rank_config(read_model_config(Path(config.model)), options.parallel)
    return EngineSpec(model=config.model, options=options, num_threads=own.cpus or 1)


def _replicas(config: DeployConfig, name: str, own: ReplicaSettings) -> Deployment:
    # The engine itself reports a full queue; one that prefills for others has at most their rows.
    num_callers = config.decode.most if config.prefill is own else 1
    num_calls = num_callers * most_requests(config.engine.max_rows, config.engine.max_waiting) + SPARE_CALLS
    options = config.options_of(own)
    num_gpus = options.tensor_parallel if options.device.startswith("cuda") else 0
    scaling = scaling_of(own, prefills=name == "prefill" or config.prefill is None)
    count: dict[str, Any] = {"num_replicas": own.replicas} if scaling is None else {"autoscaling_config": scaling}
    return serve.deployment(
        EngineReplica,
        name=name,
        ray_actor_options={"num_cpus": own.cpus, "num_gpus": num_gpus},
        max_ongoing_requests=num_calls,
        request_router_config=RequestRouterConfig(request_router_class=_path(RegistryRouter)),
        max_constructor_retry_count=MAX_FAILED_STARTS,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        logging_config=QUIET,
        **count,
    )


def _settings(config: DeployConfig) -> ServerSettings:
    front = config.front
    return ServerSettings.of(
        front,
        api_keys=all_keys((), config.api_key_file),
        allowed_hosts=answered_hosts(config.host, front.allowed_hosts),
        role="both" if config.prefill is None else "decode",
        max_requests=config.decode.most * most_requests(config.engine.max_rows, config.engine.max_waiting),
    )


def scaling_of(own: ReplicaSettings, *, prefills: bool) -> AutoscalingConfig | None:
    """How the number of replicas follows the load; None where it does not. ``prefills``: they prefill."""
    if own.most == own.replicas:
        return None
    aims = {"rows_in_use": own.rows_in_use} if isinstance(own, DecodeSettings) else {}
    policy = AutoscalingPolicy(
        policy_function=_path(ScaleByLoad, ":"),
        policy_kwargs=aims | ({"queued_tokens": own.queued_tokens} if prefills else {}),
    )
    return AutoscalingConfig(min_replicas=own.replicas, max_replicas=own.most, policy=policy)


def _path(kind: type, mark: str = ".") -> str:
    return f"{kind.__module__}{mark}{kind.__name__}"


log = logging.getLogger(__name__)

APPLICATION = "snapstream"
OBJECT_STORE_BYTES = 100 * 2**20  # of a cluster of our own: we send nothing large enough for Ray to store it there
CONNECT_S = 10.0
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|EngineDead): (.+)$", re.MULTILINE)  # the last line of a traceback


class CannotDeploy(RuntimeError):
    """Ray could not start what the config says."""


def deploy(config: DeployConfig, address: str | None) -> None:
    """Deploy to the cluster at ``address``, or to a new one until a signal. CannotDeploy, ValueError, OSError."""
    application = application_of(config)  # errors before anything is started
    if address is None:
        listen(config.host, config.port).close()  # OSError unless a server can listen there: Ray would only log it
    with _cluster(address), _signals() as signals:  # Ray sets its own handlers when it starts
        options = HTTPOptions(
            host=config.host, port=config.port, keep_alive_timeout_s=KEEP_ALIVE_S, location="EveryNode"
        )
        try:
            serve.start(http_options=options)
            serve.run(application, name=APPLICATION, route_prefix="/")
        except (RuntimeError, RayError, RayServeException) as error:
            raise CannotDeploy(_replica_errors() or str(error)) from None
        check_served(config.host, config.port)
        log.info("serving %s at http://%s:%d/v1", ", ".join(config.names), config.host, config.port)
        if address is None:
            signals.wait()
            log.info("draining for at most %g s", config.drain_timeout)
            serve.delete(APPLICATION)
            serve.shutdown()


def check_served(host: str, port: int) -> None:
    """CannotDeploy if nothing listens there: Serve was already running in that cluster, at another address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((reached, port), CONNECT_S):
            return
    except OSError:
        raise CannotDeploy(
            f"the application runs, but not at {host}:{port}: Serve was started in this cluster before with another "
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


class _Signals:
    """SIGTERM and SIGINT: they interrupt the start, and end ``wait`` afterwards."""

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
def _signals() -> Iterator[_Signals]:
    """Handle signals within; restore the handlers that were there."""
    signals = _Signals()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signals.note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replica_errors() -> str:
    """Why replicas did not start: the last lines of their tracebacks, which Ray forwards as text."""
    try:
        application = serve.status().applications.get(APPLICATION)
    except (RayError, RayServeException, RuntimeError):
        return ""
    deployments = {} if application is None else application.deployments
    found = {name: ERROR.findall(status.message) for name, status in deployments.items()}
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in found.items() if lines)
