"""Markdown of stored results of ``looping.py``, ``looping_rows.py``, ``equal_memory.py`` and ``sampling.py``."""

from __future__ import annotations

from typing import Any

from figures.markdown import table

RUNGS = ("B0", "B1", "B2", "B3")  # B3, in older records: the next stage's weights prefetched before each barrier


def looping(figures: dict[str, Any]) -> str:
    """The ladder at the shortest context, B2 at the others, and ablations in words."""
    shortest = min(arm["context"] for arm in figures["arms"])
    rungs = [rung for rung in RUNGS if rung in figures["arms"][0]]
    rows = [
        [arm["shape"], arm["width"], str(arm["batch"]), *(f"{arm[rung]['p10_ms']:.3g}" for rung in rungs),
         f"{arm['read_gb_per_s']:.0f}", f"{arm['B2']['of_bandwidth']:.0%}", f"{arm['B2']['times_bound']:.2f}"]
        for arm in figures["arms"] if arm["context"] == shortest
    ]  # fmt: skip
    heads = ["shape", "weights", "rows", *(f"{rung}, ms" for rung in rungs), "read, GB/s", "B2, of it",
             "B2 over its bound"]  # fmt: skip
    waiting, ablations = figures["ablations"], figures["ablations"]
    by_threads = ", ".join(
        f"{arm['threads']} at batch {arm['batch']}: {arm['p10_ms']:.3g} ms" for arm in ablations["threads"]
    )
    by_touch = ", ".join(f"{arm['touched']}: {arm['p10_ms']:.3g} ms" for arm in ablations.get("touched", ()))
    touched = f"Touched ahead at batch 1: {by_touch}. " if by_touch else ""
    head = (
        f"A decode step in more and more of one piece, rows of {shortest:,} slots, {figures['threads']} threads, "
        f"{figures['instructions']}; tenth percentiles:"
    )
    words = (
        f"Shape {ablations['shape']} in bfloat16, B2. Threads: {by_threads}. {touched}A "
        f"barrier takes {waiting['barrier_us']:.2f} µs, a call {waiting['call_us']:.1f} µs, one after threads fell "
        f"asleep {waiting['call_after_sleep_us']:.0f} µs."
    )
    return f"{head}\n\n{table(heads, rows)}\n\n{_longer(figures, shortest)}{words}"


def _longer(figures: dict[str, Any], shortest: int) -> str:
    """B2 at other contexts: a line for shape, weights and slots."""
    batches = sorted({arm["batch"] for arm in figures["arms"]})
    lines: dict[tuple[str, str, int], dict[int, str]] = {}
    for arm in figures["arms"]:
        if arm["context"] > shortest:
            own = arm["B2"]
            lines.setdefault((arm["shape"], arm["width"], arm["context"]), {})[arm["batch"]] = (
                f"{own['p10_ms']:.3g} ms, {own['of_bandwidth']:.0%}, {own['times_bound']:.2f}"
            )
    if not lines:
        return ""
    rows = [
        [shape, width, f"{slots:,}", *(own.get(batch, "") for batch in batches)]
        for (shape, width, slots), own in lines.items()
    ]
    heads = ["shape", "weights", "slots", *(f"{batch} row{'s' * (batch > 1)}" for batch in batches)]
    return f"B2 over longer rows: time, share of the read rate, times its bound:\n\n{table(heads, rows)}\n\n"


def looping_rows(figures: dict[str, Any]) -> str:
    """Kinds of rows side by side, each against fp32 ones."""
    rows = [
        [arm["shape"], arm["width"], str(arm["batch"]), f"{arm['context']:,}", kind, f"{own['mb']:,.0f}",
         f"{own['p10_ms']:.3g}", f"{own['p10_ms'] / arm['rows']['float32']['p10_ms']:.2f}",
         f"{arm['read_gb_per_s']:.0f}", f"{own['times_bound']:.2f}"]
        for arm in figures["arms"] for kind, own in arm["rows"].items()
    ]  # fmt: skip
    heads = ["shape", "weights", "rows", "slots", "kind of rows", "MB a step", "step, ms", "against fp32 rows",
             "read, GB/s", "over its bound"]  # fmt: skip
    return (
        f"A looped step over rows of four kinds, {figures['threads']} threads, {figures['instructions']}; tenth "
        f"percentiles:\n\n{table(heads, rows)}"
    )


def equal_memory(figures: dict[str, Any]) -> str:
    """Few full rows against many small ones."""
    rows = [
        [arm["budget"], str(arm["rows"]), f"{arm['row_mib']:.0f} MiB", f"{arm['all_mib']:.0f} MiB",
         f"{arm['step_ms']:.1f} ms", f"{arm['tokens_per_s']:.1f}", f"{arm['speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["row", "rows", "a row", "all rows", "step", "tokens/s", "against full rows"]
    return f"Decode after {figures['prompt_len']:,}-token prompts, the same bytes of rows:\n\n{table(heads, rows)}"


def sampling(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['vocabulary']:,}", str(arm["rows"]), arm["sampling"], f"{arm['torch']['median_ms']:.3g} ms",
         str(arm["torch"]["threads"]), f"{arm['native']['median_ms']:.2g} ms", f"{arm['speedup']:.0f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["vocabulary", "rows", "sampling", "PyTorch", "its threads", "native", "faster"]
    return f"The draw of a step alone, {figures['threads']} threads, {figures['instructions']} (medians):\n\n" + table(
        heads, rows
    )
