"""One setting at a time: what the defaults of ``KVBudget.of`` and ``SnapKV`` rest on.

    python -m evals.sweep                # the shipped model, 2,048 tokens, 1/8, 100 prompts per cell
    python -m evals.sweep --sweeps split window --budget 1/16 --jobs 2

Cells are stored and resumed as those of ``evals.run``. ``python -m figures`` puts them into docs/research/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evals.arms import Arm
from evals.cells import Cell, run_cells
from evals.selectors import Pooling, Variant
from evals.tables import Result, with_error
from evals.tables import cells as stored_cells
from evals.tasks import TASKS
from figures.markdown import table
from snapstream.assets import TINY_MODEL
from snapstream.config import DEFAULT_SINK, KVBudget

# What the models that ship can do with all tokens kept: elsewhere a sweep says nothing.
TASKS_OF = {
    "tiny": (
        "kv", "multi_uuid", "variable", "variable_dense", "paraphrase", "second_kept", "second_dense",
    ),
    "tiny_draft": (
        "kv", "multi_uuid", "variable", "variable_dense", "paraphrase", "multi_query", "multi_value", "recite",
        "second_kept", "second_dense",
    ),
}  # fmt: skip
# What the sweeps of the other settings vary around: the default when they were measured, nothing carried ahead.
CENTRED = Variant(pool_width=13, pool_half_life=0)
ARM = "sweep"  # what stored points are called, so that no table of arms takes one for the default
PROMPT_LEN = 2048
NUM_PROMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of a sweep."""

    label: str
    budget: KVBudget
    selector: Variant = field(default_factory=Variant)

    @property
    def is_default(self) -> bool:
        """True for what a plain number of slots gives."""
        return self.budget == KVBudget.of(self.budget.capacity) and self.selector == Variant()


def split_of(slots: int, num_recent: int, num_sink: int = DEFAULT_SINK, num_window: int = 0) -> KVBudget:
    """A budget of ``slots`` whose top-k is what the other regions leave."""
    rest = slots - num_sink - num_recent - num_window
    return KVBudget(num_sink=num_sink, num_topk=rest, num_window=num_window, num_recent=num_recent)


def _split(slots: int) -> list[Setting]:
    """K : R at fixed capacity."""
    parts = [Fraction(1, 16), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)]
    return [
        Setting(label=f"R = {part} C", budget=split_of(slots, int(slots * part)), selector=CENTRED) for part in parts
    ]


def _sinks(slots: int) -> list[Setting]:
    recent = KVBudget.of(slots).num_recent
    return [
        Setting(label=f"S = {n}", budget=split_of(slots, recent, num_sink=n), selector=CENTRED) for n in (0, 1, 4, 16)
    ]


def _window(slots: int) -> list[Setting]:
    """How many queries vote."""
    budget = KVBudget.of(slots)
    return [
        Setting(label=f"{n}", budget=budget, selector=replace(CENTRED, observation_len=n)) for n in (4, 8, 16, 32, 64)
    ]


def _pooling(slots: int) -> list[Setting]:
    """Centred pooling alone, as SnapKV has it; then how far a hit is carried ahead, and over which width."""
    points = [_pool(slots, 1, 0, label="none")]
    points += [_pool(slots, width, 0, kind) for kind, width in (("avg", 7), ("max", 7), ("max", 13), ("max", 29))]
    points += [_pool(slots, 7, half_life) for half_life in (2, 4, 8, 16, 32)]
    return [*points, _pool(slots, 1, 8), _pool(slots, 3, 8), _pool(slots, 13, 8), _pool(slots, 7, 8, "avg")]


def _pool(slots: int, width: int, half_life: int, kind: Pooling = "max", hops: int = 0, label: str = "") -> Setting:
    selector = Variant(pool_width=width, pooling=kind, pool_half_life=half_life, num_hops=hops)
    ahead = f", half-life {half_life}" if half_life else ""
    return Setting(label=label or f"{kind} {width}{ahead}", budget=KVBudget.of(slots), selector=selector)


def _merge(slots: int) -> list[Setting]:
    """What the softmax runs over, and how the query heads of a group merge."""
    budget = KVBudget.of(slots)
    return [
        Setting(
            label=f"{over}, {merge}", budget=budget, selector=replace(CENTRED, softmax_over=over, group_reduce=merge)
        )
        for over in ("candidates", "row")
        for merge in ("sum", "max")
    ]


def _keep(slots: int) -> list[Setting]:
    """How many of the last prompt tokens stay when the ring wraps: out of the ring, then out of the top-k too."""
    recent = KVBudget.of(slots).num_recent
    points = [KVBudget.of(slots, num_window=recent * quarters // 4) for quarters in range(4)]
    points += [split_of(slots, recent // 2, num_window=kept) for kept in (recent, 3 * recent // 2)]
    return [
        Setting(label=f"{b.num_window} kept, ring {b.num_recent}, top-k {b.num_topk}", budget=b, selector=CENTRED)
        for b in points
    ]


def _hops(slots: int) -> list[Setting]:
    """In how many rounds the tokens voted for vote in turn."""
    budget = KVBudget.of(slots)
    return [Setting(label=f"{n}", budget=budget, selector=replace(CENTRED, num_hops=n)) for n in (0, 1, 2, 4, 8, 16)]


def _hops_pooling(slots: int) -> list[Setting]:
    """Hops and pooling together: both reach for the rest of a long answer."""
    return [
        _pool(slots, 7, half_life, hops=hops, label=f"{hops} hops, half-life {half_life}")
        for hops in (0, 4, 8) for half_life in (0, 4, 8)
    ]  # fmt: skip


def _diverse(slots: int) -> list[Setting]:
    """The share of the slots that keys unlike the rest get, and hops beside it."""
    budget = KVBudget.of(slots)
    points = [Setting(label=f"{share:g}", budget=budget, selector=Variant(diverse_share=share))
              for share in (0.0, 0.25, 0.5, 0.75, 1.0)]  # fmt: skip
    return [*points, Setting(label="4 hops instead", budget=budget, selector=Variant(num_hops=4))]


# name: (heading, points at so many slots)
SWEEPS = {
    "split": ("The ring's share of the slots", _split),
    "sinks": ("Sinks", _sinks),
    "window": ("Queries that vote", _window),
    "pooling": ("Pooling of the scores", _pooling),
    "merge": ("Softmax over, and merge of a group's heads", _merge),
    "hops": ("Hops", _hops),
    "reach": ("Hops and pooling", _hops_pooling),
    "diverse": ("Share of the slots for keys unlike the rest", _diverse),
    "keep": ("Prompt tokens kept when the ring wraps", _keep),
}


def tasks_of(model: Path) -> tuple[str, ...]:
    """The tasks of a model's sweeps; for another model all of them."""
    return TASKS_OF.get(model.name, tuple(dict.fromkeys(task for tasks in TASKS_OF.values() for task in tasks)))


def points_of(name: str, slots: int) -> list[Setting]:
    """The points of a sweep; the default is one of them."""
    points = SWEEPS[name][1](slots)
    if not any(point.is_default for point in points):
        points.insert(0, Setting(label="default", budget=KVBudget.of(slots)))
    return points


def cells_of(
    name: str, model: Path, slots: int, num_prompts: int = NUM_PROMPTS, tasks: Sequence[str] = ()
) -> list[tuple[Setting, list[Cell]]]:
    """The points of a sweep, and for each its cells in the order of ``tasks`` (none given: those of the model)."""
    tasks = tasks or tasks_of(model)
    rows = []
    for point in points_of(name, slots):
        arm = Arm(name=ARM, slots=slots, budget=point.budget, selector=point.selector)
        cells = [Cell(model=model, task=t, arm=arm, prompt_len=PROMPT_LEN, num_prompts=num_prompts) for t in tasks]
        rows.append((point, cells))
    return rows


def table_of(name: str, rows: Sequence[tuple[Setting, list[Cell]]], tasks: Sequence[str]) -> Table:
    """One line per point: accuracy +- standard error per task, in points; the default is marked."""
    table = Table(title=f"{SWEEPS[name][0]}: accuracy in points, +- one standard error")
    for heading in ("setting", *tasks):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for point, cells in rows:
        results = [cell.read() for cell in cells]
        texts = [f"{r['result']['accuracy']:.1f} +-{r['result']['standard_error']:.1f}" if r else "" for r in results]
        table.add_row(point.label + (" (default)" if point.is_default else ""), *texts)
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument(
        "--families", nargs="+", choices=list(TASKS), metavar="TASK", help="default: what the model can do"
    )
    parser.add_argument("--budget", type=Fraction, default=Fraction(1, 8), help="slots as a part of the prompt")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="per cell")
    parser.add_argument("--jobs", type=int, default=1)
    return parser.parse_args(argv)


def sweep_table(name: str, model: Path = TINY_MODEL) -> str:
    """docs: one sweep, at every budget that was measured."""
    found = [cell for cell in stored_cells(model) if cell["settings"]["arm"] == ARM]
    parts = []
    for slots in sorted({cell["settings"]["slots"] for cell in found}, reverse=True):
        own = {_point(cell["settings"]): cell for cell in found if cell["settings"]["slots"] == slots}
        lines = []
        for point in points_of(name, slots):
            arm = Arm(name=ARM, slots=slots, budget=point.budget, selector=point.selector)
            settings = {"budget": asdict(arm.budget), "snapkv": arm.selection}
            line = {task: own.get(_point(settings | {"task": task})) for task in tasks_of(model)}
            lines.append((point, line))
        measured = [line for point, line in lines if not point.is_default and any(line.values())]
        names = [task for task in tasks_of(model) if sum(line[task] is not None for line in measured) > 1]
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
            head = f"{slots} slots, {count} prompts of {PROMPT_LEN:,} tokens per cell:"
            parts.append(f"{head}\n\n{table(['setting', *names], rows)}")
    if not parts:
        raise ValueError(f"not measured; run python -m evals.sweep --sweeps {name}")
    return "\n\n".join(parts)


def _point(settings: Result) -> str:
    return json.dumps([settings[key] for key in ("task", "budget", "snapkv")], sort_keys=True)


def main() -> None:
    args = parse_args()
    args.families = args.families or tasks_of(args.model)
    slots = int(PROMPT_LEN * args.budget)
    sweeps = {name: cells_of(name, args.model, slots, args.prompts, args.families) for name in args.sweeps}
    every = [cell for rows in sweeps.values() for _, cells in rows for cell in cells]
    run_cells(sorted(every, key=lambda cell: args.families.index(cell.task)), args.jobs)
    for name, rows in sweeps.items():
        Console(width=200).print(table_of(name, rows, args.families))


if __name__ == "__main__":
    main()
