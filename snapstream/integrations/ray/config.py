"""The config of a deployment: one TOML or YAML file, read strictly. No ray.

Invariant: unknown names, wrong types and combinations that cannot work are refused here, with their place in the file,
before anything is started.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from snapstream.assets import TINY_MODEL
from snapstream.config import EngineOptions, as_count, as_number
from snapstream.config.engine import STALL_TIMEOUT_S
from snapstream.server.options import ENGINE_DEFAULTS, ApiOptions, ListenOptions, set_text

# Ray's environment in a cluster of our own, set before ray is imported unless the user has set it. By default Ray kills
# a proxy that is not ready within 5 s, three times, and with it the start, and one that does not answer within 10 s,
# and with it all streams; and it gives its workers a low priority.
OWN_CLUSTER = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
}
TOKEN = Path(".ray") / "auth_token"  # in the home folder; Ray writes it when it starts a local cluster


def prepare(address: str | None) -> None:
    """Set Ray's environment for a new cluster (None), or for a client of the one at ``address``.

    A cluster that Ray starts asks for a token, but its clients send theirs only if configured to.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # log lines of two requests are not duplicates, however similar
    if address is None:
        for name, value in OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    elif (Path.home() / TOKEN).is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


Settings = TypeVar("Settings")
MAX_REPLICAS = 10_000
QUEUED_TOKENS = 65536


@dataclass(frozen=True, kw_only=True)
class FrontSettings(ApiOptions):
    """``[front]``: the HTTP server; names and meanings are those of ``snapstream serve``."""

    replicas: int = 1
    responses_store: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "replicas", 1, MAX_REPLICAS)
        if self.responses_store and self.replicas > 1:
            raise ValueError(
                f"responses_store is {self.responses_store} and replicas is {self.replicas}; "
                "responses are stored in one HTTP server, and others would not find them"
            )


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What replicas of both kinds have; ``[prefill]``: replicas that prefill and send the rows, if there are some."""

    replicas: int = 1  # the fewest
    max_replicas: int | None = None  # None: as many as ``replicas``, always
    cpus: int = 1  # of a replica, and threads of its torch; 0: Ray does not count them, and torch has one thread
    stall_timeout: float = STALL_TIMEOUT_S  # as of ``snapstream serve``; 0: never
    queued_tokens: int = QUEUED_TOKENS  # prompt tokens that may wait at a replica before another is started
    tensor_parallel: int | None = None  # ranks of a replica, all on one machine; None: as in ``[engine]``

    def __post_init__(self) -> None:
        _count(self, "replicas", 1, MAX_REPLICAS)
        _count(self, "queued_tokens", 1)
        if self.max_replicas is not None:
            _count(self, "max_replicas", self.replicas, MAX_REPLICAS)
        _count(self, "cpus", 0, 4096)
        if self.tensor_parallel is not None:
            _count(self, "tensor_parallel", 1)
        if self.stall_timeout != 0:
            object.__setattr__(self, "stall_timeout", as_number("stall_timeout", self.stall_timeout, 1.0, 86400.0))

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(ReplicaSettings):
    """``[decode]``: replicas that decode, and prefill if there are no prefill replicas."""

    rows_in_use: float = 0.8  # share of the rows that scaling aims at

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rows_in_use", as_number("rows_in_use", self.rows_in_use, 0.05, 1.0))


@dataclass(frozen=True, kw_only=True)
class DeployConfig(ListenOptions):
    """The whole file; ``drain_timeout`` is also what requests of a replica get before an update ends it."""

    model: str = str(TINY_MODEL)  # checkpoint folder, at the same path on every machine
    engine: EngineOptions = field(default_factory=lambda: EngineOptions.of(None, dict(ENGINE_DEFAULTS)))
    front: FrontSettings = field(default_factory=FrontSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    prefill: ReplicaSettings | None = None  # those of ``decode`` then only decode

    def __post_init__(self) -> None:
        super().__post_init__()
        set_text(self, "model")
        as_count("port", self.port, 1, 65535)
        if not self.model:
            raise ValueError("model is empty; it must be a checkpoint folder")
        if self.engine.master_addr is not None or self.engine.local_ranks:
            raise ValueError(
                f"engine: master_addr is {self.engine.master_addr!r} and local_ranks {self.engine.local_ranks}; "
                "Ray decides on which machine a replica runs, and all ranks of it run there"
            )
        if self.engine.loras:
            raise ValueError(f"engine: loras: {len(self.engine.loras)} adapters are given; a deployment serves none")
        if self.engine.prefix_dir is not None and (self.prefill or self.decode).most > 1:
            raise ValueError("engine: prefix_dir is one folder, and one engine at a time may use it")
        if self.prefill is not None:
            self._check_disaggregation()
        for name, own in (("decode", self.decode), ("prefill", self.prefill)):
            if own is not None and own.tensor_parallel is not None:
                try:
                    self.options_of(own)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    def _check_disaggregation(self) -> None:
        """What KV transfer rules out, before any engine is loaded."""
        if self.engine.heads not in (None, "auto"):
            raise ValueError(
                "engine: heads is given; a deployment does not transfer rows with per-head KV budgets, so there "
                "can be no prefill replicas"
            )
        if self.decode.queued_tokens != QUEUED_TOKENS:
            raise ValueError("decode: queued_tokens is for replicas that prefill; give it to prefill")
        if sys.platform != "linux":
            raise ValueError(f"prefill: keys of rows are held in files in memory, which {sys.platform} does not have")

    def options_of(self, own: ReplicaSettings) -> EngineOptions:
        """Engine options of one kind of replica. Replicas that only decode have no prefix store."""
        options = replace(self.engine, tensor_parallel=own.tensor_parallel or self.engine.tensor_parallel)
        if self.prefill is not None:  # rows are transferred: "auto" is equal heads
            options = replace(options, heads=None)
        only_decodes = self.prefill is not None and own is self.decode
        return replace(options, prefix_store=None, prefix_dir=None) if only_decodes else options

    @property
    def names(self) -> tuple[str, ...]:
        return self.names_of(self.model)


def read_config(path: Path) -> DeployConfig:
    """A ``.toml``, ``.yaml``, ``.yml`` or ``.json`` file. ValueError that names the file and the place in it."""
    try:
        return config_of(_parse(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_of(table: Any) -> DeployConfig:
    given = dict(_table("", table))
    sections: dict[str, Any] = {
        name: _make(kind, name, given.pop(name, {}))
        for name, kind in (("front", FrontSettings), ("decode", DecodeSettings))
    }
    if "prefill" in given:
        sections["prefill"] = _make(ReplicaSettings, "prefill", given.pop("prefill"))
    engine = {**ENGINE_DEFAULTS, **_table("engine", given.pop("engine", {}))}
    sections["engine"] = _make(EngineOptions, "engine", engine)
    return _make(DeployConfig, "", {**given, **sections})


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            import yaml

            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
    raise ValueError(f"its name ends in {path.suffix!r}; it must end in .toml, .yaml, .yml or .json")


def _make(kind: type[Settings], place: str, table: Any) -> Settings:
    given = _table(place, table)
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    before = f"{place}: " if place else ""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{before}{unknown[0]!r} is not a setting; the settings are {', '.join(known)}")
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{before}{error}") from None


def _table(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{place or 'the file'} is {value!r}; it must be a table of settings")
    return value


def _count(settings: Any, name: str, low: int, high: int | None = None) -> None:
    object.__setattr__(settings, name, as_count(name, getattr(settings, name), low, high))
