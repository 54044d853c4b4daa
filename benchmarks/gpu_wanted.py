"""What one H200 should reach, and where in a result of the GPU suite each figure stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """One line; ``measured`` is None where the result has no such figure."""

    what: str
    limit: float
    measured: Callable[[Result], float | None]
    unit: str = ""  # "%" shows a share as one
    is_most: bool = False  # the limit is a ceiling
    is_strict: bool = False

    def is_reached(self, value: float) -> bool:
        if self.is_strict:
            return value > self.limit
        return value <= self.limit if self.is_most else value >= self.limit

    def bound(self) -> str:
        sign = ">" if self.is_strict else "<=" if self.is_most else ">="
        return f"{sign} {self.shown(self.limit)}"

    def shown(self, value: float) -> str:
        return f"{value * 100:.3g} %" if self.unit == "%" else f"{value:.3g}{self.unit}"


def figures(result: Result, section: str, **fixed: Any) -> Iterator[dict[str, Any]]:
    """Figures of a section that have these values."""
    for figure in result["sections"].get(section, {}).get("figures", []):
        if all(figure.get(name) == value for name, value in fixed.items()):
            yield figure


def one(section: str, name: str, **fixed: Any) -> Callable[[Result], float | None]:
    """The figure ``name`` of the line that has these values."""
    return lambda result: next((f[name] for f in figures(result, section, **fixed) if name in f), None)


def prefill(name: str, prompt_len: int) -> Callable[[Result], float | None]:
    """Of the prompt of about that length."""

    def find(result: Result) -> float | None:
        near = (f for f in figures(result, "prefill_8b") if abs(f["prompt_len"] - prompt_len) <= 64 and name in f)
        return next((figure[name] for figure in near), None)

    return find


def speedup_of_draft(result: Result) -> float | None:
    found = [figure["speedup"] for figure in figures(result, "spec_prefill") if "speedup" in figure]
    return max(found, default=None)


def plan_error(result: Result) -> float | None:
    """The largest deviation of the peak from what was planned."""
    found = [abs(f["peak_gib"] / f["planned_gib"] - 1) for f in figures(result, "largest_batch")]
    return max(found, default=None)


def ahead_of_peer(result: Result) -> float | None:
    """Least ratio to transformers' static cache over the batches of both; None unless all of ours have one."""
    ours = {f["batch"]: f["tokens_per_s"] for f in figures(result, "peers") if f["engine"].startswith("snapstream")}
    theirs = {f["batch"]: f["tokens_per_s"] for f in figures(result, "peers") if f["engine"].startswith("transformers")}
    return min((ours[batch] / theirs[batch] for batch in ours), default=None) if ours.keys() == theirs.keys() else None


def ahead_of_continuous(result: Result) -> float | None:
    ours, theirs = (one(name, "tokens_per_s")(result) for name in ("requests", "peers_continuous"))
    return None if ours is None or theirs is None else ours / theirs


WANTED = (
    Wanted("decode of 8B, 64 rows of 8,192 slots: share of the read bandwidth", 0.80,
           one("decode_8b", "share_of_read", executor="graph", batch=64), "%"),
    Wanted("decode of 8B, one row", 0.70, one("decode_8b", "share_of_read", executor="graph", batch=1), "%"),
    Wanted("decode attention alone, 64 rows of 8,192 slots of 8B", 0.85,
           one("decode_kernel", "share_of_read", model="Llama-3.1-8B", batch=64), "%"),
    Wanted("128k prompts: decode at the largest batch, a quarter of the cache over all of it", 4.3,
           one("largest_batch", "speedup_over_full", slots=32_768), "x"),
    Wanted("scoring, selection and write of a 128k prefill", 0.01, prefill("compress_share", 131_072), "%",
           is_most=True),
    Wanted("extra memory of a 128k prefill at 8B", 2.0, prefill("extra_gib", 131_072), " GiB", is_most=True),
    Wanted("MFU of a 32k prefill", 0.55, prefill("mfu", 32_768), "%"),
    Wanted("p99 between tokens during a 128k prefill over idle, by default", 2.0,
           one("streams", "p99_ratio", is_default=True), "x", is_most=True),
    Wanted("tokens/s over transformers, static cache and compile, the least of all batches", 1.0, ahead_of_peer, "x",
           is_strict=True),
    Wanted("tokens/s over transformers' continuous batching, prefill included", 1.0, ahead_of_continuous, "x",
           is_strict=True),
    Wanted("first token of 128k tokens cut to 16k by a draft, over the whole prompt", 8.0, speedup_of_draft, "x"),
    Wanted("peak memory against the plan, largest deviation", 0.03, plan_error, "%", is_most=True),
    Wanted("first token of a 33k prompt out of the prefix store, over cold", 12.0, one("prefixes", "speedup"), "x"),
    Wanted("a cold prefill with the prefix store on, over one without", 1.02, one("prefixes", "slowdown"), "x",
           is_most=True),
    Wanted("p99 between tokens of streams while a stored prompt is restored, over idle", 1.5,
           one("prefixes", "p99_ratio"), "x", is_most=True),
)  # fmt: skip
