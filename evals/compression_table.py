"""The tables of ``evals.prompt_compression``, as Markdown, from its stored cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evals import store, tables
from evals.prompt_compression import FAMILIES, RESULTS, cells_of, parse_args
from figures.markdown import table

ARM_NAMES = {
    "full": "whole prompt", "cross_family": "draft of another family", "same_family": "the target as its own draft",
    "random": "random chunks", "truncation": "middle cut out",
}  # fmt: skip
DRAFTS = ("cross_family", "same_family")
VARIED = ("look_ahead", "chunk_len", "snap")  # what the table of settings varies
WANTED = 0.95  # of the whole prompt's accuracy

Cell = dict[str, Any]


def stored() -> list[Cell]:
    """Every cell; of the same measurement with different numbers of prompts, the one with the most."""
    best: dict[str, Cell] = {}
    for cell in store.read(RESULTS).values():
        key = store.key_of(cell["settings"] | {"num_prompts": 0})
        if key not in best or cell["settings"]["num_prompts"] > best[key]["settings"]["num_prompts"]:
            best[key] = cell
    if not best:
        raise ValueError("not measured; run python -m evals.prompt_compression")
    return list(best.values())


def usual_settings() -> dict[str, Any]:
    """Those of the first default cell, as they are stored."""
    found: dict[str, Any] = json.loads(store.key_of(cells_of(parse_args([]))[0]))
    return found


def cells() -> list[Cell]:
    """Cells of the default settings."""
    usual = usual_settings()
    kept = [key for key in usual if key not in ("num_prompts", "family", "arm", "part", "max_prompt_tokens")]
    found = [cell for cell in stored() if all(cell["settings"][key] == usual[key] for key in kept)]
    if not found:
        raise ValueError("not measured; run python -m evals.prompt_compression")
    return found


def whole_prompts() -> dict[str, Cell]:
    """The uncut arm of each family: the cell here, or that of ``evals.run``, whose prompts are the same, if larger."""
    best = {cell["settings"]["family"]: cell for cell in cells() if cell["settings"]["arm"] == "full"}
    usual = parse_args([])
    for cell in tables.arm_cells():
        own = cell["settings"]
        family, most = own["task"], best.get(own["task"])
        is_same = (own["arm"], own["prompt_len"], own["seed"]) == ("full", usual.prompt_len, usual.seed)
        if is_same and family in FAMILIES and (not most or own["num_prompts"] > most["settings"]["num_prompts"]):
            result = {key: cell["result"][key] for key in ("accuracy", "standard_error")}
            settings = {"family": family, "arm": "full", "max_prompt_tokens": own["prompt_len"]}
            settings["num_prompts"] = own["num_prompts"]
            best[family] = {"settings": settings, "result": result | {"gold_survives": 100.0}}
    return best


def below(cell: Cell, whole: dict[str, Cell]) -> bool:
    """Whether a draft's cell keeps less than ``WANTED`` of the whole prompt's accuracy."""
    own, family = cell["settings"]["arm"], cell["settings"]["family"]
    least = WANTED * whole[family]["result"]["accuracy"] if family in whole else 0.0
    return own in DRAFTS and bool(cell["result"]["accuracy"] < least)


def compression_table() -> str:
    """One line per arm and size: accuracy, and in brackets in how many prompts the answering sentences were left."""
    whole = whole_prompts()
    found = [*whole.values(), *(cell for cell in cells() if cell["settings"]["arm"] != "full")]
    families = [family for family in FAMILIES if any(cell["settings"]["family"] == family for cell in found)]
    most = max(cell["settings"]["num_prompts"] for cell in found)
    fewer = sorted({cell["settings"]["num_prompts"] for cell in found} - {most})
    lines: dict[tuple[int, int], dict[str, str]] = {}
    for cell in found:
        own, result = cell["settings"], cell["result"]
        value = f"{result['accuracy']:.1f}"
        value = f"**{value}**" if below(cell, whole) else value
        mark = "*" if own["num_prompts"] < most else ""
        key = (-own["max_prompt_tokens"], list(ARM_NAMES).index(own["arm"]))
        lines.setdefault(key, {})[own["family"]] = f"{value} ({result['gold_survives']:.0f}){mark}"
    rows = [
        [list(ARM_NAMES.values())[arm], f"{-tokens:,}", *(lines[tokens, arm].get(family, "") for family in families)]
        for tokens, arm in sorted(lines)
    ]
    first = cells()[0]
    widest = max(cell["result"]["standard_error"] for cell in found)
    note = (
        f"Accuracy in points, in brackets the share of prompts in which the answering sentences were left; {most} "
        f"prompts of {first['settings']['prompt_len']:,} tokens per cell"
        + (f" ({' or '.join(map(str, fewer))} where marked *)" if fewer else "")
        + f", full attention in the target, delimiter `{first['settings']['delimiter']}`; standard errors up to "
        f"{widest:.1f}. Bold: a draft keeps less than {WANTED:.0%} of the whole prompt's accuracy."
    )
    return f"{note}\n\n{table(['prompt', 'most tokens', *families], rows)}\n\n{source(cells())}"


def settings_table() -> str:
    """Other look-aheads, chunks or borders beside the default: one line per family, size and draft that has both."""
    usual = tuple(usual_settings()[key] for key in VARIED)
    lines: dict[tuple[int, int, int], dict[tuple[Any, ...], Cell]] = {}
    for cell in store.read(RESULTS).values():
        own = cell["settings"]
        if own["arm"] in DRAFTS:
            line = (FAMILIES.index(own["family"]), -own["max_prompt_tokens"], DRAFTS.index(own["arm"]))
            found, way = lines.setdefault(line, {}), tuple(own[key] for key in VARIED)
            if way not in found or own["num_prompts"] > found[way]["settings"]["num_prompts"]:
                found[way] = cell
    lines = {line: found for line, found in lines.items() if usual in found and len(found) > 1}
    if not lines:
        raise ValueError("not measured; run python -m evals.prompt_compression with --look-ahead or --chunk-len")
    shown = [cell for found in lines.values() for cell in found.values()]
    ways = sorted({way for found in lines.values() for way in found}, key=lambda way: (way != usual, str(way)))
    rows = []
    for (family, tokens, arm), found in sorted(lines.items()):
        values = [
            f"{found[way]['result']['accuracy']:.1f} ({found[way]['result']['gold_survives']:.0f})"
            if way in found
            else ""
            for way in ways
        ]
        rows.append([FAMILIES[family], f"{-tokens:,}", ARM_NAMES[DRAFTS[arm]], *values])
    heads = ["family", "most tokens", "prompt", *(_way(*way) for way in ways)]
    errors = max(cell["result"]["standard_error"] for cell in shown)
    prompts = sorted({cell["settings"]["num_prompts"] for cell in shown})
    note = f"As above, {' or '.join(map(str, prompts))} prompts per cell; standard errors up to {errors:.1f}."
    return f"{note}\n\n{table(heads, rows)}\n\n{source(shown)}"


def _way(look_ahead: int, chunk_len: int, snap: str | None) -> str:
    return f"chunks of {chunk_len or 32}, look-ahead {look_ahead}" + (f", whole {snap}s" if snap else "")


def source(found: Sequence[Cell]) -> str:
    """Where cells were measured: devices, versions and commits, each once."""
    parts = {key: ", ".join(sorted({str(cell[key]) for cell in found})) for key in ("device", "torch", "commit")}
    return f"<sub>{parts['device']}; torch {parts['torch']}; commit {parts['commit']}; `evals.prompt_compression`</sub>"
