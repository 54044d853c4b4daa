"""The layer of Llama, Mistral, Qwen, Mixtral and GLM-4, and the parts that all layers share.

A layer is grouped-query attention and an MLP, each after an RMSNorm. Biases, head norms, and a mixture of experts
instead of one MLP are data. The residual stream is carried as two parts: ``residual``, and the output of the previous
block, not added yet; the next norm does the addition, which saves a pass and leaves room for an all-reduce between a
product and its sum. With several ranks each has some heads and a part of the MLP, and their products are summed.

A layer does not know whether it prefills or decodes: it hands projected heads to a ``KVView`` and gets attended heads
back. ``views.py`` implements it for staging buffers (prefill) and for rows (decode).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig
from snapstream.config.model import MoEConfig
from snapstream.distributed.group import Group
from snapstream.kernels.interface import (
    CosSin,
    ExpertParts,
    HeadNorm,
    Kernels,
    LayerActivation,
    Pairs,
    SumNorm,
    Xielu,
)
from snapstream.kernels.pytorch import geglu
from snapstream.models.matrix import Matrix
from snapstream.models.weights import DecoderWeights, LayerWeights

# Feeds sequences of n tokens each: inputs ``[S, n, C]`` and the states ``[S, ...]``, which it updates in place; returns
# the outputs ``[S, n, C']``.
Recurrence = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
# The same of a token for each of ``rows [B]``: inputs ``[B, C]``, the states of all rows, and rows, to ``[B, C']``.
RowsRecurrence = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]


class KVView(Protocol):
    """What one layer keeps of every sequence, and what attention or recurrence makes of it."""

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Norm and rotate heads, store their keys and values, attend over all that is visible.

        ``heads [T, H+2G, E]`` (q | k | v) as projected; returns ``[T', H, E']`` of the same dtype. T' is T, or fewer if
        only some tokens need an output: the last of each prompt, in the last layer. If values are the first elements of
        the keys (latents) there are no heads of v, ``[T, H+G, E]``. With ``rope`` None heads are already normed and
        rotated.
        """
        ...

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        """Feed packed tokens ``inputs [T, C]`` to their sequences' states of a recurrent layer: ``[T', C']``.
        ``of_rows`` is the same for kernels that have ``conv_step``; None: states are copied.
        """
        ...

    def outputs(self, x: Tensor) -> Tensor:
        """Those T' of ``x [T, ...]`` that need an output."""
        ...


class TokenInputs(NamedTuple):
    """What layers with embeddings of their own read of T tokens."""

    token_ids: Tensor  # [T] int64
    embedded: Tensor  # [T, D], as they enter layer 0


# Routing of Mixtral, Qwen3 and DeepSeek. A token's choice depends on that token only: experts have no capacity.


def route(logits: Tensor, correction: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """``logits [T, X]`` fp32 to the weights ``[T, k]`` fp32 and the experts ``[T, k]`` int64 of every token.

    ``correction [X]`` is added to the scores for the choice only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if moe.scoring == "sparsemixer":
        return _sparsemixer(logits, moe)
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()  # [T, X]
    choice = logits if moe.chooses_by_logits else scores
    choice = choice if correction is None else choice + correction
    if moe.num_groups > 1:
        choice = _inside_best_groups(choice, moe)
    experts = choice.topk(moe.top_k, dim=-1, sorted=False).indices  # [T, k]
    weights = scores.gather(1, experts)
    if moe.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + moe.least_sum)
    return weights * moe.scale, experts


def _sparsemixer(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """The likeliest expert, then that of the others; each by its softmax among those left whose logits are near
    (arXiv 2409.12136).
    """
    left, weights, experts = logits, list[Tensor](), list[Tensor]()
    for _ in range(2):
        most, expert = left.max(-1, keepdim=True)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * moe.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, expert))
        experts.append(expert)
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(weights, 1) * moe.scale, torch.cat(experts, 1)


def _inside_best_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """``choice [T, X]`` with -inf outside each token's best groups (device-limited routing, arXiv 2405.04434)."""
    grouped = choice.view(-1, moe.num_groups, moe.group_len)  # [T, groups, X / groups]
    best = 2 if moe.group_score == "top2" else 1
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)  # [T, groups]
    chosen = group_scores.topk(moe.top_groups, dim=-1, sorted=False).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, chosen, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)


class Vocabulary:
    """Embedding and output embedding of one rank, ``[V', D]`` each, of V token ids.

    Every rank holds a range of V' ids. The last range may end in rows of no token: they are never looked up, and their
    logits are dropped.
    """

    def __init__(self, weights: DecoderWeights, vocab_size: int, kernels: Kernels, group: Group) -> None:
        self._embed, self._head, self._vocab_size = weights.embed, weights.lm_head, vocab_size
        self._bias = weights.vectors.get("lm_head_bias")
        self._kernels, self._group = kernels, group
        self._num_local = weights.embed.shape[0]  # V'
        self._first = group.rank * self._num_local

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids [T]`` to ``[T, D]``, summed over ranks."""
        if self._num_local == self._vocab_size:
            return self._embed.lookup(token_ids)
        local = token_ids - self._first
        is_remote = (local < 0) | (local >= self._num_local)
        found = self._embed.lookup(local.masked_fill(is_remote, 0))
        return self._group.all_reduce(found.masked_fill_(is_remote[:, None], 0.0))

    def logits(self, normed: Tensor) -> Tensor:
        """``normed [T, D]`` to ``[T, V]`` fp32."""
        local = self._head.multiply(normed, self._bias, self._kernels)  # [T, V']
        logits = self._group.all_gather(local, 1).to(torch.float32)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size].contiguous()


class Experts:
    """A mixture of experts; an ``Mlp``: route, two grouped products, a weighted sum, shared experts.

    A pair is a token and one of its experts. Pairs are sorted by expert, so that each chosen matrix is read once for
    all of its tokens; shapes depend on T alone. A token's pairs are summed in the order of the router's choice, so its
    result does not depend on the other tokens but for rounding. With expert parallelism a rank stores some of the
    experts, routes like all ranks, and leaves out the pairs of others.
    """

    def __init__(
        self, moe: MoEConfig, weights: LayerWeights, kernels: Kernels, group: Group,
        shared: Callable[[Tensor], Tensor] | None, activation: LayerActivation = "silu",
    ) -> None:  # fmt: skip
        """``shared`` is the MLP of the shared experts, if any."""
        self._moe, self._kernels, self._shared = moe, kernels, shared
        self._router, self._correction = weights.vector("router"), weights.optional("router_bias")
        self._logit_bias = weights.optional("router_logit_bias")
        self._gate_up, self._down = weights.matrix("experts_gate_up"), weights.matrix("experts_down")
        self._in, self._out = (weights.matrices.get(name) for name in ("latent_in", "latent_out"))
        down_bias = expert_bias_of_sum(moe, weights.optional("experts_down_bias"), group)
        up_bias = weights.optional("experts_gate_up_bias")
        self._parts = ExpertParts(up_bias, down_bias, activation, moe.scales_inputs)
        self._scales = weights.optional("expert_scale")
        self._first, self._num_local = moe.own.start, len(moe.own)
        self._ids = torch.arange(self._num_local, device=self._router.device)

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """``x [T, D]`` to the weighted sum of its experts' outputs and the shared ones' ``[T, D]``; ``routed_by
        [T, D]`` is what the router reads, by default ``x``.
        """
        read = x if routed_by is None else routed_by
        logits = F.linear(read.to(torch.float32), self._router, self._logit_bias)  # [T, X]
        weights, experts = route(logits, self._correction, self._moe)
        if self._scales is not None:
            weights = weights * self._scales[experts]
        flat = self._local_ids(experts.flatten())
        order = flat.argsort(stable=True)  # [T k], pairs by expert; those of other ranks last
        ends = torch.searchsorted(flat[order], self._ids, right=True, out_int32=True)  # [X'], of each expert's pairs
        is_whole = self._num_local == self._moe.num_experts
        pairs = Pairs(order, ends, weights, None if is_whole else flat == self._num_local)
        given = x if self._in is None else self._in.multiply(x, None, self._kernels)
        routed = self._gate_up.swiglu_grouped(self._down, given, pairs, self._kernels, self._parts)  # [T, D]
        routed = routed if self._out is None else self._out.multiply(routed, None, self._kernels)
        return routed if self._shared is None else routed.add_(self._shared(x))

    def of_norm(self, given: SumNorm) -> Tensor:
        return self(self._kernels.normed(given))

    add_of_norm = of_norm

    def _local_ids(self, experts: Tensor) -> Tensor:
        """Local ids of experts, 0 to X' - 1; X' for those of other ranks."""
        if self._num_local == self._moe.num_experts:
            return experts
        local = experts - self._first
        return local.masked_fill((local < 0) | (local >= self._num_local), self._num_local)


class Mlp(Protocol):
    """The second half of a layer, without norm and residual."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """``x [T, D]``, normed, to the output ``[T, D]``, or this rank's part of the sum."""
        ...

    def of_norm(self, given: SumNorm) -> Tensor:
        """The same, including the norm."""
        ...

    def add_of_norm(self, given: SumNorm) -> Tensor | None:
        """``of_norm`` added to ``given.residual`` where one kernel does both; else the output or fp32 parts of it
        ``[S, T, D]``, not added.
        """
        ...


class SwiGLU:
    """``down(act(gate x) * up x)`` of stored matrices, or ``relu2``, xIELU or GELU without gate; an ``Mlp``."""

    def __init__(
        self, gate_up: Matrix, down: Matrix, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels,
        activation: LayerActivation = "silu",
    ) -> None:  # fmt: skip
        self._gate_up, self._down, self._kernels = gate_up, down, kernels
        self._biases, self._activation = biases, activation

    def __call__(self, given: Tensor | SumNorm) -> Tensor:
        return self._gate_up.swiglu(self._down, given, self._biases, self._kernels, self._activation)

    of_norm = __call__

    def add_of_norm(self, given: SumNorm) -> Tensor | None:
        if self._kernels.add_one_linear is None:
            return self.of_norm(given)
        inner = self._gate_up.activated(given, self._biases[0], self._kernels, self._activation)
        return self._down.add_product(given.residual, inner, self._biases[1], self._kernels)


class MlpBesideExperts:
    """An MLP and experts side by side, each with a norm of its input and of its output (Gemma 4); an ``Mlp``.

    The router reads a third norm of the input, which has no weights but is scaled.
    """

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, mlp: SwiGLU, experts: Experts, kernels: Kernels, group: Group
    ) -> None:
        self._group = group
        self._mlp, self._experts, self._kernels, self._eps = mlp, experts, kernels, config.rms_norm_eps
        self._mlp_norm, self._part_norm = weights.vector("mlp_part_norm"), weights.vector("experts_part_norm")
        self._experts_norm = weights.vector("experts_norm")
        self._router_scale = weights.vector("router_scale")  # [D]
        self._root = config.hidden_size**-0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Not to be called: the experts read another norm."""
        raise TypeError("an MLP beside experts reads the residual stream")

    def of_norm(self, given: SumNorm) -> Tensor:
        """See ``Mlp``; ``given`` has the norm of the MLP. Ranks norm the sums of both parts; the first gives all of the
        output.
        """
        output = self._group.all_reduce(self._mlp.of_norm(given))
        mlp = self._kernels.rms_norm(output, self._mlp_norm, self._eps)
        x = given.residual  # with what was added
        read = self._kernels.rms_norm(x.to(torch.float32), self._router_scale, self._eps) * self._root
        normed = self._kernels.rms_norm(x, self._experts_norm, self._eps)
        routed = self._group.all_reduce(self._experts(normed, read))
        both = mlp.add_(self._kernels.rms_norm(routed, self._part_norm, self._eps))
        return both if self._group.rank == 0 else both.zero_()

    add_of_norm = of_norm


def _gated(mlp: Callable[[Tensor], Tensor], gate: Tensor) -> Callable[[Tensor], Tensor]:
    """``mlp`` times the sigmoid of ``gate [1, D]`` and the token."""
    return lambda x: mlp(x) * F.linear(x.to(torch.float32), gate).sigmoid().to(x.dtype)


def _scaled(mlp: Callable[[Tensor], Tensor], scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: mlp(x) * scale


def bias_of_sum(bias: Tensor | None, group: Group) -> Tensor | None:
    """The bias of a product that is summed over ranks: rank 0 adds it."""
    return bias if group.rank == 0 else None


def expert_bias_of_sum(moe: MoEConfig, bias: Tensor | None, group: Group) -> Tensor | None:
    """The biases ``[X', D]`` of the experts' last products that this rank adds: if ranks share experts, only rank 0."""
    return bias_of_sum(bias, group) if len(moe.own) == moe.num_experts else bias


def activations_of(index: int, config: ModelConfig, weights: LayerWeights) -> tuple[LayerActivation, LayerActivation]:
    """Of a layer's MLP and shared experts, and of the experts that it routes to."""
    if config.activation == "xielu":
        return Xielu.of(weights.vector("xielu")), "xielu"
    clamps = (None, None) if config.clamps is None else (config.clamps.mlps[index], config.clamps.experts[index])
    return clamps[0] or config.activation, clamps[1] or config.activation


def mlp_of(index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> Mlp:
    """The MLP of a layer: ``Experts`` if its weights have any, else ``SwiGLU``."""
    activation, of_experts = activations_of(index, config, weights)
    biases = weights.optional("gate_up_bias"), bias_of_sum(weights.optional("down_bias"), group)
    if config.moe is not None and config.moe.is_beside_mlp:
        mlp = SwiGLU(weights.matrix("gate_up"), weights.matrix("down"), biases, kernels, activation)
        experts = Experts(config.moe, weights, kernels, group, None, of_experts)
        return MlpBesideExperts(config, weights, mlp, experts, kernels, group)
    if config.moe is not None and "experts_down" in weights.matrices:
        shared: Callable[[Tensor], Tensor] | None = None
        if config.moe.num_shared:
            own = weights.matrix("shared_gate_up"), weights.matrix("shared_down")
            shared = SwiGLU(*own, (None, None), kernels, activation)
            if config.moe.has_shared_gate:
                shared = _gated(shared, weights.vector("shared_gate"))
            if config.moe.shared_scale != 1.0:
                shared = _scaled(shared, config.moe.shared_scale)
        return Experts(config.moe, weights, kernels, group, shared, of_experts)
    return SwiGLU(weights.matrix("gate_up"), weights.matrix("down"), biases, kernels, activation)


class SparseGLU:
    """``down(gelu(cut(gate x)) * up x)``; an ``Mlp``. Gates have their mean and some of their standard deviations taken
    off, and are 0 below (Spark Transformer, arXiv 2506.06644, section 2).
    """

    def __init__(self, gate_up: Matrix, down: Matrix, deviations: float, kernels: Kernels, group: Group) -> None:
        self._gate_up, self._down, self._kernels, self._deviations = gate_up, down, kernels, deviations
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up.multiply(x, None, self._kernels)
        gates = gate_up[:, : gate_up.shape[1] // 2]
        deviation, mean = torch.std_mean(gates, -1, correction=0, keepdim=True)
        if (size := self._group.size) > 1:  # each has as many
            moments = torch.stack((mean, deviation.square().add_(mean.square()))).to(torch.float32)
            mean, square = self._group.all_reduce(moments) / size
            mean, deviation = mean.to(gates.dtype), (square - mean.square()).clamp_(min=0.0).sqrt_().to(gates.dtype)
        gates.sub_(mean.add_(deviation, alpha=self._deviations)).relu_()
        return self._down.multiply(geglu(gate_up), None, self._kernels)

    def of_norm(self, given: SumNorm) -> Tensor:
        return self(self._kernels.normed(given))

    add_of_norm = of_norm


class LayerEnd:
    """What follows a layer's MLP in Gemma 4: a token's embedding for the layer, and the layer's scalar.

    The embedding is looked up, and projected from that of layer 0. It gates what is added:
    ``norm(out(gelu(gate x) * embedding))``. Then the residual stream is multiplied by the scalar. With several residual
    streams x is the first, scaled, and the others have it added (Gemma 3n).
    """

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, outer: Mapping[str, Tensor], kernels: Kernels
    ) -> None:
        """``outer``: the model's vectors."""
        self._kernels, self._eps, self._size = kernels, config.rms_norm_eps, config.per_layer_dim
        self._scalar = weights.vector("layer_scalar") if config.has_layer_scalars else None
        self._stream_scale = weights.optional("stream_scale")  # [D]
        self._num_lines = config.per_layer_lines
        if not self._size:
            return
        self._table, self._in = weights.matrix("embed_per_layer"), weights.matrix("per_layer_in")
        self._gate, self._out = weights.matrix("per_layer_gate"), weights.matrix("per_layer_out")
        self._in_norm, self._norm = outer["per_layer_in_norm"], weights.vector("per_layer_norm")

    def __call__(self, residual: Tensor, output: Tensor | None, tokens: TokenInputs | None) -> Tensor | None:
        """From the residual stream ``[T, D]``, updated in place, and the output of the MLP: what to add to it. Several
        streams ``[T, SD]`` have the output already.
        """
        if (scale := self._stream_scale) is not None:
            streams = residual.unflatten(1, (-1, len(scale)))
            streams[:, 1:].add_(self._added(streams[:, 0] * scale, tokens)[:, None])
            return None
        assert output is not None, "a layer that something follows adds nothing itself"
        if self._size:
            output = self._added(residual.add_(output), tokens)
        if self._scalar is None:
            return output
        residual.mul_(self._scalar)
        return output.mul_(self._scalar)

    def _added(self, x: Tensor, tokens: TokenInputs | None) -> Tensor:
        assert tokens is not None, "embeddings for each layer need the tokens"
        ids, lines = tokens.token_ids, self._num_lines
        ids = ids.masked_fill(ids >= lines, 0) if lines else ids
        looked_up = self._table.lookup(ids) * float(torch.tensor(self._size**0.5, dtype=x.dtype))
        projected = self._in.multiply(tokens.embedded, None, self._kernels) * tokens.embedded.shape[1] ** -0.5
        own = (self._kernels.rms_norm(projected, self._in_norm, self._eps) + looked_up) * 2.0**-0.5  # [T, P]
        gate = self._gate.multiply(x, None, self._kernels)
        added = self._out.multiply(F.gelu(gate, approximate="tanh").mul_(own), None, self._kernels)
        return self._kernels.rms_norm(added, self._norm, self._eps)


class DenseLayer:
    """One layer over views of the stacked weights; a ``models.decoder.Layer``."""

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        self._index, self._kernels, self._group, self._eps = index, kernels, group, config.rms_norm_eps
        num_kv_heads, self._head_dim, num_heads = config.heads_of(index)
        is_shared = config.source_of(index) != index
        self._num_heads = num_heads + (0 if is_shared else 2 * num_kv_heads)  # of q, k and v
        self._input_norm, self._post_norm = weights.optional("input_norm"), weights.optional("post_norm")
        self._attention_out_norm = weights.optional("attention_out_norm")
        self._mlp_out_norm = weights.optional("mlp_out_norm")
        self._out_eps = config.out_norm_eps or self._eps
        has_mlp = config.mlp_layers is None or index in config.mlp_layers
        self._mlp = mlp_of(index, config, weights, kernels, group) if has_mlp else None
        own, self._is_centered = config.multipliers, config.is_centered
        self._attention_multiplier = own.residual * own.attention_out
        self._mlp_multiplier = own.residual * own.mlp_out / own.mlp_gate
        self._is_parallel = config.is_parallel
        self._read_mixer(config, weights)
        # Whether outputs are added to the residual stream as they are: not summed over ranks, normed or multiplied.
        self._adds_products = (
            group.size == 1 and type(self)._projected is DenseLayer._projected
            and not (self._is_parallel or self._is_centered or config.has_layer_ends)
            and self._attention_multiplier == self._mlp_multiplier == 1.0
            and self._attention_out_norm is self._mlp_out_norm is None
        )  # fmt: skip

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        """The part of the layer that mixes tokens."""
        index = self._index
        self._qkv, self._qkv_bias = weights.matrix("qkv"), weights.optional("qkv_bias")
        self._o, self._o_bias = weights.matrix("o"), bias_of_sum(weights.optional("o_bias"), self._group)
        self._head_norm, self._turned_scale = _head_norm(config, weights, index), turned_scale(config, weights)
        is_full, is_shared = config.layer_windows[index] is None, config.source_of(index) != index
        self._num_values, _, num_heads = config.heads_of(index)
        self._value_dim = config.value_dim
        self._num_copied = self._num_values if config.keys_are_values and is_full and not is_shared else 0
        self._value_norm: Tensor | None = None
        if config.has_value_norm and not is_shared:
            self._value_norm = torch.ones(self._head_dim, device=weights.vector("q_norm").device)
        self._gate_dim, self._num_gates = config.gate_dim, num_heads * config.gate_dim
        self._gated = F.softplus if config.has_softplus_gates else torch.sigmoid
        self._centers_heads = config.norms_heads_apart
        self._is_rotated = config.rotated_layers is None or config.rotated_layers[index]
        self._unrotated = math.sqrt(config.multipliers.attention)  # as rotated heads are multiplied, see ``Rope``
        self._rope_kind = None if config.window_rope is None else int(config.layer_windows[index] is not None)
        self._has_scales, self._num_queries = config.length_scale is not None, num_heads * self._head_dim
        self._scales_queries = not (self._is_rotated and config.length_scale and config.length_scale.is_unrotated)
        self._whole_norms: list[tuple[slice, Tensor]] = []  # columns of the projection, and the norm over all of them
        if config.has_whole_qk_norm:
            queries = self._num_queries
            columns = slice(queries), slice(queries, queries + self._num_values * self._head_dim)
            self._whole_norms = list(zip(columns, (weights.vector("q_norm"), weights.vector("k_norm")), strict=True))

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        if self._input_norm is None:
            residual = residual if pending is None else residual.add_(pending)
            heads = self._qkv.multiply(residual, self._qkv_bias, self._kernels)  # [T, (H+2G)E]
        else:
            given = SumNorm(residual, pending, self._input_norm, self._eps)
            heads = self._qkv.multiply_normed(given, self._qkv_bias, self._kernels)
        return self._attend_heads(heads, rope, view)

    def _attend_heads(self, heads: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """Gates, if any, and heads as projected, ``[T, HP + (H+2G)E]``; returns ``[T', H, E]``."""
        if not self._num_gates:
            return self._attend_ungated(heads, rope, view)
        gates = self._gated(view.outputs(heads[:, : self._num_gates]))
        attended = self._attend_ungated(heads[:, self._num_gates :].contiguous(), rope, view)
        return attended * gates.unflatten(1, (-1, self._gate_dim))

    def _attend_ungated(self, heads: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """``heads [T, (H+2G)E]``; returns ``[T', H, E']``, E' numbers of a value."""
        if self._whole_norms and self._group.size > 1:
            self._norm_over_ranks(heads)
        else:
            for columns, weight in self._whole_norms:
                heads[:, columns] = self._kernels.rms_norm(heads[:, columns].contiguous(), weight, self._eps)
        if self._has_scales:
            if self._scales_queries:
                heads[:, : self._num_queries].mul_(rope[0][1, :, 0, :1])
            rope = rope[0][0], rope[1][0]
        if self._rope_kind is not None:
            cos, sin = rope[0][self._rope_kind], rope[1][self._rope_kind]
            rope = cos[..., : self._head_dim].contiguous(), sin[..., : self._head_dim].contiguous()
        if self._turned_scale is not None:
            rope = rope[0] * self._turned_scale, rope[1] * self._turned_scale
        if not self._is_rotated:
            rope = torch.full_like(rope[0], self._unrotated), torch.zeros_like(rope[1])
        heads = heads.view(len(heads), -1, self._head_dim)
        if self._centers_heads:
            normed = heads[:, : -self._num_values]
            normed.sub_(normed.mean(-1, keepdim=True))
        if self._num_copied:
            heads = torch.cat((heads, heads[:, -self._num_copied :]), 1)
        if self._value_norm is not None:
            values = heads[:, -self._num_values :]
            normed = self._kernels.rms_norm(values.reshape(-1, self._head_dim), self._value_norm, self._eps)
            values.copy_(normed.view_as(values))
        attended = view.attend(self._index, heads, self._head_norm, rope)
        return attended if self._value_dim is None else attended[..., : self._value_dim]

    def _norm_over_ranks(self, heads: Tensor) -> None:
        """One norm over the queries of all ranks, and one over the keys, of which several may have the same."""
        parts = [heads[:, columns].to(torch.float32) for columns, _ in self._whole_norms]
        squares = self._group.all_reduce(torch.stack([part.square().mean(-1) for part in parts]))  # [2, T]
        factors = (squares / self._group.size + self._eps).rsqrt()[..., None]
        for (columns, weight), part, factor in zip(self._whole_norms, parts, factors, strict=True):
            heads[:, columns] = (part * factor * weight).to(heads.dtype)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor | None:
        if self._adds_products and self._post_norm is not None and self._mlp is not None:
            pending = self._o.add_product(residual, attended.flatten(1), self._o_bias, self._kernels)
            return self._mlp.add_of_norm(SumNorm(residual, pending, self._post_norm, self._eps))
        if self._is_parallel:
            assert self._input_norm is not None and self._mlp is not None
            output = self._mlp.of_norm(SumNorm(residual, None, self._input_norm, self._eps))
            reduced = self._group.all_reduce(self._projected(attended).add_(output))
            return self._ended(reduced, None, self._mlp_multiplier)
        mixed = self.mixed(attended)
        return mixed if self._mlp is None else self.run_mlp(residual, mixed)

    def mixed(self, attended: Tensor) -> Tensor:
        """What the part that mixes tokens adds to the residual stream, ``[T', D]``."""
        reduced = self._group.all_reduce(self._projected(attended))
        return self._ended(reduced, self._attention_out_norm, self._attention_multiplier)

    def run_mlp(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        """Add ``pending`` to ``residual [T', D]``; what the MLP then adds."""
        assert self._mlp is not None
        if self._post_norm is None:
            output = self._mlp(residual if pending is None else residual.add_(pending))
        else:
            output = self._mlp.of_norm(SumNorm(residual, pending, self._post_norm, self._eps))
        return self._ended(self._group.all_reduce(output), self._mlp_out_norm, self._mlp_multiplier)

    def _projected(self, attended: Tensor) -> Tensor:
        """What the part that mixes tokens adds ``[T', D]``, of this rank's heads; not multiplied yet."""
        return self._o.multiply(attended.flatten(1), self._o_bias, self._kernels)

    def _ended(self, output: Tensor, norm: Tensor | None, multiplier: float) -> Tensor:
        """An output as it is added to the residual stream."""
        output = output if norm is None else self._kernels.rms_norm(output, norm, self._out_eps)
        output = output.sub_(output.mean(-1, keepdim=True)) if self._is_centered else output
        return output if multiplier == 1.0 else output.mul_(multiplier)


class MlpLayer(DenseLayer):
    """A layer that is an MLP or experts alone; what it hands on between its halves is its normed input."""

    def _read_mixer(self, config: ModelConfig, weights: LayerWeights) -> None:
        """None."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        assert self._input_norm is not None
        return view.outputs(self._kernels.normed(SumNorm(residual, pending, self._input_norm, self._eps)))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        assert self._mlp is not None
        return self._ended(self._group.all_reduce(self._mlp(attended)), None, self._mlp_multiplier)


def turned_scale(config: ModelConfig, weights: LayerWeights) -> Tensor | None:
    """What queries and keys are multiplied by once rotated ``[E]``, where their norms come after the rotation.

    A rotation keeps the size of a head, so it is divided before. Products of queries and keys have the weights of both
    norms: here each has the root of their product, so that both take one table of cosines and sines.
    """
    if not config.norms_after_rope:
        return None
    product = weights.vector("q_norm").to(torch.float32) * weights.vector("k_norm").to(torch.float32)
    if bool((product < 0).any()):
        raise ValueError(
            "weights of the norms of queries and keys differ in their sign, which is not supported after the rotation"
        )
    return product.sqrt()


def _head_norm(config: ModelConfig, weights: LayerWeights, layer: int) -> HeadNorm:
    """Norms of q and k as one over ``[T, H+G, E]``, so that both cost one call; of a layer that shares the keys of
    another that of q alone. Where scores are not divided by sqrt(E), q is multiplied by it.
    """
    sinks = weights.vector("sinks") if config.has_sinks_in(layer) else None
    q, k = weights.optional("q_norm"), weights.optional("k_norm")
    if not config.qk_norm or q is None:  # also where whole projections are normed: before this
        return HeadNorm(None, config.rms_norm_eps, sinks, config.score_cap)
    num_kv_heads, size, num_heads = config.heads_of(layer)
    if config.norms_after_rope:
        q = k = torch.ones_like(q)
    if config.has_unscaled_scores:
        q = q.to(torch.float32) * size**0.5
        k = None if k is None else k.to(torch.float32)
    per_head = q.expand(num_heads, -1)
    if k is not None:
        per_head = torch.cat((per_head, k.expand(num_kv_heads, -1)))  # [H+G, E]
    per_head = per_head.contiguous()
    return HeadNorm(per_head, config.rms_norm_eps, sinks, config.score_cap)
