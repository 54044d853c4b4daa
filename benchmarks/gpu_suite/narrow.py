"""Sections on products of few tokens: each alone at real sizes, and whole decode steps of an 8B model in int8 and int4.

Of bf16 weights ``torch`` is cuBLAS and ``one_token`` our kernel for a single token. Of int8 and int4 ones ``codes`` is
the kernel that reads codes, ``widened`` the same weight widened block by block: where the second becomes faster is
where ``models/matrix.py`` should change over (``FEW``). Captured, a call on each of several matrices in turn.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_suite.models import config_of, decode_seconds, engine_config, use_executor
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.kernels import Call, seconds
from benchmarks.stand_ins import random_share
from snapstream.config import WeightFormat, WeightFormats
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import bind
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import make_matrix
from snapstream.models.sharding import Share, decode_weight_bytes

TOKENS = (1, 4, 16, 64, 128, 256)
MODELS = ("qwen3_06b", "llama_8b")
GROUP = 32
SLOTS, CONTEXT = 8192, 131_000


def narrow_linear(bench: Bench) -> Figures:
    """Microseconds and GB/s, of the bytes as they are stored, of each matrix of a layer. Copies that together exceed a
    cache take turns, as layers do.
    """
    device, dtype = bench.device.name, bench.device.dtype
    kernels = bind(device)
    for model in MODELS:
        for role, shape in _matrices(bench, model).items():
            for width in (bench.device.dtype_name, "int8", "int4"):
                is_quantized = width != bench.device.dtype_name
                form = WeightFormat(dtype=width, group=GROUP if is_quantized else 0)
                copies = 2 if bench.is_smoke else max(2, -(-(2**28) // form.num_bytes(shape)))
                weights = [make_matrix(form, shape, dtype, device) for _ in range(copies)]
                for weight in weights:
                    weight.fill(torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5)
                torch_only = replace(kernels, code_linear=None, one_linear=None)
                ways = {"codes": replace(kernels, one_linear=None), "widened": torch_only}
                if not is_quantized:
                    ways = {"one_token": kernels, "torch": torch_only}
                for tokens in TOKENS[:2] if bench.is_smoke else TOKENS:
                    x = torch.randn(tokens, shape[1], device=device, dtype=dtype)
                    for way, own in ways.items():
                        if way == "one_token" and tokens > 1:
                            continue
                        calls: list[Call] = [partial(weight.multiply, x, None, own) for weight in weights]
                        time = seconds(calls, device)
                        figure: dict[str, Any] = {
                            "model": model, "role": role, "weights": width, "way": way, "tokens": tokens,
                            "us": time * 1e6, "gb_per_s": weights[0].num_bytes / time / 1e9,
                        }  # fmt: skip
                        if bench.ceilings:
                            figure["share_of_read"] = figure["gb_per_s"] / bench.ceilings["read_gb_per_s"]
                        yield figure
                del weights, weight
                bench.device.free()


def decode_8b_narrow(bench: Bench) -> Figures:
    """A decode step of the whole model with weights of each width; int4 is what ``weights="int4"`` makes."""
    bench.forget()
    config, device = config_of(bench, "llama_8b"), bench.device
    slots, context, batches = (64, 200, (1, 3)) if bench.is_smoke else (SLOTS, CONTEXT, (1, 8, 64))
    for width in ("int4", "int8"):
        formats = WeightFormats.of(width)
        decoder = Decoder(config, random_share(Share(whole=config, own=config), device.dtype, device.name, 0, formats))
        engine = engine_config(bench, slots, max(batches), context + 256, min(512, slots))
        runner = ModelRunner(decoder, replace(engine, weights=formats))
        for batch in batches:
            use_executor(bench, runner, "graph", batch)
            time = decode_seconds(bench, runner, batch, context, steps=20)
            read = decode_weight_bytes(config, device.dtype_name, formats, batch)
            read += batch * decoder.kv_spec().row_bytes(slots)
            figure: dict[str, Any] = {
                "model": "llama_8b", "weights": formats.describe(), "executor": "graph", "batch": batch, "slots": slots,
                "context": context, "step_ms": time * 1e3, "tokens_per_s": batch / time,
                "gb_per_step": read / 1e9, "gb_per_s": read / time / 1e9,
            }  # fmt: skip
            if bench.ceilings:
                figure["share_of_read"] = figure["gb_per_s"] / bench.ceilings["read_gb_per_s"]
            yield figure
        del runner, decoder
        bench.device.free()


def _matrices(bench: Bench, model: str) -> dict[str, tuple[int, int]]:
    """The matrices ``[out, in]`` of a layer."""
    config = config_of(bench, model)
    hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    found = {"qkv": (wide + 2 * config.num_kv_heads * config.head_dim, hidden), "o": (hidden, wide),
             "gate_up": (2 * inner, hidden), "down": (hidden, inner)}  # fmt: skip
    return dict(list(found.items())[2:]) if bench.is_smoke else found
