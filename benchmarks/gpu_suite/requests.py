"""Section on whole requests through the engine: what stands beside transformers' continuous batching."""

from __future__ import annotations

from time import perf_counter

from benchmarks.gpu_suite.models import decoder_of, make_runner, use_executor
from benchmarks.gpu_suite.peers import MODEL
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.shapes import random_prompt
from snapstream.engine.core import Engine
from snapstream.types import Request, SamplingParams

RUNS = 2  # the first is unmeasured


def requests(bench: Bench) -> Figures:
    """The prompts of ``peers_continuous``, all at once, full cache: output tokens per second, prefill included."""
    decoder = decoder_of(bench, MODEL)
    batch, prompt_len, steps = (3, 40, 4) if bench.is_smoke else (64, 2048, 64)
    max_len = prompt_len + steps + 8
    runner = make_runner(bench, decoder, max_len, batch, max_len, chunk_len=min(2048, prompt_len))
    use_executor(bench, runner, "graph", batch)
    engine = Engine(runner, runner.config, vocab_size=decoder.config.vocab_size, num_layers=decoder.config.num_layers)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for run in range(RUNS):
        prompts = [
            tuple(random_prompt(prompt_len, decoder.config.vocab_size, seed=run * batch + i)) for i in range(batch)
        ]
        bench.device.sync()
        began = perf_counter()
        outputs = [
            engine.add_request(Request(request_id=f"{run}-{i}", prompt_token_ids=prompt, sampling=params))
            for i, prompt in enumerate(prompts)
        ]
        while engine.has_work:
            engine.step()
        bench.device.sync()
        elapsed = perf_counter() - began
    assert all(len(output.token_ids) == steps for output in outputs)
    yield {"engine": "snapstream engine, prefill included", "batch": batch, "prompt_len": prompt_len,
           "output_len": steps, "tokens_per_s": batch * steps / elapsed, "seconds": elapsed}  # fmt: skip
