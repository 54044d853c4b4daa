"""The command; see ``__init__.py``. Sections are listed here in the order of their value."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu_suite import attention, peers, peers_kvpress, prompts, spec_prefill, speed
from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.suite import Bench, Section, run
from benchmarks.machine import describe

SMOKE_S = 3600.0
# A module with `sections: list[Section]` joins in by being there.
OPTIONAL = ("benchmarks.gpu_suite.kernels",)


def sections() -> list[Section]:
    """All sections, the most valuable first, each with the seconds it may take."""
    both, best = ("graph", "eager"), ("graph",)
    found = [
        Section("ceilings", speed.ceilings, 30),
        Section("decode_8b", speed.decode("llama_8b", [(8192, [1, 64, 8], 131_000)], both), 60),
        Section("prefill_8b", prompts.prefill("llama_8b", [
            (2048, 2048, 2048), (8192, 8192, 2048), (32_768, 8192, 2048), (131_072 - 8, 8192, 2048)]), 90),
        Section("largest_batch", speed.largest_batch, 60),
        Section("streams", prompts.streams, 100),
        *spec_prefill.sections,
        Section("decode_8b_fp8", speed.decode("llama_8b", [(8192, [1, 64], 131_000)], best, "fp8"), 40),
        Section("decode_small", speed.decode("qwen3_06b", [(2048, [1, 8, 64], 8000)], both), 30),
        Section("attention", attention.attention, 45),
        Section("decode_1b", speed.decode("llama_1b", [(8192, [1, 16, 64], 131_000)], both), 30),
        Section("peers", peers.peers, 100),
        Section("peers_continuous", peers.continuous, 60),
        Section("peers_kvpress", peers_kvpress.kvpress, 45),
        Section("decode_budgets", speed.decode("llama_8b", [
            (2048, [1, 64], 8000), (32_768, [1, 16], 131_000)], best), 40),
        Section("prefill_chunks", prompts.prefill("llama_8b", [
            (32_768, 8192, 1024), (131_072 - 8, 8192, 512), (32_768, 8192, 512), (32_768, 8192, 8192)]), 70),
        Section("decode_compiled", speed.decode("llama_8b", [(8192, [1, 64], 131_000)], ("graph+compile",)), 200),
    ]  # fmt: skip
    for name in OPTIONAL:
        if importlib.util.find_spec(name) is not None:
            found += importlib.import_module(name).sections
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run only these")
    parser.add_argument("--budget-s", type=float, default=520, help="seconds for all of it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU where there is no GPU")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("torch sees no GPU; --smoke runs tiny shapes without one")
    known = sections()
    unknown = set(args.only or ()) - {section.name for section in known}
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    wanted = [section for section in known if not args.only or section.name in args.only or section.name == "ceilings"]
    if args.smoke:  # it tells whether they run: a slow machine must not cut them short
        wanted = [replace(section, limit_s=SMOKE_S) for section in wanted]
    device = Device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"name": "gpu_suite", **describe(), **device.describe(), "date": date.today().isoformat(),
            "command": "python -m benchmarks.gpu_suite " + " ".join(sys.argv[1:])}  # fmt: skip
    result = run(wanted, Bench(device, args.smoke), SMOKE_S if args.smoke else args.budget_s, args.out, head)
    failed = [name for name, entry in result["sections"].items() if entry["error"]]
    print(
        f"wrote {args.out}; {len(failed)} of {len(wanted)} sections failed{': ' if failed else ''}{', '.join(failed)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
