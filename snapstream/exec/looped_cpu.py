"""The decode step as one native call: from row indices to logits, and for greedy rows to the next tokens.

The library (``kernels/cpu/looped``, whose ``abi.h`` says what the structs mean) gets the addresses of weights, rows and
state once; nothing is copied, so the decoder must outlive them. A step hands it row indices; where sampling needs more
than the likeliest token, a second call samples from the logits. Ranks of one machine call it together, each over its
shard, and all-reduce in shared memory. Invariant: logits are batch-invariant, the same bits on every rank, and equal to
eager's but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from snapstream.config import EngineConfig, ModelConfig
from snapstream.config.model import LengthScale
from snapstream.config.recurrent import DeltaNet, Mamba2
from snapstream.distributed.group import Group, memory_problem
from snapstream.exec.eager import DraftBatch, GoOn, StepParts
from snapstream.exec.executors import LOOPED, max_batch
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import Sampled
from snapstream.exec.sampling_state import SamplingState
from snapstream.kernels.cpu.looped.library import (
    ACTIVATIONS,
    FORMATS,
    PANEL,
    Connection,
    Draw,
    Hyper,
    Latent,
    LayerParts,
    Library,
    LowRank,
    Mixture,
    Model,
    NativeEngine,
    Ranks,
    Recurrent,
    RowTable,
    Sampling,
    Stack,
    Step,
    ThreadPool,
    address,
    library_problem,
    load,
    shared_bytes,
    workspace_floats,
)
from snapstream.kernels.rows import activation_numbers
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import State, Window
from snapstream.models.adapters import PRODUCTS
from snapstream.models.decoder import Decoder
from snapstream.models.layers import activations_of, bias_of_sum, expert_bias_of_sum, turned_scale
from snapstream.models.matrix import JoinedMatrix, MakeMatrix
from snapstream.models.panels import PanelMatrix, make_panels
from snapstream.models.recurrent import in_scales
from snapstream.models.rope import Rope
from snapstream.models.streams import stream_router
from snapstream.models.weights import LayerWeights

_VECTORS = "final_norm", "lm_head_bias", "sinks", "per_layer_in_norm"
# Of a layer, by names as in abi.h.
_LAYER_VECTORS = (
    "q_norm", "k_norm", "input_norm", "attention_out_norm", "mlp_out_norm", "per_layer_norm", "laurel_norm",
    "stream_prediction", "stream_correction", "stream_scale",
)  # fmt: skip
_MATRICES = (
    "per_layer_in", "per_layer_gate", "per_layer_out", "experts_gate_up", "experts_down", "shared_gate_up",
    "shared_down", "latent_in", "latent_out", "q_a", "q", "kv_a", "gates", "laurel_in", "laurel_out",
)  # fmt: skip
_BOTH = 3  # as abi.h: the kind of layers with attention and recurrence
_BESIDE = ("mlp_part_norm", "experts_norm", "experts_part_norm", "router_scale", "expert_scale")


def machine_problem(num_ranks: int) -> str | None:
    """Why this machine cannot run steps of so many ranks; the first call that finds no library compiles it."""
    return (memory_problem() if num_ranks > 1 else None) or library_problem()


def panels_for(config: EngineConfig) -> MakeMatrix:
    """The storage of weights as the library reads them."""
    return make_panels(load(), prefill_inputs=None if config.weights is None else config.weights.prefill_inputs)


def panels_of(decoder: Decoder, role: str) -> PanelMatrix:
    """A matrix role; ValueError for one in another form."""
    weights = decoder.weights
    found = weights.lm_head if role == "lm_head" else weights.matrices[role]
    if not isinstance(found, PanelMatrix):
        raise ValueError(f"executor 'looped' reads weights in panels, and {role} is stored row by row")
    return found


def model_of(decoder: Decoder, num_drafted: int = 0) -> Model:
    """All of a decoder, for steps of up to ``num_drafted`` drafted entries."""
    config, vectors = decoder.shard, decoder.weights.vectors
    multipliers, scale = config.multipliers, config.length_scale or LengthScale(0.0, 0)
    full_dim = config.rope_dim if config.full_heads is None else config.full_heads.head_dim
    rope = Rope(config.rope, full_dim, "cpu", multipliers.attention)
    is_dynamic = config.rope.kind == "dynamic"
    own = config.window_rope
    window_rope = None if own is None else Rope(own, config.rope_dim, "cpu", multipliers.attention)
    rotated = None if config.rotated_layers is None else torch.tensor(config.rotated_layers, dtype=torch.int64)
    recurrent, kinds = _recurrent(decoder, num_drafted), _kinds(config)
    made = [_made_of(index, config, decoder.weights.layer(index)) for index in range(config.num_layers)]
    num_streams = 0 if config.altup is None else config.altup.num_streams
    streams = [panels_of(decoder, f"streams_out.{i}").stack for i in range(num_streams - 1)]
    streams_out = (Stack * len(streams))(*streams)
    low_rank, most_rank, kept = _low_ranks(decoder)
    parts = (LayerParts * config.num_layers)(*_layer_parts(decoder, made))
    recurrent.projected = max(own.recurrent_in.rows for own in parts)
    recurrent.mixed = max(own.recurrent_out.cols for own in parts)
    model = Model(
        layers=config.num_layers, hidden=config.hidden_size, heads=config.most_heads, vocab=config.vocab_size,
        kv_heads=max(own.num_kv_heads for own in config.all_heads), head_dim=config.widest_head,
        inner=config.widest_inner, parts=addressof(parts), embed=panels_of(decoder, "embed").stack,
        head=panels_of(decoder, "lm_head").stack, frequencies=address(rope.frequencies), rope_scale=rope.scale,
        rotated=config.rope.rotary_dim(full_dim), rotated_layers=address(rotated), eps=config.rms_norm_eps,
        out_eps=config.out_norm_eps or config.rms_norm_eps,
        window_rotated=0 if own is None else own.rotary_dim(config.rope_dim), window_head_dim=config.head_dim,
        full_head_dim=full_dim if config.latent is None else config.head_dim, norms_values=config.has_value_norm,
        per_layer_dim=config.per_layer_dim, logit_cap=config.logit_cap or 0.0,
        score_cap=config.score_cap or 0.0,
        unrotated_scale=multipliers.attention**0.5,
        dynamic_original=config.rope.original_max_position if is_dynamic else 0,
        long_frequencies=address(rope.long_frequencies),
        long_original=config.rope.original_max_position if rope.long_frequencies is not None else 0,
        has_whole_qk_norm=config.has_whole_qk_norm, activation=ACTIVATIONS[config.activation],
        mixers=address(kinds[0]), mixer_places=address(kinds[1]), mlps=address(kinds[2]), mlp_places=address(kinds[3]),
        is_single=config.mlp_layers is not None,
        window_frequencies=None if window_rope is None else address(window_rope.frequencies),
        window_rope_scale=1.0 if window_rope is None else window_rope.scale,
        embed_multiplier=decoder.embedding_multiplier, residual_multiplier=multipliers.residual,
        attention_multiplier=multipliers.attention_out, mlp_multiplier=multipliers.mlp_out / multipliers.mlp_gate,
        logits_multiplier=multipliers.logits, dynamic_factor=config.rope.factor, dynamic_theta=config.rope.theta,
        mixture=_mixture(decoder), latent=_latent(decoder), recurrent=recurrent, hyper=_hyper(decoder),
        gate_dim=config.gate_dim, is_parallel=config.is_parallel, is_centered=config.is_centered,
        has_softplus_gates=config.has_softplus_gates, norms_heads_apart=config.norms_heads_apart,
        scaled_from=scale.original, query_beta=scale.beta, scales_unrotated=scale.is_unrotated,
        has_chunks=config.has_chunks, streams=num_streams,
        streams_in=panels_of(decoder, "streams_in").stack if streams else Stack(),
        streams_out=addressof(streams_out), **{name: address(vectors.get(name)) for name in _VECTORS},
        low_rank=low_rank, most_rank=most_rank,
    )  # fmt: skip
    model.kept = rope, window_rope, rotated, recurrent, kinds, parts, made, streams_out, kept
    return model


def _low_ranks(decoder: Decoder) -> tuple[int | None, int, list[Any]]:
    """The address of what adapters add, the most rows of a first matrix in whole panels, and what must be kept."""
    adapters, num_layers = decoder.adapters, decoder.config.num_layers
    if adapters is None:
        return None, 0, []
    table = (LowRank * (len(PRODUCTS) * num_layers * max(own[0] for own in adapters.products)))()
    kept: list[Any] = [table, adapters]
    for (adapter, layer, product), own in adapters.products.items():
        stacks, firsts = [], torch.tensor([first for first, _ in own.ups])
        for matrix in (own.down, *(up for _, up in own.ups)):
            assert isinstance(matrix, PanelMatrix), "adapters are stored as the executor reads weights"
            stacks.append(matrix.stack)
        ups = (Stack * len(own.ups))(*stacks[1:])
        at = ((adapter - 1) * num_layers + layer) * len(PRODUCTS) + PRODUCTS.index(product)
        table[at] = LowRank(down=stacks[0], ups=addressof(ups), firsts=address(firsts), count=len(ups))
        kept += [ups, firsts]
    most = max(own.down.shape[0] for own in adapters.products.values())
    return addressof(table), -(-most // PANEL) * PANEL, kept


def _made_of(index: int, config: ModelConfig, weights: LayerWeights) -> dict[str, Tensor | None]:
    """What is made of a layer's vectors, by names as in abi.h."""
    own, of_experts = activations_of(index, config, weights)
    return {
        "turned_scale": turned_scale(config, weights),
        "stream_router": None if config.altup is None else stream_router(weights),
        "numbers": activation_numbers(own),
        "experts_numbers": activation_numbers(of_experts),
    }


def _layer_parts(decoder: Decoder, made: Sequence[Mapping[str, Tensor | None]]) -> Iterator[LayerParts]:
    """Of every layer; a view of a stack's layer lies where the stack does. ``made``: see ``_made_of``."""
    config, group = decoder.shard, decoder.group
    recurrent = {DeltaNet: "delta", Mamba2: "mamba"}.get(type(config.recurrent), "conv")
    second = "input_norm" if config.is_parallel or config.mlp_layers is not None else "post_norm"
    for index in range(config.num_layers):
        weights, (kv_heads, head_dim, heads) = decoder.weights.layer(index), config.heads_of(index)
        biases = {
            "qkv": weights.optional("qkv_bias"), "gate_up": weights.optional("gate_up_bias"),
            "o": bias_of_sum(weights.optional("o_bias"), group),
            "down": bias_of_sum(weights.optional("down_bias"), group),
        }  # fmt: skip
        stacks = {name: _layer_stack(weights, name) for name in (*biases, *_MATRICES)}
        if decoder.adapters is not None:
            for place, name in enumerate(PRODUCTS, start=len(PRODUCTS) * index + 1):
                stacks[name].adapted = place
        stacks |= {f"recurrent_{side}": _layer_stack(weights, f"{recurrent}_{side}") for side in ("in", "out")}
        stacks["qkv_rest"] = _layer_stack(weights, "qkv", 1)
        scale = 1.0 if config.has_unscaled_scores else head_dim**-0.5
        yield LayerParts(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            inner=config.inner_of(index), source=config.source_of(index),
            values_are_keys=config.keys_are_values and config.layer_windows[index] is None, score_scale=scale,
            scalar=float(weights.vector("layer_scalar")) if config.has_layer_scalars else 1.0,
            per_layer_table=_layer_stack(weights, "embed_per_layer"),
            **{f"{name}_bias": address(bias) for name, bias in biases.items()}, **stacks,
            **{name: address(vector) for name, vector in made[index].items()},
            post_norm=address(weights.optional(second)),
            **{f"before_{half}": _connection(weights.vectors, f"hyper_{half}") for half in ("attention", "mlp")},
            deviations=-math.inf if config.altup is None else config.altup.deviations(index),
            **{name: address(weights.optional(name)) for name in _LAYER_VECTORS},
        )  # fmt: skip


def _layer_stack(weights: LayerWeights, name: str, part: int = 0) -> Stack:
    """A matrix of a layer, or one of those that are joined to it; zeros if it has none."""
    matrix = weights.matrices.get(name)
    if matrix is None:
        return Stack()
    parts = matrix.parts if isinstance(matrix, JoinedMatrix) else (matrix,)
    if part == len(parts):
        return Stack()
    matrix = parts[part]
    if not isinstance(matrix, PanelMatrix):
        raise ValueError(f"executor 'looped' reads weights in panels, and {name} is stored row by row")
    return matrix.stack


def _kinds(config: ModelConfig) -> Tensor:
    """By layer the kind of its mixer and its place among those of that kind, the same of its MLP: ``[4, L]`` int64."""
    layers = range(config.num_layers)
    experts = () if config.moe is None else config.moe.layers(config.num_layers)
    tables: list[tuple[int, ...]] = []
    for kinds in ((config.attention_layers, config.recurrent_layers), (config.dense_layers, experts)):
        others = tuple(layer for layer in layers if not any(layer in own for own in kinds))
        of = {layer: (kind, own.index(layer)) for kind, own in enumerate((*kinds, others)) for layer in own}
        tables += zip(*(of[layer] for layer in layers), strict=True)
    if config.has_parallel_recurrence:
        tables[0] = (_BOTH,) * config.num_layers
    return torch.tensor(tables)


def _mixture(decoder: Decoder) -> Mixture:
    moe, vectors = decoder.shard.moe, decoder.weights.vectors
    if moe is None:
        return Mixture()
    return Mixture(
        router=address(vectors["router"]), correction=address(vectors.get("router_bias")), experts=moe.num_experts,
        top_k=moe.top_k, inner=moe.inner, shared_inner=moe.shared_inner,
        groups=moe.num_groups, top_groups=moe.top_groups, best_of_group=2 if moe.group_score == "top2" else 1,
        is_sigmoid=moe.scoring == "sigmoid", jitter=moe.jitter if moe.scoring == "sparsemixer" else -1.0,
        normalises=moe.normalise, scale=moe.scale, least_sum=moe.least_sum,
        chooses_by_logits=moe.chooses_by_logits, shared_scale=moe.shared_scale,
        shared_gate=address(vectors.get("shared_gate")),
        first_held=moe.own.start, held=len(moe.own), router_bias=address(vectors.get("router_logit_bias")),
        gate_up_bias=address(vectors.get("experts_gate_up_bias")),
        down_bias=address(expert_bias_of_sum(moe, vectors.get("experts_down_bias"), decoder.group)),
        scales_inputs=moe.scales_inputs, latent=moe.latent,
        **{name: address(vectors.get(name)) for name in _BESIDE},
    )  # fmt: skip


def _latent(decoder: Decoder) -> Latent:
    latent, weights = decoder.shard.latent, decoder.weights
    if latent is None:
        return Latent()
    return Latent(
        q_a_norm=address(weights.vectors.get("q_a_norm")), c_norm=address(weights.vectors["kv_a_norm"]),
        up=address(weights.matrices["kv_b"].dense()), q_rank=latent.q_rank or 0, rank=latent.kv_rank,
        nope_dim=latent.nope_dim, rope_dim=latent.rope_dim, value_dim=latent.value_dim,
        eps=latent.norm_eps, factor=latent.softmax_scale * latent.latent_dim**0.5,
    )  # fmt: skip


def _connection(vectors: Mapping[str, Tensor], name: str) -> Connection:
    return Connection(**{part: address(vectors.get(f"{name}_{part}")) for part in ("weights", "base", "scale")})


def _hyper(decoder: Decoder) -> Hyper:
    hyper = decoder.shard.hyper
    if hyper is None:
        return Hyper()
    return Hyper(
        head=_connection(decoder.weights.vectors, "hyper_head"), streams=hyper.num_streams, shares=hyper.num_shares,
        iterations=hyper.iterations, most_added=hyper.most_added, eps=hyper.eps,
    )  # fmt: skip


def _recurrent(decoder: Decoder, num_drafted: int) -> Recurrent:
    config, weights = decoder.shard, decoder.weights
    if config.recurrent is None or not config.recurrent_layers:
        return Recurrent()
    net, vectors = config.recurrent, weights.vectors
    taps = vectors["conv_kernel"][:, :, 0].transpose(1, 2).contiguous()  # [L', K, C]
    given: dict[str, Tensor | None]
    sizes: dict[str, float]
    if isinstance(net, DeltaNet):
        given = {
            "gates": weights.matrices["delta_gates"].dense(), "rate": -vectors["delta_decay"].exp(),
            "step": vectors["delta_step"], "norm": vectors["delta_norm"],
        }  # fmt: skip
        if net.gate_rank and not net.has_full_gates:
            for name in ("decay_up", "gate_up"):
                given[name] = weights.matrices[f"delta_{name}"].dense()
        names = "key_heads", "value_heads", "key_dim", "value_dim", "gate_rank"
        sizes = {name: getattr(net, name) for name in names}
        sizes |= {
            "most_beta": net.most_beta,
            "decay_floor": net.decay_floor or 0.0,
            "eps": net.norm_eps or config.rms_norm_eps,
        }
    elif isinstance(net, Mamba2):
        given = {
            "rate": -vectors["mamba_decay"].exp(), "step": vectors["mamba_step"], "norm": vectors.get("mamba_norm"),
            "skip": vectors["mamba_skip"], "conv_bias": vectors.get("conv_bias"),
            "in_bias": vectors.get("mamba_in_bias"), "in_scales": in_scales(net),
            "out_bias": bias_of_sum(vectors.get("mamba_out_bias"), decoder.group),
        }  # fmt: skip
        sizes = {"key_heads": net.groups, "value_heads": net.heads, "key_dim": net.state_dim, "value_dim": net.head_dim}
    else:
        given = {
            "conv_bias": vectors.get("conv_bias"), "in_bias": vectors.get("conv_in_bias"),
            "out_bias": bias_of_sum(vectors.get("conv_out_bias"), decoder.group),
        }  # fmt: skip
        sizes = {}
    recurrent = Recurrent(
        taps=address(taps), kernel=net.kernel, channels=net.channels, drafted=num_drafted, **sizes,
        out_multiplier=config.multipliers.recurrent_out,
        **{name: address(tensor) for name, tensor in given.items()},
    )  # fmt: skip
    recurrent.kept = taps, given
    return recurrent


class NativeDraw:
    """``sampling.sample``, and with it ``Rows.advance``, in one call of the library (``looped/sampling.h``).

    Rows of a call are distinct. ``exec/sampling.py`` is the reference; log-probabilities equal its to rounding.
    """

    def __init__(self, pool: ThreadPool, state: SamplingState, rows: Rows, max_batch: int) -> None:
        """``state`` and ``rows`` lie on the CPU and keep their addresses."""
        self._pool, self._kept = pool, (state, rows)
        self._places = min(pool.num_threads, max_batch)
        self._workspace = torch.empty(self._places * pool.library.sampling_bytes(state.vocab_size), dtype=torch.uint8)
        counters = {name: getattr(rows, name) for name in ("last_token", "num_tokens")}
        addresses = {name: address(tensor) for name, tensor in (state.tensors() | counters).items()}
        self._sampling = Sampling(
            vocab=state.vocab_size, num_stop_ids=state.stop_ids.shape[1], num_bias=state.bias_ids.shape[1], **addresses
        )

    @property
    def workspace_bytes(self) -> int:
        """Workspace of all sampling threads."""
        return self._workspace.nbytes

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """A token for each of ``rows [B]`` int64 from ``logits [B, V]`` fp32, of which there may be any number; they
        are fed it and go on.
        """
        return self._call(logits, rows, needs, feeds=True)

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``OwnSampler``: rows are not fed what they draw."""
        return self._call(logits, rows, needs, feeds=False)

    def _call(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds, *, feeds: bool) -> Sampled:
        tokens, reported = torch.empty_like(rows), self._room(len(rows), needs)
        logprobs, top_ids, top_logprobs = reported or (None, None, None)
        call = Draw(
            rows=address(rows), logits=address(logits), tokens=address(tokens), logprobs=address(logprobs),
            top_ids=address(top_ids), top_logprobs=address(top_logprobs), batch=len(rows),
            num_top=0 if top_ids is None else top_ids.shape[1], bias=needs.bias, min_tokens=needs.min_tokens,
            penalties=needs.penalties, grammar=needs.grammar, feeds=feeds,
        )  # fmt: skip
        pool = self._pool
        pool.library.draw(pool.handle, byref(self._sampling), byref(call), address(self._workspace), self._places)
        return Sampled(tokens, logprobs, top_ids, top_logprobs)

    def _room(self, batch: int, needs: SamplingNeeds) -> tuple[Tensor, Tensor, Tensor] | None:
        """Buffers for log-probabilities, if requested."""
        if needs.num_logprobs is None:
            return None
        num_top = min(needs.num_logprobs, self._sampling.vocab)
        return torch.empty(batch), torch.empty(batch, num_top, dtype=torch.int64), torch.empty(batch, num_top)


_GREEDY = SamplingNeeds()
REJECTED = -2  # as abi.h: the token of a drafted entry that is not what the entry before it drew


class LoopedDecode:
    """A ``DecodeStep`` on a CPU. ValueError for a model or rows that the library cannot run.

    A step is a RuntimeError where another rank has gone.
    """

    most_draft_rows: int | None = None
    keeps_latents = False  # they are written before any entry attends

    def __init__(self, parts: StepParts, num_threads: int | None = None, *, pool: ThreadPool | None = None) -> None:
        """``num_threads`` is torch's unless given; of a ``pool`` that is shared, steps must not overlap."""
        config = parts.config
        if (problem := LOOPED.why_not(parts.decoder.config, config)) is not None:
            raise ValueError(f"executor 'looped': {problem}")
        self._max_batch, vocab_size = max_batch(config), parts.decoder.config.vocab_size
        library = panels_of(parts.decoder, "lm_head").library
        self.pool = pool or ThreadPool(library, num_threads or torch.get_num_threads())
        self._num_drafted = self._max_batch - config.max_rows
        model, rows = model_of(parts.decoder, self._num_drafted), _rows(parts)
        self._has_states, self._hidden_size = parts.cache.spec.has_states, parts.decoder.config.hidden_size
        floats = workspace_floats(self.pool, model, rows, self._max_batch)
        ranks, shared = None, None
        if parts.decoder.group.size > 1:
            ranks, shared = _shared_memory(parts.decoder.group, library, model, self._max_batch)
        self.engine = NativeEngine(self.pool, model, rows, self._max_batch, torch.empty(floats), ranks)
        self.shared = shared  # memory of barriers and all-reduces (threads.h); None for one rank
        self._kept = parts, model, rows  # whose addresses the library has
        # [max_batch, V]; of several ranks one for all: each writes the scores of its own tokens.
        num_logits = self._max_batch * vocab_size
        logits = torch.empty(num_logits) if shared is None else shared[-4 * num_logits :].view(torch.float32)
        self._logits = logits.view(self._max_batch, vocab_size)
        self._sampler = NativeDraw(self.pool, parts.sampling, parts.rows, self._max_batch)
        self._fed: Tensor | None = None  # whose address the step has
        self._step = Step(logits=address(self._logits), first=0, last=self.engine.num_stages)

    @property
    def workspace_bytes(self) -> int:
        """Workspace of stages and of sampling."""
        return self.engine.workspace_bytes + self._sampler.workspace_bytes

    def warm_up(self, progress: bool) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``EagerDecode.step``; ``rows [B]`` int64, distinct, B at most ``max_rows``."""
        if needs != _GREEDY:
            return self._sampler.draw(self.logits(rows), rows, needs)
        tokens = torch.empty_like(rows)
        self._run(rows, tokens)
        return Sampled(tokens)

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``OwnSampler``."""
        return self._sampler.sample(logits, rows.contiguous(), needs)

    def logits(self, rows: Tensor) -> Tensor:
        """See ``EagerDecode.logits``; overwritten by the next step."""
        self._run(rows, None)
        return self._logits[: len(rows)]

    def verify(self, batch: DraftBatch, needs: SamplingNeeds, go_on: GoOn | None = None) -> tuple[Sampled, list[int]]:
        """See ``eager.Verifier``."""
        tokens = torch.empty_like(batch.rows) if needs == _GREEDY else None
        self._run_batch(batch, tokens)
        if tokens is not None:
            accepted = tokens != REJECTED
            nums = torch.zeros(len(batch.starts), dtype=torch.int64)
            nums.index_add_(0, (batch.ahead == 0).cumsum(0) - 1, accepted.to(torch.int64))
            sampled, counts = Sampled(tokens[accepted]), nums.tolist()
        else:
            sampled, counts = self._draw_in_turn(batch, needs, go_on)
        if self._has_states and max(counts) > 1:
            with self._drafts(batch) as step:
                self.engine.accept(step, torch.tensor(counts))
        return sampled, counts

    def feed(self, batch: DraftBatch) -> Tensor:
        """See ``eager.Verifier``. No logits of other entries than the last of rows are computed."""
        is_last, num_tokens = torch.zeros(len(batch.rows), dtype=torch.bool), self._kept[0].rows.num_tokens
        is_last[batch.ends] = True
        if len(batch.starts) < len(batch.rows):
            others = DraftBatch(batch.rows[~is_last], batch.ahead[~is_last], batch.inputs[~is_last], ())
            self._step.last = self.engine.num_stages - 2  # before the final norm
            try:
                self._run_batch(others, None)
            finally:
                self._step.last = self.engine.num_stages
        rows, behind = batch.rows[is_last], batch.ahead[is_last]
        num_tokens[rows] += behind  # an entry that is ahead follows others of its row
        try:
            self._run_batch(DraftBatch(rows, torch.zeros_like(behind), batch.inputs[is_last], ()), None)
        finally:
            num_tokens[rows] -= behind
        return self._logits[: len(rows)]

    def hidden(self, count: int) -> Tensor:
        """See ``eager.ShowsHidden``."""
        out = torch.empty(count, self._hidden_size)
        self.engine.hidden(out)
        return out

    def _run_batch(self, batch: DraftBatch, tokens: Tensor | None) -> None:
        if self._has_states and (count := int((batch.ahead > 0).sum())) > self._num_drafted:
            raise ValueError(f"{count} drafted entries in a step; this engine has {self._num_drafted}")
        with self._drafts(batch):
            self._run(batch.rows, tokens)

    @contextmanager
    def _drafts(self, batch: DraftBatch) -> Iterator[Step]:
        """The step with the addresses of a batch, which must live as long."""
        step = self._step
        step.ahead, step.inputs = address(batch.ahead), address(batch.inputs)
        try:
            yield step
        finally:
            step.ahead, step.inputs = None, None

    def _draw_in_turn(self, batch: DraftBatch, needs: SamplingNeeds, go_on: GoOn | None) -> tuple[Sampled, list[int]]:
        """Sample the first entry of every row, then the second of those whose draft was right, and so on: what a token
        changes (counts of penalties, the random stream, the mask of a grammar) is seen by the next.
        """
        inputs, ends = batch.inputs.tolist(), (*batch.starts[1:], len(batch.rows))
        turn, drawn, counts = list(enumerate(batch.starts)), [], [0] * len(batch.starts)
        order: list[int] = []  # entries in the order in which they are drawn
        while turn:
            entries = torch.tensor([entry for _, entry in turn])
            sampled = self._sampler.draw(self._logits[entries], batch.rows[entries], needs)
            drawn.append(sampled)
            order += [entry for _, entry in turn]
            right = []
            for (row, entry), token in zip(turn, sampled.token_ids.tolist(), strict=True):
                counts[row] += 1
                if entry + 1 < ends[row] and inputs[entry + 1] == token:
                    right.append((row, entry + 1))
            if right and go_on is not None:
                following = [entry for _, entry in right]
                goes = go_on(batch.rows[following].tolist(), [inputs[entry] for entry in following])
                right = list(compress(right, goes))
            turn = right
        return Sampled.joined(drawn, torch.tensor(order).argsort()), counts

    def _run(self, rows: Tensor, tokens: Tensor | None) -> None:
        step = self._step
        if rows is not self._fed:  # most steps feed the rows of the one before
            if len(rows) > self._max_batch:
                raise ValueError(f"{len(rows)} entries in a step; this engine has {self._max_batch}")
            step.rows, step.batch, self._fed = address(rows), len(rows), rows
        step.tokens = address(tokens)
        self.engine.run(step)


def _shared_memory(group: Group, library: Library, model: Model, max_rows: int) -> tuple[Ranks, Tensor]:
    """This rank's ``Ranks`` and the memory for barriers and all-reduces; a collective."""
    num_bytes = shared_bytes(library, model, group.size, max_rows)
    shared = group.share_memory(num_bytes)
    waits = shared is not None
    if shared is None:
        shared = torch.zeros(num_bytes, dtype=torch.uint8)
    return Ranks(shared=address(shared), rank=group.rank, size=group.size, waits=waits), shared


def _rows(parts: StepParts) -> RowTable:
    cache, state = parts.cache, parts.rows
    queries = None if parts.queries is None else parts.queries.buffer
    heads, slots = cache.heads, None if cache.heads is None else cache.heads.slots
    sources = [cache.spec.source(layer) for layer in range(cache.spec.num_layers)]
    layers = [cache.spec.layers[source] for source in sources]
    windows = [own.num_tokens if isinstance(own, Window) else 0 for own in layers]
    slots_of_layers = [cache.layer_slots[source] for source in sources]
    states = list(map(cache.state, range(cache.spec.num_layers)))
    memories = [[0 if name not in own else address(own[name]) for own in states] for name in ("inputs", "memory")]
    stored = zip(*(_stored(cache, source) for source in sources), strict=True)
    tables = torch.tensor([slots_of_layers, windows, *memories, *stored])  # [8, L]
    scales = None if cache.k_scale is None else tables[6], None if cache.v_scale is None else tables[7]
    table = RowTable(
        last_token=address(state.last_token), num_tokens=address(state.num_tokens),
        ring_start=address(state.ring_start), capacity=address(state.capacity),
        num_sampled=address(parts.sampling.num_sampled),
        keys=address(tables[4]), values=address(tables[5]), key_scales=address(scales[0]),
        value_scales=address(scales[1]),
        queries=address(queries), kept_queries=0 if queries is None else queries.shape[2],
        head_starts=address(None if heads is None else heads.starts),
        head_ends=address(None if heads is None else heads.ends),
        head_capacities=address(None if heads is None else heads.capacities),
        row_slots=0 if slots is None else slots.row_slots,
        layer_slots=address(tables[0]), windows=address(tables[1]), conv_inputs=address(tables[2]),
        memories=address(tables[3]), num_rows=cache.num_rows + 1,
        slots=max([*cache.layer_slots, 0 if slots is None else slots.longest]),
        key_format=FORMATS[cache.encodings[0].format.name], value_format=FORMATS[cache.encodings[1].format.name],
        adapters=None if parts.decoder.adapters is None else address(state.adapter),
    )  # fmt: skip
    table.kept = tables
    return table


def _stored(cache: KVCache, layer: int) -> list[int]:
    """Addresses of a layer's keys, values and their scales, 0 for what it has not; with per-head budgets those of
    all rows, but of scales by head.
    """
    if isinstance(cache.spec.layers[layer], State):
        return [0] * 4
    rows = cache.layer(layer)
    scales = list(rows.scales)
    if cache.has_own_heads(layer):
        by_head = [encoding.format.scales == "head" for encoding in cache.encodings]
        sides = zip((cache.k_scale, cache.v_scale), by_head, strict=True)
        scales = [own[layer] if is_own and own is not None else own for own, is_own in sides]
    return [0 if own is None else own.data_ptr() for own in (rows.k, rows.v, *scales)]
