"""The command; see ``__init__.py``. Sections are listed here in the order of their value."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu_suite import (
    attention,
    experts,
    kernels,
    latents,
    narrow,
    peers,
    peers_kvpress,
    prefixes,
    prompts,
    rank_share,
    requests,
    spec_prefill,
    speed,
)
from benchmarks.gpu_suite.apart import START_S, Apart, is_waiting, rehearse, run_apart
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.suite import Bench, Section, run
from benchmarks.gpu_tables import wanted_table
from figures.machine import describe

SMOKE_S = 3600.0
HANG_S = 3.0  # of the stand-in that hangs, in a rehearsal
GRACE_S = 15.0  # by which a figure may be late; then the process ends, within nine minutes


def sections() -> list[Section]:
    """All sections, the most valuable first, each with the seconds it may take."""
    both, best = ("graph", "eager"), ("graph",)
    decode = (
        "one decode step of rows after a prompt of `context` tokens; gb_per_step: weights and visible slots read once"
    )
    prefill = ("one prompt; compress_share: scoring, selection and write of the row; extra_gib: peak beside weights "
               "and rows, staging included; mfu: of the maker's dense bf16 rate")  # fmt: skip
    return [
        Section("ceilings", speed.ceilings, 30, "rates of this device that shares refer to: reads, copies, products"),
        Section("decode_8b", speed.decode("llama_8b", [(8192, [1, 64, 8], 131_000)], both), 60, decode),
        Section("decode_kernel", kernels.decode_kernel, 30, "decode attention alone over full rows"),
        Section("prefill_8b", prompts.prefill("llama_8b", [
            (2048, 2048, 2048), (8192, 8192, 2048), (32_768, 8192, 2048), (131_072 - 8, 8192, 2048)]), 90, prefill),
        Section("prefill_kernels", prompts.prefill(
            "llama_8b", [(32_768, 8192, 2048)], ("triton", "sdpa_cudnn", "sdpa_flash")),
                40, prefill),
        Section("largest_batch", speed.largest_batch, 60,
                "decode at the most rows that fit for prompts of 128k tokens; planned_gib: what plan counts, without "
                "the framework"),
        Section("streams", prompts.streams, 100,
                "milliseconds between tokens of running streams, alone (idle) and during a long prefill (busy)"),
        Section("prefixes", prefixes.prefixes, 60,
                "first token of a prompt of 33k tokens, cold and out of the prefix store; what eight streams notice"),
        *spec_prefill.sections,
        Section("peers", peers.peers, 100, "decode after a prompt of 2,048 tokens, full cache, the same weights"),
        Section("requests", requests.requests, 30, "64 prompts of 2,048 tokens at once through the engine"),
        Section("drafts", requests.drafts, 60, "speculative decoding by prompt lookup, compared with plain steps"),
        Section("peers_continuous", peers.continuous, 60, "the same prompts through transformers' continuous batching"),
        Section("decode_8b_fp8", speed.decode("llama_8b", [(8192, [1, 64], 131_000)], best, "fp8"), 40, decode),
        Section("decode_8b_int4", speed.decode("llama_8b", [(8192, [1, 64], 131_000)], best, "int4"), 40, decode),
        Section("decode_8b_heads", speed.decode(
            "llama_8b", [(8192, [1, 64], 131_000)], best, has_heads=True), 40, f"{decode}; per-head budgets"),
        Section("narrow_linear", narrow.narrow_linear, 60,
                "products of few tokens: bf16 by cuBLAS and, of one, by our kernel; int8 and int4 weights (codes), and "
                "widened block by block"),
        Section("decode_8b_narrow", narrow.decode_8b_narrow, 60, "decode_8b over weights of int4 and int8"),
        Section("decode_small", speed.decode("qwen3_06b", [(2048, [1, 2, 8, 16, 64], 8000)], best), 30, decode),
        Section("attention", attention.attention, 45, "kernels that can attend a chunk of a prompt"),
        Section("latent_kernel", latents.latent_kernel, 30, "decode attention alone over full rows of latents"),
        Section("decode_lite", speed.decode("deepseek_v2_lite", [(8192, [1, 8, 64], 131_000), (32_768, [16], 131_000)],
                                            both), 60, decode),
        Section("prefill_lite", prompts.prefill("deepseek_v2_lite", [(32_768, 8192, 2048)]), 40, prefill),
        Section("experts_kernel", experts.experts_kernel, 30, "products with a matrix per expert alone, bf16 and FP8"),
        Section("rank_share", rank_share.rank_share, 200,
                "one rank of sixteen of DeepSeek-R1 alone: share_ms and seconds_per_layer are measured, node_ms and "
                "prompt_s predicted: with the rest of the layers, and with collectives that are assumed"),
        Section("decode_1b", speed.decode("llama_1b", [(8192, [1, 16, 64], 131_000)], both), 30, decode),
        Section("peers_kvpress", peers_kvpress.kvpress, 45, "SnapKV in transformers, the same weights, one prompt"),
        Section("decode_budgets", speed.decode("llama_8b", [
            (2048, [1, 64], 8000), (32_768, [1, 16], 131_000)], best), 40, decode),
        Section("prefill_chunks", prompts.prefill("llama_8b", [
            (32_768, 8192, 1024), (131_072 - 8, 8192, 512), (32_768, 8192, 512), (32_768, 8192, 8192)]), 70, prefill),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run only these, in this order")
    parser.add_argument("--budget-s", type=float, default=520, help="seconds for all of it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU where there is no GPU")
    parser.add_argument("--rehearse", action="store_true", help="stand-ins on a CPU: one hangs, one dies")
    parser.add_argument("--in-process", action="store_true", help="all sections in this process, as each child runs")
    parser.add_argument(
        "--ceilings", type=json.loads, metavar="JSON", help="measured rates, which are not measured again"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        problems = rehearse([section.name for section in sections()], args.out, HANG_S)
        print("\n".join(problems) or f"wrote {args.out}: what hung and what died cost only themselves")
        return 1 if problems else 0
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("torch sees no GPU; --smoke runs tiny shapes without one")
    known = sections()
    unknown = set(args.only or ()) - {section.name for section in known}
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    names = dict.fromkeys(["ceilings", *args.only]) if args.only else [section.name for section in known]
    wanted = [section for name in names for section in known if section.name == name]
    if args.smoke:  # it tells whether they run: a slow machine must not cut them short
        wanted = [replace(section, limit_s=SMOKE_S) for section in wanted]
    if not args.smoke and not args.in_process:
        return _apart(wanted, args.out, args.budget_s)
    if args.ceilings:
        wanted = [section for section in wanted if section.name != "ceilings" or "ceilings" in (args.only or ())]
    device = Device("cuda" if torch.cuda.is_available() else "cpu")
    head = {"name": "gpu_suite", **describe(), **device.describe(), "date": date.today().isoformat(),
            "command": "python -m benchmarks.gpu_suite " + " ".join(sys.argv[1:])}  # fmt: skip
    budget_s, grace_s = (SMOKE_S, 0.0) if args.smoke else (args.budget_s, GRACE_S)
    result = run(wanted, Bench(device, args.smoke, args.ceilings or {}), budget_s, args.out, head, grace_s)
    print(wanted_table(result))
    failed = [name for name, entry in result["sections"].items() if entry["error"]]
    print(
        f"wrote {args.out}; {len(failed)} of {len(wanted)} sections failed{': ' if failed else ''}{', '.join(failed)}"
    )
    return 1 if failed else 0


def _apart(wanted: list[Section], out: Path, budget_s: float) -> int:
    """A process per section; what ``out`` has already is not run again."""

    def command(name: str, seconds: float, part: Path) -> list[str]:
        measured = json.loads(out.read_text()).get("ceilings") if out.exists() else None
        own = ["--out", str(part), "--only", name, "--budget-s", str(max(seconds - START_S, 1.0)), "--in-process"]
        ceilings = ["--ceilings", json.dumps(measured)] if measured else []
        return [sys.executable, "-m", "benchmarks.gpu_suite", *own, *ceilings]

    limits = [Apart(section.name, section.limit_s + START_S, section.about) for section in wanted]
    result = run_apart(limits, command, out, budget_s)
    print(wanted_table(result))
    waiting = [name for name, entry in result["sections"].items() if is_waiting(entry)]
    failed = [name for name, entry in result["sections"].items() if entry["error"]]
    print(f"wrote {out}; failed: {', '.join(failed) or 'none'}; left for the next run: {', '.join(waiting) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
