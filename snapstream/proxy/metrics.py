"""Prometheus metrics of the proxy. Invariant: a registry of its own; two proxies in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from snapstream.spec_prefill.report import TrimReport

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProxyMetrics:
    """Requests by status, prompts by what became of them, tokens in and out, seconds of the draft."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"snapstream_proxy_{name}", text, list(labels), registry=self._registry)

        self.open = Gauge("snapstream_proxy_requests_open", "Requests being answered.", registry=self._registry)
        self._requests = counter("requests", "Requests, by status of the answer.", ("status",))
        self._prompts = counter("prompts", "Prompts, by whether the draft trimmed them.", ("applied",))
        self._before = counter("prompt_tokens", "Tokens of prompts that were trimmed, before.")
        self._trimmed = counter("prompt_tokens_trimmed", "Tokens that did not go upstream.")
        self._draft = Histogram(
            "snapstream_proxy_draft_seconds", "Draft time of a prompt.", buckets=_SECONDS, registry=self._registry
        )

    def count_answer(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def count_prompt(self, report: TrimReport) -> None:
        self._prompts.labels("true" if report.is_applied else "false").inc()
        if report.is_applied:
            self._before.inc(report.tokens_before)
            self._trimmed.inc(max(0, report.tokens_before - report.tokens_after))
        if report.draft_ms:
            self._draft.observe(report.draft_ms / 1e3)

    def render(self) -> bytes:
        return generate_latest(self._registry)
