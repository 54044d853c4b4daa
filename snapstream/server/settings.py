"""The settings of the HTTP front, given once at start: its own limits, and the facts of the model behind it.

Invariant: every limit a caller can run into has a number here or in ``EngineConfig``; handlers hold none.
``app.py`` builds the application from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from snapstream.config import EngineConfig
from snapstream.server.http.auth import check_keys
from snapstream.server.http.hosts import check_hosts
from snapstream.server.http.paths import check_root_path
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.version import __version__

MIB = 2**20

TOOL_PARSERS = (
    "auto", "none", "hermes", "llama3_json", "llama4_pythonic", "qwen3_coder", "glm45", "glm47", "deepseek_v3",
    "deepseek_v31", "kimi_k2", "mistral",
)  # fmt: skip
Duty = Literal["both", "prefill", "decode"]  # what a server does of a request
ReasoningParser = Literal["auto", "deepseek_r1", "qwen3", "none"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the front behaves; nothing here reaches the engine."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens /v1/*; none means open to all
    admin_key: str = field(default="", repr=False)  # what it resets, it resets for all callers; none by default
    cors_origins: tuple[str, ...] = ()  # exact origins, e.g. http://localhost:3000
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, beside loopback ones; none means any
    root_path: str = ""  # what a proxy in front puts before our paths, e.g. /llm; paths without it are answered, too
    max_body_bytes: int = 32 * MIB
    max_open_body_bytes: int = 256 * MIB  # of all requests being answered together; more get 429
    body_timeout_s: float = 60.0  # for a client to send its body: one that trickles may not hold a place for ever
    max_prompts: int = 256  # prompts of one completions request
    max_samples: int = 256  # n times prompts of one request
    responses_store: int = 0  # responses that requests may go on from; 0: none
    max_stored_bytes: int = 256 * MIB  # of their conversations
    max_requests: int = 1024  # HTTP requests open at once, from before their body is read; more get 429
    max_prompt_logprobs: int = 1_000_000  # of one answer with echo: prompt tokens x (1 + top) x n, all prompts
    max_kept_positions: int = 4_000_000  # of one answer with return_kept: layers x kv heads x top-k, all prompts
    max_kept_bits: int = 64 * MIB  # the same as a bitmap: layers x kv heads x prompt tokens
    retry_after_s: int = 1  # told to clients with 429 and 503
    tokenizer_threads: int = 2  # each has its own copy of the tokenizer
    tool_parser: str = "auto"  # how the model writes tool calls; auto goes by its chat template
    trusts_users: bool = False  # special tokens that they spell out in messages become such
    reasoning_parser: ReasoningParser = "auto"  # how the model thinks aloud; auto goes by its chat template
    has_vllm_names: bool = True  # metrics also under the names that dashboards know
    has_page: bool = True  # the chat page at /
    duty: Duty = "both"
    transfer_secret: bytes = field(default=b"", repr=False)  # opens the routes for other servers of ours
    prompt_compression: PromptCompression | None = None  # of requests that bring none; needs a draft
    namespace_secret: bytes = field(default=b"", repr=False)  # of the prefix store; empty: one of this process
    max_draft_waiting: int = 64  # prompts that wait for the draft; more get 429
    max_draft_chars: int = 4 * MIB  # of one prompt that the draft reads

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_open_body_bytes", "body_timeout_s", "max_prompts", "max_samples",
                     "max_requests", "max_stored_bytes", "max_prompt_logprobs", "max_kept_positions", "max_kept_bits",
                     "retry_after_s", "tokenizer_threads", "max_draft_waiting", "max_draft_chars"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")
        if self.max_open_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_open_body_bytes is {self.max_open_body_bytes}; one body may have {self.max_body_bytes}"
            )
        if self.tool_parser not in TOOL_PARSERS:
            raise ValueError(f"the tool parser is {self.tool_parser!r}; it must be one of {', '.join(TOOL_PARSERS)}")
        if self.responses_store < 0:
            raise ValueError(f"responses_store is {self.responses_store}; it must be >= 0")
        check_keys((*self.api_keys, *([self.admin_key] if self.admin_key else [])))
        if self.admin_key in self.api_keys:
            raise ValueError("the admin key is an API key, too; give callers and the operator keys of their own")
        check_root_path(self.root_path)
        check_hosts(self.allowed_hosts)
        for origin in self.cors_origins:
            if not origin.startswith(("http://", "https://")) or "*" in origin or origin.endswith("/"):
                raise ValueError(f"CORS origin {origin!r} is not of the form scheme://host[:port], without wildcards")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The model as callers see it."""

    names: tuple[str, ...]  # the first is the one we answer with where a request names none
    vocab_size: int
    engine: EngineConfig  # limits: max_model_len, rows, largest budget
    created: int = 0  # seconds since the epoch
    num_layers: int = 1
    num_kv_heads: int = 1  # of one layer
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
