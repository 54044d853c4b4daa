"""Checks of the Triton decode steps of recurrent layers, as ``checks.py`` has them of other kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import reference
from snapstream.kernels.interface import bind
from tests.kernels.triton.checks import NAN, assert_near

SPARE = 3  # rows of which no step may read or write the state


def check_conv_step(channels: int, taps: int, batch: int, *, silu: bool, dtype: torch.dtype, device: str) -> None:
    """Equal to the reference with a bias and without; inputs are a slice of wider rows."""
    torch.manual_seed(channels + taps)
    x = torch.randn(batch, channels + 16, device=device).to(dtype)[:, 8 : 8 + channels]
    weights, bias = torch.randn(taps, channels, device=device), torch.randn(channels, device=device)
    step = bind(device, "triton").conv_step
    assert step is not None
    rows, before = _states((taps - 1, channels), batch, device)
    for own in (bias, None):
        state, want = before.clone(), before[rows]
        expected = reference.causal_conv(x[:, None], want, weights, own, silu)[:, 0]
        got = step(x, state, rows, weights, own, silu)
        assert got.dtype == dtype
        assert_near(got, expected.float(), dtype)
        assert torch.equal(state[rows], want) and _others(state, rows).isnan().all()
    _check_alone(lambda at: step(x[at], before, rows[at], weights, None, silu), got)


def check_memory_step(
    kind: str, heads: tuple[int, int], sizes: tuple[int, int], batch: int, dtype: torch.dtype, device: str
) -> None:
    """Equal to ``models/recurrent.py`` through the reference; ``heads``: of keys, of values; ``sizes`` of both.

    ``kind``: "delta", "kda" (a decay per element of a key) or "mamba".
    """
    (groups, num), (key, value) = heads, sizes
    torch.manual_seed(num * value)
    num_gates = {"delta": 2 * num, "kda": num + num * key, "mamba": num}[kind]
    wide = torch.randn(batch, 2 * groups * key + num * value + num_gates, device=device).to(dtype)
    mixed, gates = wide[:, :-num_gates], wide[:, -num_gates:]
    rate = -torch.rand(num, device=device) * 4
    bias = torch.randn(num_gates - num if kind == "kda" else num, device=device) - 3  # steps from 0.01 to 1
    skip = torch.randn(num, device=device) if kind == "mamba" else None
    rows, memory = _states((num, key, value), batch, device)
    want, before = memory[rows], memory.clone()
    args = mixed[:, None].float(), gates[:, None].float(), want, rate, bias
    expected = _mamba(*args, groups, skip) if skip is not None else _delta(*args, groups)
    step = bind(device, "triton").memory_step
    assert step is not None
    got = step(mixed, gates, memory, rows, rate, bias, skip)
    assert got.dtype == torch.float32
    assert_near(got, expected[:, 0], torch.float32, 4.0)
    assert_near(memory[rows], want, torch.float32, 4.0)
    assert _others(memory, rows).isnan().all()
    _check_alone(lambda at: step(mixed[at], gates[at], before, rows[at], rate, bias, skip), got)


def check_refusals(device: str) -> None:
    """States and inputs in pieces are refused."""
    kernels = bind(device, "triton")
    conv, memory = kernels.conv_step, kernels.memory_step
    assert conv is not None and memory is not None
    x, rows, wide = (
        torch.zeros(2, 8, device=device),
        torch.arange(2, device=device),
        torch.zeros(3, 3, 16, device=device),
    )
    with pytest.raises(ValueError, match="a convolution needs"):
        conv(x, wide[..., ::2], rows, torch.zeros(4, 8, device=device), None, True)
    states, one = torch.zeros(3, 1, 2, 8, device=device)[..., ::2], torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="a recurrence needs"):
        memory(x, x[:, :2], states, rows, one, one, None)


def _states(shape: tuple[int, ...], batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Distinct rows in any order, and the states of all: NaN but for these."""
    rows = torch.randperm(batch + SPARE)[:batch].to(device)
    states = torch.full((batch + SPARE, *shape), NAN, device=device)
    states[rows] = torch.randn(batch, *shape, device=device)
    return rows, states


def _others(states: Tensor, rows: Tensor) -> Tensor:
    is_other = torch.ones(len(states), dtype=torch.bool, device=states.device)
    is_other[rows] = False
    return states[is_other]


def _check_alone(step: Callable[[slice], Tensor], got: Tensor) -> None:
    """The last row alone gives the bits that it gives in the batch."""
    last = slice(len(got) - 1, len(got))
    assert torch.equal(step(last), got[last])


def _delta(mixed: Tensor, gates: Tensor, memory: Tensor, rate: Tensor, bias: Tensor, groups: int) -> Tensor:
    """``DeltaNetLayer`` after its convolution: ``[B, 1, HV]``."""
    num, key, value = memory.shape[1:]
    q, k, v = mixed.split((groups * key, groups * key, num * value), dim=-1)
    q, k = (F.normalize(part.unflatten(-1, (groups, key)), dim=-1, eps=1e-6) for part in (q, k))
    step = F.softplus(gates[..., num:] + bias)
    decay = rate * step if step.shape[-1] == num else rate[:, None] * step.unflatten(-1, (num, key))
    beta, v = gates[..., :num].sigmoid(), v.unflatten(-1, (num, value))
    return reference.gated_delta(q, k, v, decay, beta, memory).flatten(2)


def _mamba(
    mixed: Tensor, gates: Tensor, memory: Tensor, rate: Tensor, bias: Tensor, groups: int, skip: Tensor
) -> Tensor:
    """``Mamba2Layer`` after its convolution: ``[B, 1, HP]``."""
    num, size, dim = memory.shape[1:]
    x, b, c = mixed.split((num * dim, groups * size, groups * size), dim=-1)
    x, (b, c) = x.unflatten(-1, (num, dim)), (part.unflatten(-1, (groups, size)) for part in (b, c))
    step = F.softplus(gates + bias)
    out = reference.selective_scan(c, b, x * step[..., None], rate * step, memory)
    return (out + skip[:, None] * x).flatten(2)
