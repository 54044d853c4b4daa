"""How the heads of a layer agree on the tokens of a row of latents: the rules side by side, task by task."""

from __future__ import annotations

from pathlib import Path

from evals import tables
from figures.markdown import table

RULES = {
    "full": "full attention", "snapstream": "sum of the votes", "largest_head": "largest vote",
    "by_head": "every head its own, keys and values per head",
}  # fmt: skip


def cells(model: Path) -> list[tables.Result]:
    """Stored cells of the rules, of arms as they are defined today; the longest prompts."""
    found = [
        cell for cell in tables.cells(model)
        if cell["settings"]["source"] == "snapstream" and "kv_dtype" not in cell["settings"]
        and cell["settings"]["arm"] in RULES and tables.is_current(cell["settings"])
    ]  # fmt: skip
    compared = {cell["settings"]["task"] for cell in found if cell["settings"]["arm"] == "by_head"}
    longest = max((cell["settings"]["prompt_len"] for cell in found), default=0)
    return [c for c in found if c["settings"]["task"] in compared and c["settings"]["prompt_len"] == longest]


def rules_table(model: Path) -> str:
    """docs: accuracy by number of slots and rule; ValueError if nothing was measured."""
    found = cells(model)
    if not found:
        raise ValueError("not measured; run python -m evals.run --arms full snapstream largest_head by_head")
    lines = tables.by_row(found, lambda cell: cell["settings"]["task"])
    names = list(dict.fromkeys(cell["settings"]["task"] for cell in found))
    prompt_len = found[0]["settings"]["prompt_len"]
    order = sorted(lines, key=lambda row: (row[0] != "full", -row[1], list(RULES).index(row[0])))
    rows = []
    for arm, slots in order:
        line = lines[arm, slots]
        mean, error = tables.mean([results[0] for results in line.values()])
        values = [tables.with_error(line[name][0]).split(" (")[0] if name in line else "" for name in names]
        average = f"{mean:.1f} ± {error:.1f}" if len(line) == len(names) else ""
        rows.append([tables.part_of(slots, prompt_len), RULES[arm], tables.bytes_of(line), *values, average])
    heads = ["slots", "what the heads keep", "bytes per row", *names, "mean"]
    return f"{tables.note_of(found)}\n\n{table(heads, rows)}"
