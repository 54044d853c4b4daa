"""A decoder: embedding, L layers of the model's family, logits.

It keeps no state: tokens are packed along T whatever sequence they belong to, positions come from the caller, and
attention is left to a ``KVView``. The caller holds ``torch.inference_mode``. Read ``dense.py`` for a layer,
``weights.py`` for storage, ``models/rope.py`` for the rotation, ``layer_pass.py`` and ``exec/eager.py`` for the two
ways in which layers are run. Of several ranks each has a decoder over its share of the weights, all are called alike,
and each returns the same bits: ``shards.py`` says who stores what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from snapstream.config import DType, KVDType, ModelConfig, WeightFormats
from snapstream.distributed.group import Alone, Group, ReduceOp
from snapstream.kernels.interface import CosSin, Kernels, bind
from snapstream.kv.spec import KVSpec
from snapstream.models import checkpoint
from snapstream.models.latent import DealtLatentLayer, LatentLayer, is_dealt, own_heads, with_own_heads
from snapstream.models.layers import DenseLayer, KVView, Vocabulary
from snapstream.models.matrix import MakeMatrix, make_matrix
from snapstream.models.registry import FAMILIES, kv_spec_of
from snapstream.models.rope import Rope
from snapstream.models.weights import DecoderWeights, LayerWeights

# Votes for the tokens of a row where the query heads of one kv head are spread over ranks.
#
# A selector merges the votes of all query heads that share a kv head. With one kv head on several ranks - of latents,
# on all of them - each rank has the votes of its own query heads only, so they are merged over the ranks before a
# selector sees them: every rank then keeps the same tokens. Kv heads that are whole on a rank need nothing of this.


def share_votes(kernels: Kernels, whole: KVSpec, own: KVSpec, group: Group) -> Kernels:
    """``kernels`` whose votes are those of whole kv heads; ``own``: the rank's share of the rows of ``whole``."""
    copies = group.size * own.num_kv_heads // whole.num_kv_heads
    if copies == 1:
        return kernels
    votes = _SharedVotes(kernels, whole.num_kv_heads, copies, group)
    return replace(kernels, snapkv_scores=votes.snapkv_scores, hop_scores=votes.hop_scores)


class _SharedVotes:
    """Each rank has one of G kv heads, and ``copies`` ranks have the same."""

    def __init__(self, kernels: Kernels, num_kv_heads: int, copies: int, group: Group) -> None:
        self._kernels, self._num_kv_heads, self._copies, self._group = kernels, num_kv_heads, copies, group
        self._own = slice(group.rank // copies, group.rank // copies + 1)

    def snapkv_scores(
        self, queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool
    ) -> Tensor:
        """See ``reference.snapkv_scores``."""
        own = self._kernels.snapkv_scores(
            queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max
        )
        return self._merged(own, "max" if group_max else "sum")

    def hop_scores(
        self, weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int
    ) -> Tensor:
        """See ``reference.hop_scores``, a mean over query heads."""
        own = self._kernels.hop_scores(weights, voters, queries, keys, start, stop)
        return self._merged(own, "sum") / self._copies

    def _merged(self, own: Tensor, op: ReduceOp) -> Tensor:
        """``own [1, n]``, merged over the ranks that have this kv head. Votes are >= 0, so zeros do not count."""
        everyone = own.new_zeros(self._num_kv_heads, own.shape[1])  # [G, n]
        everyone[self._own] = own
        return self._group.all_reduce(everyone, op)[self._own]


class Layer(Protocol):
    """One layer in two halves; between them stand only the tokens that need an output.

    ``residual [T, D]`` is the residual stream, which changes in place; ``pending [T, D]`` is what the layer before has
    yet to add to it, None before the first.
    """

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """Add ``pending``, norm, project, attend: ``[T', H, E']`` of the tokens that go on."""
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer for T' tokens; returns what it has yet to add to ``residual [T', D]``, the same on
        every rank.
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
    ) -> None:
        """``kernels`` are those of the weights' device unless given. ``config`` is the whole model; ``weights`` may be
        a rank's share of it, and ``group`` then that rank's.
        """
        self.config = config
        self.group = Alone() if group is None else group
        self.is_dealt = is_dealt(config, weights.config, self.group)
        # The part of the model that is stored and computed here; where rows are dealt out, that prompts are read with.
        self.share = with_own_heads(weights.config, self.group) if self.is_dealt else weights.config
        self.weights = weights
        self.dtype = weights.dtype
        self.device = weights.device
        if self.share.num_heads * self.group.size != config.num_heads:
            raise ValueError(
                f"these weights have {self.share.num_heads} of {config.num_heads} query heads, and there are "
                f"{self.group.size} ranks"
            )
        whole, own = (kv_spec_of(model, "float32") for model in (config, self.share))
        self._kv_heads = slice(None, None, self.group.size * own.num_kv_heads // whole.num_kv_heads)
        own_kernels = bind(self.device) if kernels is None else kernels
        self.kernels = share_votes(own_kernels, whole, own, self.group)
        # In decode a rank that has whole rows asks them with all heads, and no scores need adding.
        self.decode_heads = weights.config.num_heads
        self.decode_kernels = own_kernels if self.is_dealt else self.kernels
        if self.is_dealt:
            self.layers = self._dealt_layers()
            self._wide_layers = self._layers(lambda index: own_heads(weights.wide_layer(index), self.share, self.group))
        else:
            self.layers = self._layers(weights.layer)
            self._wide_layers = self.layers if weights.wide is None else self._layers(weights.wide_layer)
        self._rope = Rope(config.rope, config.rope_dim, self.device)
        self._vocabulary = Vocabulary(weights.embed, weights.lm_head, config.vocab_size, self.kernels, self.group)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        dtype: str,
        device: str,
        *,
        progress: bool,
        formats: WeightFormats | None = None,
        make: MakeMatrix = make_matrix,
    ) -> Decoder:
        """Read a checkpoint.

        ``formats``: how the matrices lie in memory, by default in ``dtype``; ``make`` makes the storage of a form.
        """
        weights = checkpoint.load_weights(folder, config, getattr(torch, dtype), device, progress, formats, make)
        return cls(config, weights)

    def wide_layer(self, index: int) -> Layer:
        """A layer for many tokens: its matrices as they are computed with, until another layer is asked for."""
        if self.weights.wide is not None:
            self.weights.wide.hold(index)
        return self._wide_layers[index]

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what a token gets from the second half of a layer is the same bits alone and beside others. Not so
        among experts, whose products over panels would be: a router's product is a plain one.
        """
        return self.config.moe is None and all(weight.is_batch_invariant for weight in self.weights.matrices.values())

    def with_kernels(self, kernels: Kernels) -> Decoder:
        """The same weights under other kernels, as they are bound to a device: ranks share their votes anew."""
        return Decoder(self.config, self.weights, kernels, self.group)

    def kv_spec(self, kv_dtype: KVDType = "auto") -> KVSpec:
        """What a layer keeps per token on this rank."""
        return kv_spec_of(self.share, self._dtype_name, kv_dtype)

    def whole_kv_spec(self, kv_dtype: KVDType = "auto") -> KVSpec:
        """What a layer of this model keeps per token, on all ranks together but once."""
        return kv_spec_of(self.config, self._dtype_name, kv_dtype)

    def all_kv_heads(self, own: Tensor, dim: int) -> Tensor:
        """Of every kv head what ``own`` has, along ``dim``, of this rank's."""
        whole = self.group.all_gather(own, dim)
        return whole[(slice(None),) * dim + (self._kv_heads,)]  # once of those that several ranks hold

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids [T]`` to the hidden states that enter layer 0, ``[T, D]``."""
        return self._vocabulary.embed(token_ids)

    def rope(self, positions: Tensor, seq_lens: Tensor) -> CosSin:
        """Cosine and signed sine ``[T, 1, E]`` fp32 of every token.

        In decode it is made once for all layers, in prefill once per chunk and layer.

        ``seq_lens [T]`` is the length of each token's sequence when it is fed: the prompt length in prefill,
        position + 1 in decode. Only dynamic stretching reads it.
        """
        return self._rope.angles(positions, seq_lens)

    def layer(self, index: int, hidden: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """One whole layer, ``[T, D]`` to ``[T, D]``; ``hidden`` is overwritten with the result."""
        layer = self.layers[index]
        return hidden.add_(layer.finish(hidden, layer.attend(hidden, None, rope, view)))

    def run(self, hidden: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """All layers: from what enters layer 0, ``[T, D]``, to scores of the next token ``[T, V]`` fp32.

        ``hidden`` is overwritten.
        """
        pending: Tensor | None = None
        for layer in self.layers:
            pending = layer.finish(hidden, layer.attend(hidden, pending, rope, view))
        return self._scores(hidden, pending)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token ``[T, V]`` fp32, from the output of the last layer."""
        return self._scores(hidden, None)

    def _scores(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        norm = self.weights.vectors["final_norm"]
        normed = self.kernels.sum_norm(residual, pending, norm, self.config.rms_norm_eps)
        return self._vocabulary.scores(normed)

    @property
    def _dtype_name(self) -> DType:
        return cast(DType, str(self.dtype).removeprefix("torch."))

    def _layers(self, weights_of: Callable[[int], LayerWeights]) -> list[Layer]:
        layer = _layer_class(self.config)
        return [
            layer(index, self.share, weights_of(index), self.kernels, self.group)
            for index in range(self.config.num_layers)
        ]

    def _dealt_layers(self) -> list[Layer]:
        """Of decode, with all heads."""
        stored = self.weights.config
        return [
            DealtLatentLayer(index, stored, self.weights.layer(index), self.kernels, self.group)
            for index in range(stored.num_layers)
        ]


def _layer_class(config: ModelConfig) -> Any:
    """The family's own layer, or that of the recipe."""
    layer = FAMILIES.get(config.architecture).layer
    if layer is None:
        return DenseLayer if config.latent is None else LatentLayer
    if not isinstance(layer, str):
        return layer
    module, _, name = layer.partition(":")
    return getattr(import_module(module), name)
