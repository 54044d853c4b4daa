"""Models with several residual streams of a token, which lie side by side, ``[T, SD]``.

AltUp (Gemma 3n): attention and MLP run on one of them, and the others follow. Hyper-connections (Hy V4, GLM-5.3-Flash):
attention and MLP each read a sum of all and add to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig
from snapstream.config.model import HyperConnections
from snapstream.distributed.group import Group
from snapstream.kernels.interface import CosSin, Kernels
from snapstream.models.layers import DenseLayer, KVView, SparseGLU
from snapstream.models.matrix import Matrix
from snapstream.models.weights import LayerWeights


class Streams(Protocol):
    """The ends of several residual streams."""

    def split(self, embedded: Tensor) -> Tensor:
        """``embedded [T, D]`` to the streams ``[T, SD]`` that enter layer 0."""
        ...

    def merged(self, residual: Tensor) -> Tensor:
        """The streams ``[T, SD]`` behind the last layer to ``[T, D]``."""
        ...


class AltUpLayer(DenseLayer):
    """A layer over S residual streams ``[T, SD]`` side by side (AltUp, arXiv 2301.13310, algorithm 1).

    All are predicted from all, attention and MLP run on the first, and all are corrected by how that differs from its
    prediction. A low-rank branch reads the input of attention (LAuReL, arXiv 2411.07501). Coefficients are
    products of ``tanh(router(norm(x)) / D)``.
    """

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        super().__init__(index, config, weights, kernels, group)
        assert config.altup is not None
        self._num_streams = config.altup.num_streams
        self._attention_multiplier = math.sqrt(0.5)
        if config.altup.sparsities[index]:
            own = weights.matrix("gate_up"), weights.matrix("down")
            self._mlp = SparseGLU(*own, config.altup.deviations(index), kernels, group)
        self._router = stream_router(weights)
        self._prediction, self._correction = weights.vector("stream_prediction"), weights.vector("stream_correction")
        self._left, self._right = weights.matrix("laurel_in"), weights.matrix("laurel_out")
        self._laurel_norm = weights.vector("laurel_norm")

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        streams = residual.unflatten(1, (self._num_streams, -1))
        mixed = F.linear(self._modalities(streams[:, 0]), self._prediction).unflatten(1, (-1, self._num_streams))
        streams.add_(torch.bmm(mixed.to(streams.dtype), streams))
        return super().attend(streams[:, 0].contiguous(), None, rope, view)

    def finish(self, residual: Tensor, attended: Tensor) -> None:
        streams = residual.unflatten(1, (self._num_streams, -1))
        predicted = streams[:, 0].contiguous()
        assert self._input_norm is not None
        normed = self._kernels.rms_norm(predicted, self._input_norm, self._eps)
        low = self._right.multiply(self._left.multiply(normed, None, self._kernels), None, self._kernels)
        x = normed.add_(self._kernels.rms_norm(low, self._laurel_norm, self._eps)).add_(predicted).mul_(math.sqrt(0.5))
        output = super().finish(x, attended)
        assert output is not None
        x.add_(output)
        shares = F.linear(self._modalities(x), self._correction).add_(1.0).to(x.dtype)  # [T, S]
        streams.addcmul_(shares[:, :, None], x.sub_(predicted)[:, None])

    def _modalities(self, x: Tensor) -> Tensor:
        """What coefficients are products of, ``[T, S]`` fp32."""
        x = x.to(torch.float32)
        return F.linear(x, self._router).mul_((x.square().mean(-1, keepdim=True) + self._eps).rsqrt()).tanh_()


def stream_router(weights: LayerWeights) -> Tensor:
    """The router of residual streams with the weight of its norm and 1 / D, ``[S, D]`` fp32."""
    norm = weights.vector("stream_router_norm").to(torch.float32)
    return weights.vector("stream_router") * (norm / len(norm))


class AltUpStreams:
    """Projections of the embedding, and of each stream to their mean, as large as the first stream's numbers (root mean
    square).
    """

    def __init__(self, matrices: Mapping[str, Matrix], count: int, kernels: Kernels) -> None:
        self._in, self._kernels = matrices["streams_in"], kernels
        self._outs = [matrices[f"streams_out.{i}"] for i in range(count - 1)]

    def split(self, embedded: Tensor) -> Tensor:
        others = self._in.multiply(embedded, None, self._kernels).unflatten(1, (-1, embedded.shape[1]))
        return torch.cat((embedded[:, None], self._sized(others, embedded[:, None])), 1).flatten(1)

    def merged(self, residual: Tensor) -> Tensor:
        first, *others = residual.chunk(len(self._outs) + 1, 1)
        pairs = zip(self._outs, others, strict=True)
        found = [self._sized(own.multiply(x.contiguous(), None, self._kernels), first) for own, x in pairs]
        return torch.stack((first, *found)).mean(0)

    @staticmethod
    def _sized(x: Tensor, like: Tensor) -> Tensor:
        size, wanted = (own.to(torch.float32).square().mean(-1, keepdim=True) for own in (x, like))
        return x * (wanted.sqrt() / size.clamp(min=1e-5).sqrt()).to(x.dtype)


class TwoPartLayer(Protocol):
    """A layer whose halves run apart."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """See ``models.decoder.Layer``."""
        ...

    def mixed(self, attended: Tensor) -> Tensor:
        """What the part that mixes tokens adds to the residual stream, ``[T', D]``."""
        ...

    def run_mlp(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        """Add ``pending`` to ``residual [T', D]``; what the MLP then adds."""
        ...


class Connection:
    """What one half of a layer reads of the streams ``[T, SD]``, and how they take its output (arXiv 2512.24880,
    section 4). A token's shares are made of ``scale * (weights @ norm(streams)) + base``: what is read ``[S]``, what is
    added ``[S]``, and how streams are mixed ``[S, S]``, unless ``weights`` end before these.
    """

    def __init__(self, hyper: HyperConnections, vector: Callable[[str], Tensor], name: str, eps: float) -> None:
        """``vector`` gives the stored ``name_weights [C, SD]``, ``name_base [C]`` and ``name_scale``, one number for
        each kind of shares, fp32.
        """
        self._hyper, self._eps = hyper, eps
        self._weights, self._base = vector(f"{name}_weights"), vector(f"{name}_base")
        scale = vector(f"{name}_scale")
        self._num_streams = count = hyper.num_streams
        sizes = torch.tensor([count, count, count**2][: len(scale)], device=scale.device)
        self._scale = scale.repeat_interleave(sizes, output_size=len(self._base))

    def read(self, streams: Tensor) -> Tensor:
        """``[T, SD]`` to ``[T, D]``."""
        shares = self._seen(streams, slice(self._num_streams)).sigmoid_().add_(self._hyper.eps)  # [T, S]
        return torch.bmm(shares[:, None], self._apart(streams).to(torch.float32))[:, 0].to(streams.dtype)

    def add(self, streams: Tensor, output: Tensor) -> None:
        """``output [T, D]`` to the streams, in place; these are still what ``read`` got."""
        count, hyper = self._num_streams, self._hyper
        seen = self._seen(streams, slice(count, None))
        added = seen[:, :count].sigmoid().mul_(hyper.most_added)
        apart, given = self._apart(streams), output.to(torch.float32)[:, None]
        if hyper.iterations:
            mixed = self._balanced(seen[:, count:].unflatten(1, (count, count)))
            kept = torch.bmm(mixed.transpose(1, 2), apart.to(torch.float32))
            apart.copy_(kept.addcmul_(added[:, :, None], given))
        else:
            apart.copy_(torch.addcmul(apart.to(torch.float32), added.add_(hyper.eps)[:, :, None], given))

    def _balanced(self, logits: Tensor) -> Tensor:
        """``[T, S, S]`` to matrices whose rows and columns add up to about 1 (Sinkhorn and Knopp)."""
        eps = self._hyper.eps
        mixed = logits.softmax(-1).add_(eps)
        mixed.div_(mixed.sum(-2, keepdim=True).add_(eps))
        for _ in range(self._hyper.iterations - 1):
            mixed.div_(mixed.sum(-1, keepdim=True).add_(eps))
            mixed.div_(mixed.sum(-2, keepdim=True).add_(eps))
        return mixed

    def _seen(self, streams: Tensor, rows: slice) -> Tensor:
        """``[T, C']`` fp32."""
        x = streams.to(torch.float32)
        normed = x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return F.linear(normed, self._weights[rows]).mul_(self._scale[rows]).add_(self._base[rows])

    def _apart(self, streams: Tensor) -> Tensor:
        return streams.unflatten(1, (self._num_streams, -1))


class HyperLayer:
    """A layer over streams ``[T, SD]`` with a connection for each half; a ``models.decoder.Layer``."""

    def __init__(self, layer: TwoPartLayer, config: ModelConfig, weights: LayerWeights) -> None:
        assert config.hyper is not None
        self._layer = layer
        self._attention, self._mlp = (
            Connection(config.hyper, weights.vector, f"hyper_{half}", config.rms_norm_eps)
            for half in ("attention", "mlp")
        )

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        return self._layer.attend(self._attention.read(residual), None, rope, view)

    def finish(self, residual: Tensor, attended: Tensor) -> None:
        self._attention.add(residual, self._layer.mixed(attended))
        self._mlp.add(residual, self._layer.run_mlp(self._mlp.read(residual), None))


class HyperStreams:
    """The embedding is every stream. Behind the last layer one more connection is read, or their mean."""

    def __init__(self, hyper: HyperConnections, vectors: Mapping[str, Tensor], eps: float) -> None:
        self._num_streams = hyper.num_streams
        self._head: Connection | None = None
        if hyper.has_head:
            self._head = Connection(hyper, vectors.__getitem__, "hyper_head", eps)

    def split(self, embedded: Tensor) -> Tensor:
        return embedded.repeat(1, self._num_streams)

    def merged(self, residual: Tensor) -> Tensor:
        if self._head is not None:
            return self._head.read(residual)
        return residual.unflatten(1, (self._num_streams, -1)).mean(1)
