"""transformers on the very same weight tensors: static cache with compiled decode, and its continuous batching."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_suite.models import FILES, decode_seconds, decoder_of, make_runner, use_executor
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.shapes import random_prompt
from snapstream.models.decoder import Decoder
from snapstream.models.loader import named_views

MODEL = "llama_1b"


def peers(bench: Bench) -> Figures:
    """Decode at a few batches after a prompt of 2,048 tokens, full cache on both sides; prefill is not counted."""
    decoder = decoder_of(bench, MODEL)
    prompt_len, steps = (64, 16) if bench.is_smoke else (2048, 64)
    batches = (2,) if bench.is_smoke else (1, 16, 64)
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
        yield _static(bench, model, batch, prompt_len, steps)


def continuous(bench: Bench) -> Figures:
    """Continuous batching of transformers; it takes most of the free memory, so a smoke run on a CPU leaves it out."""
    if not bench.device.is_cuda:
        return
    model = transformers_model(bench, decoder_of(bench, MODEL))
    bench.forget()
    with torch.inference_mode(False):  # it works in a thread of its own
        yield _continuous(bench, model, 64, 2048, 64)


def transformers_model(bench: Bench, decoder: Decoder) -> Any:
    """A transformers model whose parameters are the views of our stacks: no second copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = decoder.config
    settings = {k: v for k, v in FILES[MODEL].items() if k not in ("architectures", "model_type")} | {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate_size,
    }  # fmt: skip
    with torch.inference_mode(False):
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(bench.device.name, bench.device.dtype).eval()
        views = {name: view.detach().clone() for name, view in named_views(shape, decoder.weights).items()}
        model.load_state_dict(views, assign=True, strict=False)
        model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt_ids(bench: Bench, batch: int, prompt_len: int, vocab: int) -> torch.Tensor:
    return torch.tensor([random_prompt(prompt_len, vocab, seed=i) for i in range(batch)], device=bench.device.name)


def _static(bench: Bench, model: Any, batch: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Decode speed as the difference of a long and a short ``generate``, so that prefill drops out."""
    ids = prompt_ids(bench, batch, prompt_len, model.config.vocab_size)
    mask = torch.ones_like(ids)

    def seconds(new_tokens: int) -> float:
        bench.device.sync()
        began = perf_counter()
        with torch.no_grad():
            model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                           do_sample=False, cache_implementation="static", max_length=None)  # fmt: skip
        bench.device.sync()
        return perf_counter() - began

    began = perf_counter()
    seconds(steps + 2)  # compiles
    first = perf_counter() - began
    per_step = (seconds(steps + 2) - seconds(2)) / steps
    return {"engine": "transformers static cache + compile", "batch": batch, "tokens_per_s": batch / per_step,
            "step_ms": per_step * 1e3, "first_call_s": first}  # fmt: skip


def _continuous(bench: Bench, model: Any, batch: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Output tokens per second of its continuous batching, prefill included."""
    from transformers import GenerationConfig

    prompts = prompt_ids(bench, batch, prompt_len, model.config.vocab_size).tolist()
    settings = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    best = float("inf")
    for _ in range(2):
        began = perf_counter()
        model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        best = min(best, perf_counter() - began)
    return {"engine": "transformers continuous batching, prefill included", "batch": batch,
            "tokens_per_s": batch * steps / best, "seconds": best}  # fmt: skip
