"""Tables that compare models, engines, rules and weights, as Markdown, from stored cells. ``tables.py`` has what they
share.
"""

from __future__ import annotations

from pathlib import Path

from evals import store, tables
from evals.rounded import SETTINGS, WIDTHS
from evals.tasks import TASKS
from figures.markdown import table
from snapstream.assets import TINY_MODEL

# A model with states of constant size compared with one that has none: what cut rows keep of their answers.
HYBRID_MODEL = Path("build/tiny_hybrid")  # trained by recipes/tiny_hybrid; it does not ship, its results do
HYBRIDS = {"LFM2, 2 of 6 layers cut": HYBRID_MODEL, "Llama, 4 of 4": TINY_MODEL}


def hybrid_cells(model: Path) -> list[tables.Result]:
    """Stored cells of a model in the tasks and arms that the hybrid was measured in, of prompts as long."""
    own = tables.compared(HYBRID_MODEL)
    tasks, arms = ({cell["settings"][key] for cell in own} for key in ("task", "arm"))
    return [
        cell for cell in (own if model == HYBRID_MODEL else tables.compared(model))
        if cell["settings"]["task"] in tasks and cell["settings"]["arm"] in arms
        and cell["settings"]["prompt_len"] == own[0]["settings"]["prompt_len"]
    ]  # fmt: skip


def hybrid_table() -> str:
    """docs: accuracy by slots, cache and model; ``kept`` is the mean as a part of the model's with all tokens kept."""
    found = {name: hybrid_cells(model) for name, model in HYBRIDS.items()}
    lines = {name: tables.by_row(own, lambda cell: cell["settings"]["task"]) for name, own in found.items()}
    (hybrid, *_) = lines.values()
    names = list(hybrid["full", 0])
    prompt_len = next(iter(found.values()))[0]["settings"]["prompt_len"]
    rows = []
    for arm, slots in hybrid:
        for model, by_row in lines.items():
            own, full = by_row.get((arm, slots), {}), by_row["full", 0]
            values = [tables.with_error(own[name][0]).split(" (")[0] if name in own else "" for name in names]
            kept = ""
            if set(names) <= set(own):
                mean, whole = (tables.mean([line[name][0] for name in names])[0] for line in (own, full))
                kept = f"{100 * mean / whole:.1f} %"
            rows.append([tables.part_of(slots, prompt_len), tables.ARM_NAMES[arm], model, *values, kept])
    note = tables.note_of([cell for own in found.values() for cell in own])
    return f"{note}\n\n{table(['slots', 'cache', 'model', *names, 'kept'], rows)}"


# How the heads of a layer agree on the tokens of a row of latents: the rules side by side, task by task.
RULES = {
    "full": "full attention", "snapstream": "sum of the votes", "largest_head": "largest vote",
    "by_head": "every head its own, keys and values per head",
}  # fmt: skip


def latent_cells(model: Path) -> list[tables.Result]:
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
    found = latent_cells(model)
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


# This engine and kvpress at the same slots.
ENGINES = {"snapstream": "this engine", "kvpress": "kvpress"}
# Source, arm, name: what resembles each other stands together.
PEER_ROWS = (
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
        for source, arm, title in PEER_ROWS:
            line = lines.get((source, arm, slots))
            if line:
                values = [tables.with_error(line[name]).split(" (")[0] if name in line else "" for name in names]
                rows.append([ENGINES[source], title, tables.part_of(slots, longest), *values])
                shown += line.values()
    versions = ", ".join(sorted({cell["result"]["peer_version"] for cell in theirs}))
    note = f"{tables.note_of(shown)} Full attention of both on the same prompts. {versions}."
    return f"{note}\n\n{table(['engine', 'cache', 'slots', *names], rows)}"


# Weights of int8 and int4 compared with those that a model ships with: the same prompts, arm by arm.


def width_cells(model: Path) -> list[tables.Result]:
    """Cells of narrow weights, and those of the model's own width that saw the same prompts under the same arms."""
    narrow = tables.narrow_records(model)
    wanted = set(map(_prompts, narrow))
    return [cell for cell in tables.records(model) if _prompts(cell) in wanted] + narrow


def _prompts(cell: tables.Result) -> str:
    s = cell["settings"]
    return store.key_of({k: v for k, v in s.items() if k not in SETTINGS})


def widths_table(model: Path) -> str:
    """docs: accuracy by width and arm, task by task; what differs from the model's own width in brackets."""
    found = width_cells(model)
    if not found:
        raise ValueError("not measured; run python -m evals.run --width int8")
    most = max(cell["settings"]["num_prompts"] for cell in found)
    found = [cell for cell in found if cell["settings"]["num_prompts"] == most]
    names = list(dict.fromkeys(cell["settings"]["task"] for cell in found))
    own = {_prompts(cell): cell["result"]["accuracy"] for cell in found if "weight_width" not in cell["settings"]}
    rows = []
    for width, own_width in WIDTHS.items():
        lines = tables.by_row([c for c in found if width_of(c) == width], lambda cell: cell["settings"]["task"])
        for (arm, slots), line in lines.items():
            values = []
            for name in names:
                cell = line[name][0] if name in line else None
                values.append("" if cell is None else _beside(cell, own.get(_prompts(cell))))
            part = tables.part_of(slots, found[0]["settings"]["prompt_len"])
            inputs = {"int8": "int8", "bfloat16": "bf16"}.get(own_width.settings.get("activations", ""), "fp32")
            read = {"int8": "int8", "int16": "int16", "bfloat16": "bf16", None: "fp32"}[own_width.prefill_inputs]
            rows.append([own_width.words, read, inputs, tables.ARM_NAMES[arm], part, *values])
    heads = ["weights", "inputs in prefill", "in decode", "cache", "slots", *names]
    return f"{tables.note_of(found)}\n\n{table(heads, rows)}"


def _beside(cell: tables.Result, own: float | None) -> str:
    accuracy = cell["result"]["accuracy"]
    if own is None or "weight_width" not in cell["settings"]:
        return f"{accuracy:.1f}"
    return f"{accuracy:.1f} ({accuracy - own:+.1f})"


def width_of(cell: tables.Result) -> str:
    """The name of a stored cell's width."""
    own = {name: cell["settings"][name] for name in SETTINGS if name in cell["settings"]}
    return next(name for name, width in WIDTHS.items() if width.settings == own)
