"""The table of ``evals.prompt_compression``, as Markdown, from its stored cells."""

from __future__ import annotations

import json
from typing import Any

from evals.prompt_compression import RESULTS

ARM_NAMES = {
    "full": "whole prompt", "cross_family": "draft of another family", "same_family": "the target as its own draft",
    "random": "random chunks", "truncation": "middle cut out",
}  # fmt: skip


def cells() -> list[dict[str, Any]]:
    """Stored cells of the default settings; ValueError where there are none."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    if not found:
        raise ValueError("not measured; run python -m evals.prompt_compression")
    return found


def compression_table() -> str:
    """One line per arm and size: accuracy, and in brackets in how many prompts the answering sentence was left."""
    found = cells()
    families = list(dict.fromkeys(cell["settings"]["family"] for cell in found))
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for cell in found:
        settings = cell["settings"]
        lines.setdefault((-settings["max_prompt_tokens"], settings["arm"]), {})[settings["family"]] = cell["result"]
    names = list(ARM_NAMES)
    order = sorted(lines, key=lambda key: (key[0], names.index(key[1]) if key[1] in names else len(names)))
    rows = []
    for tokens, arm in order:
        line = lines[tokens, arm]
        values = [
            f"{line[family]['accuracy']:.1f} ({line[family]['gold_survives']:.0f})" if family in line else ""
            for family in families
        ]
        rows.append([ARM_NAMES.get(arm, arm), f"{-tokens:,}", *values])
    heads = ["prompt", "most tokens", *families]
    table = [heads, ["---"] * len(heads), *rows]
    first = found[0]
    widest = max(cell["result"]["standard_error"] for cell in found)
    note = (
        f"Accuracy in points, in brackets the share of prompts in which the answering sentences were left; "
        f"{first['settings']['num_prompts']} prompts of {first['settings']['prompt_len']:,} tokens per cell, full "
        f"attention in the target, delimiter `{first['settings']['delimiter']}`; standard errors up to {widest:.1f}."
    )
    body = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return (
        f"{note}\n\n{body}\n\n<sub>{first['device']}; torch {first['torch']}; commit {first['commit']}; "
        f"`{first['command']}`</sub>"
    )
