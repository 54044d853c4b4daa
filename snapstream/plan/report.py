"""Prints a ``Plan`` for people: fixed costs, then a line per kind of row. Arithmetic: ``plan.py``."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table

from snapstream.config.values import format_bytes
from snapstream.plan.plan import Plan, RowPlan
from snapstream.plan.predict import HOST_S, LINKS, PRODUCT_SHARE, READ_SHARE, RanksPlan

INDENT = " " * 9  # below the labels


def _format_rate(rate: float) -> str:
    """Three digits at least, and no more than seven characters."""
    if rate >= 1e6:
        return f"{rate / 1e6:,.3g}M" if rate < 1e9 else f"{rate / 1e6:,.0f}M"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _name(row: RowPlan) -> str:
    return row.name if row.name == "full" else f"{row.capacity:,}"


def _table_line(row: RowPlan) -> tuple[str, ...]:
    fits = row.max_rows > 0
    return (
        _name(row),
        format_bytes(row.row_bytes),
        f"{100 * row.full_fraction:.3g} %",
        _format_rate(row.max_rows) if row.max_rows >= 1e6 else f"{row.max_rows:,}" if fits else "none",
        _format_rate(row.tokens_per_s_one),
        _format_rate(row.tokens_per_s_max) if fits else "-",
        *([] if row.rows_here is None else [f"{row.rows_here:,}" if row.rows_here else "none"]),
    )


def _short_chunks(plan: Plan) -> str:
    if plan.short_chunk_len == plan.chunk_len:
        return ""
    return f" (short prompts: of {plan.short_chunk_len:,})"


def _dequantized_layer(plan: Plan) -> str:
    if not plan.dequantized_bytes:
        return ""
    return f"; prefill dequantizes a layer to {plan.dtype} in {format_bytes(plan.dequantized_bytes)}"


def _draft_costs(plan: Plan) -> list[tuple[str, str]]:
    if plan.draft is None:
        return []
    weights, working = format_bytes(plan.draft.weight_bytes), format_bytes(plan.draft.working_bytes)
    return [("draft", f"{weights} of weights, {working} at peak while it scores a text")]


def _prefix_costs(plan: Plan) -> list[tuple[str, str]]:
    prefix = plan.prefix
    if prefix is None:
        return []
    link, even = prefix.link_bytes_per_s / 1e9, prefix.break_even_bytes_per_s / 1e9
    holds = f"{prefix.num_tokens:,} tokens, {prefix.num_prompts:,} such prompts"
    return [
        ("prefixes", f"{format_bytes(prefix.store_bytes)} on the host hold {holds}"),
        ("", f"  a hit copies {format_bytes(prefix.prompt_bytes)}: {prefix.restore_ms:,.0f} ms at {link:,.3g} GB/s"),
        ("", f"  and saves {prefix.compute_ms:,.0f} ms (predicted): it pays from {even:,.2g} GB/s on"),
    ]


def _staged(expanded_bytes: int) -> str:
    if not expanded_bytes:
        return "keys and values"
    return f"latents, {format_bytes(expanded_bytes)} of it keys and values of every head"


def _ranks(plan: Plan) -> list[tuple[str, str]]:
    """What one rank holds of the weights, large tensors first; those of less than a percent together."""
    ranks = plan.ranks
    if ranks is None:
        return []
    total = sum(ranks.tensor_bytes.values())
    sizes = sorted(ranks.tensor_bytes.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in sizes if size >= total / 100]
    rest = total - sum(size for _, size in large)
    parts = [f"{name} {format_bytes(size)}" for name, size in large] + (
        [f"others {format_bytes(rest)}"] if rest else []
    )
    if ranks.parallel.attention == "dp":
        rows = "distributed (dp)"
    else:
        rows = "of latents, whole on each rank" if plan.prefill.expanded_bytes else "split by heads"
    experts = ", whole experts (ep)" if ranks.parallel.experts == "ep" else ""
    return [
        ("ranks", f"{ranks.parallel.size}, and what follows is one rank's; rows {rows}{experts}"),
        ("", f"  of its weights: {', '.join(parts)}"),
    ]


def _fixed_costs(plan: Plan) -> list[tuple[str, str]]:
    prefill = plan.prefill
    return [
        (
            "model",
            f"{plan.architecture}, {plan.num_parameters / 1e6:,.1f}M parameters, "
            f"{plan.active_parameters / 1e6:,.1f}M per token",
        ),
        *_ranks(plan),
        ("weights", f"{format_bytes(plan.weight_bytes)} in {plan.weights}{_dequantized_layer(plan)}"),
        (
            "cache",
            f"{format_bytes(plan.token_bytes)} per token{'' if plan.kv_dtype == 'auto' else f' in {plan.kv_dtype}'}",
        ),
        *([("", f"  {plan.windows}")] if plan.windows else []),
        ("prompt", f"{plan.prompt_len:,} tokens, prefilled in chunks of {plan.chunk_len:,}{_short_chunks(plan)}"),
        ("prefill", f"{format_bytes(prefill.total_bytes)} at peak, without weights and rows:"),
        ("", f"  {format_bytes(prefill.hidden_bytes)} hidden states"),
        ("", f"  {format_bytes(prefill.staging_bytes)} staging of one layer's {_staged(prefill.expanded_bytes)}"),
        ("", f"  {format_bytes(prefill.transient_bytes)} temporaries"),
        *(
            [("", f"  {format_bytes(prefill.query_bytes)} queries of one layer, for hops")]
            if prefill.query_bytes
            else []
        ),
        ("", f"  (staging all layers would take {format_bytes(plan.all_layers_staging_bytes)})"),
        *_draft_costs(plan),
        *_prefix_costs(plan),
        ("device", f"{format_bytes(plan.memory_bytes)}, {plan.bandwidth_bytes_per_s / 1e9:,.0f} GB/s"),
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Write the plan to ``console``; 60 columns are enough."""
    for label, text in _fixed_costs(plan):
        _print_line(console, f"{label:<{len(INDENT)}}", text)
    # No frame, no wrapped cells: seven columns then fit into 60.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    titles = ["slots", "row", "of\nfull", "rows\nthat fit", "tok/s\n1 row", "tok/s\nall rows"]
    if plan.here is not None:
        titles.append("auto\nhere")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_table_line(row))
    console.print()
    console.print(table)
    console.print()
    _print_line(console, "tok/s    ", "the bound set by bytes read per step, not a measurement")
    sizes = ", ".join(f"{format_bytes(row.transfer_bytes)} ({_name(row)})" for row in plan.rows)
    _print_line(console, "transfer ", f"with --role, host memory on either side during a KV transfer: {sizes}")
    if plan.ranks is not None:
        _print_steps(plan.ranks, console)
    if plan.here is not None:
        free = format_bytes(plan.here.free_bytes)
        _print_line(
            console, "auto     ", f"rows of --max-rows auto on this machine now ({plan.here.device}, {free} free)"
        )


def _print_steps(ranks: RanksPlan, console: Console) -> None:
    """Predicted steps, and what they were predicted from."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("slots", "rows", "ms:\nweights", "\nrows", "\ncollect.", "\nstep", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, step in ranks.steps.items():
        parts = [f"{1e3 * part:.1f}" for part in (step.weights_s, step.rows_s)]
        ranges = [_range(1e3 * part for part in over) for over in (step.collectives_s, step.seconds)]
        table.add_row(
            f"{int(name):,}" if name.isdigit() else name,
            f"{step.num_rows:,}",
            *parts,
            *ranges,
            _range(reversed(step.tokens_per_s)),
        )
    console.print()
    console.print(table)
    console.print()
    links = " and ".join(
        f"{link.name} ({1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e9:.0f} GB/s)" for link in LINKS
    )
    assumed = [
        f"predicted, not measured: {READ_SHARE:.0%} of the bandwidth and {PRODUCT_SHARE:.0%} of "
        f"{ranks.flop_per_s / 1e12:,.0f} TFLOP/s",
        f"{1e3 * HOST_S:.1f} ms of the host",
        f"collectives over {links}",
        "experts chosen evenly, no prompt between steps",
    ]
    _print_line(console, "step     ", "; ".join(assumed))
    _print_line(console, "prompt   ", f"{_range(ranks.prompt.seconds)} s, alone: predicted, too")


def _range(values: Iterable[float]) -> str:
    """``3.2`` or ``3.2-8.1``."""
    texts = [f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
             for value in values]  # fmt: skip
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}-{texts[-1]}"


def _print_line(console: Console, label: str, text: str) -> None:
    """A line that wraps below its text, not below its label."""
    own = len(text) - len(text.lstrip())
    lines = wrap(text, console.width - len(label), subsequent_indent=" " * own) or [""]
    for index, line in enumerate(lines):
        console.print((INDENT if index else label) + line, highlight=False, markup=False, soft_wrap=True)
