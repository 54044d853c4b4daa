"""Section on the product with a matrix per expert, alone, in the sizes of published models, in bf16 and FP8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_suite.suite import Bench, Figures
from snapstream.kernels import pytorch
from snapstream.kernels.interface import bind

# Experts, chosen per token, rows and columns of gate and up of one expert.
MODELS = {"Qwen3-30B-A3B": (128, 8, 1536, 2048), "DeepSeek-V3": (256, 8, 4096, 7168)}
TOKENS = (1, 8, 64, 512, 4096)


def experts_kernel(bench: Bench) -> Figures:
    """Microseconds of one call; GB/s of the chosen experts' matrices, read once each, and TFLOP/s.

    ``engine`` is what a layer calls, ``grouped_mm`` PyTorch's own product of bf16.
    """
    device, dtype = bench.device.name, bench.device.dtype
    for model, sizes in MODELS.items():
        num_experts, top_k, num_out, num_in = (8, 2, 64, 32) if bench.is_smoke else sizes
        weight = torch.randn(num_experts, num_out, num_in, device=device, dtype=dtype) / num_in**0.5
        blocks = torch.ones(num_experts, -(-num_out // 128), -(-num_in // 128), device=device)
        forms: dict[str, tuple[Tensor, Tensor | None]] = {"bf16": (weight, None)}
        if bench.is_smoke or torch.cuda.get_device_capability() >= (8, 9):
            forms["fp8"] = (weight.to(torch.float8_e4m3fn), blocks)
        for tokens in TOKENS[:2] if bench.is_smoke else TOKENS:
            scores = torch.rand(tokens, num_experts, device=device)
            chosen = scores.topk(top_k).indices.flatten().sort().values
            ends = torch.searchsorted(chosen, torch.arange(num_experts, device=device), right=True, out_int32=True)
            x = torch.randn(tokens * top_k, num_in, device=device, dtype=dtype)
            for name, (matrices, scale) in forms.items():
                calls: dict[str, Callable[[], object]] = {
                    "engine": partial(bind(device).grouped_linear, x, matrices, scale, ends)
                }
                if scale is None:
                    calls["grouped_mm"] = partial(pytorch.grouped_linear, x, matrices, None, ends)
                num_bytes = len(chosen.unique()) * num_out * num_in * matrices.element_size()
                flop = 2 * len(x) * num_out * num_in
                for way, call in calls.items():
                    seconds = bench.device.seconds(call, 20, warm_ups=3)
                    yield {"model": model, "weights": name, "tokens": tokens, "way": way, "us": seconds * 1e6,
                           "experts_read": len(chosen.unique()), "gb_per_s": num_bytes / seconds / 1e9,
                           "tflop_per_s": flop / seconds / 1e12}  # fmt: skip
        del weight, forms
        bench.device.free()
