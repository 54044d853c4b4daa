"""docs: rows over real text, one table of retrieval and one of perplexity (``evals/prose.py`` measures both).

A stored run has either or both; runs that differ in the number of tokens that follow a window stand side by side.
"""

from __future__ import annotations

from evals import prose, store
from evals.store import Record
from figures.markdown import table

ARMS = {
    "full": "full attention", "hops": "SnapStream, 4 hops", "diverse": "SnapStream, half for unlike keys",
    "snapstream": "SnapStream", "snapkv": "SnapKV as published", "streaming": "StreamingLLM",
    "truncation": "both ends of the prompt", "random": "random tokens",
}  # fmt: skip
PERPLEXITY = "perplexity, "
Column = tuple[str, dict[str, float]]


def retrieval_table() -> str:
    """Accuracy in points, a column per family of planted facts, and their mean."""
    record = max(_records(), key=lambda one: len(_families(one)))
    families = _families(record)
    if not families:
        raise ValueError("no retrieval was measured; run python -m evals.prose")
    columns: list[Column] = [(name, record["result"][name]) for name in families]
    common = set.intersection(*(set(cells) for _, cells in columns))
    mean = {name: sum(cells[name] for _, cells in columns) / len(columns) for name in common}
    settings = record["settings"]
    text = f"Points, {settings['num_prompts']} prompts of {settings['prompt_len']:,} tokens per cell, greedy:"
    return f"{text}\n\n{_table([*columns, ('mean', mean)], '.1f')}\n\n{_source([record])}"


def perplexity_table() -> str:
    """Of what follows a window of held-out text, a column per kind of text and number of tokens."""
    columns: list[Column] = []
    records = sorted(_records(), key=lambda one: int(one["settings"]["continuation"]))
    for record in records:
        for name, cells in record["result"].items():
            if name.startswith(PERPLEXITY):
                tokens = record["settings"]["continuation"] - 1
                columns.append((f"{name.removeprefix(PERPLEXITY)}, {tokens:,} tokens", cells))
    windows = " or ".join(map(str, sorted({record["settings"]["num_prompts"] for record in records})))
    text = f"Perplexity per token of what follows {windows} windows of {records[0]['settings']['prompt_len']:,} tokens:"
    return f"{text}\n\n{_table(columns, '.2f')}\n\n{_source(records)}"


def _records() -> list[Record]:
    found = list(store.read(prose.FILE).values())
    if not found:
        raise ValueError("not measured; run python -m evals.prose")
    return found


def _families(record: Record) -> list[str]:
    return [name for name in record["result"] if not name.startswith(PERPLEXITY)]


def _table(columns: list[Column], form: str) -> str:
    """A line for full attention, then one per part of the slots and arm; empty where an arm does not fit."""
    lines = ["full/1", *(f"{arm}/{part}" for part in prose.PARTS for arm in ARMS if arm != "full")]
    rows = []
    for line in lines:
        cells = [format(own[line], form) if line in own else "" for _, own in columns]
        if any(cells):
            arm, _, part = line.partition("/")
            rows.append(["all" if arm == "full" else f"1/{part}", ARMS[arm], *cells])
    return table(["slots", "cache", *(name for name, _ in columns)], rows)


def _source(records: list[Record]) -> str:
    last = records[-1]
    commits = ", ".join(sorted({record["commit"] for record in records}))
    return f"<sub>{last['device']}; torch {last['torch']}; commit {commits}; `python -m evals.prose`</sub>"
