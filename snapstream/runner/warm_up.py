"""Compiles the Triton kernels of prefill, compression and plain decode before a request needs them.

Triton compiles a kernel at its first launch, once per combination of dtypes, sizes of the model and whether strides are
multiples of 16; the length of a prompt does not matter. So one short prompt that is compressed, through one layer of
the engine's own buffers into the padding row, compiles all that later prompts of any length will launch. Captured
decode has compiled its own kernels by then.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from snapstream.cache.kv_cache import KVCache
from snapstream.config import EngineConfig, KVBudget
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.models.decoder import Decoder
from snapstream.models.staging import StagingBuffers
from snapstream.request import SamplingParams
from snapstream.runner.prefill import PrefillJob
from snapstream.runner.row_writer import make_row_writer
from snapstream.step import JobSpec, PrefillEntry

logger = logging.getLogger(__name__)

_BUDGET = KVBudget(num_sink=0, num_topk=1, num_recent=1)
_MORE = 19  # prompt tokens beside those that vote: more than the budget holds


@torch.inference_mode()
def warm_up_kernels(
    decoder: Decoder, cache: KVCache, buffers: StagingBuffers, config: EngineConfig, attention: PrefillAttention
) -> None:
    """Run a prompt of ``observation_len + 19`` tokens, or more than the smallest head holds, through the first layer,
    and on to the first that has experts; writes to the padding row alone.
    """
    began = perf_counter()
    if cache.capacity < _BUDGET.capacity:
        return  # such a row selects nothing, and holds one token
    num_tokens = config.selector.observation_len + _MORE
    if config.heads is not None:
        num_tokens = max(num_tokens, config.heads.least + 1)  # or no head would select
    entry = PrefillEntry(
        request_id="warm-up",
        token_ids=(0,) * min(num_tokens, config.pool_tokens),
        rows=(config.max_rows,),  # the padding row
        seeds=(0,),
        sampling=SamplingParams(),
        budget=_BUDGET,
        selector=config.selector,
    )
    spec = JobSpec(job_id=-1, staging_start=0, entries=(entry,))
    job = PrefillJob(spec, decoder, buffers, make_row_writer(cache, config), config.chunking.chunk_len, attention)
    moe, num_layers = decoder.config.moe, decoder.config.num_layers
    first_experts = 0 if moe is None else min(moe.layers(num_layers).start, num_layers - 1)
    for unit in range((1 + first_experts) * job.spec.num_chunks(config.chunking.chunk_len)):
        job.run_unit(unit)
    decoder.logits(job.last_hidden())
    logger.info("kernels of prefill and compression are ready after %.1f s", perf_counter() - began)
