"""Sections on ceilings and decode: bandwidth, decode against it, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_suite.models import decode_seconds, decoder_of, engine_config, make_runner, use_executor
from benchmarks.gpu_suite.suite import Bench, Figures
from snapstream.config import KVDType
from snapstream.kv.layout import num_visible
from snapstream.models.decoder import Decoder
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import decode_weight_bytes
from snapstream.plan.memory import engine_memory


def ceilings(bench: Bench) -> Figures:
    """Read, copy and matrix-product rates; the shares of the other sections refer to these."""
    device, small = bench.device, bench.is_smoke
    data = torch.ones((2**20 if small else 2**32), dtype=torch.uint8, device=device.name).view(torch.float32)
    other = torch.empty_like(data)
    copy = 2 * data.nbytes / device.seconds(lambda: other.copy_(data), 5)
    read = data.nbytes / device.seconds(lambda: torch.sum(data), 5)
    maximum = data.nbytes / device.seconds(lambda: torch.amax(data), 5)
    data = other = torch.empty(0)
    side = 256 if small else 8192
    a = torch.randn(side, side, device=device.name, dtype=device.dtype)
    rate = 2 * side**3 / device.seconds(lambda: a @ a, 10)
    bench.ceilings |= {
        "copy_gb_per_s": copy / 1e9,
        "read_gb_per_s": max(read, maximum) / 1e9,
        "tflop_per_s": rate / 1e12,
    }
    yield {"read_sum_gb_per_s": read / 1e9, "read_max_gb_per_s": maximum / 1e9, **bench.ceilings}


def decode(
    model: str,
    points: list[tuple[int, list[int], int]],
    executors: tuple[str, ...],
    kv_dtype: KVDType = "auto",
    has_heads: bool = False,
) -> Callable[[Bench], Figures]:
    """Decode of ``model`` for points of (slots, batches, tokens of context), with each executor.

    ``has_heads``: over per-head budgets of as many slots in all.
    """

    def section(bench: Bench) -> Figures:
        decoder = decoder_of(bench, model)
        for slots, batches, context in _smaller(bench, points):
            max_len = max(context + 256, slots)
            most = _rows_that_fit(bench, decoder, slots, max_len, kv_dtype)
            batches = [*dict.fromkeys(min(batch, most) for batch in batches)]
            runner = make_runner(bench, decoder, slots, max(batches), max_len, min(512, slots), kv_dtype, has_heads)
            for batch in batches:
                for executor in executors:
                    use_executor(bench, runner, executor, batch)
                    seconds = decode_seconds(bench, runner, batch, context, steps=20)
                    yield {"model": model, "executor": executor, "slots": slots, "context": context,
                           "kv_dtype": kv_dtype, "heads": "uneven" if has_heads else "equal",
                           **_rates(bench, decoder.config, batch, slots, context, seconds, kv_dtype)}  # fmt: skip
            del runner
            bench.device.free()

    return section


def _rows_that_fit(bench: Bench, decoder: Decoder, slots: int, max_len: int, kv_dtype: KVDType) -> int:
    """How many rows fit into the device's memory after the weights, a multiple of eight from eight on."""
    memory = engine_memory(decoder.config, engine_config(bench, slots, 1, max_len, min(512, slots), kv_dtype))
    fit = memory.rows_that_fit(bench.device.free_bytes() + decoder.weights.num_bytes)
    return max(fit - fit % 8 if fit >= 8 else fit, 1)


def largest_batch(bench: Bench) -> Figures:
    """As many rows as fit for prompts of 128k tokens: full rows, 32k and 8k slots; decode at that batch."""
    decoder = decoder_of(bench, "llama_8b")
    prompt = 512 if bench.is_smoke else 131_072 - 256
    first = 0.0
    for slots in (768, 192, 64) if bench.is_smoke else (131_072, 32_768, 8192):
        max_len = prompt + 256
        bench.device.free()
        bench.device.reset_peak()
        memory = engine_memory(decoder.config, engine_config(bench, slots, 1, max_len, chunk_len=512))
        free = bench.device.free_bytes() + decoder.weights.num_bytes  # the weights are there already
        planned = min(memory.rows_that_fit(free), 4 if bench.is_smoke else 256)
        batch, seconds = _most_rows(bench, decoder, slots, max_len, prompt, planned)
        # What the framework holds outside of its allocator is no part of this peak.
        row_bytes = memory.row_bytes + memory.state_bytes + memory.batch_bytes
        num_bytes = memory.fixed_bytes - memory.framework_bytes + batch * row_bytes
        figure = {"slots": slots, "prompt_len": prompt, "planned_rows": planned, "planned_gib": num_bytes / 2**30,
                  "peak_gib": bench.device.peak_bytes() / 2**30,
            **_rates(bench, decoder.config, batch, slots, prompt, seconds)}  # fmt: skip
        first = first or figure["tokens_per_s"]
        yield {**figure, "speedup_over_full": figure["tokens_per_s"] / first}


def _most_rows(
    bench: Bench, decoder: Decoder, slots: int, max_len: int, context: int, planned: int
) -> tuple[int, float]:
    """The planned rows, or as many as really fit if the plan was too bold, and the seconds of a decode step."""
    for batch in (planned, planned - max(1, planned // 20), planned - max(2, planned // 10)):
        try:
            runner = make_runner(bench, decoder, slots, batch, max_len, chunk_len=512)
            use_executor(bench, runner, "graph", batch)
            return batch, decode_seconds(bench, runner, batch, context, steps=20)
        except torch.OutOfMemoryError as error:
            print(f"{batch} rows of {slots} slots: {str(error).splitlines()[0]}", flush=True)
        runner = None  # type: ignore[assignment]
        bench.device.free()
        bench.device.reset_peak()
    raise RuntimeError(f"not even {batch} of {planned} planned rows of {slots} slots fit")


def _rates(
    bench: Bench, config: Any, batch: int, slots: int, context: int, seconds: float, kv_dtype: KVDType = "auto"
) -> dict[str, Any]:
    dtype = bench.device.dtype_name
    spec = kv_spec_of(config, dtype, kv_dtype)
    read = decode_weight_bytes(config, dtype, None, batch) + batch * spec.row_bytes(num_visible(context, slots))
    found = {"batch": batch, "step_ms": seconds * 1e3, "tokens_per_s": batch / seconds,
             "gb_per_step": read / 1e9, "gb_per_s": read / seconds / 1e9}  # fmt: skip
    if bench.ceilings:
        found["share_of_read"] = found["gb_per_s"] / bench.ceilings["read_gb_per_s"]
    return found


def _smaller(bench: Bench, points: list[tuple[int, list[int], int]]) -> list[tuple[int, list[int], int]]:
    return [(64, [1, 3], 200)] if bench.is_smoke else points
