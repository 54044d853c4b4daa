"""``snapstream plan``: options to ``plan/plan.py``; a ``Plan`` as JSON, or for people: fixed costs, a line per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from snapstream.cli.flags import Flags
from snapstream.config import DType, EngineOptions
from snapstream.config.engine import setting
from snapstream.config.values import format_bytes
from snapstream.models.hub import local_folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from snapstream.plan.memory import DraftMemory
    from snapstream.plan.plan import Plan, RowPlan


_INDENT = " " * 9  # below the labels


def _format_rate(rate: float) -> str:
    """Three digits at least, and no more than seven characters."""
    if rate >= 1e6:
        return f"{rate / 1e6:,.3g}M" if rate < 1e9 else f"{rate / 1e6:,.0f}M"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _row_name(row: RowPlan) -> str:
    return row.name if row.name == "full" else f"{row.capacity:,}"


def _table_line(row: RowPlan) -> tuple[str, ...]:
    fits = row.max_rows > 0
    return (
        _row_name(row),
        format_bytes(row.row_bytes),
        f"{100 * row.full_fraction:.3g} %",
        _format_rate(row.max_rows) if row.max_rows >= 1e6 else f"{row.max_rows:,}" if fits else "none",
        _format_rate(row.tokens_per_s_one),
        _format_rate(row.tokens_per_s_max) if fits else "-",
    )


def _draft_costs(plan: Plan) -> list[tuple[str, str]]:
    if plan.draft is None:
        return []
    weights, working = format_bytes(plan.draft.weight_bytes), format_bytes(plan.draft.working_bytes)
    return [("draft", f"{weights} of weights, {working} at peak while it scores a text")]


def _prefix_costs(plan: Plan) -> list[tuple[str, str]]:
    prefix = plan.prefix
    if prefix is None:
        return []
    holds = f"{prefix.num_tokens:,} tokens, {prefix.num_prompts:,} such prompts"
    return [
        ("prefixes", f"{format_bytes(prefix.store_bytes)} on the host hold {holds}"),
        ("", f"  a hit copies {format_bytes(prefix.prompt_bytes)}"),
    ]


def _rank_costs(plan: Plan) -> list[tuple[str, str]]:
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
    weights = f"{format_bytes(plan.weight_bytes)} in {plan.weights}"
    if plan.dequantized_bytes:
        weights += f"; prefill dequantizes a layer to {plan.dtype} in {format_bytes(plan.dequantized_bytes)}"
    short = "" if plan.short_chunk_len == plan.chunk_len else f" (short prompts: of {plan.short_chunk_len:,})"
    staged = "keys and values"
    if prefill.expanded_bytes:
        staged = f"latents, {format_bytes(prefill.expanded_bytes)} of it keys and values of every head"
    return [
        (
            "model",
            f"{plan.architecture}, {plan.num_parameters / 1e6:,.1f}M parameters, "
            f"{plan.active_parameters / 1e6:,.1f}M per token",
        ),
        *_rank_costs(plan),
        ("weights", weights),
        (
            "cache",
            f"{format_bytes(plan.token_bytes)} per token{'' if plan.kv_dtype == 'auto' else f' in {plan.kv_dtype}'}",
        ),
        *([("", f"  {plan.windows}")] if plan.windows else []),
        ("prompt", f"{plan.prompt_len:,} tokens, prefilled in chunks of {plan.chunk_len:,}{short}"),
        ("prefill", f"{format_bytes(prefill.total_bytes)} at peak, without weights and rows:"),
        ("", f"  {format_bytes(prefill.hidden_bytes)} hidden states"),
        ("", f"  {format_bytes(prefill.staging_bytes)} staging of one layer's {staged}"),
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


def _table(titles: Sequence[str]) -> Table:
    """No frame and no wrapped cells, so that it fits 60 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def print_plan(plan: Plan, console: Console) -> None:
    """Write the plan to ``console``; 60 columns are enough."""
    for label, text in _fixed_costs(plan):
        _print_line(console, f"{label:<{len(_INDENT)}}", text)
    titles = ["slots", "row", "of\nfull", "rows\nthat fit", "tok/s\n1 row", "tok/s\nall rows"]
    table = _table(titles)
    for row in plan.rows:
        table.add_row(*_table_line(row))
    console.print()
    console.print(table)
    console.print()
    _print_line(console, "tok/s    ", "the bound set by bytes read per step, not a measurement")
    sizes = ", ".join(f"{format_bytes(row.transfer_bytes)} ({_row_name(row)})" for row in plan.rows)
    _print_line(console, "transfer ", f"with --role, host memory on either side during a KV transfer: {sizes}")


def _print_line(console: Console, label: str, text: str) -> None:
    """A line that wraps below its text, not below its label."""
    own = len(text) - len(text.lstrip())
    lines = wrap(text, console.width - len(label), subsequent_indent=" " * own) or [""]
    for index, line in enumerate(lines):
        console.print((_INDENT if index else label) + line, highlight=False, markup=False, soft_wrap=True)


HELP = """What a model costs, from its config.json alone: bytes per row, rows that fit, prefill, speed.

Budgets are slots: tokens kept per layer and kv head. A row is the cache of one sequence.

\b
Examples:
  snapstream plan Llama-3.1-8B-Instruct/
  snapstream plan config.json --memory 24GB --bandwidth 1TB/s --budget 4096 --budget 8192
  snapstream plan config.json --prompt-len 32768 --json
  snapstream plan Llama-3.2-1B-Instruct/ --device cpu
  snapstream plan DeepSeek-R1/ --tensor-parallel 16 --attention dp --memory 141GB --bandwidth 4.8TB/s
  snapstream plan Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --draft-context-len 8192
"""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is planned, and for which device."""

    budget: tuple[int, ...] = setting((), "Slots of a row; repeatable. Default: 1/2, 1/4, 1/8, 1/16 of the prompt.")
    prompt_len: int | None = setting(None, "Prompt tokens. Default: the model's context, at most 131072.")
    draft: Path | None = setting(None, "Draft on the same device: its config.json, or the folder.")
    draft_context_len: int | None = setting(None, "With --draft: tokens it reads at once. Default: the model's limit.")
    device: str | None = setting(
        None,
        "Device of this machine to plan for. Default: a GPU, which need not be present.",
        metavar="cpu|cuda",
    )
    dtype: DType | None = setting(None, "Dtype of the computation. Default: bfloat16; float32 with --device cpu.")
    memory: str | None = setting(
        None, "Device memory, e.g. 80GiB, 24GB. Default: 80GiB; with --device, what is free now.", metavar="SIZE"
    )
    bandwidth: str | None = setting(
        None, "Memory bandwidth, e.g. 900GB/s. Default: 3.35TB/s; 50GB/s for a CPU.", metavar="RATE"
    )
    as_json: bool = setting(False, "Print JSON (bytes, tokens, tokens/s).", flag="--json")

    def __post_init__(self) -> None:
        if self.draft is None and self.draft_context_len is not None:
            raise ValueError(
                f"--draft-context-len is {self.draft_context_len}, and there is no draft; give one with --draft"
            )


ENGINE = Flags(
    words={
        "max_model_len": "Prompt and output tokens: slots of a full row. Default: the prompt.",
        "chunk_len": "Tokens of one prefill unit; auto: as a GPU engine does.",
        "prefix_store": "Host memory for prompt prefixes: print what it holds.",
    },
    without=(
        "budget",
        "device",
        "dtype",
        "executor",
        "max_rows",
        "prefill_quantum",
        "prefill_attention",
        "max_waiting",
        "prefix_dir",
        "prefix_disk",
        "local_ranks",
        "master_addr",
    ),  # fmt: skip
)


def plan(
    config: Annotated[Path, typer.Argument(help="config.json, or the folder it is in.", show_default=False)],
    flags: PlanFlags,
    engine: Annotated[EngineOptions, ENGINE],
) -> None:
    from snapstream.config.values import parse_bandwidth, parse_bytes
    from snapstream.models.adapters import with_loras
    from snapstream.models.registry import read_model_config
    from snapstream.plan.fit import with_speculator
    from snapstream.plan.plan import Device, make_plan
    from snapstream.startup.measure import check_device, device_memory

    on_cpu = flags.device == "cpu"
    engine = replace(engine, device=flags.device or "cpu", dtype=flags.dtype or ("float32" if on_cpu else "bfloat16"))
    check_device(engine.device)
    free_bytes = device_memory(engine.device)[0] if flags.device is not None and flags.memory is None else None
    bandwidth = flags.bandwidth or ("50GB/s" if on_cpu else "3.35TB/s")
    folder = local_folder(config, config_only=True)
    model = read_model_config(folder)
    result = make_plan(
        model,
        with_loras(model, with_speculator(engine, (folder, model), config_only=True)),
        budgets=flags.budget,
        prompt_len=flags.prompt_len,
        gpu=Device(
            kind="cpu" if on_cpu else "cuda",
            memory_bytes=parse_bytes(flags.memory or "80GiB") if free_bytes is None else free_bytes,
            bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        ),
        draft=_draft_memory(flags, engine),
    )
    if flags.as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from rich.console import Console

    print_plan(result, Console())


def _draft_memory(flags: PlanFlags, engine: EngineOptions) -> DraftMemory | None:
    if flags.draft is None:
        return None
    from snapstream.models.registry import read_model_config
    from snapstream.plan.memory import draft_memory
    from snapstream.spec_prefill.settings import scoring_of

    scoring = scoring_of(None, flags.draft_context_len)
    draft = read_model_config(local_folder(flags.draft, config_only=True))
    return draft_memory(draft, scoring, dtype=engine.dtype, device=flags.device or "cuda")
