"""The settings of ``snapstream serve`` as one object, whose fields are the flags (``cli/flags.py``).

Ray's config has the parts ``ListenOptions`` and ``ApiOptions``; ``ServerSettings`` extends the latter by its limits.
Imports no package of the extra ``serve``: ``--help`` needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from snapstream.config import as_count, as_number, as_path
from snapstream.config.engine import STALL_TIMEOUT_S, setting
from snapstream.config.values import check
from snapstream.spec_prefill.settings import DraftOptions

TOOL_PARSERS = (
    "auto", "none", "hermes", "llama3_json", "llama4_pythonic", "qwen3_coder", "glm45", "glm47", "deepseek_v3",
    "deepseek_v31", "kimi_k2", "mistral",
)  # fmt: skip
Role = Literal["both", "prefill", "decode"]  # what a server does of a request
ReasoningParser = Literal["auto", "deepseek_r1", "qwen3", "none"]
ADMIN_VARIABLE = "SNAPSTREAM_ADMIN_KEY"
# What a server sets of an engine, other than the package alone.
ENGINE_DEFAULTS: dict[str, Any] = {"max_waiting": 128, "prefix_store": "auto"}


def set_text(options: Any, *names: str) -> None:
    """Check text fields of a frozen dataclass."""
    for name in names:
        value = getattr(options, name)
        check(isinstance(value, str) and "\0" not in value, f"{name} is {value!r}; it must be a text")


def set_texts(options: Any, *names: str) -> None:
    """The same for lists of texts, which become tuples."""
    for name in names:
        value = getattr(options, name)
        check(
            isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value),
            f"{name} is {value!r}; it must be a list of texts, none of them empty",
        )
        object.__setattr__(options, name, tuple(value))


def set_paths(options: Any, *names: str) -> None:
    """The same for paths; an empty text is none."""
    for name in names:
        value = getattr(options, name)
        object.__setattr__(options, name, None if value in (None, "") else as_path(name, value))


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where a server listens, under which names it serves the model, and for whom."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network.", metavar="ADDRESS")
    port: int = setting(8000, "Port; 0 takes a free one.")
    api_key_file: Path | None = setting(None, "File of further keys, one a line.")
    served_model_name: tuple[str, ...] = setting(
        (), "Name(s) that clients use; repeatable. Default: the folder's.", metavar="NAME"
    )
    drain_timeout: float = setting(30.0, "Seconds that running requests get after SIGTERM.")

    def __post_init__(self) -> None:
        set_text(self, "host")
        set_texts(self, "served_model_name")
        set_paths(self, "api_key_file")
        as_count("port", self.port, 0, 65535)
        object.__setattr__(self, "drain_timeout", as_number("drain_timeout", self.drain_timeout, 0.0, 86399.0))

    def names_of(self, model: str | Path) -> tuple[str, ...]:
        """The served names; the first is the one that answers state."""
        return self.served_model_name or (Path(model).resolve().name,)


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """How the API reads requests and models, and which browsers may call it."""

    allowed_hosts: tuple[str, ...] = setting(
        (), "Host to answer to, beside localhost.", metavar="HOST", flag="--allowed-host"
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origin whose pages may call this server; repeatable.", metavar="ORIGIN", flag="--cors-origin"
    )
    root_path: str = setting("", "Prefix of a proxy in front, like /llm. Default: none.", metavar="PATH")
    tool_parser: str = setting(
        "auto", "How the model writes tool calls; auto goes by its chat template.", metavar="NAME"
    )
    chat_template: Path | None = setting(None, "Jinja file to render conversations with. Default: the checkpoint's.")
    trusts_users: bool = setting(
        False, "Special tokens spelled in messages of users and tools become such.", flag="--trust-users"
    )
    reasoning_parser: ReasoningParser = setting(
        "auto", "How the model marks its reasoning; auto goes by its chat template."
    )
    responses_store: int = setting(
        1000, "Responses of each key kept in memory for requests that refer to them; 0 keeps none."
    )
    has_page: bool = setting(True, "Do not serve the chat page at /.", flag="--no-page")
    has_vllm_names: bool = setting(
        True, "Metrics under snapstream: only, not also under vllm:.", flag="--no-vllm-names"
    )

    def __post_init__(self) -> None:
        set_text(self, "root_path", "tool_parser")
        set_texts(self, "allowed_hosts", "cors_origins")
        set_paths(self, "chat_template")
        as_count("responses_store", self.responses_store, 0)
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", get_args(ReasoningParser))):
            given = getattr(self, name)
            check(given in known, f"{name} is {given!r}; it must be one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """Which half of a request a server does, and where the other half is done."""

    role: Role = setting("both", "Prefill for other servers (prefill), or have such servers prefill (decode).")
    prefill: tuple[str, ...] = setting((), "With --role decode: server with --role prefill; repeatable.", metavar="URL")
    transfer_host: str | None = setting(
        None,
        "With --role decode: where rows arrive, as prefill servers reach it. Default: 127.0.0.1.",
        metavar="ADDRESS",
    )
    transfer_port: int = setting(0, "With --role decode: its port; 0 takes a free one.")
    transfer_ca: Path | None = setting(
        None, "Authorities of the other side's certificate (PEM). Default: the system's."
    )
    transfer_secret_file: Path | None = setting(
        None, "Secret that both sides know, mode 0600; or SNAPSTREAM_TRANSFER_SECRET."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill", tuple(url for given in self.prefill for url in given.split(",")))
        if self.role == "decode" and not self.prefill:
            raise ValueError("--role decode needs --prefill URL, a server with --role prefill; it may be repeated")
        given = {
            "--prefill": bool(self.prefill),
            "--transfer-host": self.transfer_host is not None,
            "--transfer-port": self.transfer_port != 0,
        }
        if self.role != "decode" and any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ValueError(f"{name} is for --role decode; the role is {self.role}")
        if self.role == "both" and (self.transfer_ca is not None or self.transfer_secret_file is not None):
            raise ValueError("--transfer-ca and --transfer-secret-file are for --role prefill or decode")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DisaggregationOptions, DraftOptions, ApiOptions, ListenOptions):
    """The whole command, but for the engine's options."""

    api_keys: tuple[str, ...] = setting(
        (),
        "Bearer key for /v1/*, repeatable; SNAPSTREAM_API_KEY adds more. Default: open.",
        metavar="KEY",
        flag="--api-key",
    )
    admin_key: str = setting(
        "", "Key that resets the prefix store of all callers. Default: none.", metavar="KEY", envvar=ADMIN_VARIABLE
    )
    stall_timeout: float = setting(
        STALL_TIMEOUT_S, "Seconds without a sign of progress after which the engine is ended. 0: never."
    )
    restart: bool = setting(True, "Do not restart an engine that died.", flag="--no-restart")
    log_format: Literal["text", "json"] = setting(
        "text", "Of the log on stderr: a line for each request, never its text."
    )
    otlp_traces_endpoint: str | None = setting(
        None, "Send OpenTelemetry traces there. Needs the extra: snapstream-llm[otel].", metavar="URL"
    )
    tls_cert: Path | None = setting(None, "Certificate file (PEM).")
    tls_key: Path | None = setting(None, "Key file (PEM).")

    def __post_init__(self) -> None:
        for part in (ListenOptions, ApiOptions, DraftOptions, DisaggregationOptions):
            part.__post_init__(self)
        if self.stall_timeout:  # 0: never
            as_number("--stall-timeout", self.stall_timeout, 1.0, 86400.0)
        check((self.tls_cert is None) == (self.tls_key is None), "TLS needs both a certificate and a key")
        for file in (self.tls_cert, self.tls_key, self.chat_template):
            check(file is None or file.is_file(), f"{file} is not a file")
