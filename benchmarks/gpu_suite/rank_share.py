"""Section on one rank of many, alone: its share of decode steps and of a prompt, with collectives left out.

``Pretend(0, W)`` cuts the model as rank 0 of W and communicates nothing. Weights are random FP8 blocks, tokens are
drawn anew for every step from the rank's own lines of the vocabulary, so that the router spreads them as evenly as
random weights do. Experts see all B rows of a step, attention the rank's ``ceil(B / W)`` rows. What it cannot show: the
skew of a trained router, ranks that wait for each other, and the collectives: those are added as assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.models import GREEDY, use_executor
from benchmarks.gpu_suite.prompts import prefill_once
from benchmarks.gpu_suite.suite import Bench, Figures
from benchmarks.predictor import LINKS, Predictor
from benchmarks.published import DEEPSEEK_V3
from benchmarks.stand_ins import Pretend, occupy, random_share
from snapstream.config import Chunking, EngineConfig, KVBudget, ModelConfig, ParallelConfig, WeightFormats
from snapstream.config.weights import WeightFormat
from snapstream.exec.eager import EagerDecode
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import Kernels, bind
from snapstream.models.decoder import Decoder
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import Share
from snapstream.step import StepPlan

RANK = 0  # has the first lines of the vocabulary, so that drawn and pretended tokens are its own
BLOCKS = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
# Of no published model: widths at which nothing is split unevenly and FP8 blocks stay whole.
SMALL: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 512,
    "intermediate_size": 512, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured of which rank."""

    model: ModelConfig
    parallel: ParallelConfig
    batches: tuple[int, ...]
    slots: int
    prompt_len: int  # its first layers are prefilled; 0: none
    prompt_layers: int = 4
    chunk_len: int = 512
    executor: str = "graph"
    steps: int = 20


def share_of_r1(size: int, layers: int = 0, **settings: Any) -> Asked:
    """Of DeepSeek-R1 in FP8 over ``size`` ranks, rows dealt out; with ``layers`` so many of its layers."""
    model = model_config_from_dict(DEEPSEEK_V3 | ({"num_hidden_layers": layers} if layers else {}))
    return Asked(model=model, parallel=ParallelConfig(size=size, attention="dp"), **settings)


def small_share() -> Asked:
    """A tiny shape of the same kind, for smoke runs."""
    model = model_config_from_dict(DEEPSEEK_V3 | SMALL)
    return Asked(model=model, parallel=ParallelConfig(size=2, attention="dp"), batches=(1, 4), slots=48,
                 prompt_len=96, prompt_layers=1, chunk_len=32, steps=2)  # fmt: skip


def rank_share(bench: Bench) -> Figures:
    """One rank of 16 of DeepSeek-R1."""
    bench.forget()
    share = (
        small_share() if bench.is_smoke else share_of_r1(16, batches=(16, 64, 128), slots=32_768, prompt_len=131_072)
    )
    yield from measured(bench, share)


def measured(bench: Bench, share: Asked) -> Figures:
    """A figure per batch, then one of the prompt."""
    yield from _steps(bench, share)
    bench.device.free()
    if share.prompt_len:
        yield _prompt(bench, share)
        bench.device.free()


def _steps(bench: Bench, share: Asked) -> Iterator[dict[str, Any]]:
    decoder = _decoder(bench, share.model, share.parallel)
    largest = max(share.batches)
    runner = ModelRunner(decoder, _config(bench, share, share.slots, largest, share.slots + 4096))
    draw = _Tokens(runner)
    for batch in share.batches:
        use_executor(bench, runner, share.executor, batch)
        occupy(runner, range(batch), share.slots, GREEDY)
        draw()
        experts = _experts_read(runner, batch)
        plan = StepPlan(step_id=0, decode_rows=tuple(range(batch)))
        pending: list[Any] = []

        def step(plan: StepPlan = plan, pending: list[Any] = pending) -> None:
            draw()
            pending.append(runner.submit(plan))  # each result is read one step late, as the engine does
            if len(pending) > 1:
                pending.pop(0).result()

        seconds = bench.device.seconds(step, share.steps, warm_ups=3)
        predicted = _predictor(bench, share).step(batch, share.slots)
        own = predicted.weights_s + predicted.rows_s + predicted.host_s
        nodes = [seconds + over for over in predicted.collectives_s]
        yield {"ranks": share.parallel.size, "layers": share.model.num_layers, "batch": batch, "slots": share.slots,
               "own_rows": -(-batch // share.parallel.size), "executor": share.executor, "experts_read": experts,
               "share_ms": seconds * 1e3, "predicted_share_ms": own * 1e3, "num_collectives": predicted.num_collectives,
               **_over_links("node_ms", [1e3 * node for node in nodes]),
               **_over_links("tokens_per_s", [batch / node for node in nodes])}  # fmt: skip


def _prompt(bench: Bench, share: Asked) -> dict[str, Any]:
    """Layers with experts; one more, in which the last token alone goes through attention and MLP, as always."""
    assert share.model.moe is not None
    model = replace(share.model, num_layers=share.prompt_layers + 1, moe=replace(share.model.moe, first_dense=0))
    decoder = _decoder(bench, model, share.parallel)
    runner = ModelRunner(decoder, _config(bench, share, share.slots, 1, share.prompt_len + 8))
    seconds = [prefill_once(bench, runner, share.prompt_len)[0] for _ in range(2)][1]
    per_layer = seconds / share.prompt_layers
    predicted = _predictor(bench, share).prompt(share.prompt_len, share.chunk_len)
    layers = share.model.num_layers
    nodes = [per_layer * layers + over for over in predicted.collectives_s]
    return {"ranks": share.parallel.size, "prompt_len": share.prompt_len, "slots": share.slots,
            "chunk_len": share.chunk_len, "layers_measured": share.prompt_layers, "seconds_per_layer": per_layer,
            "predicted_per_layer": (predicted.layers_s + predicted.attention_s) / layers,
            **_over_links("prompt_s", nodes)}  # fmt: skip


def _over_links(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}, {link.name}": value for link, value in zip(LINKS, values, strict=True)}


def _predictor(bench: Bench, share: Asked) -> Predictor:
    """With the rates that were measured here, where they were: all of them, since they are what is reached."""
    read, products = bench.ceilings.get("read_gb_per_s", 4800.0), bench.ceilings.get("tflop_per_s", 989.0)
    return Predictor(
        model=share.model, parallel=share.parallel, formats=BLOCKS, dtype="bfloat16",
        bandwidth_bytes_per_s=read * 1e9, flop_per_s=products * 1e12,
    )  # fmt: skip


def _config(bench: Bench, share: Asked, slots: int, max_rows: int, max_len: int) -> EngineConfig:
    return EngineConfig(
        budget=KVBudget.of(slots), max_model_len=max_len, max_rows=max_rows, weights=BLOCKS, parallel=share.parallel,
        chunking=Chunking(chunk_len=share.chunk_len, short_len=share.chunk_len), short_reserve=share.chunk_len,
        staging_tokens=max_len + share.chunk_len if max_rows == 1 else 2 * share.chunk_len,
        dtype=bench.device.dtype_name, device=bench.device.name, executor="eager",
    )  # fmt: skip


def _decoder(bench: Bench, model: ModelConfig, parallel: ParallelConfig) -> Decoder:
    """Over one rank's random weights."""
    device = bench.device
    formats = replace(BLOCKS, tables=WeightFormat(dtype=device.dtype_name))
    share = Share.of(model, parallel, RANK, formats)
    weights = random_share(share, device.dtype, device.name, 0, formats)
    return Decoder(model, weights, group=Pretend(RANK, parallel.size))


class _Tokens:
    """Gives every row another token to embed, of the rank's own lines of the vocabulary."""

    def __init__(self, runner: ModelRunner) -> None:
        self._last = runner.rows.last_token
        self._num_own = runner.decoder.weights.embed.shape[0]

    def __call__(self) -> None:
        self._last.random_(0, self._num_own)


def _experts_read(runner: ModelRunner, batch: int) -> float:
    """Mean number of experts of a layer whose matrices a step of the rank reads, counted in eager steps."""
    counts: list[Tensor] = []
    kernels = bind(runner.decoder.device)

    def counting(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
        if len(ends) > 1:  # a plain matrix is a stack of one
            counts.append((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
        return kernels.grouped_linear(x, weight, scale, ends)

    counted: Kernels = replace(kernels, grouped_linear=counting)
    decoder = Decoder(runner.decoder.config, runner.decoder.weights, counted, runner.decoder.group)
    parts = replace(runner.step_parts, decoder=decoder)
    EagerDecode(parts).logits(torch.arange(batch, device=runner.decoder.device))
    return float(torch.stack(counts).double().mean())
