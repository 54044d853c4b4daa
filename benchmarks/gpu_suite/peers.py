"""transformers on the very same weight tensors: static cache with compiled decode, and its continuous batching."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_suite.models import FILES, decode_seconds, decoder_of, make_runner, use_executor
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.shapes import random_prompt
from benchmarks.stand_ins import checkpoint_of
from snapstream.models.decoder import Decoder

MODEL = "llama_1b"


def peers(bench: Bench) -> Figures:
    """Decode at a few batches after a prompt of 2,048 tokens, full cache on both sides; prefill is not counted."""
    decoder = decoder_of(bench, MODEL)
    prompt_len, steps = (64, 16) if bench.is_smoke else (2048, 64)
    batches = (2,) if bench.is_smoke else (1, 64, 16)
    for batch in batches:
        max_len = prompt_len + 256
        runner = make_runner(bench, decoder, max_len, batch, max_len, chunk_len=min(512, prompt_len))
        use_executor(bench, runner, "graph", batch)
        seconds = decode_seconds(bench, runner, batch, prompt_len, steps=steps)
        yield {"engine": "snapstream graph", "batch": batch, "tokens_per_s": batch / seconds, "step_ms": seconds * 1e3}
        del runner
        bench.device.free()
    model = transformers_model(bench, decoder)
    for batch in batches:
        with torch.inference_mode(False):  # as its users run it
            figure = _static(bench, model, batch, prompt_len, steps)
        yield figure


def continuous(bench: Bench) -> Figures:
    """Continuous batching of transformers; it takes most of the free memory, so a smoke run on a CPU leaves it out."""
    if not bench.device.is_cuda:
        return
    model = transformers_model(bench, decoder_of(bench, MODEL))
    bench.forget()
    with torch.inference_mode(False):  # it works in a thread of its own
        figure = _continuous(bench, model, 64, 2048, 64)
    yield figure


def transformers_model(bench: Bench, decoder: Decoder) -> Any:
    """A transformers model with a copy of our weights; made on the device, in its dtype."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = decoder.config
    settings = {k: v for k, v in FILES[MODEL].items() if k not in ("architectures", "model_type")} | {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate_size,
    }  # fmt: skip
    with torch.inference_mode(False):  # weights that are inference tensors can be no parameters
        with torch.device(bench.device.name):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=bench.device.dtype).eval()
        views = {name: view.detach().clone() for name, view in checkpoint_of(decoder.weights).items()}
        found = model.load_state_dict(views, assign=True, strict=False)
        model.tie_weights()
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers names its weights otherwise: {found}")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt_ids(bench: Bench, batch: int, prompt_len: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random prompts ``[batch, prompt_len]``, others for every ``seed``."""
    prompts = [random_prompt(prompt_len, vocab, seed=seed * batch + i) for i in range(batch)]
    return torch.tensor(prompts, device=bench.device.name)


def _static(bench: Bench, model: Any, batch: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Decode speed as the difference of a long and a short ``generate``, so that prefill drops out.

    One cache for all runs: its length is part of what is compiled, and ``generate`` alone makes it as long as each run.
    """
    from transformers import CompileConfig, StaticCache

    ids = prompt_ids(bench, batch, prompt_len, model.config.vocab_size)
    mask = torch.ones_like(ids)
    cache = StaticCache(config=model.config, max_cache_len=prompt_len + steps + 8)
    model.generation_config.compile_config = CompileConfig(dynamic=False) if bench.device.is_cuda else None

    def seconds(new_tokens: int) -> float:
        cache.reset()
        bench.device.sync()
        began = perf_counter()
        with torch.no_grad():
            model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                           do_sample=False, past_key_values=cache, max_length=None)  # fmt: skip
        bench.device.sync()
        return perf_counter() - began

    began = perf_counter()
    seconds(steps + 2)  # compiles
    first = perf_counter() - began
    seconds(steps + 2)  # captures what is compiled
    per_step = (seconds(steps + 2) - seconds(2)) / steps
    return {"engine": "transformers static cache + compile", "batch": batch, "tokens_per_s": batch / per_step,
            "step_ms": per_step * 1e3, "first_call_s": first}  # fmt: skip


def _continuous(bench: Bench, model: Any, batch: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Output tokens per second of its continuous batching, prefill included; other prompts in every run."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    best = float("inf")
    for run in range(3):  # the first makes the manager and its graphs, the others keep them
        prompts = prompt_ids(bench, batch, prompt_len, model.config.vocab_size, seed=run).tolist()
        bench.device.sync()
        began = perf_counter()
        found = model.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False, persistent_manager=True
        )
        best = min(best, perf_counter() - began)
        lengths = [len(output.generated_tokens) for output in found.values()]
        if lengths != [steps] * batch:  # it logs what fails and returns the rest
            raise RuntimeError(
                f"{len(lengths)} of {batch} prompts were answered, with {min(lengths, default=0)} tokens"
            )
    model.destroy_cached_continuous_batching_manager()
    return {"engine": "transformers continuous batching, prefill included", "batch": batch,
            "tokens_per_s": batch * steps / best, "seconds": best}  # fmt: skip
