"""Options of ``snapstream serve`` and ``snapstream proxy``, whose fields are their flags, and settings of the server.

Ray's config has the parts ``ListenOptions`` and ``ApiOptions``. Invariant: every limit that a client can run into is a
number here or in ``EngineConfig``; handlers hold none. No package of the extra ``serve`` is imported here: ``--help``
needs none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from snapstream.config import as_count, as_number, as_path
from snapstream.config.engine import STALL_TIMEOUT_S, setting
from snapstream.config.values import check, check_choice, is_loopback, read_text
from snapstream.models.hub import model_name
from snapstream.spec_prefill.settings import DraftOptions, PromptCompression

TOOL_PARSERS = (
    "auto", "none", "hermes", "llama3_json", "llama4_pythonic", "qwen3_coder", "glm45", "glm47", "deepseek_v3",
    "deepseek_v31", "kimi_k2", "mistral", "harmony", "minimax_m2", "minimax_m3", "cohere", "nemotron", "gemma4",
)  # fmt: skip
Role = Literal["both", "prefill", "decode"]
ReasoningParser = Literal[
    "auto", "deepseek_r1", "qwen3", "harmony", "cohere", "gemma4", "minimax_m3", "mistral", "none"
]  # fmt: skip
KEY_VARIABLE, ADMIN_VARIABLE = "SNAPSTREAM_API_KEY", "SNAPSTREAM_ADMIN_KEY"
MIB = 2**20
STREAM_INTERVAL_MS = 2.0
# Engine options whose default differs in a server.
ENGINE_DEFAULTS: dict[str, Any] = {"max_waiting": 128, "prefix_store": "auto"}


def set_text(options: Any, *names: str) -> None:
    """Check text fields of a frozen dataclass."""
    for name in names:
        value = getattr(options, name)
        check(isinstance(value, str) and "\0" not in value, f"{name} is {value!r}; it must be a string")


def set_texts(options: Any, *names: str) -> None:
    """Check lists of strings, which become tuples."""
    for name in names:
        value = getattr(options, name)
        check(
            isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value),
            f"{name} is {value!r}; it must be a list of strings, none of them empty",
        )
        object.__setattr__(options, name, tuple(value))


def set_paths(options: Any, *names: str) -> None:
    """Check paths; an empty string becomes None."""
    for name in names:
        value = getattr(options, name)
        object.__setattr__(options, name, None if value in (None, "") else as_path(name, value))


def check_root_path(path: str) -> None:
    """ValueError for what cannot be the beginning of a path."""
    is_plain = path.isascii() and path.isprintable() and not set(path) & set(" ?#%\\")
    if path and not (path.startswith("/") and not path.endswith("/") and "//" not in path and is_plain):
        raise ValueError(f"the root path is {path!r}; it must be like /llm: a slash first, none at the end")


def check_keys(keys: Sequence[str]) -> None:
    """ValueError for a key that no client could send."""
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ValueError("an API key is empty, not printable ASCII, or has spaces around it")


def refuse_blank(variable: str) -> None:
    """ValueError for a key in the environment that is blank: it looks set and would leave the server open."""
    if not os.environ.get(variable, "unset").strip():
        raise ValueError(f"{variable} is set but blank; give it a key, or unset it to serve without")


def all_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Keys of the command line, of the file (one a line) and of the environment, together.

    ValueError for a file or a variable that holds none: giving one means that keys are wanted.
    """
    refuse_blank(KEY_VARIABLE)
    lines = [] if file is None else [line.strip() for line in read_text(file).splitlines()]
    kept = [line for line in lines if line]
    if file is not None and not kept:
        raise ValueError(f"{file} holds no API key")
    return tuple(dict.fromkeys((*given, *kept, *os.environ.get(KEY_VARIABLE, "").split())))


def check_hosts(hosts: Sequence[str]) -> None:
    """ValueError for what can never equal the name in a Host header."""
    for host in hosts:
        if not host or "/" in host or "*" in host or ":" in host:
            raise ValueError(f"allowed host {host!r} is not a name without port and wildcards")


def answered_hosts(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names in Host headers to answer to at the address ``host``; none means any."""
    return ("localhost", *allowed) if allowed or is_loopback(host) else ()


def is_base_url(url: str) -> bool:
    """Whether paths can be appended to ``url``: http or https, with a host, and no query."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number or above 65535, half an IPv6 address
        return False
    is_whole = not any(char.isspace() for char in url)
    return parts.scheme in ("http", "https") and has_host and is_whole and not (parts.query or parts.fragment)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where a server listens, under which names it serves the model, and for whom."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network.", metavar="ADDRESS")
    port: int = setting(8000, "Port; 0 takes a free one.")
    api_key_file: Path | None = setting(None, "File with more keys, one per line.")
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
        return self.served_model_name or (model_name(model),)


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """How the API reads requests and models, and which browsers may call it."""

    allowed_hosts: tuple[str, ...] = setting(
        (), "Host to answer to, in addition to localhost.", metavar="HOST", flag="--allowed-host"
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origin whose pages may call this server; repeatable.", metavar="ORIGIN", flag="--cors-origin"
    )
    root_path: str = setting("", "Path prefix of a reverse proxy in front, like /llm. Default: none.", metavar="PATH")
    tool_parser: str = setting(
        "auto", "Format of the model's tool calls; auto detects it from the chat template.", metavar="NAME"
    )
    chat_template: Path | None = setting(None, "Jinja file to render conversations with. Default: the checkpoint's.")
    trusts_users: bool = setting(
        False, "Encode special tokens that user and tool messages spell out as special tokens.", flag="--trust-users"
    )
    reasoning_parser: ReasoningParser = setting(
        "auto", "How the model marks its reasoning; auto detects it from the chat template."
    )
    responses_store: int = setting(
        1000, "Responses of each key kept in memory for requests that refer to them; 0 keeps none."
    )
    has_page: bool = setting(True, "Do not serve the chat page at /.", flag="--no-page")
    has_vllm_names: bool = setting(
        True, "Publish metrics under snapstream: only, without the vllm: aliases.", flag="--no-vllm-names"
    )

    def __post_init__(self) -> None:
        set_text(self, "root_path", "tool_parser")
        set_texts(self, "allowed_hosts", "cors_origins")
        set_paths(self, "chat_template")
        as_count("responses_store", self.responses_store, 0)
        check_choice("tool_parser", self.tool_parser, TOOL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, get_args(ReasoningParser))


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """Whether a server does prefill, decode or both, and where the other part is done."""

    role: Role = setting("both", "Prefill for other servers (prefill), or have such servers prefill (decode).")
    prefill: tuple[str, ...] = setting((), "With --role decode: server with --role prefill; repeatable.", metavar="URL")
    transfer_host: str | None = setting(
        None,
        "With --role decode: address at which prefill servers reach it. Default: 127.0.0.1.",
        metavar="ADDRESS",
    )
    transfer_port: int = setting(0, "With --role decode: its port; 0 takes a free one.")
    transfer_ca: Path | None = setting(None, "CA file for the other side's certificate (PEM). Default: the system's.")
    transfer_secret_file: Path | None = setting(
        None, "File with the shared secret, mode 0600; or SNAPSTREAM_TRANSFER_SECRET."
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
    """All options of the command but the engine's."""

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
        STALL_TIMEOUT_S, "Seconds without progress after which the engine is killed. 0: never."
    )
    stream_interval_ms: float = setting(
        STREAM_INTERVAL_MS, "Tokens of steps that are closer together than this are sent as one event. 0: one per step."
    )
    restart: bool = setting(True, "Do not restart an engine that died.", flag="--no-restart")
    log_format: Literal["text", "json"] = setting(
        "text", "Format of the log on stderr: one line per request, never its text."
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
        as_number("--stream-interval-ms", self.stream_interval_ms, 0.0, 10000.0)
        check((self.tls_cert is None) == (self.tls_key is None), "TLS needs both a certificate and a key")
        for file in (self.tls_cert, self.tls_key, self.chat_template):
            check(file is None or file.is_file(), f"{file} is not a file")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on the HTTP requests of a server or proxy."""

    max_requests: int = 1024  # open at once, from before their body is read; more get 429
    max_body_bytes: int = 32 * MIB
    max_open_body_bytes: int = 256 * MIB  # of all requests being answered together; more get 429
    body_timeout_s: float = 60.0  # for a client to send its body
    retry_after_s: int = 1  # sent to clients with 429 and 503

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_open_body_bytes", "retry_after_s"):
            as_count(name, getattr(self, name), 1)
        as_number("body_timeout_s", self.body_timeout_s, 0.001, 86400.0)
        if self.max_open_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_open_body_bytes is {self.max_open_body_bytes}; one body may have {self.max_body_bytes}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ApiOptions, RequestLimits):
    """Settings of the HTTP server; nothing here reaches the engine."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # of /v1/*; none: open to all
    admin_key: str = field(default="", repr=False)  # resets the prefix store of all callers; none by default
    max_prompts: int = 256  # prompts of one completions request
    max_samples: int = 256  # n times prompts of one request
    max_stored_bytes: int = 256 * MIB  # of their conversations, all keys together
    max_prompt_logprobs: int = 1_000_000  # of one answer with echo: prompt tokens x (1 + top) x n, all prompts
    max_kept_positions: int = 4_000_000  # of one answer with return_kept: layers x kv heads x top-k, all prompts
    max_kept_bits: int = 64 * MIB  # the same as a bitmap: layers x kv heads x prompt tokens
    tokenizer_threads: int = 2  # each has its own copy of the tokenizer
    role: Role = "both"
    transfer_secret: bytes = field(default=b"", repr=False)  # of the routes for other servers of the same deployment
    prompt_compression: PromptCompression | None = None  # of requests that bring none; needs a draft
    namespace_secret: bytes = field(default=b"", repr=False)  # of the prefix store; empty: one of this process
    max_draft_waiting: int = 64  # prompts that wait for the draft; more get 429
    max_draft_chars: int = 4 * MIB  # of one prompt that the draft reads

    @classmethod
    def of(cls, api: ApiOptions, **own: Any) -> ServerSettings:
        """Combine the API's options with the server's own settings."""
        return cls(**{each.name: getattr(api, each.name) for each in fields(ApiOptions)} | own)

    def __post_init__(self) -> None:
        ApiOptions.__post_init__(self)
        RequestLimits.__post_init__(self)
        for name in ("max_prompts", "max_samples", "max_stored_bytes", "max_prompt_logprobs", "max_kept_positions",
                     "max_kept_bits", "tokenizer_threads", "max_draft_waiting", "max_draft_chars"):  # fmt: skip
            as_count(name, getattr(self, name), 1)
        check_keys((*self.api_keys, *([self.admin_key] if self.admin_key else [])))
        if self.admin_key in self.api_keys:
            raise ValueError("the admin key is also an API key; give callers and the operator different keys")
        check_root_path(self.root_path)
        check_hosts(self.allowed_hosts)
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or "*" in origin or origin.endswith("/"):
                raise ValueError(f"CORS origin {origin!r} is not of the form scheme://host[:port], without wildcards")


UPSTREAM_KEY_VARIABLE = "SNAPSTREAM_UPSTREAM_KEY"
DEFAULT_KEEP = 0.25  # where the published accuracy still holds (arXiv 2603.02631)


@dataclass(frozen=True, kw_only=True)
class ProxyOptions(RequestLimits):
    """Where prompts go, how much of them, and the limits on the way."""

    upstream: str = setting(MISSING, "Base URL of the server, with or without /v1.")
    target: Path | None = setting(
        None, "Folder with the upstream model's tokenizer, to count its tokens. Default: the draft's."
    )
    keep: float | None = setting(None, "Share of a long prompt that stays, in (0, 1]. Default: 0.25.")
    max_tokens: int | None = setting(None, "Maximum tokens of a prompt, instead of --keep.")
    threshold: int | None = setting(None, "Prompts of fewer tokens stay uncompressed. Default: 1024.")
    look_ahead: int | None = setting(
        None, "Look-ahead queries of the draft whose attention scores count; 0: the prompt's last ones. Default: 8."
    )
    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network.", metavar="ADDRESS")
    port: int = setting(8001, "Port; 0 takes a free one.")
    # Any of them opens /v1/*, and stays here; without, the proxy is open and clients' own keys go upstream.
    api_keys: tuple[str, ...] = setting(
        (),
        "Bearer key for /v1/*, repeatable; SNAPSTREAM_API_KEY adds more. Default: open.",
        metavar="KEY",
        flag="--api-key",
    )
    api_key_file: Path | None = setting(None, "File with more keys, one per line.")
    upstream_key: str | None = setting(
        None, "Key sent upstream. Default: the client's own.", metavar="KEY", envvar=UPSTREAM_KEY_VARIABLE
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Host to answer to, in addition to localhost.", metavar="HOST", flag="--allowed-host"
    )
    is_strict: bool = setting(
        False, "Answer 500 if the draft fails, instead of sending the prompt uncompressed.", flag="--strict"
    )
    drain_timeout: float = setting(30.0, "Seconds that open answers get after SIGTERM.")
    max_waiting: int = 64  # prompts waiting for the draft; more get 429
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0  # the longest silence of the upstream
    compression: PromptCompression = field(init=False)  # of requests that bring none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_base_url(self.upstream):
            raise ValueError(f"upstream is {self.upstream!r}; it must be of the form http(s)://host[:port][/path]")
        refuse_blank(UPSTREAM_KEY_VARIABLE)
        check_keys((*self.api_keys, *(() if self.upstream_key is None else (self.upstream_key,))))
        check_hosts(self.allowed_hosts)
        as_count("port", self.port, 0, 65535)
        as_count("max_waiting", self.max_waiting, 1)
        as_number("drain_timeout", self.drain_timeout, 0.0, 86399.0)
        for name in ("connect_timeout_s", "read_timeout_s"):
            as_number(name, getattr(self, name), 0.001, 86400.0)
        keep = DEFAULT_KEEP if self.keep is None and self.max_tokens is None else self.keep
        object.__setattr__(self, "compression", PromptCompression(keep=keep, max_tokens=self.max_tokens))

    @property
    def root(self) -> str:
        """The upstream without a trailing /v1: paths are appended as they came."""
        return self.upstream.rstrip("/").removesuffix("/v1")

    @property
    def shown(self) -> str:
        """Scheme, host and port of the upstream, for logs: the rest of the URL may hold secrets."""
        parts = urlsplit(self.upstream)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
