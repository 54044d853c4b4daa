"""The options of ``snapstream proxy``, whose fields are its flags, and the limits of the proxy.

No package of the extra ``serve`` is imported here: ``--help`` needs none.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from snapstream.config import as_count, as_number
from snapstream.config.engine import setting
from snapstream.server.options import RequestLimits, check_hosts, check_keys, refuse_blank
from snapstream.spec_prefill.settings import PromptCompression

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
    max_tokens: int | None = setting(None, "Ceiling of a prompt in tokens, instead of --keep.")
    threshold: int | None = setting(None, "Shorter prompts are left alone (tokens). Default: 1024.")
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
    api_key_file: Path | None = setting(None, "File of further keys, one a line.")
    upstream_key: str | None = setting(
        None, "Key sent upstream. Default: the client's own.", metavar="KEY", envvar=UPSTREAM_KEY_VARIABLE
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Host to answer to, in addition to localhost.", metavar="HOST", flag="--allowed-host"
    )
    is_strict: bool = setting(False, "A failing draft is a 500, not an uncompressed prompt.", flag="--strict")
    drain_timeout: float = setting(30.0, "Seconds that open answers get after SIGTERM.")
    max_waiting: int = 64  # prompts waiting for the draft; more get 429
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0  # the longest silence of the upstream
    compression: PromptCompression = field(init=False)  # of requests that bring none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_base_url(self.upstream):
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


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        template_has_tools = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number or above 65535, half an IPv6 address
        return False
    is_whole = not any(char.isspace() for char in text)
    return parts.scheme in ("http", "https") and template_has_tools and is_whole and not (parts.query or parts.fragment)
