"""A decoder: embedding, L layers of the model's family, logits.

It keeps no state: tokens of any sequences are packed along T, positions come from the caller, and a ``KVView`` does the
attention. The caller holds ``torch.inference_mode``. With several ranks each has a decoder over its shard of the
weights (``sharding.py``), all are called in the same order, and all return the same bits. ``prefill.py`` runs layer by
layer over chunks, ``exec/eager.py`` all layers over one token per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import DType, KVDType, ModelConfig, WeightFormats
from snapstream.config.values import imported
from snapstream.distributed.group import Alone, Group, ReduceOp
from snapstream.kernels.interface import CosSin, Kernels, bind
from snapstream.kv.spec import KVSpec
from snapstream.models import checkpoint
from snapstream.models.latent import (
    DataParallelLatentLayer,
    LatentLayer,
    is_data_parallel,
    local_heads,
    with_local_heads,
)
from snapstream.models.layers import DenseLayer, KVView, LayerEnd, MlpLayer, TokenInputs, Vocabulary
from snapstream.models.lora import Adapters
from snapstream.models.matrix import MakeMatrix, make_matrix
from snapstream.models.recurrent import RECURRENT_LAYERS, ParallelMambaLayer
from snapstream.models.registry import FAMILIES, kv_spec_of
from snapstream.models.rope import Rope
from snapstream.models.streams import AltUpLayer, AltUpStreams, HyperLayer, HyperStreams, Streams
from snapstream.models.weights import DecoderWeights, LayerWeights


def with_reduced_scores(kernels: Kernels, model_spec: KVSpec, shard_spec: KVSpec, group: Group) -> Kernels:
    """``kernels`` whose attention scores are reduced over the ranks that share a kv head.

    A selector merges the scores of all query heads of a kv head. If these are spread over ranks (with latents: all
    ranks), each rank scores with its own query heads, and the reduction makes every rank keep the same tokens.
    """
    if group.size == 1 or not model_spec.budget_layers:
        return kernels
    num_kv_heads, own = (spec.slots_of(spec.budget_layers[0]).num_kv_heads for spec in (model_spec, shard_spec))
    copies = group.size * own // num_kv_heads
    if copies == 1:
        return kernels
    scores = _ReducedScores(kernels, num_kv_heads, copies, group)
    return replace(kernels, snapkv_scores=scores.snapkv_scores, hop_scores=scores.hop_scores)


class _ReducedScores:
    """Each rank has one of G kv heads, and ``copies`` ranks have the same one."""

    def __init__(self, kernels: Kernels, num_kv_heads: int, copies: int, group: Group) -> None:
        self._kernels, self._num_kv_heads, self._copies, self._group = kernels, num_kv_heads, copies, group
        self._local = slice(group.rank // copies, group.rank // copies + 1)

    def snapkv_scores(
        self, queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool,
        group_max: bool, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``reference.snapkv_scores``."""
        local = self._kernels.snapkv_scores(
            queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max, sinks=sinks
        )
        return self._reduce(local, "max" if group_max else "sum", keys.shape[1])

    def hop_scores(
        self, weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int, *,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``reference.hop_scores``, a mean over query heads."""
        local = self._kernels.hop_scores(weights, voters, queries, keys, start, stop, sinks=sinks)
        return self._reduce(local, "sum", keys.shape[1]) / self._copies

    def _reduce(self, local: Tensor, op: ReduceOp, num_keys: int) -> Tensor:
        """Reduce ``local [1, n]`` over the ranks that have this kv head. Scores are >= 0, so zeros do not count. All
        ranks call the collective with one shape: with per-head budgets n differs between heads.
        """
        scores = local.new_zeros(self._num_kv_heads, num_keys)  # [G, N]
        scores[self._local, : local.shape[1]] = local
        return self._group.all_reduce(scores, op)[self._local, : local.shape[1]]


class Layer(Protocol):
    """One layer in two halves; the second runs only for the T' tokens that need an output.

    ``residual [T, D]`` is the residual stream, updated in place, or several side by side; ``pending [T, D]`` is the
    output of the previous layer that is not added to it yet, None before the first.
    """

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """Add ``pending``, norm, project, attend: ``[T', H, E']``."""
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor | None:
        """The rest of the layer for T' tokens; returns what to add to ``residual [T', D]``, the same on all ranks, or
        None if it has been added.
        """
        ...


class Decoder:
    """A decoder-only transformer over stacked weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: Kernels | None = None,
        group: Group | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """``kernels`` default to those of the weights' device. ``config`` is the whole model; ``weights`` may be a
        rank's shard, with that rank's ``group``.
        """
        self.config, self.adapters = config, adapters
        self.group = Alone() if group is None else group
        self.is_data_parallel = is_data_parallel(config, weights.config, self.group)  # attention
        # This rank's part of the model in prefill; with data-parallel attention decode has all heads.
        self.shard = with_local_heads(weights.config, self.group) if self.is_data_parallel else weights.config
        self.weights = weights
        self.dtype = weights.dtype
        self.device = weights.device
        if self.shard.num_heads * self.group.size != config.num_heads:
            raise ValueError(
                f"these weights have {self.shard.num_heads} of {config.num_heads} query heads, and there are "
                f"{self.group.size} ranks"
            )
        model_spec, shard_spec = (kv_spec_of(model, "float32") for model in (config, self.shard))
        kernels = (bind(self.device) if kernels is None else kernels).with_cap(config.score_cap)
        self.kernels = with_reduced_scores(kernels, model_spec, shard_spec, self.group)
        if self.is_data_parallel:
            self.layers: list[Layer] = [
                self._connected(DataParallelLatentLayer, index, weights.config, weights.layer(index))
                for index in range(config.num_layers)
            ]
            self._prefill_layers = self._layers(
                lambda index: local_heads(weights.prefill_layer(index), self.shard, self.group)
            )
        else:
            self.layers = self._layers(weights.layer)
            self._prefill_layers = self.layers if weights.dequantized is None else self._layers(weights.prefill_layer)
        full_dim = config.rope_dim if config.full_heads is None else config.full_heads.head_dim
        self._ropes = [
            Rope(rope, dim, self.device, config.multipliers.attention)
            for rope, dim in ((config.rope, full_dim), (config.window_rope, config.rope_dim))
            if rope is not None
        ]
        # As transformers multiplies Gemma's embeddings: with a constant of their dtype.
        self.embedding_multiplier = float(torch.tensor(config.multipliers.embedding, dtype=self.dtype))
        self._ends: list[LayerEnd] = []
        if config.has_layer_ends:
            layers = map(weights.layer, range(config.num_layers))
            self._ends = [LayerEnd(config, own, weights.vectors, self.kernels) for own in layers]
        self._streams: Streams | None = None
        if config.altup is not None:
            self._streams = AltUpStreams(weights.matrices, config.altup.num_streams, self.kernels)
        if config.hyper is not None:
            self._streams = HyperStreams(config.hyper, weights.vectors, config.rms_norm_eps)
        self._vocabulary = Vocabulary(weights, config.vocab_size, self.kernels, self.group)

    def sinks(self, layer: int) -> Tensor | None:
        """Learned attention sinks ``[H]`` of a layer, of this rank's query heads; None if it has none."""
        return self.weights.vectors["sinks"][layer] if self.config.has_sinks_in(layer) else None

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        dtype: str,
        device: str,
        *,
        progress: checkpoint.LoadProgress,
        formats: WeightFormats | None = None,
        make: MakeMatrix = make_matrix,
    ) -> Decoder:
        """Read a checkpoint.

        ``formats``: of the stored matrices, by default ``dtype``; ``make`` allocates a matrix.
        """
        weights = checkpoint.load_weights(folder, config, getattr(torch, dtype), device, progress, formats, make)
        return cls(config, weights)

    def prefill_layer(self, index: int) -> Layer:
        """A layer for many tokens, its low-precision matrices dequantized; valid until the next call."""
        if self.weights.dequantized is not None:
            self.weights.dequantized.hold(index)
        return self._prefill_layers[index]

    @property
    def is_batch_invariant(self) -> bool:
        """Whether ``Layer.finish`` gives a token the same bits in any batch. Never with experts or several residual
        streams: their router's product is not batch-invariant.
        """
        has_router = self.config.moe is not None or self._streams is not None
        return not has_router and all(weight.is_batch_invariant for weight in self.weights.matrices.values())

    def kv_spec(self, kv_dtype: KVDType = "auto") -> KVSpec:
        return kv_spec_of(self.shard, self._dtype_name, kv_dtype)

    def whole_kv_spec(self, kv_dtype: KVDType = "auto") -> KVSpec:
        """KV cache of the whole model, without copies on several ranks."""
        return kv_spec_of(self.config, self._dtype_name, kv_dtype)

    def all_kv_heads(self, own: Tensor, num_kv_heads: int) -> Tensor:
        """All-gather ``own [local kv heads, ...]`` of ``num_kv_heads``; those that several ranks hold appear once."""
        return self.group.all_gather(own, 0)[:: self.group.size * len(own) // num_kv_heads]

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids [T]`` to the hidden states that enter layer 0, ``[T, D]``, of every residual stream."""
        hidden = self._embedded(token_ids)
        return hidden if self._streams is None else self._streams.split(hidden)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        hidden = self._vocabulary.embed(token_ids)
        hidden = hidden if self.embedding_multiplier == 1.0 else hidden * self.embedding_multiplier
        return hidden - hidden.mean(-1, keepdim=True) if self.config.is_centered else hidden

    def rope(self, positions: Tensor, seq_lens: Tensor) -> CosSin:
        """Cosine and signed sine ``[T, 1, E]`` fp32 of every token. If layers with sliding windows have other angles,
        these come second: ``[2, T, 1, E]``, with zeros behind the smaller heads. So does, in place of the cosine, what
        queries are multiplied by if the position scales them.

        ``seq_lens [T]`` is the length of each token's sequence when it is fed: the prompt length in prefill,
        position + 1 in decode. Only dynamic stretching and longrope read it.
        """
        angles = [rope.angles(positions, seq_lens) for rope in self._ropes]
        if (scale := self.config.length_scale) is not None:
            (cos, sin), spans = angles[0], ((positions + scale.is_unrotated) // scale.original).to(torch.float32)
            factors = 1.0 + scale.beta * torch.log1p(spans)
            return torch.stack((cos, factors[:, None, None].expand_as(cos))), torch.stack((sin, sin))
        if len(angles) == 1:
            return angles[0]
        if self.config.full_heads is not None:
            missing = [self.config.widest_head - cos.shape[-1] for cos, _ in angles]
            angles = [(F.pad(cos, (0, n)), F.pad(sin, (0, n))) for (cos, sin), n in zip(angles, missing, strict=True)]
        return torch.stack([cos for cos, _ in angles]), torch.stack([sin for _, sin in angles])

    def run(self, token_ids: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """All layers: from tokens ``[T]`` to logits ``[T, V]`` fp32."""
        hidden = self.embed(token_ids)
        pending: Tensor | None = None
        embedded = hidden[:, : self.config.hidden_size]
        tokens = TokenInputs(token_ids, embedded.clone()) if self.config.per_layer_dim else None
        for index, layer in enumerate(self.layers):
            attended = layer.attend(hidden, pending, rope, view)
            pending = self.finish_layer(index, layer, (hidden, attended), tokens)
        return self._logits(hidden, pending)

    def token_inputs(self, token_ids: Tensor) -> TokenInputs | None:
        """What ``finish_layer`` reads of tokens ``[T]``; None for models without embeddings for each layer."""
        return TokenInputs(token_ids, self._embedded(token_ids)) if self.config.per_layer_dim else None

    def finish_layer(
        self, index: int, layer: Layer, given: tuple[Tensor, Tensor], tokens: TokenInputs | None
    ) -> Tensor | None:
        """``Layer.finish`` of ``given``, the residual stream ``[T', D]`` and attended heads, and what follows it in
        models with embeddings for each layer or scalars of layers; ``tokens`` are the T'.
        """
        output = layer.finish(*given)
        return output if not self._ends else self._ends[index](given[0], output, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[T, V]`` fp32 from the output of the last layer."""
        return self._logits(hidden, None)

    def _logits(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        residual = residual if self._streams is None else self._streams.merged(residual)
        norm = self.weights.vectors["final_norm"]
        normed = self.kernels.sum_norm(residual, pending, norm, self.config.rms_norm_eps)
        logits = self._vocabulary.logits(normed)
        multiplier, cap = self.config.multipliers.logits, self.config.logit_cap
        logits = logits if multiplier == 1.0 else logits.mul_(multiplier)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def _dtype_name(self) -> DType:
        return cast(DType, str(self.dtype).removeprefix("torch."))

    def _layers(self, weights_of: Callable[[int], LayerWeights]) -> list[Layer]:
        classes = [_layer_class(self.config)] * self.config.num_layers
        for index in self.config.recurrent_layers:
            own = RECURRENT_LAYERS[type(self.config.recurrent)]
            classes[index] = ParallelMambaLayer if self.config.has_parallel_recurrence else own
        if self.config.mlp_layers is not None:
            for index in self.config.mlp_layers:
                classes[index] = MlpLayer
        layers = [weights_of(index) for index in range(self.config.num_layers)]
        if (adapters := self.adapters) is not None:
            layers = list(map(adapters.around, range(len(layers)), layers))
        return [
            self._connected(layer, index, self.shard, own)
            for index, (layer, own) in enumerate(zip(classes, layers, strict=True))
        ]

    def _connected(self, made: Any, index: int, config: ModelConfig, weights: LayerWeights) -> Layer:
        """A layer of class ``made``, between hyper-connections if the model has these."""
        layer = made(index, config, weights, self.kernels, self.group)
        return layer if config.hyper is None else HyperLayer(layer, config, weights)


def added(residual: Tensor, output: Tensor | None) -> Tensor:
    """``residual`` with what ``finish_layer`` returned added in place."""
    if output is None:
        return residual
    return residual.add_(output) if output.dim() == 2 else residual.copy_(residual + output.sum(0))


def _layer_class(config: ModelConfig) -> Any:
    """The family's layer class, or that of the recipe."""
    layer = FAMILIES.get(config.architecture).layer
    if layer is None:
        return LatentLayer if config.latent is not None else DenseLayer if config.altup is None else AltUpLayer
    return imported(layer)
