"""Bytes that looped decode sets aside between its stages, by the rule of ``kernels/cpu/looped``. No torch.

A batch entry has the numbers of every stage, and each thread some more for a mixture of experts; beside them each
thread has a scratch of its own, whatever the batch, and room to draw a token in. Invariant: never less than
``library.cpp`` and ``sample.cpp`` ask for, and a few percent more at most (a thread's scratch serves one stage at a
time, here the largest and a panel's sums are added).
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import DTYPE_BYTES, EngineConfig, ModelConfig

_NUMBER = 4  # bytes: fp32
_PANEL, _ALIGN, _LANES, _DOTS = 32, 4, 16, 4  # the widest that a CPU has
_PART_SLOTS = 1024  # of a row, that one task attends
_TARGET_SPLITS, _MAX_SPLITS, _LEAST_SPLIT = 132, 64, 128  # of a row, and slots of one, by the kernel of a GPU
_DRAWN_BYTES, _TOKENS_OF_MAXIMUM = 20, 64  # of a token of the vocabulary: its score, a candidate, its weight
_LATENTS_AT_ONCE = 32  # of a row, that a thread reads at a time


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Of one engine."""

    entry_bytes: int  # of one row of the batch, for all threads together
    scratch_bytes: int  # of the threads, whatever the batch


def looped_workspace(model: ModelConfig, config: EngineConfig, num_threads: int) -> Workspace:
    """``model``: as the device stores it."""
    slots = config.budget.capacity if config.heads is None else config.heads.widest.capacity
    entry = _dense_entry(model, slots) + _latent_entry(model) + _mixture_entry(model, num_threads)
    around = config.weights and (config.weights.attention or config.weights.layers)
    if around and around.is_codes and around.rounds_inputs:
        entry += model.num_heads * model.head_dim  # what was attended, to be rounded
    entry += 2 * num_threads * _PANEL  # sums of a panel of gate and one of up
    scratch = num_threads * (_scratch(model) + _LANES) + 8 * _LANES
    drawing = min(num_threads, config.max_rows) * _drawing_bytes(model.vocab_size)
    return Workspace(entry_bytes=_NUMBER * entry, scratch_bytes=_NUMBER * scratch + drawing)


def looped_kernel_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Of an entry of a looped step on a GPU: what its stages hand each other, and the logits."""
    wide, heads = model.num_heads * model.head_dim, model.num_heads + 2 * model.num_kv_heads
    splits = min(-(-_TARGET_SPLITS // model.num_kv_heads), _MAX_SPLITS, -(-config.budget.capacity // _LEAST_SPLIT))
    attention = model.num_heads * splits * (model.head_dim + 1) + model.num_kv_heads + 2  # sums, shares, counters
    stored = heads * model.head_dim + wide + model.intermediate_size  # in the dtype of the weights
    return _NUMBER * (model.hidden_size + attention + model.vocab_size) + DTYPE_BYTES[config.dtype] * stored


def _dense_entry(model: ModelConfig, slots: int) -> int:
    heads, q_rank = model.num_heads, 0 if model.latent is None else model.latent.q_rank or 0
    widest = max(model.hidden_size, model.intermediate_size, heads * model.head_dim, q_rank) + _ALIGN
    projected = (heads + 2 * model.num_kv_heads) * model.head_dim
    parts = heads * -(-slots // _PART_SLOTS) * (2 + model.head_dim)
    return model.hidden_size + projected + 2 * model.intermediate_size + widest + model.head_dim + parts


def _latent_entry(model: ModelConfig) -> int:
    latent, heads = model.latent, model.num_heads
    if latent is None:
        return 0
    kept = latent.kv_rank + latent.rope_dim
    return (latent.q_rank or 0) + heads * (latent.nope_dim + latent.rope_dim + kept + latent.kv_rank) + kept


def _mixture_entry(model: ModelConfig, num_threads: int) -> int:
    moe = model.moe
    if moe is None:
        return 0
    wide, pairs = _padded(model.hidden_size), moe.top_k
    chosen = 2 * wide + moe.num_experts + _LANES + pairs * (1 + 2 * moe.inner + _padded(moe.inner))
    shared = 2 * moe.shared_inner + _padded(moe.shared_inner)
    return chosen + shared + num_threads * (wide + 2 * (pairs + 1) * _PANEL)


def _scratch(model: ModelConfig) -> int:
    """Of one thread: the largest of its stages."""
    latent, moe = model.latent, model.moe
    if latent is None:
        shared = model.num_heads // model.num_kv_heads
        group = shared * model.head_dim
        attention = group + max(group, shared * (_PART_SLOTS + 2 * _LANES))
    else:
        attention = max(_LATENTS_AT_ONCE * (latent.kv_rank + latent.rope_dim + _DOTS), _DOTS * latent.nope_dim)
    return max(attention, _DOTS * _LANES, 0 if moe is None else 3 * moe.num_experts)


def _drawing_bytes(vocab_size: int) -> int:
    """Of a thread that draws tokens: five arrays that begin on lines of a cache, three of them with a vector more."""
    maxima = _NUMBER * (vocab_size // _TOKENS_OF_MAXIMUM + _LANES)
    return _DRAWN_BYTES * vocab_size + maxima + (_DRAWN_BYTES - _NUMBER) * _LANES + 5 * _NUMBER * _LANES


def _padded(columns: int) -> int:
    return -(-columns // _ALIGN) * _ALIGN
