"""Decode of a mixture of experts on a CPU, against transformers and llama.cpp, and against the bytes that the chosen
experts weigh; the arm over FP8 blocks reads a checkpoint of its own.

A step of B rows must read what every token passes and the experts that its rows chose: of X experts, k per token,
X (1 - (1 - k / X)^B) if they choose evenly. The benchmark counts those that were really chosen and compares the time of
a step with the time of reading so many bytes, in the arm's format. All engines get the same weights (random, fp32, a
Qwen3-MoE shape), prompts and greedy tokens, in processes of their own, as in ``benchmarks.peers``; a step's time is
the difference of a call for all tokens and of one for the first, so that prefill is not in it.

    make peers                              # once, for llama.cpp; without it the result says that it is left out
    python -m benchmarks.experts --save     # 100M parameters activated of 480M
    python -m benchmarks.experts --quick    # a small shape
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.machine import ceilings, report
from benchmarks.peers.arms import OWN, Arm
from benchmarks.peers.compare import compare
from benchmarks.peers.work import Job, prompts_of
from benchmarks.shapes import LLAMA_100M
from snapstream.config import ModelConfig, WeightFormat, WeightFormats
from snapstream.kernels.interface import bind
from snapstream.llm import LLM
from snapstream.models.matrix import quantize
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import decode_weight_bytes, num_parameters
from snapstream.startup.build import build_runner
from snapstream.types import SamplingParams

# The layers of LLAMA_100M with 32 experts of a quarter of its MLP, of which four are chosen: as much per token.
MIXTURE: dict[str, Any] = {**LLAMA_100M, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
                           "norm_topk_prob": True}  # fmt: skip
QUICK: dict[str, Any] = {**MIXTURE, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_experts": 16, "moe_intermediate_size": 128, "vocab_size": 4096}  # fmt: skip

ARMS = (
    Arm("transformers float32, grouped_mm", OWN, "run_transformers", "float32 grouped_mm"),
    Arm("transformers float32, batched_mm", OWN, "run_transformers", "float32 batched_mm"),
    *(Arm(f"llama.cpp {kind}", "llama_cpp", "run_llama_cpp", kind) for kind in ("f32", "f16", "q8_0", "q4_0")),
    Arm("snapstream eager float32", OWN, "run_snapstream", "eager float32"),
    *(
        Arm(f"snapstream looped {width}", OWN, "run_snapstream", f"looped {width}")
        for width in ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
    ),
)
_INT4 = WeightFormat(dtype="int4", group=32)
# Formats of llama.cpp weigh what ours do; its q4_0 has the embeddings at 4 bits too.
_PEERS = {"f32": WeightFormats.of("float32"), "f16": WeightFormats.of("float16"), "q8_0": WeightFormats.of("int8"),
          "q4_0": WeightFormats(layers=_INT4, tables=_INT4)}  # fmt: skip


_FLOATS = ("embed_tokens", "lm_head", "norm", ".mlp.gate.")  # in a checkpoint in FP8 blocks
_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def write_blocks(folder: Path) -> None:
    """The checkpoint in ``folder`` once more, in FP8 blocks and bf16 as models are published, in ``folder/fp8``."""
    settings = json.loads((folder / "config.json").read_text())
    found = dict[str, Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        for name, numbers in load_file(file).items():
            if any(part in name for part in _FLOATS):
                found[name] = numbers.to(torch.bfloat16)
            else:
                found[name], found[f"{name}_scale_inv"] = quantize(numbers)
    (folder / "fp8").mkdir()
    save_file(found, folder / "fp8" / "model.safetensors")
    settings |= {"quantization_config": _BLOCKS, "dtype": "bfloat16"}
    (folder / "fp8" / "config.json").write_text(json.dumps(settings))


@contextmanager
def mixture_folder(shape: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint folder of that shape, with one in FP8 blocks in it; deleted at the end."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)
        write_blocks(Path(folder))
        yield Path(folder)


def forms_of(arm: Arm) -> WeightFormats:
    """How the weights of an arm lie in memory."""
    if arm.option in _PEERS:
        return _PEERS[arm.option]
    if arm.option.endswith("fp8"):
        return WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
    return WeightFormats.of("float32" if arm.module == "run_transformers" else arm.option.split()[1])


def step_bytes(model: ModelConfig, formats: WeightFormats, chosen: float) -> float:
    """Bytes of the weights that a step reads whose rows chose so many experts of each layer."""
    assert model.moe is not None
    inner, hidden = model.moe.inner, model.hidden_size
    expert = formats.layers.num_bytes((2 * inner, hidden)) + formats.layers.num_bytes((hidden, inner))
    num_layers = len(model.moe.layers(model.num_layers))
    return decode_weight_bytes(model, "float32", formats, 0) + chosen * num_layers * expert


def mean_chosen(job: Job, batch: int, top_k: int) -> float:
    """Experts of a layer that a decode step of all prompts reads, counted; each layer asks for two products."""
    counts: list[int] = []
    kernels = bind("cpu", "torch")

    def counting(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
        if len(x) == batch * top_k:  # a decode step of all rows; prompts are longer
            counts.append(len(ends[ends > 0].unique()))
        return kernels.grouped_linear(x, weight, scale, ends)

    runner = partial(build_runner, kernels=replace(kernels, grouped_linear=counting))
    max_len = job.prompt_len + job.new_tokens
    with LLM(job.folder, budget="full", max_rows=batch, max_model_len=max_len, executor="eager", weights="float32",
             make_runner=runner, progress=False) as llm:  # fmt: skip
        llm.generate(prompts_of(job, batch, 2), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return sum(counts) / len(counts)


def run(job: Job, only: list[str], read_gb_per_s: float) -> dict[str, Any]:
    """Every arm in turn; those whose names begin with one of ``only``, if any are named."""
    model = read_model_config(Path(job.folder))
    moe = model.moe
    assert moe is not None
    chosen = {batch: mean_chosen(job, batch, moe.top_k) for batch in job.batches}

    def weighed(arm: Arm, line: dict[str, Any]) -> dict[str, Any]:
        batch, rate = line["batch"], line["decode_tokens_per_s"]
        num_bytes = step_bytes(model, forms_of(arm), chosen[batch])
        share = rate and num_bytes * rate / batch / 1e9 / read_gb_per_s
        return {"experts_chosen": chosen[batch], "experts_expected": moe.num_read(batch),
                "gb_per_step": num_bytes / 1e9, "share_of_read_rate": share}  # fmt: skip

    return compare(ARMS, job, only, weighed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=49)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="arms whose names begin so")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    with mixture_folder(QUICK if args.quick else MIXTURE) as folder:
        model = read_model_config(folder)
        job = Job(
            folder=str(folder), option="", threads=args.threads, vocab_size=model.vocab_size,
            prompt_len=args.prompt_len, new_tokens=args.new_tokens, batches=args.batches, repeats=args.repeats,
        )  # fmt: skip
        found = run(job, args.only, ceiling["read_gb_per_s"])
    settings = {
        "model": f"random Qwen3-MoE of {num_parameters(model) / 1e6:.0f}M, fp32 as stored", "threads": args.threads,
        "prompt_len": args.prompt_len, "new_tokens": args.new_tokens, "is_quick": args.quick,
    }  # fmt: skip
    report("experts", ceiling, settings | found, save=args.save)


if __name__ == "__main__":
    main()
