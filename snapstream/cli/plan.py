"""``snapstream plan``: options to ``planning.py`` and ``plan_report.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from snapstream.cli.options import EngineDType, RescoreEvery, RowDType, parse_chunk_len, parse_rescoring, whole_option
from snapstream.config import SnapKVConfig

HELP = """What a model costs, from its config.json alone: bytes per row, rows that fit, prefill, speed.

Budgets are slots: tokens kept per layer and kv head. A row is the cache of one sequence.

\b
Examples:
  snapstream plan Llama-3.1-8B-Instruct/
  snapstream plan config.json --memory 24GB --bandwidth 1TB/s --budget 4096 --budget 8192
  snapstream plan config.json --prompt-len 32768 --json
  snapstream plan Llama-3.1-8B-Instruct/ --rescore-every 32 --draft Qwen3-0.6B/ --draft-window-len 8192
"""


def plan(
    config: Annotated[Path, typer.Argument(help="config.json, or the folder it is in.", show_default=False)],
    budget: Annotated[
        list[int] | None,
        whole_option("Slots of a row; repeatable. Default: 1/2, 1/4, 1/8, 1/16 of the prompt."),
    ] = None,
    prompt_len: Annotated[
        int | None, whole_option("Prompt tokens. Default: the model's window, at most 131072.")
    ] = None,
    max_model_len: Annotated[
        int | None, whole_option("Prompt and output tokens: slots of a full row. Default: the prompt.")
    ] = None,
    chunk_len: Annotated[
        str, typer.Option(help="Tokens of one prefill unit; auto: as a GPU engine does.", metavar="N|auto")
    ] = "auto",
    dtype: EngineDType = "bfloat16",
    kv_dtype: RowDType = "auto",
    rescore_every: RescoreEvery = None,
    hops: Annotated[int, whole_option("Rounds of selection after the window's (SnapKVConfig.num_hops).")] = 0,
    draft: Annotated[
        Path | None, typer.Option(help="Draft on the same device: its config.json, or the folder.")
    ] = None,
    draft_window_len: Annotated[
        int | None, whole_option("With --draft: tokens it reads at once. Default: its own window.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Device memory, e.g. 80GiB, 24GB.")] = "80GiB",
    bandwidth: Annotated[str, typer.Option(help="Memory bandwidth, e.g. 3.35TB/s, 900GB/s.")] = "3.35TB/s",
    device: Annotated[str, typer.Option(help="Device of this machine that --max-rows auto fills.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (bytes, tokens, tokens/s).")] = False,
) -> None:
    from snapstream.config import DTYPE_BYTES
    from snapstream.models.registry import read_model_config
    from snapstream.plan.draft_memory import draft_memory
    from snapstream.plan.plan import Here, make_plan
    from snapstream.plan.sizes import parse_bandwidth, parse_bytes
    from snapstream.spec_prefill.settings import ScoringSettings
    from snapstream.start.resolve import available_bytes, check_device

    if draft is None and draft_window_len is not None:
        raise ValueError(f"--draft-window-len is {draft_window_len}, and there is no draft; give one with --draft")
    if device != "cpu":  # asking for a GPU imports torch
        check_device(device)

    result = make_plan(
        read_model_config(config),
        dtype=dtype,
        kv_dtype=kv_dtype,
        budgets=budget or (),
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        chunk_len=parse_chunk_len(chunk_len),
        memory_bytes=parse_bytes(memory),
        bandwidth=parse_bandwidth(bandwidth),
        here=Here(device=device, free_bytes=available_bytes(device)),
        snapkv=SnapKVConfig(num_hops=hops),
        rescoring=parse_rescoring(rescore_every),
        draft=None
        if draft is None
        else draft_memory(
            read_model_config(draft),
            ScoringSettings(window_len=draft_window_len or 0),
            dtype_bytes=DTYPE_BYTES[dtype],
            device="cuda",
        ),
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from rich.console import Console

    from snapstream.plan.report import print_plan

    print_plan(result, Console())
