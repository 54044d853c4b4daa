"""The table of answers that are longer than the ring, as Markdown, from stored cells: what rescoring changes.

    python -m evals.run --families told asked_again --prompts 40 --budgets 1/8 1/4 --arms full streaming snapstream \\
        window rescoring rescoring_fresh rescoring_window
    python -m evals.run --model snapstream/assets/tiny_draft --families recite --prompts 100 ... (the same)
"""

from __future__ import annotations

from evals import tables
from figures.markdown import table
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

# How the arms are called, in the order of the table.
ARM_NAMES = {
    "full": "full attention", "snapstream": "SnapStream", "window": "end of the prompt kept",
    "streaming": "StreamingLLM", "rescoring": "rescoring", "rescoring_fresh": "rescoring without memory",
    "rescoring_window": "rescoring, end of the prompt kept",
}  # fmt: skip
# Who answers what: only the second tiny model can recite.
COLUMNS = ((TINY_MODEL, "told"), (TINY_MODEL, "asked_again"), (TINY_DRAFT_MODEL, "recite"))


def rescoring_table() -> str:
    """One line per arm and size; ValueError where rescoring was not measured."""
    lines: dict[tuple[int, str], dict[str, str]] = {}
    heads, sources = [], []
    for model, task in COLUMNS:
        found = [
            c for c in tables.records(model) if c["settings"]["task"] == task and c["settings"]["arm"] in ARM_NAMES
        ]
        own = [c for c in found if c["settings"]["arm"] == "rescoring"]
        if not own:
            raise ValueError(f"not measured; run python -m evals.run --families {task} --arms rescoring")
        count = max(cell["settings"]["num_prompts"] for cell in own)
        found = [c for c in found if c["settings"]["num_prompts"] == count]  # every arm on the same prompts
        own = [c for c in own if c["settings"]["num_prompts"] == count]
        sizes = {cell["settings"]["slots"] for cell in own}
        for cell in found:
            settings, result = cell["settings"], cell["result"]
            slots = 0 if settings["arm"] == "full" else settings["slots"]
            if slots in sizes or not slots:
                text = f"{result['accuracy']:.1f} ± {result['standard_error']:.1f}"
                lines.setdefault((slots, settings["arm"]), {})[task] = text
        heads.append(f"{task} ({count} prompts, {model.name})")
        sources.append(f"`{own[0]['command']}`")
    names = list(ARM_NAMES)
    order = sorted(lines, key=lambda line: (line[0] > 0, line[0], names.index(line[1])))
    rows = [
        [ARM_NAMES[arm], str(slots or "all"), *(lines[slots, arm].get(task, "") for _, task in COLUMNS)]
        for slots, arm in order
    ]
    where = f"{own[0]['device']}; torch {own[0]['torch']}; commit {own[0]['commit']}; {'; '.join(sources)}"
    shown = table(["cache", "slots", *heads], rows)
    return f"Accuracy in points, prompts of 2,048 tokens, greedy:\n\n{shown}\n\n<sub>{where}</sub>"
