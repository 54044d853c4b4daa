"""What ranks do with a row that travels: a function that ``pool.py`` calls in every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from snapstream.config import Chunking, EngineConfig, KVBudget, KVDType, ParallelConfig, SplitAttention
from snapstream.distributed.group import Alone, Group
from snapstream.exec.row_transfer import RowParts, read_later
from snapstream.exec.runner import ModelRunner
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.checkpoint import load_weights
from snapstream.models.decoder import Decoder
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import Share
from snapstream.plan.memory import row_sizes
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams

PROMPT = tuple((7 * i) % 80 + 3 for i in range(70))
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)


@dataclass(frozen=True)
class Carried:
    """A row that one engine reads and takes to another row of its own."""

    folder: Path
    attention: SplitAttention
    kv_dtype: KVDType


@dataclass(frozen=True)
class Row:
    """What one rank has seen of it."""

    sent: list[bytes]  # by layer
    again: list[bytes]  # the same, of the row to which it was carried
    layer_bytes: tuple[int, ...]  # by layer, as both ends of a transfer expect it


def carried(group: Group | None, asked: Carried) -> Row:
    """Read a prompt into row 0, carry it to rows 1 and 2 through rank 0's bytes; row 1 lies on another rank."""
    group = group or Alone()
    model, parallel = read_model_config(asked.folder), ParallelConfig(size=group.size, attention=asked.attention)
    share = Share.of(model, parallel, group.rank)
    config = EngineConfig(budget=BUDGET, max_model_len=100, max_rows=3, chunking=Chunking(chunk_len=32),
                          kv_dtype=asked.kv_dtype, parallel=parallel, selector=SnapKV(observation_len=8))  # fmt: skip
    weights = load_weights(asked.folder, model, torch.float32, "cpu", False, None, share=share)
    runner = ModelRunner(Decoder(model, weights, group=group), config)
    job = JobSpec(job_id=0, staging_start=0, entries=(_entry((0,), config),), chunk_len=32)
    units = UnitRange(0, 0, job.num_units(model.num_layers))
    runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result()
    parts, layers = RowParts(runner.cache, runner.decoder), range(model.num_layers)
    sent = [bytes(read_later(parts.take(layer, _entry((0,), config)))()) for layer in layers]
    for layer in layers:
        parts.place(layer, _entry((1, 2), config), bytearray(sent[layer]) if group.rank == 0 else None)
    again = [bytes(read_later(parts.take(layer, _entry((1,), config)))()) for layer in layers]
    assert again == [bytes(read_later(parts.take(layer, _entry((2,), config)))()) for layer in layers]
    return Row(sent, again, row_sizes(model, config).layer_bytes(len(PROMPT), BUDGET))


def _entry(rows: tuple[int, ...], config: EngineConfig) -> PrefillEntry:
    return PrefillEntry(
        request_id="a",
        token_ids=PROMPT,
        rows=rows,
        seeds=rows,
        sampling=SamplingParams(temperature=0.0, max_tokens=9),
        budget=BUDGET,
        selector=config.selector,
    )
