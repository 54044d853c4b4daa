"""How long the units of a prompt are, and how much work each of them is. ``chunking.py`` has the reasons.

Work is counted in query-key pairs: a unit of T tokens that ends behind N keys is ``T (token_keys + N)``.
"""

from __future__ import annotations

from typing import Protocol

from snapstream.step import JobSpec

LEAST_TOKENS = 128  # a unit of fewer takes as long: reading the layer's weights bounds it


class Cut(Protocol):
    """How prompts are cut: ``EngineConfig``, or what ``chunking.py`` makes for it."""

    @property
    def chunk_len(self) -> int: ...
    @property
    def least_chunk_len(self) -> int: ...
    @property
    def step_work(self) -> int: ...
    @property
    def token_keys(self) -> int: ...


def job_chunk_len(config: Cut, num_tokens: int) -> int:
    """Tokens of a unit of a prompt: ``chunk_len``, halved until its last unit fits a step of decoding rows."""
    size = config.chunk_len
    while size > config.least_chunk_len > 0 and size * (config.token_keys + num_tokens) > config.step_work > 0:
        size //= 2
    return max(size, config.least_chunk_len)


def unit_work(config: Cut, spec: JobSpec, unit: int) -> int:
    """Work of unit ``unit`` of a job."""
    size = spec.chunk_len or config.chunk_len
    start = unit % spec.num_chunks(config.chunk_len) * size
    stop = min(start + size, spec.num_tokens)
    return max(stop - start, LEAST_TOKENS) * (config.token_keys + stop)
