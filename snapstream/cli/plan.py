"""``snapstream plan``: options to ``plan/plan.py`` and ``plan/report.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstream.cli.flags import Flags
from snapstream.config import DType, EngineOptions
from snapstream.config.engine import setting
from snapstream.models.hub import local_folder

if TYPE_CHECKING:
    from snapstream.plan.memory import DraftMemory

HELP = """What a model costs, from its config.json alone: bytes per row, rows that fit, prefill, speed.

Budgets are slots: tokens kept per layer and kv head. A row is the cache of one sequence.

\b
Examples:
  snapstream plan Llama-3.1-8B-Instruct/
  snapstream plan config.json --memory 24GB --bandwidth 1TB/s --budget 4096 --budget 8192
  snapstream plan config.json --prompt-len 32768 --json
  snapstream plan Llama-3.2-1B-Instruct/ --device cpu
  snapstream plan DeepSeek-R1/ --tensor-parallel 16 --attention dp --memory 141GB --bandwidth 4.8TB/s
  snapstream plan Llama-3.1-8B-Instruct/ --reselect-every 32 --draft Qwen3-0.6B/ --draft-context-len 8192
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
        "Planned for; cpu: as this machine's. Default: a GPU, which need not be here.",
        metavar="cpu|cuda",
    )
    dtype: DType | None = setting(None, "Of the computation. Default: bfloat16, with --device cpu float32.")
    memory: str | None = setting(
        None, "Device memory, e.g. 80GiB, 24GB. Default: 80GiB, of a CPU what is free now.", metavar="SIZE"
    )
    bandwidth: str | None = setting(
        None, "Memory bandwidth, e.g. 900GB/s. Default: 3.35TB/s, of a CPU 50GB/s.", metavar="RATE"
    )
    flops: str = setting(
        "989TFLOP/s", "Products in dense bf16, for --tensor-parallel, e.g. 989TFLOP/s.", metavar="RATE"
    )
    link: str = setting("50GB/s", "Between host and device, for --prefix-store.", metavar="RATE")
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
        "prefix_store": "Host memory for the beginnings of prompts: what it holds, and from which --link on it pays.",
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
    from snapstream.config.values import parse_bandwidth, parse_bytes, parse_flops
    from snapstream.models.registry import read_model_config
    from snapstream.plan.fit import with_speculator
    from snapstream.plan.plan import Device, Here, make_plan
    from snapstream.startup.measure import check_device, device_memory

    on_cpu = flags.device == "cpu"
    engine = replace(engine, device=flags.device or "cpu", dtype=flags.dtype or ("float32" if on_cpu else "bfloat16"))
    check_device(engine.device)
    free_bytes, _ = device_memory(engine.device)
    memory, bandwidth = flags.memory or "80GiB", flags.bandwidth or ("50GB/s" if on_cpu else "3.35TB/s")
    result = make_plan(
        read_model_config(local_folder(config, config_only=True)),
        with_speculator(engine, config_only=True),
        budgets=flags.budget,
        prompt_len=flags.prompt_len,
        gpu=Device(
            kind="cpu" if on_cpu else "cuda",
            memory_bytes=free_bytes if on_cpu and flags.memory is None else parse_bytes(memory),
            bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
            link_bytes_per_s=parse_bandwidth(flags.link),
            flop_per_s=parse_flops(flags.flops),
        ),
        # A CPU computes in float32 unless another dtype was asked for.
        here=Here(
            device=engine.device,
            free_bytes=free_bytes,
            dtype=flags.dtype or ("float32" if engine.device == "cpu" else None),
        ),
        draft=_draft_memory(flags, engine),
    )
    if flags.as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from rich.console import Console

    from snapstream.plan.report import print_plan

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
