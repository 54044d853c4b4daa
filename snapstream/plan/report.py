"""Prints a ``Plan`` for people: fixed costs, then a line per kind of row. Arithmetic: ``plan.py``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from snapstream.plan.plan import Plan, RowPlan
from snapstream.plan.sizes import format_bytes


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _table_line(row: RowPlan) -> tuple[str, ...]:
    fits = row.max_rows > 0
    return (
        row.name if row.name == "full" else f"{row.capacity:,}",
        format_bytes(row.row_bytes),
        f"{100 * row.full_fraction:.3g} %",
        f"{row.max_rows:,}" if fits else "none",
        _format_rate(row.tokens_per_s_one),
        _format_rate(row.tokens_per_s_max) if fits else "-",
        *([] if row.rows_here is None else [f"{row.rows_here:,}" if row.rows_here else "none"]),
    )


def _short_chunks(plan: Plan) -> str:
    if plan.short_chunk_len == plan.chunk_len:
        return ""
    return f" (short prompts: of {plan.short_chunk_len:,})"


def _draft_costs(plan: Plan) -> list[tuple[str, str]]:
    if plan.draft is None:
        return []
    weights, working = format_bytes(plan.draft.weight_bytes), format_bytes(plan.draft.working_bytes)
    return [("draft", f"{weights} of weights, {working} at peak while it scores a text")]


def _fixed_costs(plan: Plan) -> list[tuple[str, str]]:
    prefill = plan.prefill
    return [
        ("model", f"{plan.architecture}, {plan.num_parameters / 1e6:,.1f}M parameters"),
        ("weights", f"{format_bytes(plan.weight_bytes)} in {plan.dtype}"),
        ("cache", f"{format_bytes(plan.token_bytes)} per token{' in fp8' if plan.kv_dtype == 'fp8' else ''}"),
        ("prompt", f"{plan.prompt_len:,} tokens, prefilled in chunks of {plan.chunk_len:,}{_short_chunks(plan)}"),
        ("prefill", f"{format_bytes(prefill.total_bytes)} at peak, beside weights and rows:"),
        ("", f"  {format_bytes(prefill.hidden_bytes)} hidden states"),
        ("", f"  {format_bytes(prefill.staging_bytes)} staging of one layer's keys and values"),
        ("", f"  {format_bytes(prefill.transient_bytes)} temporaries"),
        *(
            [("", f"  {format_bytes(prefill.query_bytes)} queries of one layer, for hops")]
            if prefill.query_bytes
            else []
        ),
        ("", f"  (staging all layers would take {format_bytes(plan.all_layers_staging_bytes)})"),
        *_draft_costs(plan),
        ("device", f"{format_bytes(plan.memory_bytes)}, {plan.bandwidth_bytes_per_s / 1e9:,.0f} GB/s"),
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """Write the plan to ``console``."""
    for label, text in _fixed_costs(plan):
        console.print(f"{label:<8} {text}", highlight=False, markup=False, soft_wrap=True)
    table = Table()
    titles = ["slots", "row", "of full", "rows\nthat fit", "tok/s\n1 row", "tok/s\nall rows"]
    if plan.here is not None:
        titles.append("auto rows\nhere")
    for title in titles:
        table.add_column(title, justify="right")
    for row in plan.rows:
        table.add_row(*_table_line(row))
    console.print(table)
    console.print("tok/s: the bound set by bytes read per step, not a measurement", highlight=False)
    if plan.here is not None:
        console.print(
            f"auto rows here: what --max-rows auto gives on this machine now "
            f"({plan.here.device}, {format_bytes(plan.here.free_bytes)} free)",
            highlight=False,
            soft_wrap=True,
        )
