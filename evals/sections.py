"""What the sections of the documents that begin with ``<!-- figures: NAME -->`` show of stored cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evals import comparisons, plots, sweep, tables
from evals.chains import chains_table
from evals.comparisons import HYBRID_MODEL
from evals.divergence import divergence_table
from evals.prompt_compression import compression_table, settings_table
from evals.prose import perplexity_table, retrieval_table
from evals.reconstruction import reconstruction_table
from evals.second_question import second_question_table
from evals.uneven import uneven_table
from figures.markdown import link
from snapstream.assets import TINY_DRAFT_MODEL, TINY_LATENT_MODEL, TINY_MODEL

NARROW_ROWS = {"bfloat16": "bf16", "int8": "int8", "int4": "int4"}  # of a CPU, with a name for tables
DRAFT = "draft_"  # sections of the second model (Qwen3, another tokenizer): are results one model's accident?
LATENT = "latent_"  # of the third (DeepSeek-V3), whose rows hold latents
HYBRID = "hybrid_accuracy"  # of an LFM2 and the first model

TABLES: dict[str, Callable[[], str]] = {
    "accuracy": tables.accuracy,
    "accuracy_short": tables.headline,
    "accuracy_tasks": tables.tasks_table,
    "accuracy_by_position": lambda: tables.by_position(TINY_DRAFT_MODEL),  # the first model cannot recite
    "accuracy_peers": comparisons.peer_table,
    "accuracy_fp8": lambda: tables.rows_table({"fp8": "FP8"}),
    "accuracy_rows": lambda: tables.rows_table(NARROW_ROWS),
    f"{DRAFT}accuracy_rows": lambda: tables.rows_table(NARROW_ROWS, TINY_DRAFT_MODEL),
    "accuracy_goals": tables.goals,
    "accuracy_widths": lambda: comparisons.widths_table(TINY_MODEL),
    f"{DRAFT}accuracy_widths": lambda: comparisons.widths_table(TINY_DRAFT_MODEL),
    f"{DRAFT}accuracy_tasks": lambda: tables.tasks_table(TINY_DRAFT_MODEL),
    f"{LATENT}accuracy": lambda: tables.accuracy(model=TINY_LATENT_MODEL),
    f"{LATENT}accuracy_fp8": lambda: tables.rows_table({"fp8": "FP8"}, TINY_LATENT_MODEL),
    f"{LATENT}rules": lambda: comparisons.rules_table(TINY_LATENT_MODEL),
    HYBRID: comparisons.hybrid_table,
    **{f"sweep_{name}": (lambda name=name: sweep.sweep_table(name)) for name in sweep.SWEEPS},
    **{f"{DRAFT}sweep_{name}": (lambda name=name: sweep.sweep_table(name, TINY_DRAFT_MODEL))
       for name in sweep.SWEEPS},
}  # fmt: skip

# Tables that name their sources themselves.
WITH_SOURCE: dict[str, Callable[[], str]] = {
    "prompt_compression": compression_table, "prompt_compression_settings": settings_table,
    "chains": chains_table, "second_question": second_question_table,
    "uneven": lambda: uneven_table(TINY_MODEL), f"{DRAFT}uneven": lambda: uneven_table(TINY_DRAFT_MODEL),
    "reconstruction": lambda: reconstruction_table(TINY_MODEL),
    f"{DRAFT}reconstruction": lambda: reconstruction_table(TINY_DRAFT_MODEL),
    "divergence": lambda: divergence_table(TINY_MODEL),
    f"{DRAFT}divergence": lambda: divergence_table(TINY_DRAFT_MODEL),
    "prose_retrieval": retrieval_table, "prose_perplexity": perplexity_table,
}  # fmt: skip
NAMES = {*TABLES, *WITH_SOURCE, *plots.PLOTS}


def model_of(section: str) -> Path:
    """The model whose cells a section shows."""
    if section.startswith(LATENT):
        return TINY_LATENT_MODEL
    if section == HYBRID:
        return HYBRID_MODEL
    return TINY_DRAFT_MODEL if section.startswith(DRAFT) or section == "accuracy_by_position" else TINY_MODEL


def cells_of(section: str) -> list[tables.Result]:
    """The stored cells that a table is made of."""
    model = model_of(section)
    if "sweep_" in section:
        return [cell for cell in tables.cells(model) if cell["settings"]["arm"] == sweep.ARM]
    if section.endswith("accuracy_widths"):
        return comparisons.width_cells(model)
    if section == f"{LATENT}rules":
        return comparisons.latent_cells(model)
    if section == "accuracy_short":
        return [cell for line in tables.headline_cells() for cell in line]
    if section == "accuracy_peers":
        return [*tables.arm_cells(), *comparisons.peer_cells()]
    if section.endswith("accuracy_rows"):
        return [cell for kind in ("auto", *NARROW_ROWS) for cell in tables.arm_cells(kind, model)]
    return tables.arm_cells("fp8" if section.endswith("accuracy_fp8") else "auto", model)


def section(name: str, document: Path, plot_folder: Path) -> str:
    """Markdown of a table with its source, or of a plot in ``plot_folder``; ValueError if nothing was measured."""
    if name in plots.PLOTS:
        plots.PLOTS[name].panels()
        return f"![{plots.PLOTS[name].text}]({link(plot_folder / f'{name}.svg', document)})\n"
    if name in WITH_SOURCE:
        return WITH_SOURCE[name]() + "\n"
    text, folder = TABLES[name](), tables.folder(model_of(name))
    where = f"[evals/results/{folder.name}]({link(folder, document)})"
    return f"{text}\n\n<sub>{tables.source(cells_of(name))}; {where}</sub>\n"
