"""Gauges and totals of an engine; the process that restarts it adds up the totals.

Invariant: totals never shrink. What an engine counted since its last report (``worker.STATS_INTERVAL_S``) is lost when
it is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from snapstream.engine.core import Engine
from snapstream.engine.prefix_cache import PrefixStats
from snapstream.engine.request_state import RequestDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and totals for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    rows_free: int = 0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    drafted_tokens_total: int = 0  # by speculative decoding, of finished requests
    accepted_tokens_total: int = 0
    evicted_tokens_total: int = 0
    compressions_total: int = 0
    compression_seconds_total: float = 0.0
    restarts_total: int = 0
    prefix_blocks_used: int = 0  # of the prefix store; all 0 where there is none
    prefix_blocks_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens that were looked up
    prefix_hits_total: int = 0  # of those, tokens that were cached
    prefix_answer_hits_total: int = 0  # of those, tokens of blocks that were copied from rows
    prefix_idle_hits_total: int = 0  # of those, tokens that were prefilled in idle time
    prefix_saved_total: int = 0  # tokens
    prefix_lost_answers_total: int = 0  # generated tokens that could not be stored
    prefix_evicted_blocks_total: int = 0
    stalls_total: int = 0  # engines that were killed because they did not respond
    rows_sent_total: int = 0  # to other engines
    rows_received_total: int = 0  # from them
    rows_lost_total: int = 0  # failed transfers, in either direction
    row_bytes_received_total: int = 0


_GAUGES = ("num_running", "num_waiting", "rows_free", "rows_total", "prefix_blocks_used", "prefix_blocks_total")


class StatsCounter:
    """Totals of one engine since its start; plain numbers, because every step counts."""

    def __init__(self) -> None:
        self._num_output = self._num_prompt = self._num_evicted = self._num_compressed = 0
        self._num_drafted = self._num_accepted = 0
        self._compress_ms = 0.0

    def count(self, deltas: Iterable[RequestDelta]) -> None:
        for delta in deltas:
            for sample in delta.samples:
                self._num_output += len(sample.token_ids)
            if delta.timings is not None:
                self._num_drafted += delta.timings.drafted_tokens
                self._num_accepted += delta.timings.accepted_tokens
            done = delta.compression
            if done is None:
                continue
            self._num_prompt += done.prompt_tokens
            self._num_evicted += done.evicted_tokens
            if done.evicted_tokens:  # else the row holds the whole prompt
                self._num_compressed += 1
                self._compress_ms += done.compress_ms

    def stats(self, engine: Engine, rows_total: int) -> EngineStats:
        prefix, rows = engine.prefix_stats or PrefixStats(), engine.transfer_stats
        return EngineStats(
            prompt_tokens_total=self._num_prompt,
            generation_tokens_total=self._num_output,
            drafted_tokens_total=self._num_drafted,
            accepted_tokens_total=self._num_accepted,
            evicted_tokens_total=self._num_evicted,
            compressions_total=self._num_compressed,
            compression_seconds_total=self._compress_ms / 1e3,
            rows_sent_total=rows.num_sent,
            rows_received_total=rows.num_received,
            rows_lost_total=rows.num_failed,
            row_bytes_received_total=rows.num_bytes,
            prefix_blocks_used=prefix.used_blocks,
            prefix_blocks_total=prefix.num_blocks,
            prefix_queries_total=prefix.queries,
            prefix_hits_total=prefix.hits,
            prefix_answer_hits_total=prefix.answer_hits,
            prefix_idle_hits_total=prefix.idle_hits,
            prefix_saved_total=prefix.saved,
            prefix_lost_answers_total=prefix.lost_answers,
            prefix_evicted_blocks_total=prefix.evicted_blocks,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            rows_free=engine.rows_free,
            rows_total=rows_total,
        )


def without_gauges(stats: EngineStats) -> EngineStats:
    """The totals of an engine that has ended."""
    return replace(stats, **dict.fromkeys(_GAUGES, 0))


def add_totals(stats: EngineStats, earlier: EngineStats) -> EngineStats:
    """``stats`` plus the totals of ``earlier``."""
    totals = [field.name for field in fields(EngineStats) if field.name not in _GAUGES]
    return replace(stats, **{name: getattr(stats, name) + getattr(earlier, name) for name in totals})
