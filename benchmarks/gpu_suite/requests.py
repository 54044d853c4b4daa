"""Sections on whole requests through the engine: many at once, and drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from benchmarks.gpu_suite.models import decoder_of, engine_config, use_executor
from benchmarks.gpu_suite.peers import MODEL
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.shapes import random_prompt
from benchmarks.speculation import edited
from snapstream.config.engine import SPECULATIVE_TOKENS
from snapstream.engine.core import Engine
from snapstream.exec.runner import ModelRunner
from snapstream.types import Request, SamplingParams

RUNS = 2  # the first is unmeasured


def requests(bench: Bench) -> Figures:
    """The prompts of ``peers_continuous``, all at once, full cache: output tokens per second, prefill included."""
    decoder = decoder_of(bench, MODEL)
    batch, prompt_len, steps = (3, 40, 4) if bench.is_smoke else (64, 2048, 64)
    max_len = prompt_len + steps + 8
    engine = _engine(bench, 0, batch, max_len, chunk_len=min(2048, prompt_len))
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for run in range(RUNS):
        prompts = [
            tuple(random_prompt(prompt_len, decoder.config.vocab_size, seed=run * batch + i)) for i in range(batch)
        ]
        answers, elapsed = _answers(bench, engine, prompts, [params] * batch)
    assert all(len(answer) == steps for answer in answers)
    yield {"engine": "snapstream engine, prefill included", "batch": batch, "prompt_len": prompt_len,
           "output_len": steps, "tokens_per_s": batch * steps / elapsed, "seconds": elapsed}  # fmt: skip


def drafts(bench: Bench) -> Figures:
    """Prompt lookup in answers that repeat a text with one token in twenty changed, and in those that repeat nothing,
    compared with plain steps. Answers are sampled; ``same_tokens`` is the share that plain steps draw as well.
    """
    decoder = decoder_of(bench, MODEL)
    vocab = decoder.config.vocab_size
    prompt_len, steps = (40, 24) if bench.is_smoke else (512, 192)
    for batch in (1, 8):
        prompts = [random_prompt(prompt_len, vocab, seed=row) for row in range(batch)]
        fresh = [SamplingParams(max_tokens=steps, seed=row, ignore_eos=True) for row in range(batch)]
        plain, drafting = (
            _engine(bench, count, batch, prompt_len + steps, prompt_len) for count in (0, SPECULATIVE_TOKENS)
        )
        want, plain_s = [_answers(bench, plain, prompts, fresh) for _ in range(RUNS)][-1]
        edit = [replace(own, prediction=edited(ids, vocab)) for own, ids in zip(fresh, want, strict=True)]
        for name, params in (("fresh", fresh), ("edit", edit)):
            runs = [_answers(bench, drafting, prompts, params) for _ in range(RUNS)]
            same = [a == b for answers in zip(runs[-1][0], want, strict=True) for a, b in zip(*answers, strict=True)]
            yield {"text": name, "batch": batch, "tokens_per_s": batch * steps / runs[-1][1],
                   "speedup": plain_s / runs[-1][1], "same_tokens": sum(same) / len(same)}  # fmt: skip


def _engine(bench: Bench, num_speculative_tokens: int, batch: int, max_len: int, chunk_len: int) -> Engine:
    """With a full cache."""
    decoder = decoder_of(bench, MODEL)
    config = engine_config(bench, max_len, batch, max_len, chunk_len)
    runner = ModelRunner(decoder, replace(config, num_speculative_tokens=num_speculative_tokens))
    use_executor(bench, runner, "graph", batch)
    return Engine(runner, runner.config, vocab_size=decoder.config.vocab_size, num_layers=decoder.config.num_layers)


def _answers(
    bench: Bench, engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[list[int]], float]:
    """Tokens, and seconds with prefill."""
    bench.device.sync()
    began = perf_counter()
    outputs = [
        engine.add_request(Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=own))
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    while engine.has_work:
        engine.step()
    return [list(output.token_ids) for output in outputs], perf_counter() - began
