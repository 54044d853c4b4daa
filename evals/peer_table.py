"""The table of docs/research/accuracy.md that shows this engine and kvpress at the same slots; see ``tables.py``."""

from __future__ import annotations

from evals import tables
from evals.tasks import TASKS
from figures.markdown import table

ENGINES = {"snapstream": "this engine", "kvpress": "kvpress"}
# Source, arm, name: what resembles each other stands together.
ROWS = (
    ("snapstream", "full", "full attention"),
    ("kvpress", "full", "full attention"),
    ("snapstream", "hops", "SnapStream, 4 hops"),
    ("snapstream", "snapstream", "SnapStream"),
    ("snapstream", "snapkv", "SnapKV as published"),
    ("snapstream", "as_kvpress", "SnapKV, kvpress's settings"),
    ("kvpress", "snapkv", "SnapKVPress"),
    ("kvpress", "chunkkv", "ChunkKVPress over SnapKVPress"),
    ("kvpress", "compactor", "CompactorPress"),
    ("snapstream", "streaming", "StreamingLLM"),
    ("kvpress", "streaming", "StreamingLLMPress"),
)


def _asked(cell: tables.Result) -> tuple[str, int]:
    return cell["settings"]["task"], cell["settings"]["num_prompts"]


def peer_cells() -> list[tables.Result]:
    """What was measured with the peer."""
    return [cell for cell in tables.records() if cell["settings"]["source"] == "kvpress"]


def peer_table() -> str:
    """Task by task, both engines; ValueError if the peer was not measured."""
    stored, theirs = tables.records(), peer_cells()
    lines: dict[tuple[str, str, int], dict[str, tables.Result]] = {}
    if not theirs:
        raise ValueError("not measured; run python -m evals.peers_kvpress")
    longest = max(cell["settings"]["prompt_len"] for cell in theirs)
    measured = {cell["settings"]["task"] for cell in theirs}
    names = [task for task in TASKS if task in measured]
    asked: dict[str, int] = {}
    for task, count in (_asked(cell) for cell in theirs if cell["settings"]["arm"] == "full"):
        asked[task] = max(count, asked.get(task, 0))

    def worth(cell: tables.Result) -> tuple[bool, int]:
        """Full attention is shown on the same prompts, as it must agree; else the most prompts count."""
        task, count = _asked(cell)
        return cell["settings"]["arm"] == "full" and count == asked.get(task), count

    for cell in sorted(stored, key=worth):  # a later one replaces an earlier one
        s = cell["settings"]
        if s["source"] == "snapstream" and not (s.get("kv_dtype", "auto") == "auto" and tables.is_current(s)):
            continue  # rows in another dtype than the weights' are another table's
        if s["prompt_len"] == longest and s["task"] in measured:
            slots = 0 if s["arm"] == "full" else s["slots"]
            lines.setdefault((s["source"], s["arm"], slots), {})[s["task"]] = cell
    sizes = {slots for source, _, slots in lines if source == "kvpress"}
    rows, shown = [], []
    for slots in sorted(sizes, key=lambda size: -size if size else -longest):
        for source, arm, title in ROWS:
            line = lines.get((source, arm, slots))
            if line:
                values = [tables.with_error(line[name]).split(" (")[0] if name in line else "" for name in names]
                rows.append([ENGINES[source], title, tables.part_of(slots, longest), *values])
                shown += line.values()
    versions = ", ".join(sorted({cell["result"]["peer_version"] for cell in theirs}))
    note = f"{tables.note_of(shown)} Full attention of both on the same prompts. {versions}."
    return f"{note}\n\n{table(['engine', 'cache', 'slots', *names], rows)}"
