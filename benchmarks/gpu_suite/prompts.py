"""Sections on prefill: its speed and memory, and what running streams notice of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any

from benchmarks.gpu_suite.models import GREEDY, decoder_of, engine_config, make_runner, use_executor
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.prefill import prefill_flop
from benchmarks.shapes import random_prompt
from snapstream.config import AutoCount, PrefillAttentionName
from snapstream.engine.admission import job_chunk_len
from snapstream.engine.core import Engine
from snapstream.exec.runner import ModelRunner
from snapstream.plan.fit import resolve_chunking
from snapstream.step import JobSpec, PrefillEntry, StepPlan, StepResult, UnitRange
from snapstream.types import Request, SamplingParams


def prefill(
    model: str, points: list[tuple[int, int, int]], kernels: tuple[PrefillAttentionName, ...] = ("auto",)
) -> Callable[[Bench], Figures]:
    """Prefill of ``model`` for points of (prompt tokens, slots, chunk tokens), attended by each of ``kernels``; one
    unmeasured run of the first with each.
    """

    def section(bench: Bench) -> Figures:
        decoder = decoder_of(bench, model)
        asked: list[PrefillAttentionName] = []
        for kernel, point in product(kernels, points[:1] if bench.is_smoke else points):
            prompt_len, slots, chunk_len = (300, 64, 64) if bench.is_smoke else point
            config = engine_config(bench, min(slots, prompt_len), 1, prompt_len + 8, chunk_len)
            runner = ModelRunner(decoder, replace(config, prefill_attention=kernel))
            if kernel not in asked:
                prefill_once(bench, runner, prompt_len)
                asked.append(kernel)
            allocated = bench.device.reset_peak()
            seconds, result = prefill_once(bench, runner, prompt_len)
            extra = bench.device.peak_bytes() - allocated + runner.buffers.num_bytes
            flop = prefill_flop(decoder.config, prompt_len)
            compress_ms = result.prefilled["r"].compression.compress_ms
            figure: dict[str, Any] = {
                "model": model, "attention": runner.prefill_attention.name, "prompt_len": prompt_len, "slots": slots,
                "chunk_len": chunk_len,
                "prefill_s": seconds, "tokens_per_s": prompt_len / seconds, "tflop_per_s": flop / seconds / 1e12,
                "compress_share": compress_ms / 1e3 / seconds, "extra_gib": extra / 2**30,
                "staging_gib": runner.buffers.num_bytes / 2**30,
            }  # fmt: skip
            if bench.ceilings:
                figure["share_of_measured_products"] = figure["tflop_per_s"] / bench.ceilings["tflop_per_s"]
            if bench.device.peak_tflop_per_s is not None:
                figure["mfu"] = figure["tflop_per_s"] / bench.device.peak_tflop_per_s
            yield figure
            del runner
            bench.device.free()

    return section


def prefill_once(bench: Bench, runner: ModelRunner, prompt_len: int) -> tuple[float, StepResult]:
    config = runner.decoder.config
    token_ids = tuple(random_prompt(prompt_len, runner.decoder.weights.embed.shape[0]))  # what this rank can embed
    entry = PrefillEntry(
        request_id="r", token_ids=token_ids, rows=(0,), seeds=(0,),
        sampling=GREEDY, budget=runner.config.budget, selector=runner.config.selector,
    )  # fmt: skip
    job = JobSpec(job_id=0, staging_start=0, entries=(entry,), chunk_len=runner.config.chunking.chunk_len)
    units = UnitRange(0, 0, job.num_units(config.num_layers))
    bench.device.sync()
    began = perf_counter()
    result = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result()
    bench.device.sync()
    return perf_counter() - began, result


def streams(bench: Bench) -> Figures:
    """Time between tokens of eight running streams, alone and while a 128k prompt is prefilled, by quantum of units."""
    decoder = decoder_of(bench, "llama_8b")
    prompt_len, slots, num_rows = (1300, 64, 3) if bench.is_smoke else (131_072 - 2048, 8192, 9)
    # Chunk, quantum, seconds at most: the default, which should see the whole prompt; the one of a CPU; large units.
    points: list[tuple[AutoCount, int, float]] = [("auto", 0, 45.0), (512, 32, 20.0), (2048, 1, 20.0)]
    for chunk_len, quantum, limit_s in points[:1] if bench.is_smoke else points:
        cut = resolve_chunking(decoder.config, dtype=bench.device.dtype_name, device=bench.device.name,
                               chunk_len=chunk_len, prefill_quantum=quantum)  # fmt: skip
        runner = make_runner(bench, decoder, slots, num_rows, prompt_len + 1024, cut.chunk_len)
        use_executor(bench, runner, "graph", num_rows)
        config = replace(runner.config, chunking=cut)
        engine = Engine(runner, config, vocab_size=decoder.config.vocab_size, num_layers=decoder.config.num_layers)
        num_steps = 1000 if bench.is_smoke else 8000
        endless = SamplingParams(temperature=0.0, max_tokens=num_steps + 200, ignore_eos=True)
        for i in range(num_rows - 1):
            prompt = tuple(random_prompt(24, decoder.config.vocab_size, seed=i))
            engine.add_request(Request(request_id=f"s{i}", prompt_token_ids=prompt, sampling=endless))
        for _ in range(20):
            engine.step()
        idle = step_gaps(engine, 100, 10.0, lambda: False)
        long = tuple(random_prompt(prompt_len, decoder.config.vocab_size))
        end = replace(endless, max_tokens=8)
        output = engine.add_request(Request(request_id="long", prompt_token_ids=long, sampling=end))
        engine.step()
        busy = step_gaps(engine, num_steps, limit_s, lambda output=output: bool(output.token_ids))  # type: ignore[misc]
        yield {"chunk_len": job_chunk_len(cut, prompt_len), "is_default": chunk_len == "auto",
               "quantum_units": quantum or None, "step_work": cut.step_work, "streams": num_rows - 1,
               "prompt_len": prompt_len, "steps_while_prefilling": len(busy),
               "is_whole_prompt": bool(output.token_ids), "seconds_while_prefilling": sum(busy) / 1e3,
               **{f"idle_p{q}_ms": percentile(idle, q) for q in (50, 99)},
               **{f"busy_p{q}_ms": percentile(busy, q) for q in (50, 99)},
               "p99_ratio": percentile(busy, 99) / percentile(idle, 99)}  # fmt: skip
        del engine, runner
        bench.device.free()


def step_gaps(engine: Engine, steps: int, limit_s: float, is_over: Callable[[], bool]) -> list[float]:
    """Milliseconds of each step; every step gives each stream a token."""
    gaps: list[float] = []
    began = last = perf_counter()
    while len(gaps) < steps and last - began < limit_s and not is_over():
        engine.step()
        now = perf_counter()
        gaps.append((now - last) * 1e3)
        last = now
    return gaps


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
