"""From a config to a Serve application: what ``snapstream deploy`` runs, and ``serve run`` or KubeRay by this path:

    serve run snapstream.integrations.ray.application:build config=deploy.toml

Invariant: two configs that are equal make deployments that are equal, so redeploying what runs replaces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from snapstream.integrations.ray.config import DecodeSettings, DeployConfig, ReplicaSettings, config_of, read_config
from snapstream.integrations.ray.ingress import Ingress
from snapstream.integrations.ray.replica import EngineReplica
from snapstream.integrations.ray.router import BoardRouter
from snapstream.integrations.ray.scaling import ByRowsAndTokens
from snapstream.models.registry import read_model_config
from snapstream.models.shards import rank_config
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
    check_models(EngineSpec(model=config.model, options=config.engine), ServeOptions())
    answering = _spec(config, config.decode)
    decode = _replicas(config, "decode", config.decode)
    if config.prefill is None:
        bound = decode.bind(answering, config.decode.stall_timeout)
    else:
        reading = _spec(config, config.prefill)
        prefill = _replicas(config, "prefill", config.prefill).bind(reading, config.prefill.stall_timeout, "prefill")
        bound = decode.bind(answering, config.decode.stall_timeout, "decode", prefill)
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
    return ingress.bind(config, settings, bound)


def _spec(config: DeployConfig, own: ReplicaSettings) -> EngineSpec:
    """ValueError where the model cannot be split over so many ranks."""
    options = config.options_of(own)
    rank_config(read_model_config(Path(config.model)), options.parallel)
    return EngineSpec(model=config.model, options=options, num_threads=own.cpus or 1)


def _replicas(config: DeployConfig, name: str, own: ReplicaSettings) -> Deployment:
    # The engine itself says when its queue is full; one that reads for others has at most their rows.
    num_askers = config.decode.most if config.prefill is own else 1
    num_calls = num_askers * most_requests(config.engine.max_rows, config.engine.max_waiting) + SPARE_CALLS
    options = config.options_of(own)
    num_gpus = options.tensor_parallel if options.device.startswith("cuda") else 0
    scaling = scaling_of(own, reads=name == "prefill" or config.prefill is None)
    count: dict[str, Any] = {"num_replicas": own.replicas} if scaling is None else {"autoscaling_config": scaling}
    return serve.deployment(
        EngineReplica,
        name=name,
        ray_actor_options={"num_cpus": own.cpus, "num_gpus": num_gpus},
        max_ongoing_requests=num_calls,
        request_router_config=RequestRouterConfig(request_router_class=_path(BoardRouter)),
        max_constructor_retry_count=MAX_FAILED_STARTS,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        logging_config=QUIET,
        **count,
    )


def _settings(config: DeployConfig) -> ServerSettings:
    front = config.front
    return ServerSettings(
        api_keys=all_keys((), Path(config.api_key_file) if config.api_key_file else None),
        allowed_hosts=answered_hosts(config.host, front.allowed_hosts),
        cors_origins=front.cors_origins,
        root_path=front.root_path,
        tool_parser=front.tool_parser,
        reasoning_parser=front.reasoning_parser,
        responses_store=front.responses_store,
        duty="both" if config.prefill is None else "decode",
        max_requests=config.decode.most * most_requests(config.engine.max_rows, config.engine.max_waiting),
    )


def scaling_of(own: ReplicaSettings, *, reads: bool) -> AutoscalingConfig | None:
    """How the number of replicas follows the load; None where it does not. ``reads``: they read prompts."""
    if own.most == own.replicas:
        return None
    aims = {"rows_in_use": own.rows_in_use} if isinstance(own, DecodeSettings) else {}
    policy = AutoscalingPolicy(
        policy_function=_path(ByRowsAndTokens, ":"),
        policy_kwargs=aims | ({"queued_tokens": own.queued_tokens} if reads else {}),
    )
    return AutoscalingConfig(min_replicas=own.replicas, max_replicas=own.most, policy=policy)


def _path(kind: type, mark: str = ".") -> str:
    return f"{kind.__module__}{mark}{kind.__name__}"
