"""Section on kvpress (SnapKV inside transformers) on the same weights: prefill with compression, then decode.

Where kvpress is not installed the section says so; it needs the transformers version that kvpress asks for.
"""

from __future__ import annotations

import importlib.util
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_suite.models import decode_seconds, decoder_of, make_runner, use_executor
from benchmarks.gpu_suite.peers import MODEL, prompt_ids, transformers_model
from benchmarks.gpu_suite.prompts import prefill_once
from benchmarks.gpu_suite.suite import Bench, Figures

PART = 4  # of the prompt's tokens one in so many is kept


def kvpress(bench: Bench) -> Figures:
    """One prompt of 32k tokens at a quarter of its cache: seconds to read it, milliseconds of a decode step."""
    if importlib.util.find_spec("kvpress") is None:
        yield {"engine": "kvpress", "skipped": "kvpress is not installed"}
        return
    prompt_len, steps = (256, 4) if bench.is_smoke else (32_768, 32)
    slots = prompt_len // PART
    decoder = decoder_of(bench, MODEL)
    runner = make_runner(bench, decoder, slots, 1, prompt_len + 256, chunk_len=min(2048, prompt_len))
    use_executor(bench, runner, "graph", 1)
    prefill_once(bench, runner, prompt_len)
    ours, _ = prefill_once(bench, runner, prompt_len)
    step = decode_seconds(bench, runner, 1, prompt_len, steps=steps)
    yield {"engine": "snapstream graph", "prompt_len": prompt_len, "slots": slots, "prefill_s": ours,
           "step_ms": step * 1e3}  # fmt: skip
    del runner
    bench.device.free()
    model = transformers_model(bench, decoder)
    _pressed(bench, model, prompt_len, slots, steps=1)
    yield {"engine": "kvpress", **_pressed(bench, model, prompt_len, slots, steps)}


def _pressed(bench: Bench, model: Any, prompt_len: int, slots: int, steps: int) -> dict[str, Any]:
    from kvpress import SnapKVPress  # type: ignore[import-not-found]
    from transformers import DynamicCache

    cache, ids = DynamicCache(), prompt_ids(bench, 1, prompt_len, model.config.vocab_size)
    press = SnapKVPress(compression_ratio=1 - (slots + 0.5) / prompt_len)  # it rounds what it keeps down
    bench.device.sync()
    began = perf_counter()
    with torch.no_grad(), press(model):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    bench.device.sync()
    read, kept = perf_counter() - began, cache.get_seq_length()
    began = perf_counter()
    with torch.no_grad():
        for step in range(steps):
            place = torch.tensor([[prompt_len + step]], device=bench.device.name)
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache, position_ids=place).logits
    bench.device.sync()
    return {"prompt_len": prompt_len, "slots": kept, "prefill_s": read,
            "step_ms": (perf_counter() - began) / steps * 1e3}  # fmt: skip
