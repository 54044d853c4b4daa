"""Parts that stand in no file of the package: an executor, a form of weights and a family of models of a test's own.

Worked examples of docs/architecture.md, "Where a change goes". A selector's is tests/unit/cache/test_toy_selector.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.stand_ins import checkpoint_of, random_weights
from snapstream.config import EXECUTORS, EngineConfig, KVBudget, ModelConfig
from snapstream.distributed.group import Group
from snapstream.exec.eager import EagerDecode, StepParts
from snapstream.exec.executors import Executor
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.exec.sampling import Sampled
from snapstream.kernels.interface import CosSin, HeadNorm, Kernels
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.layers import KVView
from snapstream.models.matrix import Index, Matrix
from snapstream.models.registry import FAMILIES, Family, read_model_config
from snapstream.models.tensors import TensorSpec, TensorSpecs, decoder_tensors
from snapstream.models.weights import DecoderWeights, LayerWeights
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [5 + 7 * i % 190 for i in range(40)]


# An executor: feeds the rows of a batch one at a time.


class OneAtATime:
    """A ``DecodeStep``."""

    num_steps = 0

    def __init__(self, parts: StepParts) -> None:
        self.eager = EagerDecode(parts)

    def warm_up(self, progress: bool) -> None:
        self.eager.warm_up(progress)

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        type(self).num_steps += 1
        drawn = [self.eager.step(row[None], needs) for row in rows]
        return Sampled(torch.cat([one.token_ids for one in drawn]), None, None, None)


@pytest.fixture
def one_at_a_time() -> Iterator[str]:
    EXECUTORS.add("one-at-a-time", Executor(make=OneAtATime))
    yield "one-at-a-time"
    EXECUTORS.remove("one-at-a-time")


def test_an_executor(one_at_a_time: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path)
    prompts = [PROMPT, PROMPT[:7]]
    answers = []
    for executor in ("eager", one_at_a_time):
        with LLM(folder, budget="full", max_model_len=80, executor=executor, progress=False) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, GREEDY)])
    assert answers[0] == answers[1]
    assert OneAtATime.num_steps == GREEDY.max_tokens - 1  # the first token is prefill's
    message = "executor is 'one-by-one'; it must be one of eager, graph, looped, one-at-a-time"
    with pytest.raises(ValueError, match=message):
        LLM(folder, executor="one-by-one", progress=False)
    message = "executor is 'one-at-a-time', which does not support several ranks .*; use 'looped' or 'eager'"
    with pytest.raises(ValueError, match=message):
        LLM(folder, executor=one_at_a_time, tensor_parallel=2, progress=False)


# A form of weights: a byte per number, and a scale per row of the matrix.


class Bytes(Matrix):
    """Rows of int8 and one scale each."""

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.data, self.scale, self.dtype = data, scale, dtype

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Self:
        data, scale = torch.int8, torch.float32
        return cls(torch.empty(shape, dtype=data, device=device), torch.empty(shape[:-1], dtype=scale), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, index: Index) -> Bytes:
        return Bytes(self.data[index], self.scale[index], self.dtype)

    def fill(self, numbers: Tensor) -> None:
        self.scale.copy_(numbers.float().abs().amax(-1) / 127)
        self.data.copy_((numbers.float() / self.scale[..., None]).round())

    def dense(self) -> Tensor:
        return (self.data.float() * self.scale[..., None]).to(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        out = (F.linear(x.float(), self.data.float()) * self.scale).to(self.dtype)
        return out if bias is None else out + bias

    def lookup(self, token_ids: Tensor) -> Tensor:
        return (self.data[token_ids].float() * self.scale[token_ids, None]).to(self.dtype)


@torch.inference_mode()
def first_tokens(decoder: Decoder) -> list[int]:
    config = EngineConfig(budget=KVBudget.full(80), max_model_len=80, max_rows=1)
    runner = ModelRunner(decoder, config)
    entry = PrefillEntry(request_id="r", token_ids=tuple(PROMPT), rows=(0,), seeds=(0,), sampling=GREEDY,
                         budget=config.budget, selector=config.selector)  # fmt: skip
    job = JobSpec(job_id=0, staging_start=0, entries=(entry,), chunk_len=config.chunking.chunk_len)
    units = UnitRange(0, 0, decoder.config.num_layers)
    prefilled = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result().prefilled["r"]
    steps = [runner.submit(StepPlan(step_id=1, decode_rows=(0,))).result().decoded[0] for _ in range(8)]
    return [prefilled.tokens[0].token_id, *(one.token_id for one in steps)]


def test_a_form_of_weights(tmp_path: Path) -> None:
    """Loaded narrow and computed by its own product it answers as its widened numbers do, in the bytes it tells."""
    folder = save(make_model("qwen2"), tmp_path)
    model = read_model_config(folder)
    narrow = load_weights(folder, model, torch.float32, "cpu", False, make=lambda _, *rest: Bytes.empty(*rest))
    wide = DecoderWeights.empty(model, torch.float32, "cpu")
    for role, numbers in narrow.stored().items():
        wide.fill(role, (), numbers)
    assert first_tokens(Decoder(model, narrow)) == first_tokens(Decoder(model, wide))
    matrices = sum(
        weight.dense().numel() + 4 * weight.dense().shape[:-1].numel() for weight in narrow.matrices.values()
    )
    assert narrow.num_bytes == matrices + sum(vector.nbytes for vector in narrow.vectors.values()) < wide.num_bytes / 2


# A family: attention and MLP side by side, from one norm, and a norm behind them.


class SideBySide:
    """A ``models.decoder.Layer``."""

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        self.index, self.config, self.weights, self.kernels, self.group = index, config, weights, kernels, group

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        config, kernels = self.config, self.kernels
        normed = kernels.sum_norm(residual, pending, self.weights.vector("input_norm"), config.rms_norm_eps)
        heads = self.weights.matrix("qkv").multiply(normed, None, kernels)
        shape = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        return view.attend(self.index, heads.view(shape), HeadNorm(None, 0.0), rope)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        weights, kernels, eps = self.weights, self.kernels, self.config.rms_norm_eps
        normed = kernels.rms_norm(residual, weights.vector("input_norm"), eps)
        inner = kernels.swiglu(weights.matrix("gate_up").multiply(normed, None, kernels))
        both = weights.matrix("o").multiply(attended.flatten(1), None, kernels)
        both = both + weights.matrix("down").multiply(inner, None, kernels)
        return kernels.rms_norm(self.group.all_reduce(both), weights.vector("after_norm"), eps)


def side_by_side_tensors(config: ModelConfig) -> TensorSpecs:
    roles = dict(decoder_tensors(config))
    del roles["post_norm"]
    after = TensorSpec(shape=(config.hidden_size,), parts={"after_layernorm.weight": ()}, is_matrix=False)
    return {**roles, "after_norm": after}


@pytest.fixture
def family() -> Iterator[str]:
    FAMILIES.add("SideBySideForCausalLM", Family(layer=SideBySide, tensors=side_by_side_tensors))
    yield "SideBySideForCausalLM"
    FAMILIES.remove("SideBySideForCausalLM")


def test_a_family(family: str, tmp_path: Path) -> None:
    """Its checkpoint loads, and prefill, chunks, compression and decode run it as they run every other."""
    settings = {"architectures": [family], "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_model_config(tmp_path)
    weights = random_weights(config, torch.float32, "cpu", seed=1)
    for name in ("after_norm", "input_norm"):
        weights.vectors[name].uniform_(0.5, 1.5)
    save_file({name: tensor.clone() for name, tensor in checkpoint_of(weights).items()}, tmp_path / "model.safetensors")
    with LLM(tmp_path, budget="full", chunk_len=16, max_model_len=100, progress=False) as llm:
        (output,) = llm.generate(PROMPT, GREEDY)
    assert output.token_ids == plain_answer(config, checkpoint_of(weights))
    with LLM(tmp_path, budget=40, chunk_len=16, max_model_len=100, progress=False) as llm:
        (short,) = llm.generate(PROMPT + PROMPT, replace(GREEDY, max_tokens=4))
    assert short.compression is not None and short.compression.evicted_tokens == 40


@torch.inference_mode()
def plain_answer(config: ModelConfig, weights: dict[str, Tensor]) -> list[int]:
    """The same maths over the whole text, token after token, in a few lines of PyTorch."""
    ids = list(PROMPT)
    for _ in range(GREEDY.max_tokens):
        x, eps = weights["model.embed_tokens.weight"][ids], config.rms_norm_eps
        at = torch.arange(len(ids))[:, None] / config.rope.theta ** (torch.arange(0, 12, 2) / 12)  # head size 12
        cos, sin = torch.cat((at, at), -1).cos(), torch.cat((at, at), -1).sin()
        for layer in range(config.num_layers):
            own = {key.split(f"layers.{layer}.")[1]: w for key, w in weights.items() if f"layers.{layer}." in key}
            normed = F.rms_norm(x, (48,), own["input_layernorm.weight"], eps)
            q, k, v = (F.linear(normed, own[f"self_attn.{n}_proj.weight"]).view(len(ids), -1, 12).transpose(0, 1)
                       for n in "qkv")  # fmt: skip
            q, k = (h * cos + torch.cat((-h[..., 6:], h[..., :6]), -1) * sin for h in (q, k))
            heads = F.scaled_dot_product_attention(
                q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
            )
            gate, up = (F.linear(normed, own[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            both = F.linear(heads.transpose(0, 1).flatten(1), own["self_attn.o_proj.weight"])
            both = both + F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"])
            x = x + F.rms_norm(both, (48,), own["after_layernorm.weight"], eps)
        last = F.rms_norm(x[-1], (48,), weights["model.norm.weight"], eps)
        ids.append(int(F.linear(last, weights["lm_head.weight"]).argmax()))
    return ids[len(PROMPT) :]
