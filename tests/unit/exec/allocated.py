"""Bytes that an engine allocates, or one rank of it alone, on the meta device, where Triton kernels do nothing."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.stand_ins import occupy
from snapstream.config import EngineConfig, ModelConfig
from snapstream.distributed.group import Alone, Group
from snapstream.exec import runner as model_runner
from snapstream.exec.eager import EagerDecode
from snapstream.exec.executors import MAX_DRAFTED, draft_sizes
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.backends.autotune import PrefillAttention
from snapstream.kernels.interface import bind
from snapstream.models.decoder import Decoder
from snapstream.models.sharding import rank_config
from snapstream.models.weights import DecoderWeights
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams
from tests.live import LiveBytes

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=1)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton kernels do nothing; their callers allocate what they write."""
    for function in ("interpreter.InterpretedFunction", "jit.JITFunction"):
        monkeypatch.setattr(f"triton.runtime.{function}.run", lambda *_, **__: None)


def measured(
    model: ModelConfig, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, group: Group | None = None
) -> tuple[int, int]:
    """Bytes held at the start, and the most after a prompt of all tokens and steps of all rows."""
    monkeypatch.setattr(model_runner, "warm_up_kernels", lambda *_: None)  # the prompt below is all of it
    without_kernels(monkeypatch)
    group, rows, length = group or Alone(), config.max_rows, config.max_model_len
    with LiveBytes("meta") as live:
        share = rank_config(model, config.parallel, group.rank, config.weights)
        weights = DecoderWeights.empty(share, getattr(torch, config.dtype), "meta", config.weights)
        runner = ModelRunner(Decoder(model, weights, bind("meta", "triton"), group), config)
        runner.prefill_attention = PrefillAttention(
            "none", lambda q, k, v, **_: q.new_empty(q.shape), packed_name="loop", attend_packed=None, why=""
        )  # a kernel that returns its result and takes nothing else
        runner.speculation = None  # it would read tokens
        static = live.now
        sizes = draft_sizes(MAX_DRAFTED, config.num_speculative_tokens) if config.num_speculative_tokens else ()
        held = torch.empty(sum(sizes), model.vocab_size, device="meta")  # as captured steps of 16 rows hold them
        entry = PrefillEntry(request_id="r", token_ids=(5,) * length, rows=(0,), seeds=(0,), sampling=SAMPLED,
                             budget=config.budget, selector=config.selector)  # fmt: skip
        job = JobSpec(job_id=0, staging_start=0, entries=(entry,), chunk_len=config.chunking.chunk_len)
        units = UnitRange(0, 0, job.num_units(model.num_layers))
        runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,)))
        occupy(runner, range(rows), length, SAMPLED)
        runner.submit(StepPlan(step_id=1, decode_rows=tuple(range(rows))))
        if sizes:
            eager, entries = EagerDecode(runner.step_parts), torch.zeros(sum(sizes), dtype=torch.int64, device="meta")
            with torch.inference_mode():
                logits = held.copy_(eager.draft_logits(entries.split(sizes), entries)[0])
                eager.draw(logits[:rows], entries[:rows], SamplingNeeds.of([SAMPLED]))
        peak = live.peak
        del runner, weights, held
        gc.collect()
    return static, peak
