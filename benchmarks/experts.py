"""Decode of a mixture of experts on a CPU, against transformers, and against the bytes that the chosen experts weigh.

A step of B rows must read what every token passes and the experts that its rows chose: of X experts, k per token,
X (1 - (1 - k / X)^B) if they choose evenly. The benchmark counts those that were really chosen and compares the time of
a step with the time of reading so many bytes. All engines get the same checkpoint, prompts and greedy tokens; the time
of a step is the difference of a long and a short answer, so that prefill is not in it.

    python -m benchmarks.experts            # 100M parameters activated of 480M, random weights; transformers too
    python -m benchmarks.experts --quick    # a small shape
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ceilings, report
from benchmarks.shapes import LLAMA_100M, random_prompt
from snapstream.kernels.bound import bind
from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.llm import LLM
from snapstream.models.registry import read_model_config
from snapstream.models.shapes import decode_weight_bytes, num_parameters
from snapstream.request import SamplingParams
from snapstream.runner.executors import make_graph
from snapstream.start.build import build_runner

# The layers of LLAMA_100M with 32 experts of a quarter of its MLP, of which four are chosen: as much per token.
MIXTURE: dict[str, Any] = {**LLAMA_100M, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
                           "norm_topk_prob": True}  # fmt: skip
QUICK: dict[str, Any] = {**MIXTURE, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_experts": 16, "moe_intermediate_size": 128, "vocab_size": 4096}  # fmt: skip
SHORT = 4  # new tokens of the answer whose time is taken off
Answer = Callable[[int], list[list[int]]]  # from a number of new tokens to the tokens of every prompt


@contextmanager
def mixture_folder(shape: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint folder of that shape; deleted at the end."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)
        yield Path(folder)


def seconds_of_a_step(answer: Answer, new_tokens: int, repeats: int) -> tuple[float, list[list[int]]]:
    """Of decode alone, and the tokens of the long answer; the shortest of each counts."""
    best, tokens = {}, list[list[int]]()
    for count in (SHORT, new_tokens):
        answer(count)
        times = []
        for _ in range(repeats):
            began = perf_counter()
            tokens = answer(count)
            times.append(perf_counter() - began)
        best[count] = min(times)
    return (best[new_tokens] - best[SHORT]) / (new_tokens - SHORT), tokens


@contextmanager
def ours(folder: Path, prompts: list[list[int]], settings: dict[str, Any]) -> Iterator[Answer]:
    """``graph`` compiles for this batch and greedy tokens alone, which is all that is asked."""
    if settings.get("executor") == "graph":
        greedy = partial(make_graph, buckets=(len(prompts),), samplers=(SamplingNeeds(),))
        settings = {**settings, "make_runner": partial(build_runner, make_decode=greedy)}
    with LLM(folder, budget="full", max_rows=len(prompts), progress=False, **settings) as llm:

        def answer(new_tokens: int) -> list[list[int]]:
            params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            return [output.token_ids for output in llm.generate(prompts, params)]

        yield answer


@contextmanager
def theirs(folder: Path, prompts: list[list[int]], settings: dict[str, Any]) -> Iterator[Answer]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32, **settings)
    model.eval().generation_config.eos_token_id = None
    ids = torch.tensor(prompts)

    @torch.inference_mode()
    def answer(new_tokens: int) -> list[list[int]]:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                             pad_token_id=0)  # fmt: skip
        return [row[ids.shape[1] :].tolist() for row in out]

    yield answer


def mean_chosen(folder: Path, prompts: list[list[int]], new_tokens: int, max_len: int) -> float:
    """Experts of a layer that a decode step of all prompts reads, counted; each layer asks for two products."""
    counts: list[int] = []
    kernels = bind("cpu", "torch")
    num_pairs = len(prompts) * MIXTURE["num_experts_per_tok"]

    def counting(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
        if len(x) == num_pairs:  # a decode step of all rows; prompts are longer
            counts.append(len(ends[ends > 0].unique()))
        return kernels.grouped_linear(x, weight, scale, ends)

    runner = partial(build_runner, kernels=replace(kernels, grouped_linear=counting))
    with ours(folder, prompts, {"make_runner": runner, "executor": "eager", "max_model_len": max_len}) as answer:
        answer(new_tokens)
    return sum(counts) / len(counts)


def run(folder: Path, args: argparse.Namespace, read_gb_per_s: float) -> list[dict[str, Any]]:
    model = read_model_config(folder)
    assert model.moe is not None
    max_len = args.prompt_len + args.new_tokens
    arms: list[tuple[str, Any, dict[str, Any]]] = [
        (f"snapstream, {executor}", ours, {"executor": executor, "max_model_len": max_len})
        for executor in args.executors
    ]
    arms += [(f"transformers, {way}", theirs, {"experts_implementation": way}) for way in args.transformers]
    figures = []
    expert_bytes = 3 * 4 * model.moe.inner * model.hidden_size * model.num_layers  # one of each layer, fp32
    for rows in args.rows:
        prompts = [random_prompt(args.prompt_len, model.vocab_size, seed) for seed in range(rows)]
        chosen = mean_chosen(folder, prompts, 8, max_len)
        always = decode_weight_bytes(model, "float32", None, 0)
        read = always + chosen * expert_bytes
        want: list[list[int]] = []
        for name, engine, settings in arms:
            with engine(folder, prompts, settings) as answer:
                seconds, tokens = seconds_of_a_step(answer, args.new_tokens, args.repeats)
            want = want or tokens
            pairs = zip(chain(*tokens), chain(*want), strict=True)
            figures.append(
                {"engine": name, "rows": rows, "step_ms": seconds * 1e3, "tokens_per_s": rows / seconds,
                 "experts_chosen": chosen, "experts_expected": model.moe.num_read(rows), "gb_per_step": read / 1e9,
                 "share_of_read_rate": read / seconds / 1e9 / read_gb_per_s,
                 "same_tokens": sum(a == b for a, b in pairs) / (rows * args.new_tokens)}
            )  # fmt: skip
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in figures[-1].items()}, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--executors", nargs="*", default=["looped", "eager", "graph"])
    parser.add_argument("--transformers", nargs="*", default=["grouped_mm", "batched_mm"], metavar="WAY",
                        help="its implementations of experts")  # fmt: skip
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    with mixture_folder(QUICK if args.quick else MIXTURE) as folder:
        parameters = num_parameters(read_model_config(folder))
        figures = run(folder, args, ceiling["read_gb_per_s"])
    shape = {"model": f"random Qwen3-MoE of {parameters / 1e6:.0f}M, fp32", "prompt_len": args.prompt_len}
    report("experts", ceiling, {**shape, "is_quick": args.quick, "arms": figures}, save=args.save)


if __name__ == "__main__":
    main()
