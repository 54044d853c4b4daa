"""Section on the prefix store: a later turn's first token, the cost of a first turn, and what streams notice."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from benchmarks.gpu_suite.models import decoder_of, engine_config, use_executor
from benchmarks.gpu_suite.prompts import percentile, step_gaps
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.shapes import random_prompt
from snapstream.config import EngineConfig, PrefixStoreConfig
from snapstream.engine.core import Engine
from snapstream.exec.runner import ModelRunner
from snapstream.models.decoder import Decoder
from snapstream.plan.fit import resolve_chunking
from snapstream.types import Request, SamplingParams

NEW = 1024  # tokens of a later turn
STREAMS = 8


def prefixes(bench: Bench) -> Figures:
    """First tokens of a prompt cold, cold with the store on, and out of the store; then beside streams."""
    decoder = decoder_of(bench, "llama_8b")
    context, slots = (1300, 64) if bench.is_smoke else (32_768, 8192)
    cut = resolve_chunking(decoder.config, dtype=bench.device.dtype_name, device=bench.device.name)
    config = engine_config(bench, slots, STREAMS + 1, context + NEW + 256, cut.chunk_len)
    config = replace(config, chunking=cut)
    block_bytes = 256 * decoder.kv_spec().prefix_token_bytes
    num_blocks = 2 * (context + NEW) // 256 + 1
    store = PrefixStoreConfig(num_bytes=num_blocks * block_bytes, block_len=256, min_tokens=256)
    prompts = [random_prompt(context + NEW, decoder.config.vocab_size, seed=seed) for seed in range(3)]
    later = [prompt[:context] + random_prompt(NEW, decoder.config.vocab_size, seed=9) for prompt in prompts]
    engine = _engine(bench, decoder, config)
    cold = [_first_token_s(bench, engine, prompt, f"cold{i}")[0] for i, prompt in enumerate(prompts)][1:]
    expected = _first_token_s(bench, engine, later[2], "expected")[1]
    del engine
    bench.device.free()
    engine = _engine(bench, decoder, replace(config, prefix_store=store, prefix_blocks=num_blocks))
    filling = [_first_token_s(bench, engine, prompt, f"first{i}")[0] for i, prompt in enumerate(prompts)][1:]
    hit, token = _first_token_s(bench, engine, later[2], "later")
    stats = engine.prefix_stats
    assert stats is not None
    yield {"context": context, "new": NEW, "restored": stats.hits, "cold_s": min(cold), "cold_store_on_s": min(filling),
           "slowdown": min(filling) / min(cold), "hit_s": hit, "speedup": min(cold) / hit,
           "is_same_token": token == expected}  # fmt: skip
    yield {"streams": STREAMS, **_beside_streams(bench, engine, prompts[2][:context])}


def _engine(bench: Bench, decoder: Decoder, config: EngineConfig) -> Engine:
    runner = ModelRunner(decoder, config)
    use_executor(bench, runner, "graph", config.max_rows)
    return Engine(runner, config, vocab_size=decoder.config.vocab_size, num_layers=decoder.config.num_layers)


def _first_token_s(bench: Bench, engine: Engine, prompt: list[int], name: str) -> tuple[float, int]:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    bench.device.sync()
    began = perf_counter()
    output = engine.add_request(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=params))
    while engine.has_work:
        engine.step()
    return perf_counter() - began, output.token_ids[0]


def _beside_streams(bench: Bench, engine: Engine, stored: list[int]) -> dict[str, float]:
    """Time between tokens of running streams, alone and while a stored prompt is restored."""
    vocab_size, num_steps = 199 if bench.is_smoke else 32_000, 400
    endless = SamplingParams(temperature=0.0, max_tokens=4 * num_steps, ignore_eos=True)
    for index in range(STREAMS):
        prompt = tuple(random_prompt(24, vocab_size, seed=index))
        engine.add_request(Request(request_id=f"s{index}", prompt_token_ids=prompt, sampling=endless))
    for _ in range(20):
        engine.step()
    idle = step_gaps(engine, 100, 10.0, lambda: False)
    prompt = tuple(stored + random_prompt(NEW // 2, vocab_size, seed=77))
    asked = replace(endless, max_tokens=8)
    output = engine.add_request(Request(request_id="restored", prompt_token_ids=prompt, sampling=asked))
    busy = step_gaps(engine, num_steps, 20.0, lambda: bool(output.token_ids))
    for index in range(STREAMS):
        engine.abort(f"s{index}")
    while engine.has_work:
        engine.step()
    return {"idle_p99_ms": percentile(idle, 99), "busy_p99_ms": percentile(busy, 99),
            "p99_ratio": percentile(busy, 99) / percentile(idle, 99), "restored": output.cached_tokens}  # fmt: skip
