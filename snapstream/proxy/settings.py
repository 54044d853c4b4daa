"""The proxy's settings, given once at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from snapstream.config import as_count, as_number
from snapstream.server.http.auth import check_keys
from snapstream.server.http.hosts import check_hosts
from snapstream.spec_prefill.settings import PromptCompression

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """Where prompts go, how much of them, and the limits on the way."""

    upstream: str  # base URL of the server, with or without /v1
    wish: PromptCompression  # of requests that bring none
    # Any of them opens /v1/*, and stays here; without, the proxy is open and clients' own keys go upstream.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, beside loopback ones; none means any
    upstream_key: str | None = field(default=None, repr=False)  # sent instead of the client's
    max_body_bytes: int = 32 * MIB
    max_open_body_bytes: int = 256 * MIB  # of all requests being answered together; more get 429
    body_timeout_s: float = 60.0  # for a client to send its body
    max_requests: int = 1024  # open at once; more get 429
    max_waiting: int = 64  # prompts waiting for the draft; more get 429
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0  # the longest silence of the upstream
    retry_after_s: int = 1
    is_strict: bool = False  # a failing draft is a 500; else the prompt goes on whole, and the answer says so

    def __post_init__(self) -> None:
        if not _is_base_url(self.upstream):
            raise ValueError(f"upstream is {self.upstream!r}; it must be of the form http(s)://host[:port][/path]")
        check_keys((*self.api_keys, *(() if self.upstream_key is None else (self.upstream_key,))))
        check_hosts(self.allowed_hosts)
        for name in ("max_body_bytes", "max_open_body_bytes", "max_requests", "max_waiting", "retry_after_s"):
            as_count(name, getattr(self, name), 1)
        for name in ("connect_timeout_s", "read_timeout_s", "body_timeout_s"):
            as_number(name, getattr(self, name), 0.001, 86400.0)
        if self.max_open_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_open_body_bytes is {self.max_open_body_bytes}; one body may have {self.max_body_bytes}"
            )

    @property
    def root(self) -> str:
        """The upstream without a trailing /v1: paths are appended as they came."""
        return self.upstream.rstrip("/").removesuffix("/v1")

    @property
    def shown(self) -> str:
        """Scheme, host and port of the upstream, for logs: the rest of the URL may hold secrets."""
        parts = urlsplit(self.upstream)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_place = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number or above 65535, half an IPv6 address
        return False
    is_whole = not any(char.isspace() for char in text)
    return parts.scheme in ("http", "https") and has_place and is_whole and not (parts.query or parts.fragment)
