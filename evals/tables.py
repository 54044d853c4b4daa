"""Markdown of stored cells, for README.md and docs; ``python -m figures`` puts it there.

Numbers come from the cells of one model: of the weights that ship, else of those that were measured last. A cell that
is missing leaves its place empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals import cells as stored
from evals import store
from evals.arms import make_arm
from evals.tasks import TASKS
from figures.markdown import table
from snapstream.assets import TINY_MODEL

# How the arms are called, in the order of the tables.
ARM_NAMES = {
    "full": "full attention", "heads": "SnapStream, per-head budgets (default)", "hops": "SnapStream, 4 hops",
    "snapstream": "SnapStream, equal heads",
    "snapkv": "SnapKV as published", "streaming": "StreamingLLM", "random": "random selection",
    "truncation": "truncation (middle cut)",
}  # fmt: skip
REACH = 80.0  # points; a model that fails more often with all tokens kept says little about what is forgotten

Result = dict[str, Any]


def folder(model: Path = TINY_MODEL) -> Path:
    """Where the results of a model lie; ValueError if there are none."""
    shipped = stored.RESULTS / f"{model.name}-{stored.weights_of(model)}"
    if shipped.exists():
        return shipped
    dates = {path: max(record["date"] for record in in_folder(path))
             for path in stored.RESULTS.glob(f"{model.name}-*") if in_folder(path)}  # fmt: skip
    if not dates:
        raise ValueError("not measured; run python -m evals.run")
    return max(dates, key=lambda path: dates[path])


def in_folder(path: Path) -> list[Result]:
    return [record for file in sorted(path.glob("*.jsonl")) for record in store.read(file).values()]


def records(model: Path = TINY_MODEL) -> list[Result]:
    """Every stored cell of a model, but those of narrower weights."""
    return [record for record in in_folder(folder(model)) if "weight_width" not in record["settings"]]


def narrow_records(model: Path = TINY_MODEL) -> list[Result]:
    """Every stored cell of a model over weights narrower than its own (``rounded.py``)."""
    return [record for record in in_folder(folder(model)) if "weight_width" in record["settings"]]


def cells(model: Path = TINY_MODEL) -> list[Result]:
    """Stored cells of a model; of the same measurement with different numbers of prompts, the one with the most."""
    best: dict[str, Result] = {}
    for cell in records(model):
        key = store.key_of(cell["settings"] | {"num_prompts": 0})
        if key not in best or cell["settings"]["num_prompts"] > best[key]["settings"]["num_prompts"]:
            best[key] = cell
    return list(best.values())


def is_current(settings: dict[str, Any]) -> bool:
    """Whether a stored cell of this engine is what its arm means today: defaults move, stored cells stay."""
    longest = settings["max_tokens"]
    try:
        arm = make_arm(settings["arm"], settings["slots"], settings["prompt_len"] + longest, longest)
    except ValueError:
        return False
    return (settings["budget"], settings["snapkv"]) == (asdict(arm.budget), arm.selection)


def arm_cells(kv_dtype: str = "auto", model: Path = TINY_MODEL) -> list[Result]:
    """Cells of ``evals.run`` with rows stored as ``kv_dtype``, of arms as they are defined today.

    The largest budgets first, arms and tasks in the order of the tables.
    """
    arms, tasks = list(ARM_NAMES), list(TASKS)

    def order(cell: Result) -> tuple[bool, int, int, int]:
        s = cell["settings"]
        return s["arm"] != "full", -s["slots"], arms.index(s["arm"]), tasks.index(s["task"])

    found = [
        c for c in cells(model)
        if c["settings"]["source"] == "snapstream" and c["settings"].get("kv_dtype", "auto") == kv_dtype
        and c["settings"]["arm"] in arms and is_current(c["settings"])
    ]  # fmt: skip
    if not found:
        options = "" if kv_dtype == "auto" else f" --kv-dtype {kv_dtype}"
        raise ValueError(f"not measured; run python -m evals.run{options}")
    longest = max(c["settings"]["prompt_len"] for c in found)
    return sorted((c for c in found if c["settings"]["prompt_len"] == longest), key=order)


def compared(model: Path = TINY_MODEL) -> list[Result]:
    """``arm_cells`` of the tasks in which full attention was not the only arm."""
    found = arm_cells(model=model)
    tasks = {cell["settings"]["task"] for cell in found if cell["settings"]["arm"] != "full"}
    return [cell for cell in found if cell["settings"]["task"] in tasks]


def mean(results: Sequence[Result]) -> tuple[float, float]:
    """Mean accuracy of several cells and its standard error."""
    count = len(results)
    error = math.sqrt(sum(r["result"]["standard_error"] ** 2 for r in results)) / count
    return sum(r["result"]["accuracy"] for r in results) / count, error


def by_row(found: Sequence[Result], key: Callable[[Result], str]) -> dict[tuple[str, int], dict[str, list[Result]]]:
    """Cells by (arm, slots; 0 for full attention), then by ``key``."""
    lines: dict[tuple[str, int], dict[str, list[Result]]] = {}
    for cell in found:
        s = cell["settings"]
        row = s["arm"], 0 if s["arm"] == "full" else s["slots"]
        lines.setdefault(row, {}).setdefault(key(cell), []).append(cell)
    return lines


def by_group(found: Sequence[Result]) -> dict[tuple[str, int], dict[str, list[Result]]]:
    """Cells by row and group; a group whose tasks were not all measured in a row is left out of it."""
    rows = by_row(found, group_of)
    whole = {group: max(len(line.get(group, ())) for line in rows.values()) for group in map(group_of, found)}
    return {row: {g: own for g, own in line.items() if len(own) == whole[g]} for row, line in rows.items()}


def group_of(cell: Result) -> str:
    return TASKS[cell["settings"]["task"]].group


def part_of(slots: int, prompt_len: int) -> str:
    """Slots as a part of the prompt."""
    return "all" if not slots else f"1/{prompt_len // slots}"


def note_of(found: Sequence[Result]) -> str:
    settings = found[0]["settings"]
    widest = max(cell["result"]["standard_error"] for cell in found)
    counts = sorted({cell["settings"]["num_prompts"] for cell in found})
    return (
        f"Accuracy in points, {' to '.join(map(str, counts))} prompts of {settings['prompt_len']:,} tokens per cell, "
        f"held-out keys and values, greedy; standard errors of a cell are at most {widest:.1f}."
    )


def bytes_of(line: dict[str, list[Result]]) -> str:
    smallest = min(cell["result"]["row_bytes"] for results in line.values() for cell in results)
    return f"{smallest / 2**20:.2f} MiB"


# The lines of README.md: whose engine, arm, part of the prompt's tokens that the slots are (0: all), rows, name.
HEADLINE = (
    ("snapstream", "full", 0, "auto", "full attention"),
    ("snapstream", "heads", 4, "auto", "SnapStream, defaults"),
    ("snapstream", "heads", 4, "int4", "SnapStream, int4 rows"),
    ("snapstream", "snapstream", 4, "auto", "SnapStream, equal heads"),
    ("snapstream", "snapkv", 4, "auto", "SnapKV as published"),
    ("kvpress", "chunkkv", 4, "auto", "kvpress: ChunkKV over SnapKV"),
    ("kvpress", "compactor", 4, "auto", "kvpress: Compactor"),
    ("snapstream", "streaming", 4, "auto", "StreamingLLM"),
    ("snapstream", "heads", 8, "auto", "SnapStream, defaults"),
    ("snapstream", "heads", 8, "int4", "SnapStream, int4 rows"),
    ("snapstream", "snapkv", 8, "auto", "SnapKV as published"),
    ("snapstream", "heads", 16, "auto", "SnapStream, defaults"),
)


def headline_cells() -> list[list[Result]]:
    """The cells of every line of README.md that has any, in its order: of a task those with the most prompts."""
    longest = max(cell["settings"]["prompt_len"] for cell in compared())
    lines = []
    for source, arm, part, kv_dtype, _ in HEADLINE:
        own: dict[str, Result] = {}
        for cell in cells():
            s = cell["settings"]
            of_line = s["source"], s["arm"], s["prompt_len"], s.get("kv_dtype", "auto")
            is_it = of_line == (source, arm, longest, kv_dtype) and (not part or s["slots"] == longest // part)
            if is_it and (source != "snapstream" or is_current(s)):
                most = own.get(s["task"], cell)["settings"]["num_prompts"]
                own[s["task"]] = cell if s["num_prompts"] >= most else own[s["task"]]
        lines.append(list(own.values()))
    return lines


def headline() -> str:
    """README.md: arms by groups of tasks. A group is the mean of its tasks, and empty unless all were measured."""
    tasks: dict[str, set[str]] = {}
    for cell in compared():
        tasks.setdefault(group_of(cell), set()).add(cell["settings"]["task"])
    groups = [group for group in dict.fromkeys(task.group for task in TASKS.values()) if group in tasks]
    rows, shown = [], headline_cells()
    for (_, _, part, _, title), line in zip(HEADLINE, shown, strict=True):
        values = []
        for group in groups:
            own = [cell for cell in line if cell["settings"]["task"] in tasks[group]]
            values.append(f"{mean(own)[0]:.1f}" if len(own) == len(tasks[group]) else "")
        if any(values):
            rows.append([title, f"1/{part}" if part else "all", bytes_of({"": line}), *values])
    note = note_of([cell for line in shown for cell in line])
    return f"{note}\n\n{table(['cache', 'slots per prompt token', 'bytes per row', *groups], rows)}"


def accuracy(model: Path = TINY_MODEL) -> str:
    """docs: arms by groups of tasks, a group being the mean of its tasks."""
    found = compared(model)
    prompt_len = found[0]["settings"]["prompt_len"]
    measured = {group_of(cell) for cell in found}
    groups = [group for group in dict.fromkeys(task.group for task in TASKS.values()) if group in measured]
    rows = []
    for (arm, slots), line in by_group(found).items():
        values = [f"{mean(line[group])[0]:.1f}" if group in line else "" for group in groups]
        rows.append([ARM_NAMES[arm], part_of(slots, prompt_len), bytes_of(line), *values])
    heads = ["cache", "slots per prompt token", "bytes per row", *groups]
    return f"{note_of(found)}\n\n{table(heads, rows)}"


def tasks_table(model: Path = TINY_MODEL) -> str:
    """docs: one table per group, every task with its standard error and the score without the first token."""
    found = compared(model)
    parts = [note_of(found) + " In brackets the accuracy without the first answer token."]
    for group in dict.fromkeys(task.group for task in TASKS.values()):
        own = [cell for cell in found if group_of(cell) == group]
        names = list(dict.fromkeys(cell["settings"]["task"] for cell in own))
        rows = []
        for (arm, slots), line in by_row(own, lambda cell: cell["settings"]["task"]).items():
            values = [with_error(line[name][0]) if name in line else "" for name in names]
            rows.append([ARM_NAMES[arm], part_of(slots, own[0]["settings"]["prompt_len"]), *values])
        if rows:
            parts.append(f"{group.capitalize()}:\n\n{table(['cache', 'slots', *names], rows)}")
    return "\n\n".join([*parts, *_out_of_reach(model)])


def _out_of_reach(model: Path) -> list[str]:
    """A line that names the tasks in which full attention stays below ``REACH``; nothing if there are none."""
    found = [cell for cell in arm_cells(model=model) if cell["settings"]["arm"] == "full"]
    full = {cell["settings"]["task"]: cell["result"]["accuracy"] for cell in found}
    named = [f"{task} {full[task]:.1f}" for task in TASKS if full.get(task, REACH) < REACH]
    text = f"Out of this model's reach, full attention being below {REACH:.0f} points: {', '.join(named)}."
    return [text] if named else []


def with_error(cell: Result) -> str:
    """Accuracy and standard error; in brackets the accuracy without the first token, where it differs."""
    result = cell["result"]
    later = result["accuracy_after_first_token"]
    text = f"{result['accuracy']:.1f} ± {result['standard_error']:.1f}"
    return text if later is None or abs(later - result["accuracy"]) < 0.05 else f"{text} ({later:.1f})"


def by_position(model: Path = TINY_MODEL) -> str:
    """docs: long generation, accuracy by place in the answer, in four parts."""
    found = [cell for cell in arm_cells(model=model) if TASKS[cell["settings"]["task"]].group == "long generation"]
    if not found:
        raise ValueError("not measured; run python -m evals.run --families recite")
    rows = []
    for cell in found:
        s, values = cell["settings"], cell["result"]["accuracy_by_reference"]
        quarter = len(values) // 4
        means = [f"{sum(values[i : i + quarter]) / quarter:.1f}" for i in range(0, 4 * quarter, quarter)]
        part = part_of(0 if s["arm"] == "full" else s["slots"], s["prompt_len"])
        ring = str(s["budget"]["num_recent"]) if s["arm"] != "full" else ""
        rows.append([ARM_NAMES[s["arm"]], part, ring, *means])
    return table(["cache", "slots", "ring", "first quarter", "second", "third", "last"], rows)


def rows_table(kinds: Mapping[str, str], model: Path = TINY_MODEL) -> str:
    """docs: rows in narrow dtypes, by the names that the table gives them, beside rows in fp32; the same prompts."""
    found = {name: arm_cells(kv_dtype, model) for kv_dtype, name in kinds.items()}
    narrow = [cell for cells in found.values() for cell in cells]
    names = list(dict.fromkeys(cell["settings"]["task"] for cell in narrow))

    def key(cell: Result) -> tuple[str, ...]:
        return tuple(str(cell["settings"][k]) for k in ("task", "arm", "slots", "prompt_len", "num_prompts", "seed"))

    wanted = set(map(key, narrow))
    found = {"fp32": [cell for cell in records(model) if key(cell) in wanted and _is_plain(cell)]} | found
    lines = {kind: by_row(own, lambda cell: cell["settings"]["task"]) for kind, own in found.items()}
    rows = []
    seen = {row for kind in kinds.values() for row in lines[kind]}
    for row in sorted(seen, key=lambda row: (row[1] != 0, -row[1], row[0])):
        for kind, line in ((kind, own[row]) for kind, own in lines.items() if row in own):
            values = [with_error(line[name][0]).split(" (")[0] if name in line else "" for name in names]
            part = part_of(row[1], narrow[0]["settings"]["prompt_len"])
            rows.append([ARM_NAMES[row[0]], part, kind, bytes_of(line), *values])
    return f"{note_of(narrow)}\n\n{table(['cache', 'slots', 'rows', 'bytes per row', *names], rows)}"


def _is_plain(cell: Result) -> bool:
    s = cell["settings"]
    return s["source"] == "snapstream" and "kv_dtype" not in s and is_current(s)


def devices(found: Sequence[Result]) -> str:
    """Where cells were measured, each machine once."""
    return "; ".join(sorted({cell["device"] for cell in found}))


def source(found: Sequence[Result]) -> str:
    """One line on where the numbers come from; cells were run at many commits, so each names its own."""
    versions = ", ".join(sorted({cell["torch"] for cell in found}))
    modules = ", ".join(f"`{module}`" for module in sorted({" ".join(cell["command"].split()[:3]) for cell in found}))
    return f"{devices(found)}; torch {versions}; {modules}; every record names its device, commit and whole command"


DEFAULT = "heads"
WANTED = (("1/4", 4, 1.0), ("1/8", 8, 3.0))  # the default within so many points of full attention
WANTED_EXACT = (16, 0.9)  # exact retrieval: share of full attention
WANTED_GROUPS = ("retrieval", "exact retrieval", "multi-hop", "question answering")


def goals() -> str:
    """docs: the goals for the default on the shipped model and what it reached, by group of tasks."""
    found = compared()
    prompt_len = found[0]["settings"]["prompt_len"]
    lines = by_group(found)
    heads = ["tasks", "full", *(f"{part} (wanted: full - {gap:.0f})" for part, _, gap in WANTED),
             f"1/{WANTED_EXACT[0]} (wanted: {WANTED_EXACT[1]} of full)", "above every other arm"]  # fmt: skip
    rows = []
    for group in WANTED_GROUPS:
        if not all(group in lines.get(row, {}) for row in [("full", 0), (DEFAULT, prompt_len // 4)]):
            continue
        full = mean(lines["full", 0][group])[0]

        def reached(divisor: int, least: float, group: str = group) -> str:
            cells_of_row = lines.get((DEFAULT, prompt_len // divisor), {}).get(group)
            if cells_of_row is None:
                return ""
            value = mean(cells_of_row)[0]
            return f"{value:.1f}, {'reached' if value >= least - 1e-9 else 'missed'}"

        exact = reached(WANTED_EXACT[0], WANTED_EXACT[1] * full) if group == "exact retrieval" else ""
        rows.append([group, f"{full:.1f}", *(reached(n, full - gap) for _, n, gap in WANTED), exact,
                     _above(lines, group, prompt_len)])  # fmt: skip
    return table(heads, rows)


def _above(lines: dict[tuple[str, int], dict[str, list[Result]]], group: str, prompt_len: int) -> str:
    """Does an arm do better than the default at equal slots?"""
    better = []
    for (arm, slots), line in lines.items():
        own = lines.get((DEFAULT, slots), {}).get(group)
        if arm in ("full", DEFAULT) or group not in line or own is None:
            continue
        if (gap := mean(line[group])[0] - mean(own)[0]) > 1e-9:
            better.append(f"{ARM_NAMES[arm]} +{gap:.1f} at 1/{prompt_len // slots}")
    return "no: " + ", ".join(better) if better else "yes, or equal"
