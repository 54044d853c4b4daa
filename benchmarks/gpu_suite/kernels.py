"""Section on decode attention alone: what share of the read bandwidth the kernel reaches over full rows.

The cases are those of ``benchmarks/kernels.py``: captured, each call on other data, so that no cache helps.
"""

from __future__ import annotations

import torch

from benchmarks.compile_kernels import MODELS
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.kernels import decode_cases, seconds
from snapstream.kernels.interface import has_triton

CASES = [(64, 8192), (1, 8192), (16, 32_768), (1, 131_072)]  # rows, slots


def decode_kernel(bench: Bench) -> Figures:
    """Microseconds and GB/s of one call, per model and size; the shapes decide, no weights are made."""
    if not bench.device.is_cuda or not has_triton():
        yield {"skipped": "needs a GPU and Triton"}
        return
    for shape in MODELS:
        for batch, slots in CASES:
            for case in decode_cases(shape, batch, slots, torch.bfloat16, bench.device.name, tune=False):
                time = seconds(case.calls, bench.device.name)
                rate = case.num_bytes / time / 1e9
                figure = {"model": shape.name, "head_dim": shape.head_dim, "batch": batch, "slots": slots,
                          "us": time * 1e6, "gb_per_call": case.num_bytes / 1e9, "gb_per_s": rate}  # fmt: skip
                if bench.ceilings:
                    figure["share_of_read"] = rate / bench.ceilings["read_gb_per_s"]
                yield figure
            bench.device.free()
