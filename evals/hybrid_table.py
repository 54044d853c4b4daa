"""What cut rows keep of the answers of a model with states of constant size, compared with one that has none."""

from __future__ import annotations

from pathlib import Path

from evals import tables
from figures.markdown import table
from snapstream.assets import TINY_MODEL

MODEL = Path("build/tiny_hybrid")  # trained by recipes/tiny_hybrid; it does not ship, its results do
MODELS = {"LFM2, 2 of 6 layers cut": MODEL, "Llama, 4 of 4": TINY_MODEL}


def cells(model: Path) -> list[tables.Result]:
    """Stored cells of a model in the tasks and arms that the hybrid was measured in, of prompts as long."""
    own = tables.compared(MODEL)
    tasks, arms = ({cell["settings"][key] for cell in own} for key in ("task", "arm"))
    return [
        cell for cell in (own if model == MODEL else tables.compared(model))
        if cell["settings"]["task"] in tasks and cell["settings"]["arm"] in arms
        and cell["settings"]["prompt_len"] == own[0]["settings"]["prompt_len"]
    ]  # fmt: skip


def hybrid_table() -> str:
    """docs: accuracy by slots, cache and model; ``kept`` is the mean as a part of the model's with all tokens kept."""
    found = {name: cells(model) for name, model in MODELS.items()}
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
