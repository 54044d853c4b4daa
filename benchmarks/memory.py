"""Peak memory of a long prefill against the formula that ``snapstream plan`` prints, for few and for many layers.

Each measurement runs in a process of its own. The engine is warmed up with one chunk first, so that workspaces of the
matrix library are not counted; then the high-water mark is reset and the long prompt prefilled. What the prompt may
cost beside weights: hidden states and one layer's K and V (``plan/memory.py``), and its row. The same for 8 as
for 24 layers, but for the row. The C library is told to give freed temporaries back at once
(``MALLOC_MMAP_THRESHOLD_``); with what it keeps otherwise the peak is measured too, for the first number of layers.

    python -m benchmarks.memory --prompt-len 32768 --layers 8 24
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt

# About 100M parameters at 24 layers; narrower than LLAMA_100M so that 24 layers of a 32k prompt end in minutes.
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def measure(folder: str, prompt_len: int, part: int, chunk_len: int) -> dict[str, Any]:
    """Bytes that one prefill adds to this process, and the formula's."""
    from snapstream.config import KVBudget
    from snapstream.kv.spec import KVSpec
    from snapstream.llm import LLM
    from snapstream.plan.memory import prefill_memory
    from snapstream.types import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0)
    budget = KVBudget.of(prompt_len // part)
    with LLM(folder, budget=budget, max_rows=1, max_model_len=prompt_len + 8, chunk_len=chunk_len,
             progress=False) as llm:  # fmt: skip
        llm.generate([random_prompt(chunk_len)], params)  # one chunk: workspaces of the matrix library exist
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size
        before = _status_kib("VmRSS") * 1024
        output = llm.generate([random_prompt(prompt_len)], params)[0]
        peak = _status_kib("VmHWM") * 1024
        planned = prefill_memory(
            llm.model_config, prompt_len, chunk_len=chunk_len, dtype="float32", selector=llm.config.selector
        )
        spec = KVSpec.of(llm.model_config, "float32")
        row, all_layers = spec.row_bytes(budget.capacity), spec.row_bytes(prompt_len)
    return {
        "layers": llm.model_config.num_layers,
        "measured_mib": (peak - before - row) / 2**20,
        "planned_mib": planned.total_bytes / 2**20,
        "measured_over_planned": (peak - before - row) / planned.total_bytes,
        "row_mib": row / 2**20,
        "chunk_major_staging_mib": all_layers / 2**20,
        "prefill_s": output.timings.prefill_ms / 1e3,
    }


def _in_child(command: list[str], settings: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--part", type=int, default=8, help="budget as a part of the prompt")
    parser.add_argument("--chunk-len", type=int, default=512)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a checkpoint folder: measure in this process
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.prompt_len, args.part, args.chunk_len)))
        return
    ceiling = ceilings()
    figures = []
    for layers in args.layers:
        with llama_folder(num_hidden_layers=layers, **SHAPE) as folder:
            command = [sys.executable, "-m", "benchmarks.memory", "--measure", str(folder), "--prompt-len",
                       str(args.prompt_len), "--part", str(args.part), "--chunk-len", str(args.chunk_len)]  # fmt: skip
            figures.append(_in_child(command, {"MALLOC_MMAP_THRESHOLD_": "262144"}))
            if len(figures) == 1:
                figures[0]["default_allocator_mib"] = _in_child(command, {})["measured_mib"]
            print({k: round(v, 3) for k, v in figures[-1].items()}, flush=True)
    report("memory", ceiling, {"model": f"random Llama fp32 {SHAPE}", "prompt_len": args.prompt_len,
                               "arms": figures}, save=args.save)  # fmt: skip


if __name__ == "__main__":
    main()
