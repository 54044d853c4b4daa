"""Arms of one job in turn, and what their calls come to: first tokens, decode, and whose tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.arms import Arm, Unavailable, run_arm
from benchmarks.peers.work import Job

More = Callable[[Arm, dict[str, Any]], dict[str, Any]]


def figures_of(name: str, found: dict[str, Any], new_tokens: int, want: dict[int, Any]) -> list[dict[str, Any]]:
    """One line per batch size; ``want``: greedy tokens by batch size, of the engine that is compared with."""
    lines = []
    for own in found["batches"]:
        batch, first, whole = own["batch"], min(own["first_s"]), min(own["all_s"])
        decode = whole - first
        if batch == 1:  # both of one call
            decode = min(end - begin for begin, end in zip(own["first_s"], own["all_s"], strict=True))
        line = {
            "engine": name,
            "batch": batch,
            "first_token_s": round(first, 4),
            "output_tokens_per_s": round(batch * new_tokens / whole, 1),
            # Nothing where the noise of two calls is more than what lies between them.
            "decode_tokens_per_s": round(batch * (new_tokens - 1) / decode, 1) if decode > 0 else None,
        }
        theirs = want.get(batch)
        if theirs is not None:
            pairs = [a == b for mine, other in zip(own["tokens"], theirs, strict=True)
                     for a, b in zip(mine, other, strict=True)]  # fmt: skip
            line["same_tokens"] = round(sum(pairs) / len(pairs), 4)
        lines.append(line)
    return lines


def compare(arms: Sequence[Arm], job: Job, only: Sequence[str], more: More = lambda arm, line: {}) -> dict[str, Any]:
    """Every arm in turn; those whose names begin with one of ``only``, if any are named.

    The first that runs is the one whose tokens the others are compared with; ``more`` adds to a line of an arm.
    """
    lines: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    want: dict[int, Any] = {}
    for arm in arms:
        if only and not arm.name.startswith(tuple(only)):
            continue
        try:
            found = run_arm(arm, job)
        except Unavailable as reason:
            left_out[arm.name] = str(reason)
            print(f"{arm.name}: {reason}", flush=True)
            continue
        versions |= found["versions"]
        want = want or {own["batch"]: own["tokens"] for own in found["batches"]}
        for line in figures_of(arm.name, found, job.new_tokens, want):
            line |= more(arm, line)
            lines.append(line)
            print({name: round(own, 3) if isinstance(own, float) else own for name, own in line.items()}, flush=True)
    return {"arms": lines, "versions": versions, "left_out": left_out}
