"""Fills README.md and docs from stored results, so that nobody types a number by hand.

A section between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by a table of the newest result under
``benchmarks/results``, a table of the cells under ``evals/results``, or a plot, which lies under docs/figures.
docs/cli.md is generated whole.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import published_plan, published_scale
from benchmarks import tables as benchmarks
from evals import plots
from evals import sections as evals
from figures import commands, kinds, overview

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (
    README,
    *(DOCS / name for name in ("performance.md", "compression.md", "models.md")),
    *(
        DOCS / "research" / name
        for name in ("results.md", "accuracy.md", "prompt-compression.md", "latents.md", "scale.md")
    ),
)
PLOTS = DOCS / "figures"
PUBLISHED = published_plan.TABLES | published_scale.TABLES | {kinds.NAME: kinds.section}
SECTION = re.compile(r"(<!-- figures: ([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {overview.NAME, *evals.NAMES, *benchmarks.TABLES, *PUBLISHED}
DRAWN = {
    overview.NAME: overview.svg,
    overview.TURNS_NAME: overview.turns_svg,
    **{name: plot.svg for name, plot in plots.PLOTS.items()},
}


def section(name: str, document: Path) -> str:
    """Markdown of one result, with its source underneath; a line that says so if it was not measured."""
    if name in PUBLISHED:
        return PUBLISHED[name]()
    try:
        if name == overview.NAME:
            return overview.section(document, PLOTS)
        return evals.section(name, document, PLOTS) if name in evals.NAMES else benchmarks.section(name, document)
    except ValueError as missing:
        return f"({missing})\n"


def render(text: str, document: Path) -> str:
    """A document with every section filled in anew."""
    return SECTION.sub(lambda match: match[1] + section(match[2], document) + match[4], text)


def rendered() -> dict[Path, str]:
    """Every file that ``python -m figures`` writes, as it should be."""
    out = {path: render(path.read_text(), path) for path in DOCUMENTS}
    shown = {name for name in DRAWN if any(f"/{name}.svg)" in text for text in out.values())}
    out[commands.DOCUMENT] = commands.render()
    return out | {PLOTS / f"{name}.svg": DRAWN[name]() for name in sorted(shown)}
