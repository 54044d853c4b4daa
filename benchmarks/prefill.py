"""How fast prompts are read over weights of some widths, and what compression adds: scoring, selection and the write of
the row, as a share of the whole.

Floor of compression: two passes of ``w x heads x candidates`` dot products per layer (w queries vote), about 2 w / N of
the attention; over latents more, as their votes are taken in their own, wider space. An engine decides by itself in
what numbers prefill multiplies (docs/models.md).

    python -m benchmarks.prefill --prompt-len 16384
    python -m benchmarks.prefill --prompt-len 8192 32768 --activations dtype auto    # without and with rounded inputs
    python -m benchmarks.prefill --prompt-len 16384 --model deepseek    # latents and experts, 100M parameters per token
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any, get_args

from benchmarks.machine import ceilings, report
from benchmarks.shapes import DEEPSEEK_100M, DEEPSEEK_TINY, deepseek_folder, llama_folder, random_prompt
from snapstream.config import KVBudget, ModelConfig
from snapstream.config.weights import ActivationOption
from snapstream.llm import LLM
from snapstream.models.sharding import num_parameters
from snapstream.types import SamplingParams

SHAPES = {"deepseek": DEEPSEEK_100M, "deepseek-tiny": DEEPSEEK_TINY}


def prefill_flop(model: ModelConfig, prompt_len: int) -> float:
    """Operations of a prefill; the last layer's attention and MLP run for one token only."""
    layers, hidden, heads = model.num_layers, model.hidden_size, model.num_heads
    if (latent := model.latent) is not None:
        q = latent.query_dim * heads
        projections = 2 * (hidden * (latent.q_rank + latent.latent_dim) + latent.q_rank * q if latent.q_rank else
                           hidden * (q + latent.latent_dim))  # fmt: skip
        expanded = heads * (latent.nope_dim + latent.value_dim)
        rest = 2 * (latent.kv_rank * expanded + hidden * heads * latent.value_dim)
        attention = heads * (latent.query_dim + latent.value_dim) * prompt_len
    else:
        projections = 2 * hidden * model.head_dim * (heads + 2 * model.num_kv_heads)
        rest = 2 * hidden * heads * model.head_dim
        attention = 2 * heads * model.head_dim * prompt_len  # causal: half of 4 N per token
    sparse = 0 if model.moe is None else len(model.moe.layers(layers))
    mlps = 6 * hidden * model.intermediate_size * (layers - sparse)
    if model.moe is not None:
        mlps += 6 * hidden * (model.moe.top_k * model.moe.inner + model.moe.shared_inner) * sparse
    return float(prompt_len) * (layers * projections + (layers - 1) * (rest + attention) + mlps * (layers - 1) / layers)


def run(
    model: str,
    prompt_lens: list[int],
    widths: list[str],
    activations: list[ActivationOption],
    part: int,
    chunk_len: int,
) -> tuple[str, list[dict[str, Any]]]:  # fmt: skip
    """The name of the model, and the figures of each length, width and rule of rounding."""
    figures, named = [], ""
    with llama_folder() if model == "llama" else deepseek_folder(SHAPES[model]) as folder:
        for prompt_len, width, rule in product(prompt_lens, widths, activations):
            if width == "float32" and rule != activations[-1]:
                continue  # rounds nothing
            budget = KVBudget.of(prompt_len // part)
            with LLM(folder, budget=budget, max_rows=1, max_model_len=prompt_len + 8, chunk_len=chunk_len,
                     weights=width, activations=rule, progress=False) as llm:  # fmt: skip
                params = SamplingParams(max_tokens=1, temperature=0.0)
                vocab = llm.model_config.vocab_size
                llm.generate([random_prompt(budget.capacity + 64, vocab, seed=1)], params)  # touches what is new
                output = llm.generate([random_prompt(prompt_len, vocab)], params)[0]
                flop = prefill_flop(llm.model_config, prompt_len)
                parameters = num_parameters(llm.model_config)
                attends = next(note for note in llm.notes if note.startswith("prefill attention: "))
                named = f"random {'Llama' if model == 'llama' else 'DeepSeek-V3'} of {parameters / 1e6:.0f}M"
            assert output.compression is not None
            seconds = output.timings.prefill_ms / 1e3
            figure = {
                "prompt_len": prompt_len,
                "weights": width,
                "multiplies": (llm.config.weights and llm.config.weights.prefill_inputs) or "float32",
                "attention": attends.split()[2],
                "slots": budget.capacity,
                "prefill_s": seconds,
                "tokens_per_s": prompt_len / seconds,
                "gflop_per_s": flop / seconds / 1e9,
                "compress_ms": output.compression.compress_ms,
                "compress_share": output.compression.compress_ms / output.timings.prefill_ms,
                "parameters": parameters,
            }
            figures.append(figure)
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in figure.items()}, flush=True)
    return named, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", *SHAPES], default="llama")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--activations", nargs="+", default=["auto"], choices=get_args(ActivationOption))
    parser.add_argument("--part", type=int, default=4, help="budget as a part of the prompt")
    parser.add_argument("--chunk-len", type=int, default=512)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    named, figures = run(args.model, args.prompt_len, args.weights, args.activations, args.part, args.chunk_len)
    name = "prefill" if args.model == "llama" else "prefill_latents"
    report(name, ceiling, {"model": named, "arms": figures}, save=args.save)


if __name__ == "__main__":
    main()
