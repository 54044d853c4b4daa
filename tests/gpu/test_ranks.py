"""A group over NCCL that has one rank: on one GPU the collectives of a step run, and are captured, as those of many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.stand_ins import random_weights
from snapstream.config import Chunking, EngineConfig, KVBudget, ModelConfig
from snapstream.distributed.group import Alone, Group, Ranks, ReduceOp
from snapstream.exec.runner import ModelRunner
from snapstream.models.decoder import Decoder
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=4096, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=2,
    head_dim=64, intermediate_size=1024, max_position=4096, qk_norm=True,
)  # fmt: skip
CONFIG = EngineConfig(budget=KVBudget.of(128), max_model_len=1024, max_rows=4, device="cuda",
                      chunking=Chunking(chunk_len=256, short_len=256))  # fmt: skip
STEPS = 12


class Counted:
    """A group that counts the calls of Python; those of a replay are none."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size, self.num_calls = group, group.rank, group.size, 0

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        self.num_calls += 1
        return self.group.all_reduce(x, op)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.num_calls += 1
        return self.group.all_gather(x, dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.num_calls += 1
        return self.group.broadcast(x, source)

    def share_memory(self, num_bytes: int) -> Tensor | None:
        return self.group.share_memory(num_bytes)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks.join(0, 1, f"file://{tmp_path_factory.mktemp('nccl') / 'meeting'}", "cuda", 120.0)
    yield group
    group.close()


def answered(group: Counted, executor: str) -> tuple[list[int], int]:
    """Tokens of a compressed row, and the collectives that Python called while it was decoded."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = replace(CONFIG, executor=executor)
    weights = random_weights(MODEL, torch.float32, "cuda", seed=0)
    runner = ModelRunner(Decoder(MODEL, weights, group=group), config)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    entry = PrefillEntry(request_id="r", token_ids=tuple(3 + 7 * i % 4000 for i in range(600)), rows=(1,), seeds=(0,),
                         sampling=sampling, budget=config.budget, selector=config.selector)  # fmt: skip
    job = JobSpec(job_id=0, staging_start=0, entries=(entry,), chunk_len=256)
    units = UnitRange(0, 0, job.num_units(MODEL.num_layers))
    found = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result().prefilled["r"].tokens
    group.num_calls = 0
    steps = [runner.submit(StepPlan(step_id=step, decode_rows=(1,))).result().decoded[0] for step in range(1, STEPS)]
    num_calls = group.num_calls
    runner.close()  # NCCL cannot leave the group while a graph holds its collectives
    return [one.token_id for one in (*found, *steps)], num_calls


def test_collectives_are_captured_with_the_step(nccl: Ranks) -> None:
    """Two per layer and the logits'; whoever has the whole vocabulary sums no embedding."""
    alone, _ = answered(Counted(Alone()), "eager")
    eager, num_eager = answered(Counted(nccl), "eager")
    captured, num_captured = answered(Counted(nccl), "graph")
    assert eager == captured == alone
    assert num_eager == (STEPS - 1) * (2 * MODEL.num_layers + 1) and num_captured == 0
