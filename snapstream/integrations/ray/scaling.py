"""How many replicas there should be, by rows in use and by prompt tokens that wait. Ray runs it in its controller.

Ray averages what replicas report (``EngineReplica.record_autoscaling_stats``), holds the result within the bounds of
the config, and waits before it scales: 30 s up, 600 s down by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Protocol


class Metrics(Protocol):
    """The part of Ray's ``AutoscalingContext`` that is used."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def target_num_replicas(self) -> int: ...


class ByRowsAndTokens:
    """Ray's policy: the larger of the wishes it is given, each from what all replicas have together."""

    def __init__(self, rows_in_use: float | None = None, queued_tokens: int | None = None) -> None:
        """Of one replica: the share of its rows that should be open, and the prompt tokens that may wait."""
        self._rows_in_use, self._queued_tokens = rows_in_use, queued_tokens

    def __call__(self, context: Metrics) -> tuple[int, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        rows, open_rows, queued = (found.get(name, {}) for name in ("rows", "open_rows", "queued_tokens"))
        if not rows:  # nobody has reported yet
            return context.target_num_replicas, {}
        rows_each = max(1.0, sum(rows.values()) / len(rows))
        wish = 1.0
        if self._rows_in_use is not None:
            wish = max(wish, sum(open_rows.values()) / (self._rows_in_use * rows_each))
        if self._queued_tokens is not None:
            wish = max(wish, sum(queued.values()) / self._queued_tokens)
        return ceil(wish), {}
