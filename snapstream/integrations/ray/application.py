"""From a config to a Serve application: what ``snapstream deploy`` runs, and ``serve run`` or KubeRay by this path:

    serve run snapstream.integrations.ray.application:build config=deploy.toml

Invariant: two configs that are equal make deployments that are equal, so redeploying what runs replaces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from snapstream.integrations.ray.config import DecodeSettings, DeployConfig, config_of, read_config
from snapstream.integrations.ray.ingress import Ingress
from snapstream.integrations.ray.replica import DecodeServer
from snapstream.integrations.ray.router import BoardRouter
from snapstream.integrations.ray.scaling import ByRowsAndTokens
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.http.auth import all_keys
from snapstream.server.http.hosts import answered_hosts
from snapstream.server.run import ServeOptions, check_models, most_requests
from snapstream.server.settings import ServerSettings

QUIET = LoggingConfig(enable_access_log=False)  # the front logs requests itself, and a report is no news
MAX_FAILED_STARTS = 3  # of a deployment's replicas, together, before it is given up; a load can take minutes
SPARE_CALLS = 64  # reports and health checks beside requests
DRAIN_LOOK_S = 0.2  # between two looks at whether a replica has drained


def build(args: Mapping[str, Any]) -> Application:
    """The application of ``config=FILE``, or of the settings themselves (``args`` of a Serve config file)."""
    return application_of(read_config(Path(args["config"])) if set(args) == {"config"} else config_of(args))


def application_of(config: DeployConfig) -> Application:
    """ValueError for what no server could be."""
    settings = _settings(config)
    spec = EngineSpec(model=config.model, options=config.engine, num_threads=config.decode.cpus or 1)
    check_models(spec, ServeOptions())
    num_calls = most_requests(config.engine.max_rows, config.engine.max_waiting) + SPARE_CALLS
    num_gpus = config.engine.tensor_parallel if config.engine.device.startswith("cuda") else 0
    decode = serve.deployment(
        DecodeServer,
        name="decode",
        ray_actor_options={"num_cpus": config.decode.cpus, "num_gpus": num_gpus},
        max_ongoing_requests=num_calls,  # the engine itself says when its queue is full
        request_router_config=RequestRouterConfig(request_router_class=_path(BoardRouter)),
        max_constructor_retry_count=MAX_FAILED_STARTS,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        logging_config=QUIET,
        **_count(config.decode),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=config.front.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=settings.max_requests + SPARE_CALLS,
        max_constructor_retry_count=MAX_FAILED_STARTS,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        logging_config=QUIET,
        max_surge_percent=100,  # the next one answers before the last one drains
    )
    return ingress.bind(config, settings, decode.bind(spec, config.decode.stall_timeout))


def _settings(config: DeployConfig) -> ServerSettings:
    front, most = config.front, config.decode.max_replicas or config.decode.replicas
    return ServerSettings(
        api_keys=all_keys((), Path(config.api_key_file) if config.api_key_file else None),
        allowed_hosts=answered_hosts(config.host, front.allowed_hosts),
        cors_origins=front.cors_origins,
        root_path=front.root_path,
        tool_parser=front.tool_parser,
        reasoning_parser=front.reasoning_parser,
        responses_store=front.responses_store,
        max_requests=most * most_requests(config.engine.max_rows, config.engine.max_waiting),
    )


def _count(decode: DecodeSettings) -> dict[str, Any]:
    scaling = scaling_of(decode)
    return {"num_replicas": decode.replicas} if scaling is None else {"autoscaling_config": scaling}


def scaling_of(decode: DecodeSettings) -> AutoscalingConfig | None:
    """How the number of replicas follows the load; None where it does not."""
    if decode.max_replicas is None or decode.max_replicas == decode.replicas:
        return None
    policy = AutoscalingPolicy(
        policy_function=_path(ByRowsAndTokens, ":"),
        policy_kwargs={"rows_in_use": decode.rows_in_use, "queued_tokens": decode.queued_tokens},
    )
    return AutoscalingConfig(min_replicas=decode.replicas, max_replicas=decode.max_replicas, policy=policy)


def _path(kind: type, mark: str = ".") -> str:
    return f"{kind.__module__}{mark}{kind.__name__}"
