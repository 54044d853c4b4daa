"""Settings of the HTTP server, fixed at start, and the metadata of the model it serves.

Invariant: every limit a caller can run into has a number here or in ``EngineConfig``; handlers hold none.
``app.py`` builds the application from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

from snapstream.config import EngineConfig
from snapstream.server.http.middleware import check_hosts, check_keys, check_root_path
from snapstream.server.options import ApiOptions, Role
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.version import __version__

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ApiOptions):
    """How the HTTP server behaves; nothing here reaches the engine."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens /v1/*; none means open to all
    admin_key: str = field(default="", repr=False)  # what it resets, it resets for all callers; none by default
    max_body_bytes: int = 32 * MIB
    max_open_body_bytes: int = 256 * MIB  # of all requests being answered together; more get 429
    body_timeout_s: float = 60.0  # for a client to send its body: one that trickles may not hold a place for ever
    max_prompts: int = 256  # prompts of one completions request
    max_samples: int = 256  # n times prompts of one request
    max_stored_bytes: int = 256 * MIB  # of their conversations, all keys together
    max_requests: int = 1024  # HTTP requests open at once, from before their body is read; more get 429
    max_prompt_logprobs: int = 1_000_000  # of one answer with echo: prompt tokens x (1 + top) x n, all prompts
    max_kept_positions: int = 4_000_000  # of one answer with return_kept: layers x kv heads x top-k, all prompts
    max_kept_bits: int = 64 * MIB  # the same as a bitmap: layers x kv heads x prompt tokens
    retry_after_s: int = 1  # sent to clients with 429 and 503
    tokenizer_threads: int = 2  # each has its own copy of the tokenizer
    role: Role = "both"
    transfer_secret: bytes = field(default=b"", repr=False)  # opens the routes for other servers of ours
    prompt_compression: PromptCompression | None = None  # of requests that bring none; needs a draft
    namespace_secret: bytes = field(default=b"", repr=False)  # of the prefix store; empty: one of this process
    max_draft_waiting: int = 64  # prompts that wait for the draft; more get 429
    max_draft_chars: int = 4 * MIB  # of one prompt that the draft reads

    @classmethod
    def of(cls, api: ApiOptions, **own: Any) -> ServerSettings:
        """Settings with a user's options of the API."""
        return cls(**{each.name: getattr(api, each.name) for each in fields(ApiOptions)} | own)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_body_bytes", "max_open_body_bytes", "body_timeout_s", "max_prompts", "max_samples",
                     "max_requests", "max_stored_bytes", "max_prompt_logprobs", "max_kept_positions", "max_kept_bits",
                     "retry_after_s", "tokenizer_threads", "max_draft_waiting", "max_draft_chars"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")
        if self.max_open_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_open_body_bytes is {self.max_open_body_bytes}; one body may have {self.max_body_bytes}"
            )
        check_keys((*self.api_keys, *([self.admin_key] if self.admin_key else [])))
        if self.admin_key in self.api_keys:
            raise ValueError("the admin key is an API key, too; give callers and the operator keys of their own")
        check_root_path(self.root_path)
        check_hosts(self.allowed_hosts)
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or "*" in origin or origin.endswith("/"):
                raise ValueError(f"CORS origin {origin!r} is not of the form scheme://host[:port], without wildcards")


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """The model as callers see it."""

    names: tuple[str, ...]  # the first is the one we answer with where a request names none
    vocab_size: int
    engine: EngineConfig  # limits: max_model_len, rows, largest budget
    created: int = 0  # seconds since the epoch
    num_layers: int = 1
    num_kv_heads: int = 1  # of one layer
    row_facts: dict[str, str] = field(default_factory=dict)  # what the other side of a KV transfer must agree with
    has_examples: bool = False  # it is the shipped model, which answers questions on the package's own documents

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"served model names are {self.names!r}; at least one, none empty, is needed")

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """Of model, version and settings of the engine: where it differs, answers may."""
        parts = (__version__, self.name, self.vocab_size, self.num_layers, self.num_kv_heads, self.engine)
        return f"fp_{sha256(repr(parts).encode()).hexdigest()[:12]}"

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def num_heads(self) -> int:
        """kv heads of all layers: how many lists of kept positions a prompt has."""
        return self.num_layers * self.num_kv_heads
