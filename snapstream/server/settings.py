"""What the HTTP front is told once, at start: its own limits, and the facts of the model behind it.

Invariant: every limit a caller can run into has a number here or in ``EngineConfig``; handlers hold none.
``app.py`` builds the application from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from snapstream.config import EngineConfig

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the front behaves; nothing here reaches the engine."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens /v1/*; none means open to all
    cors_origins: tuple[str, ...] = ()  # exact origins, e.g. http://localhost:3000
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, beside loopback ones; none means any
    max_body_bytes: int = 32 * MIB
    max_prompts: int = 256  # prompts of one completions request
    max_samples: int = 256  # n times prompts of one request
    max_requests: int = 1024  # HTTP requests open at once, from before their body is read; more get 429
    max_prompt_logprobs: int = 1_000_000  # of one answer with echo: prompt tokens x (1 + top) x n, all prompts
    max_kept_positions: int = 4_000_000  # of one answer with return_kept: layers x kv heads x top-k, all prompts
    retry_after_s: int = 1  # told to clients with 429 and 503
    tokenizer_threads: int = 2  # each has its own copy of the tokenizer
    has_vllm_names: bool = True  # metrics also under the names that dashboards know

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_samples", "max_requests", "max_prompt_logprobs",
                     "max_kept_positions", "retry_after_s", "tokenizer_threads"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        for key in self.api_keys:
            if not key or not key.isascii() or key != key.strip():
                raise ValueError("an API key is empty, not ASCII, or has spaces around it")
        for host in self.allowed_hosts:
            if not host or "/" in host or "*" in host or ":" in host:
                raise ValueError(f"allowed host {host!r} is not a name without port and wildcards")
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or "*" in origin or origin.endswith("/"):
                raise ValueError(f"CORS origin {origin!r} is not of the form scheme://host[:port], without wildcards")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The model as callers see it."""

    names: tuple[str, ...]  # the first is the one we answer with where a request names none
    vocab_size: int
    engine: EngineConfig  # limits: window, rows, largest budget
    created: int = 0  # seconds since the epoch
    num_heads: int = 1  # kv heads of all layers: how many lists of kept positions a prompt has

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"served model names are {self.names!r}; at least one, none empty, is needed")

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len
