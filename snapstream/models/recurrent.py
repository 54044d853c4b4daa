"""Layers that keep a state of constant size, not keys and values: short convolutions, gated DeltaNet and Mamba-2.

As attention hands heads to a ``KVView``, they hand it their projected inputs and a ``Recurrence``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig
from snapstream.config.recurrent import DeltaNet, Mamba2, ShortConv
from snapstream.kernels.interface import CosSin, SumNorm
from snapstream.models.layers import DenseLayer, KVView, bias_of_sum
from snapstream.models.weights import LayerWeights

L2_EPS = 1e-6


class ShortConvLayer(DenseLayer):
    """A layer with a gated short convolution: ``o(c * conv(b * x))`` of ``b | c | x``, three projections of its input
    (LFM2).
    """

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        self._in, self._in_bias = weights.matrix("conv_in"), weights.optional("conv_in_bias")
        self._o, self._o_bias = weights.matrix("conv_out"), bias_of_sum(weights.optional("conv_out_bias"), self._group)
        self._taps, self._conv_bias = _taps(weights), weights.optional("conv_bias")

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        assert self._input_norm is not None
        given = SumNorm(residual, pending, self._input_norm, self._eps)
        projected = self._in.multiply_normed(given, self._in_bias, self._kernels)
        return view.recur(self._index, projected, self._convolve, self._convolve_rows)

    def _convolve(self, inputs: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """A ``Recurrence`` over ``inputs [S, n, 3C]``."""
        gate, out_gate, x = inputs.chunk(3, dim=-1)
        return out_gate * self._kernels.causal_conv(gate * x, states["inputs"], self._taps, self._conv_bias, False)

    def _convolve_rows(self, inputs: Tensor, states: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        assert self._kernels.conv_step is not None
        gate, out_gate, x = inputs.chunk(3, dim=-1)
        mixed = self._kernels.conv_step(gate * x, states["inputs"], rows, self._taps, self._conv_bias, False)
        return out_gate * mixed


class DeltaNetLayer(DenseLayer):
    """A layer with a gated DeltaNet (arXiv 2412.06464; Qwen3-Next): SiLU of a convolution over ``q | k | v``, the gated
    delta rule per value head, a norm of each head's output times SiLU of the gate ``z``; or KDA (see ``DeltaNet``).
    """

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        assert isinstance(config.recurrent, DeltaNet)
        self._net = config.recurrent
        self._in, self._gates = weights.matrix("delta_in"), weights.matrix("delta_gates")
        self._o, self._o_bias = weights.matrix("delta_out"), None
        self._taps, self._out_norm = _taps(weights), weights.vector("delta_norm")
        self._norm_eps = self._net.norm_eps or self._eps
        self._rate = -weights.vector("delta_decay").exp().flatten()  # [H] fp32
        self._step = weights.vector("delta_step")  # [H], of KDA [H K]
        self._decay_up, self._gate_up = (weights.matrices.get(f"delta_{name}_up") for name in ("decay", "gate"))

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        assert self._input_norm is not None
        x = self._kernels.normed(SumNorm(residual, pending, self._input_norm, self._eps))
        projected = self._in.multiply(x, None, self._kernels)  # [T, C + V], of KDA [T, C + 2R]
        gates = self._gates.multiply(x, None, self._kernels)  # [T, 2H], of KDA [T, H]
        mixed, z = projected[:, : self._net.channels], projected[:, self._net.channels :]
        if self._net.gate_rank:
            decays, z = z.chunk(2, dim=1)
            if self._decay_up is not None:
                decays = self._decay_up.multiply(decays.contiguous(), None, self._kernels)
            gates = torch.cat((gates, decays), dim=1)
        is_usual = self._net.most_beta == 1.0 and self._net.decay_floor is None  # kernels know no other
        of_rows = self._recur_rows if is_usual else None
        out = view.recur(self._index, torch.cat((mixed, gates), dim=1), self._recur, of_rows)
        z = view.outputs(z)
        z = z if self._gate_up is None else self._gate_up.multiply(z.contiguous(), None, self._kernels)
        gate = z.to(torch.float32).sigmoid() if self._net.gate_rank else F.silu(z.to(torch.float32))
        heads = out.view(-1, self._net.value_heads, self._net.value_dim)
        normed = self._kernels.rms_norm(heads.to(x.dtype).flatten(0, 1), self._out_norm, self._norm_eps).view_as(heads)
        return (normed * gate.reshape(heads.shape)).to(x.dtype)

    def _recur(self, inputs: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """A ``Recurrence`` over ``q | k | v | b | a``, ``[S, n, C + 2H]``, of KDA ``[S, n, C + H + H K]``; outputs
        ``[S, n, V]`` fp32.
        """
        net = self._net
        mixed = self._kernels.causal_conv(inputs[..., : net.channels], states["inputs"], self._taps, None, True)
        gates = inputs[..., net.channels :].to(torch.float32)
        b, a = gates[..., : net.value_heads], gates[..., net.value_heads :]  # [S, n, H]; [S, n, H] or [S, n, H K]
        q, k, v = mixed.to(torch.float32).split((net.key_size, net.key_size, net.value_size), dim=-1)
        q, k = (_unit(part.unflatten(-1, (net.key_heads, net.key_dim))) for part in (q, k))
        v = v.unflatten(-1, (net.value_heads, net.value_dim))
        a, rate = a + self._step, self._rate
        if net.gate_rank:
            a, rate = a.unflatten(-1, (net.value_heads, net.key_dim)), rate[:, None]
        decay = rate * F.softplus(a) if net.decay_floor is None else net.decay_floor * (-rate * a).sigmoid()
        beta = self._net.most_beta * b.sigmoid()
        return self._kernels.gated_delta(q, k, v, decay, beta, states["memory"]).flatten(2)

    def _recur_rows(self, inputs: Tensor, states: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        assert self._kernels.conv_step is not None and self._kernels.memory_step is not None
        mixed, gates = inputs[:, : self._net.channels], inputs[:, self._net.channels :]
        mixed = self._kernels.conv_step(mixed, states["inputs"], rows, self._taps, None, True)
        return self._kernels.memory_step(mixed, gates, states["memory"], rows, self._rate, self._step, None)


class Mamba2Layer(DenseLayer):
    """A layer with Mamba-2 (arXiv 2405.21060): SiLU of a convolution over ``x | B | C``, the selective scan, a norm per
    group of its output times SiLU of the gate ``z``.
    """

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        assert isinstance(config.recurrent, Mamba2)
        self._net = config.recurrent
        self._in, self._in_bias = weights.matrix("mamba_in"), weights.optional("mamba_in_bias")
        self._o, self._o_bias = (
            weights.matrix("mamba_out"),
            bias_of_sum(weights.optional("mamba_out_bias"), self._group),
        )
        self._taps, self._conv_bias = _taps(weights), weights.optional("conv_bias")
        self._out_norm, self._skip = weights.optional("mamba_norm"), weights.vector("mamba_skip")  # [I], [H]
        scales = in_scales(self._net)
        self._scales = None if scales is None else scales.to(self._skip.device)
        self._rate, self._step = -weights.vector("mamba_decay").exp(), weights.vector("mamba_step")  # [H] fp32

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        assert self._input_norm is not None
        given = SumNorm(residual, pending, self._input_norm, self._eps)
        return self._scan(self._in.multiply_normed(given, self._in_bias, self._kernels), view)

    def _scan(self, projected: Tensor, view: KVView) -> Tensor:
        """From ``z | x | B | C | dt`` of tokens, ``[T, I + C + H]``, to what the last product takes, ``[T', I]``."""
        inner = self._net.inner
        if self._scales is not None:
            projected = projected * self._scales.to(projected.dtype)
        out = view.recur(self._index, projected[:, inner:], self._recur, self._recur_rows)
        # A slice, so that torch takes SiLU row by row: its last few numbers are rounded one by one, not as vectors.
        z = view.outputs(projected)[:, :inner].to(torch.float32)
        gated = out.view_as(z).mul_(F.silu(z))
        if self._out_norm is None:
            return gated.to(projected.dtype)
        grouped = gated.unflatten(1, (self._net.groups, -1))
        squares = self._over_ranks(grouped.square().mean(-1, keepdim=True))
        normed = grouped.mul_(torch.rsqrt(squares + self._eps))
        return normed.flatten(1).mul_(self._out_norm).to(projected.dtype)

    def _over_ranks(self, means: Tensor) -> Tensor:
        """Means of a group ``[T', groups, 1]`` over the heads of all ranks that share it."""
        if (shared := self._net.ranks_of_group) == 1:
            return means
        of_ranks = self._group.all_gather(means[:, 0], 1)  # [T', ranks]
        first = self._group.rank // shared * shared
        return of_ranks[:, None, first : first + shared].mean(-1, keepdim=True)

    def _recur(self, inputs: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """A ``Recurrence`` over ``x | B | C | dt``, ``[S, n, C + H]``; outputs ``[S, n, I]`` fp32."""
        net = self._net
        mixed = self._kernels.causal_conv(
            inputs[..., : net.channels], states["inputs"], self._taps, self._conv_bias, True
        )
        sizes = net.inner, net.groups * net.state_dim, net.groups * net.state_dim
        x, b, c = mixed.to(torch.float32).split(sizes, dim=-1)
        x = x.unflatten(-1, (net.heads, net.head_dim))
        b, c = (part.unflatten(-1, (net.groups, net.state_dim)) for part in (b, c))
        step = F.softplus(inputs[..., net.channels :].to(torch.float32) + self._step)  # [S, n, H]
        out = self._kernels.selective_scan(c, b, x * step[..., None], self._rate * step, states["memory"])
        return out.add_(self._skip[:, None] * x).flatten(2)

    def _recur_rows(self, inputs: Tensor, states: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        assert self._kernels.conv_step is not None and self._kernels.memory_step is not None
        mixed, gates = inputs[:, : self._net.channels], inputs[:, self._net.channels :]
        mixed = self._kernels.conv_step(mixed, states["inputs"], rows, self._taps, self._conv_bias, True)
        return self._kernels.memory_step(mixed, gates, states["memory"], rows, self._rate, self._step, self._skip)


class ParallelMambaLayer(Mamba2Layer):
    """A layer with attention and Mamba-2 over one normed input, whose outputs are added (Falcon-H1).

    What it hands on between its halves is the attended heads and the output of the scan side by side.
    """

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        super()._read_mixer(config, weights)
        self._mamba_out, self._mamba_out_bias = self._o, self._o_bias
        DenseLayer._read_mixer(self, config, weights)
        self._multipliers, self._attention_multiplier = config.multipliers, config.multipliers.residual

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        assert self._input_norm is not None
        x = self._kernels.normed(SumNorm(residual, pending, self._input_norm, self._eps))
        attended = self._attend_heads(self._qkv.multiply(x, self._qkv_bias, self._kernels), rope, view)
        scanned = self._scan(self._in.multiply(x, self._in_bias, self._kernels), view)
        return torch.cat((attended.flatten(1), scanned), dim=1)

    def _projected(self, attended: Tensor) -> Tensor:
        heads, scanned = attended.split((attended.shape[1] - self._net.inner, self._net.inner), dim=1)
        output = self._o.multiply(heads.contiguous(), self._o_bias, self._kernels)
        mixed = self._mamba_out.multiply(scanned.contiguous(), self._mamba_out_bias, self._kernels)
        return output.mul_(self._multipliers.attention_out).add_(mixed, alpha=self._multipliers.recurrent_out)


def in_scales(net: Mamba2) -> Tensor | None:
    """What the numbers that a token is projected to are multiplied by, ``[I + C + H]`` fp32."""
    if not net.in_multipliers:
        return None
    return torch.repeat_interleave(torch.tensor(net.in_multipliers), torch.tensor(net.projected))


def _taps(weights: LayerWeights) -> Tensor:
    """Weights ``[K, C]`` fp32 of a convolution."""
    return weights.vector("conv_kernel")[:, 0].t().contiguous()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


RECURRENT_LAYERS: Mapping[type, type[DenseLayer]] = {
    ShortConv: ShortConvLayer,
    DeltaNet: DeltaNetLayer,
    Mamba2: Mamba2Layer,
}
