"""Shapes, engines and bounds of ``looping.py``: what is timed, without the timing."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from time import perf_counter
from typing import Any

import torch

from benchmarks import bounds
from benchmarks.stand_ins import occupy
from snapstream.config import EngineConfig, KVBudget, KVDType, ModelConfig, WeightFormats
from snapstream.exec.looped_cpu import LoopedDecode
from snapstream.exec.runner import ModelRunner
from snapstream.kernels import memory
from snapstream.kernels.cpu.looped.library import Step, ThreadPool, address, load
from snapstream.kernels.formats import INT8
from snapstream.kv.cache import KVCache
from snapstream.models.decoder import Decoder
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import decode_weight_bytes, layer_parameters
from snapstream.models.weights import DecoderWeights
from snapstream.types import SamplingParams

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 4608, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "100m": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
    "400m": {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
_READ_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine reached just now."""

    read_bytes_per_s: float
    operations_per_s: float  # of fp32
    bf16_operations_per_s: float
    code_operations_per_s: float  # of int8, four to 32 bits

    def seconds(self, ladder: Ladder) -> float:
        """Nothing is faster than the slower of reading and computing."""
        computing = ladder.attention_operations / self.operations_per_s + self._products(ladder)
        return max(ladder.num_bytes / self.read_bytes_per_s, computing)

    def stages(self, ladder: Ladder) -> float:
        """The same of attention and of products, which barriers separate: one is not read while the other computes."""
        attention = ladder.attention_operations / self.operations_per_s
        weight_bytes = ladder.num_bytes - ladder.row_bytes
        return max(ladder.row_bytes / self.read_bytes_per_s, attention) + max(
            weight_bytes / self.read_bytes_per_s, self._products(ladder)
        )

    def _products(self, ladder: Ladder) -> float:
        return (
            ladder.num_operations / self.operations_per_s
            + ladder.num_bf16_operations / self.bf16_operations_per_s
            + ladder.num_code_operations / self.code_operations_per_s
        )

    def best(self, other: Limits) -> Limits:
        """The better of two measurements."""
        return Limits(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def limits_of(threads: int) -> Limits:
    """The best of seven measurements."""
    pool, data = ThreadPool(load(), threads), memory.zeros((_READ_BYTES // 4,), torch.float32).fill_(1.0)
    reads: list[float] = []
    rates: dict[str, list[float]] = {"multiply": [], "multiply_bf16": [], "multiply_int8": []}
    for _ in range(7):
        began = perf_counter()
        bounds.run(pool, "read", data.data_ptr(), data.nbytes)
        reads.append(data.nbytes / (perf_counter() - began))
        for name, found in rates.items():
            began = perf_counter()
            operations = bounds.run(pool, name, 2_000_000)
            found.append(operations / (perf_counter() - began))
    pool.close()
    return Limits(max(reads), *(max(found) for found in rates.values()))


def forms_of(width: str) -> WeightFormats:
    """Narrow ones as engines decode with them by default, ``int8-wide`` and the like with inputs in fp32."""
    formats = WeightFormats.of(width.removesuffix("-wide"))
    if width == "bfloat16" and load().gains_by_bf16():
        return formats.rounding_to_bf16()
    return formats.rounding_inputs() if width in ("int8", "int4") else formats


def model_of(shape: str) -> ModelConfig:
    return model_config_from_dict({**_QWEN3, **SHAPES[shape]})


def decoder_of(shape: str, width: str) -> Decoder:
    """Random weights of that form."""
    torch.manual_seed(0)
    model, formats = model_of(shape), forms_of(width)
    weights = DecoderWeights.empty(model, torch.float32, "cpu", formats, make_panels(load()))
    for matrix in weights.matrices.values():
        one = torch.randn(matrix.shape[-2:]) / matrix.shape[-1] ** 0.5
        for layer in [matrix] if len(matrix.shape) == 2 else [matrix[i] for i in range(matrix.shape[0])]:
            layer.fill(one)
    for name, vector in weights.vectors.items():
        vector.fill_(1.0 * name.endswith("norm"))
    return Decoder(model, weights)


def runner_of(decoder: Decoder, formats: WeightFormats, max_rows: int, context: int, rows_bytes: int) -> ModelRunner:
    """Rows of random numbers, as many as ``rows_bytes`` hold, at least one; of bf16 as engines have them by default."""
    kv_dtype: KVDType = "auto" if formats.layers.dtype == "float32" else "bfloat16"
    row_bytes = decoder.kv_spec(kv_dtype).row_bytes(context + 1)
    rows = max(1, min(max_rows, rows_bytes // row_bytes - 1))
    config = EngineConfig(
        budget=KVBudget.full(context + 1), max_model_len=context + 1, max_rows=rows, executor="looped", weights=formats,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    runner = ModelRunner(decoder, config, make_decode=NoDecode)
    fill_rows(runner.cache)
    return runner


class NoDecode:
    """A ladder makes its own."""

    def __init__(self, parts: Any) -> None:
        pass

    def warm_up(self, progress: bool) -> None:
        """Nothing."""

    def step(self, rows: Any, needs: Any) -> Any:
        """Never called."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Ladder:
    """A step of some rows that can be run in pieces; nothing advances, so every call is the same."""

    looped: LoopedDecode
    rows: torch.Tensor
    logits: torch.Tensor
    num_layers: int
    num_bytes: float  # of weights and rows
    row_bytes: float
    attention_operations: float  # in fp32
    num_operations: float  # of products in fp32
    num_bf16_operations: float
    num_code_operations: float  # in int8

    @property
    def all_operations(self) -> float:
        """Whatever in."""
        return self.attention_operations + self.num_operations + self.num_bf16_operations + self.num_code_operations

    @property
    def num_stages(self) -> int:
        return self.looped.engine.num_stages

    @property
    def layer_bounds(self) -> list[int]:
        """First stages of the calls of B1: the embedding goes with the first layer, norm and head are the last."""
        per_layer = (self.num_stages - 3) // self.num_layers
        return [0, *(1 + per_layer * (i + 1) for i in range(self.num_layers)), self.num_stages]

    def run(self, first: int, last: int) -> None:
        """Stages ``first .. last - 1`` of a step that draws nothing."""
        step = Step(rows=address(self.rows), logits=address(self.logits), batch=len(self.rows), first=first, last=last)
        self.looped.engine.run(step)

    def close(self) -> None:
        self.looped.close()


def fill_rows(cache: KVCache) -> None:
    """Random numbers in every slot, layer by layer."""
    for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        if scale is None:
            stored[:] = torch.randn(stored.shape[1:]).to(stored.dtype)
        elif stored.dtype == INT8.dtype:
            stored.random_(-127, 128)
            scale.fill_(0.01)
        else:
            for layer in stored:
                layer.copy_(torch.randn(layer.shape))
            scale.fill_(1.0)


def ladder_of(runner: ModelRunner, batch: int, context: int, threads: int) -> Ladder:
    """``batch`` rows that see ``context`` slots each."""
    model, spec = runner.decoder.config, runner.cache.spec
    rows = torch.arange(batch)
    occupy(runner, range(batch), context - 1, SamplingParams(temperature=0.0))
    parameters = layer_parameters(model) * model.num_layers + model.vocab_size * model.hidden_size
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * context
    layers = None if runner.config.weights is None else runner.config.weights.layers
    inputs = "fp32" if layers is None or not layers.rounds_inputs else "int8" if layers.is_quantized else "bf16"
    return Ladder(
        looped=LoopedDecode(runner.step_parts, threads),
        rows=rows,
        logits=torch.empty(batch, model.vocab_size),
        num_layers=model.num_layers,
        num_bytes=decode_weight_bytes(model, "float32", runner.config.weights) + batch * spec.row_bytes(context),
        row_bytes=batch * spec.row_bytes(context),
        attention_operations=2.0 * batch * attention,
        num_operations=2.0 * batch * parameters * (inputs == "fp32"),
        num_bf16_operations=2.0 * batch * parameters * (inputs == "bf16"),
        num_code_operations=2.0 * batch * parameters * (inputs == "int8"),
    )
