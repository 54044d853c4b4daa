"""Decode steps of recurrent layers: one token per row, whose state is read and written in place where the row has it.

Two kernels in place of some twenty small ones a layer: the causal convolution, and the recurrence with what its inputs
need before (``models/recurrent.py``: unit vectors, softplus, sigmoid). The delta rule, with a decay per head or per
element of a key (KDA), and Mamba-2 are one kernel: all decay a matrix, add an outer product and read it by a vector.
A program holds some values of one head for all elements of its key, so that no sum crosses programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.triton import configs

CHANNELS = 256  # of a convolution, per program


@triton.jit
def conv_step_kernel(
    x_ptr, state_ptr, rows_ptr, taps_ptr, bias_ptr, out_ptr,
    stride_x,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` channels of one row. A thread has all taps of a channel, so it may shift what it has read."""
    channel, entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    mask = channel < CHANNELS
    new = tl.load(x_ptr + entry * stride_x + channel, mask=mask, other=0.0).to(tl.float32)
    at = state_ptr + tl.load(rows_ptr + entry).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    acc = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TAPS - 1):
        older = tl.load(at + place * CHANNELS, mask=mask, other=0.0)
        acc += tl.load(taps_ptr + place * CHANNELS + channel, mask=mask, other=0.0) * older
        if place > 0:
            tl.store(at + (place - 1) * CHANNELS, older, mask=mask)
    tl.store(at + (TAPS - 2) * CHANNELS, new, mask=mask)
    acc += tl.load(taps_ptr + (TAPS - 1) * CHANNELS + channel, mask=mask, other=0.0) * new
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=mask, other=0.0)
    if HAS_SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out_ptr + entry * CHANNELS + channel, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, accurate for small results: the error of ``1 + u`` is divided out."""
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def memory_step_kernel(
    mixed_ptr, gates_ptr, memory_ptr, rows_ptr, rate_ptr, step_ptr, skip_ptr, out_ptr,
    scale, eps,
    stride_mixed, stride_gates,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
    BLOCK: tl.constexpr, IS_DELTA: tl.constexpr, DECAYS_KEYS: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` values of one head of one row: ``memory [KEY, BLOCK]`` decays, takes in the token and is read.

    ``mixed`` is ``q | k | v`` of the delta rule, whose gates are ``beta | decay``, or ``x | B | C`` of Mamba-2 with one
    gate per head. Vectors over keys: k is what is written, q what reads.
    """
    value, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    entry, key = tl.program_id(2).to(tl.int64), tl.arange(0, KEY_PAD)
    is_key, is_value = key < KEY, value < VALUE
    own = head // (HEADS // GROUPS) * KEY + key
    mixed, gates = mixed_ptr + entry * stride_mixed, gates_ptr + entry * stride_gates
    Q_AT: tl.constexpr = 0 if IS_DELTA else HEADS * VALUE + GROUPS * KEY
    K_AT: tl.constexpr = GROUPS * KEY if IS_DELTA else HEADS * VALUE
    V_AT: tl.constexpr = 2 * GROUPS * KEY if IS_DELTA else 0
    q = tl.load(mixed + Q_AT + own, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(mixed + K_AT + own, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(mixed + V_AT + head * VALUE + value, mask=is_value, other=0.0).to(tl.float32)
    if IS_DELTA:
        q = q / tl.sqrt(tl.sum(q * q, 0) + eps) * scale
        k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
    first_gate = gates + HEADS if IS_DELTA else gates
    rate = tl.load(rate_ptr + head)
    if DECAYS_KEYS:
        gate = tl.load(first_gate + head * KEY + key, mask=is_key, other=0.0).to(tl.float32)
        bias = tl.load(step_ptr + head * KEY + key, mask=is_key, other=0.0)
        decay = tl.exp(rate * softplus(gate + bias))[:, None]  # [KEY_PAD, 1]
    else:
        step = softplus(tl.load(first_gate + head).to(tl.float32) + tl.load(step_ptr + head))
        decay = tl.exp(rate * step)

    row = tl.load(rows_ptr + entry).to(tl.int64)
    at = memory_ptr + (row * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    mask = is_key[:, None] & is_value[None, :]
    memory = tl.load(at, mask=mask, other=0.0) * decay
    if IS_DELTA:
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + head).to(tl.float32)))
        update = beta * (v - tl.sum(memory * k[:, None], 0))
    else:
        update = v * step
    memory += k[:, None] * update[None, :]
    tl.store(at, memory, mask=mask)
    out = tl.sum(memory * q[:, None], 0)
    if not IS_DELTA:
        out += tl.load(skip_ptr + head).to(tl.float32) * v
    tl.store(out_ptr + (entry * HEADS + head) * VALUE + value, out, mask=is_value)


def conv_step(x: Tensor, state: Tensor, rows: Tensor, taps: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """See ``interface.Kernels.conv_step``."""
    batch, channels = x.shape
    if x.stride(1) != 1 or not (state.is_contiguous() and taps.is_contiguous()):
        raise ValueError("a convolution needs inputs whose elements are contiguous, and contiguous states and taps")
    out = x.new_empty(batch, channels)
    conv_step_kernel[(triton.cdiv(channels, CHANNELS), batch)](
        x, state, rows, taps, taps if bias is None else bias, out,
        x.stride(0),
        CHANNELS=channels, TAPS=len(taps), HAS_BIAS=bias is not None, HAS_SILU=silu, BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def memory_step(
    mixed: Tensor, gates: Tensor, memory: Tensor, rows: Tensor, rate: Tensor, step: Tensor, skip: Tensor | None
) -> Tensor:
    """See ``interface.Kernels.memory_step``."""
    batch, (heads, key, value) = len(mixed), memory.shape[1:]
    if mixed.stride(1) != 1 or gates.stride(1) != 1 or not memory.is_contiguous():
        raise ValueError("a recurrence needs inputs whose elements are contiguous, and contiguous states")
    launch = configs.memory_launch(key, value)
    out = torch.empty(batch, heads * value, dtype=torch.float32, device=mixed.device)
    memory_step_kernel[(triton.cdiv(value, launch.block), heads, batch)](
        mixed, gates, memory, rows, rate, step, rate if skip is None else skip, out,
        key**-0.5, 1e-6,
        mixed.stride(0), gates.stride(0),
        HEADS=heads, GROUPS=(mixed.shape[1] - heads * value) // (2 * key), KEY=key, VALUE=value,
        KEY_PAD=configs.power_of_two(key), BLOCK=launch.block, IS_DELTA=skip is None, DECAYS_KEYS=len(step) > heads,
        num_warps=launch.num_warps,
    )  # fmt: skip
    return out
