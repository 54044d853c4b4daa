"""Markdown of sweeps, of the analysis of chains and of the goals, from stored cells; ``tables.py`` reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from evals import cells as evals_cells
from evals import store, sweep
from evals.arms import Arm
from evals.tables import ARM_NAMES, Result, by_group, cells, compared, mean, with_error
from figures.markdown import table
from snapstream.assets import TINY_MODEL

WANTED = (("1/4", 4, 1.0), ("1/8", 8, 3.0))  # SnapStream within so many points of full attention
WANTED_EXACT = (16, 0.9)  # exact retrieval: share of full attention
WANTED_GROUPS = ("retrieval", "exact retrieval", "multi-hop", "question answering")


def sweep_table(name: str, model: Path = TINY_MODEL) -> str:
    """docs: one sweep, at every budget that was measured."""
    found = [cell for cell in cells(model) if cell["settings"]["arm"] == sweep.ARM]
    parts = []
    for slots in sorted({cell["settings"]["slots"] for cell in found}, reverse=True):
        own = {_point(cell["settings"]): cell for cell in found if cell["settings"]["slots"] == slots}
        lines = []
        for point in sweep.points_of(name, slots):
            arm = Arm(name=sweep.ARM, slots=slots, budget=point.budget, selector=point.selector)
            settings = {"budget": asdict(arm.budget), "snapkv": arm.selection}
            line = {task: own.get(_point(settings | {"task": task})) for task in sweep.tasks_of(model)}
            lines.append((point, line))
        measured = [line for point, line in lines if not point.is_default and any(line.values())]
        names = [task for task in sweep.tasks_of(model) if sum(line[task] is not None for line in measured) > 1]
        rows = []
        for point, line in lines:
            values = [with_error(cell).split(" (")[0] if (cell := line[task]) else "" for task in names]
            if any(values):
                mark = f"**{point.label}**" + (" (default)" if point.label != "default" else "")
                rows.append([mark if point.is_default else point.label, *values])
        if len(rows) > 2:
            shown = [cell for _, line in lines for task in names if (cell := line[task]) is not None]
            counts = sorted({cell["settings"]["num_prompts"] for cell in shown})
            count = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
            head = f"{slots} slots, {count} prompts of {sweep.PROMPT_LEN:,} tokens per cell:"
            parts.append(f"{head}\n\n{table(['setting', *names], rows)}")
    if not parts:
        raise ValueError(f"not measured; run python -m evals.sweep --sweeps {name}")
    return "\n\n".join(parts)


def goals() -> str:
    """docs: the goals for the default on the shipped model and what it reached, by group of tasks."""
    found = compared()
    prompt_len = found[0]["settings"]["prompt_len"]
    lines = by_group(found)
    heads = ["tasks", "full", *(f"{part} (wanted: full - {gap:.0f})" for part, _, gap in WANTED),
             f"1/{WANTED_EXACT[0]} (wanted: {WANTED_EXACT[1]} of full)", "above every other arm"]  # fmt: skip
    rows = []
    for group in WANTED_GROUPS:
        if not all(group in lines.get(row, {}) for row in [("full", 0), ("snapstream", prompt_len // 4)]):
            continue
        full = mean(lines["full", 0][group])[0]

        def reached(divisor: int, least: float, group: str = group) -> str:
            cells_of_row = lines.get(("snapstream", prompt_len // divisor), {}).get(group)
            if cells_of_row is None:
                return ""
            value = mean(cells_of_row)[0]
            return f"{value:.1f}, {'reached' if value >= least - 1e-9 else 'missed'}"

        exact = reached(WANTED_EXACT[0], WANTED_EXACT[1] * full) if group == "exact retrieval" else ""
        rows.append([group, f"{full:.1f}", *(reached(n, full - gap) for _, n, gap in WANTED), exact,
                     _above(lines, group, prompt_len)])  # fmt: skip
    return table(heads, rows)


def _above(lines: dict[tuple[str, int], dict[str, list[Result]]], group: str, prompt_len: int) -> str:
    """Does an arm within the papers do better at equal slots? Hops and per-head budgets are ours and not compared."""
    better = []
    for (arm, slots), line in lines.items():
        own = lines.get(("snapstream", slots), {}).get(group)
        if arm in ("full", "snapstream", "hops", "heads") or group not in line or own is None:
            continue
        if (gap := mean(line[group])[0] - mean(own)[0]) > 1e-9:
            better.append(f"{ARM_NAMES[arm]} +{gap:.1f} at 1/{prompt_len // slots}")
    return "no: " + ", ".join(better) if better else "yes, or equal"


def chains() -> str:
    """docs: what is kept of each link of a chain, without hops and with them."""
    stored = list(store.read(evals_cells.RESULTS / "chains.jsonl").values())
    if not stored:
        raise ValueError("not measured; run python -m evals.chains")
    record = stored[-1]
    settings, by_hops = record["settings"], record["result"]["hops"]
    rows, kept = [], []
    for hops, found in by_hops.items():
        rows.append([hops, *(f"{value:.1f}" for value in found["accuracy_by_links"].values())])
        for link, layers in found["kept_by_link"].items():
            kept.append([hops, str(int(link) + 1), *(" / ".join(f"{v:.0f}" for v in heads) for heads in layers)])
    counts = by_hops["0"]["prompts_by_links"]
    heads = ["hops", *(f"{n} link{'s' if n != '1' else ''} ({count} prompts)" for n, count in counts.items())]
    layers = [f"layer {i}" for i in range(len(kept[0]) - 2)]
    return (
        f"Accuracy in points by the length of the chain, {settings['slots']} of {settings['prompt_len']:,} slots:\n\n"
        f"{table(heads, rows)}\n\nTokens of each link that the row kept, in percent, by layer and kv head:\n\n"
        f"{table(['hops', 'link', *layers], kept)}\n\n"
        f"<sub>{record['device']}; torch {record['torch']}; commit {record['commit']}; `{record['command']}`</sub>"
    )


def _point(settings: Result) -> str:
    return json.dumps([settings[key] for key in ("task", "budget", "snapkv")], sort_keys=True)
