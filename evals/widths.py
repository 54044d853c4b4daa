"""Tables of weights of int8 and int4 beside those that a model ships with: the same prompts, arm by arm.

``python -m evals.run --width int4`` stores the cells; ``rounded.py`` has the engines.
"""

from __future__ import annotations

from pathlib import Path

from evals import store, tables
from evals.rounded import SETTINGS, WIDTHS
from figures.markdown import table


def cells(model: Path) -> list[tables.Result]:
    """Cells of narrow weights, and those of the model's own width that saw the same prompts under the same arms."""
    narrow = tables.narrow_records(model)
    wanted = set(map(_prompts, narrow))
    return [cell for cell in tables.records(model) if _prompts(cell) in wanted] + narrow


def _prompts(cell: tables.Result) -> str:
    s = cell["settings"]
    return store.key_of({k: v for k, v in s.items() if k not in SETTINGS})


def widths_table(model: Path) -> str:
    """docs: accuracy by width and arm, task by task; what differs from the model's own width in brackets."""
    found = cells(model)
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
                values.append("" if cell is None else _value(cell, own.get(_prompts(cell))))
            part = tables.part_of(slots, found[0]["settings"]["prompt_len"])
            inputs = {"int8": "int8", "bfloat16": "bf16"}.get(own_width.settings.get("activations", ""), "fp32")
            read = {"int8": "int8", "bfloat16": "bf16", None: "fp32"}[own_width.prefill_inputs]
            rows.append([own_width.words, read, inputs, tables.ARM_NAMES[arm], part, *values])
    heads = ["weights", "inputs in prefill", "in decode", "cache", "slots", *names]
    return f"{tables.note_of(found)}\n\n{table(heads, rows)}"


def _value(cell: tables.Result, own: float | None) -> str:
    accuracy = cell["result"]["accuracy"]
    if own is None or "weight_width" not in cell["settings"]:
        return f"{accuracy:.1f}"
    return f"{accuracy:.1f} ({accuracy - own:+.1f})"


def width_of(cell: tables.Result) -> str:
    """The name of a stored cell's width."""
    own = {name: cell["settings"][name] for name in SETTINGS if name in cell["settings"]}
    return next(name for name, width in WIDTHS.items() if width.settings == own)
