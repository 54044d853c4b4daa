"""Section on decode attention over rows of latents, alone, in the sizes of DeepSeek: 128 heads share a row, or 16."""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.gpu_suite.suite import Bench, Figures
from snapstream.config import KVDType
from snapstream.kernels.interface import HeadNorm, RowPlaces, bind
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import KVSpec, Latent

HEADS = {"DeepSeek-V3": 128, "DeepSeek-V2-Lite": 16}
RANK, ROPE_DIM = 512, 64
ROWS: tuple[KVDType, ...] = ("auto", "fp8")
CASES = [(1, 32_768), (4, 32_768), (16, 8192), (64, 8192), (16, 131_072)]  # rows of a batch, slots


def latent_kernel(bench: Bench) -> Figures:
    """Microseconds of one call with the write of its slots; GB/s of latents read once, TFLOP/s of both products."""
    rank, rope_dim = (32, 16) if bench.is_smoke else (RANK, ROPE_DIM)
    bound = bind(bench.device.name)
    for model, num_heads in HEADS.items():
        for (batch, slots), kv_dtype in product([(2, 64)] if bench.is_smoke else CASES, ROWS):
            layer = Latent(num_kv_heads=1, key_dim=rank + rope_dim, value_dim=rank)
            spec = KVSpec(layers=(layer,), num_heads=num_heads, dtype=bench.device.dtype_name, kv_dtype=kv_dtype)
            cache = KVCache(spec, batch, slots, bench.device.name, bound)
            cache.k.copy_(torch.randn(spec.key_dim, device=bench.device.name))
            rows = torch.arange(batch, device=bench.device.name)
            places = RowPlaces(rows, torch.full_like(rows, slots - 1), torch.full_like(rows, slots))
            heads = torch.randn(batch, num_heads + 1, spec.key_dim, device=bench.device.name, dtype=bench.device.dtype)

            def call(heads: torch.Tensor = heads, cache: KVCache = cache, places: RowPlaces = places) -> torch.Tensor:
                return bound.attend_rows(heads, HeadNorm(None, 0.0), None, cache.layer(0), places, None)

            num_bytes = batch * slots * spec.token_bytes()  # of one layer
            flop = 2 * batch * slots * num_heads * (spec.key_dim + spec.value_dim)
            seconds = bench.device.seconds(call, 20, warm_ups=3)
            yield {"model": model, "kernel": bound.version, "rows": kv_dtype, "heads": num_heads, "batch": batch,
                   "slots": slots, "us": seconds * 1e6, "gb_per_s": num_bytes / seconds / 1e9,
                   "tflop_per_s": flop / seconds / 1e12}  # fmt: skip
            del cache
            bench.device.free()
