"""The bytes that an engine and a draft allocate, from the integers of their configs. No torch.

``plan`` prints them, the start checks them. Of several ranks they are the bytes of each (``models/sharding.py``):
hidden states, sampler state and sampling are the same on all; weights and heads are split; rows are split by heads or,
with ``attention="dp"``, distributed whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config import (
    DTYPE_BYTES,
    DType,
    EngineConfig,
    KVBudget,
    ModelConfig,
    ParallelConfig,
    Selector,
)
from snapstream.config.engine import SNAPSHOT_LEN, Speculator
from snapstream.config.recurrent import DeltaNet, Mamba2
from snapstream.config.values import format_bytes
from snapstream.disaggregation.protocol import RowSizes
from snapstream.exec.executors import ALIGN, MAX_DRAFTED, PANEL, executor_of, mlp_size
from snapstream.exec.row_state import row_state_bytes
from snapstream.kv.spec import Full, KVSpec, State, Window
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import dequantized_bytes, dequantizing_bytes, rank_config, weight_bytes
from snapstream.spec_prefill.settings import (
    OWN_QUERIES,
    ScoringSettings,
    num_passages,
    num_prefill_tokens,
    step_config,
)


def row_sizes(model: ModelConfig, config: EngineConfig) -> RowSizes:
    """Bytes of the frames of a KV transfer (``exec/row_transfer.py``); ranks send and receive whole rows."""
    spec = kv_spec_of(model, config.dtype, config.kv_dtype).limited(config.max_model_len)

    def one_layer(index: int, prompt_len: int, budget: KVBudget) -> int:
        layer = spec.layers[index]
        if isinstance(layer, State):
            return spec.layer_state_bytes(index)
        if not isinstance(layer, Full):
            return 0
        budgets: tuple[KVBudget, ...] = (KVBudget.full(layer.num_tokens) if isinstance(layer, Window) else budget,)
        num_parts = 1
        if config.heads is not None:
            budgets, num_parts = config.heads.of(budget, prompt_len).budgets[index], spec.num_kv_heads
        num_slots = sum(min(prompt_len, own.capacity) for own in budgets)
        return spec.head_scale_bytes(layer.num_kv_heads) + num_slots * spec.slot_bytes(layer) // num_parts

    return RowSizes(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        hidden_bytes=model.stream_size * DTYPE_BYTES[config.dtype],
        layer_bytes=lambda prompt_len, budget: tuple(
            one_layer(index, prompt_len, budget) for index in range(spec.num_layers)
        ),
    )


SCORING_KEYS = 4096  # keys that are scored at a time
FRAMEWORK_BYTES = 384 * 2**20  # on a GPU: cuBLAS workspaces, kernels, fragmentation


def chunk_bytes(model: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Temporaries of a prefill unit of so many tokens."""
    hidden = model.hidden_size
    if model.latent is None:
        query_size = model.most_heads * model.widest_head
        # Heads as projected and as rotated.
        projected = 2 * max((own.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in model.all_heads)
    else:
        query_size = model.num_heads * model.latent.expanded_dim
        # Queries as projected, rotated and scaled; latents and what is expanded from them.
        projected = 4 * query_size + (model.latent.q_rank or 0) + 3 * model.latent.latent_dim
    # The chunk's own keys and values repeated, queries folded, two outputs, their merge.
    attention = hidden + projected + 6 * query_size
    # Attended heads, residual, norm and its parts; experts hold their output too.
    mlp = query_size + (3 if model.moe is None else 4) * hidden + mlp_size(model)
    if model.per_layer_dim:
        mlp += hidden + 4 * model.per_layer_dim  # the embeddings of tokens, for layer 0 and for this one
    streams = 0
    if model.hyper is not None:  # in fp32: their norm, or what they become, and unless they are fp32 these; an output
        streams = 4 * (1 + (dtype != "float32")) * model.stream_size
        streams += hidden * (4 + 2 * DTYPE_BYTES[dtype]) + query_size * DTYPE_BYTES[dtype]
    recurrent = 0
    if isinstance(net := model.recurrent, Mamba2):  # as projected and convolved; fp32 inputs and outputs of the scan
        own = sum(net.projected) + net.channels + (hidden + query_size if model.has_parallel_recurrence else 0)
        recurrent = own * DTYPE_BYTES[dtype] + 4 * (2 * net.channels + net.inner)
    elif isinstance(net, DeltaNet):  # the same, with gates and inputs side by side; of KDA a decay per element of a key
        own = hidden + net.projected + 2 * net.channels + 4 * net.value_heads + 3 * net.key_size * bool(net.gate_rank)
        recurrent = own * DTYPE_BYTES[dtype] + 4 * net.channels * (4 if net.gate_rank else 2)
    return num_tokens * max(max(attention, mlp) * DTYPE_BYTES[dtype], recurrent, streams)


@dataclass(frozen=True, kw_only=True)
class PrefillMemory:
    """Peak bytes of one prompt's prefill, without weights and rows."""

    hidden_bytes: int  # residual stream [N, D]
    staging_bytes: int  # K and V [2, G, N, E] of one layer
    transient_bytes: int  # the larger of one chunk's activations and one scoring block
    query_bytes: int = 0  # with hops: the queries of one layer [N, H, E]
    expanded_bytes: int = 0  # of staging_bytes: keys and values of every head, made from one layer's latents

    @property
    def total_bytes(self) -> int:
        return self.hidden_bytes + self.staging_bytes + self.transient_bytes + self.query_bytes


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Where the bytes of an engine go."""

    weight_bytes: int
    staging_bytes: int  # the pool: hidden states and one layer's keys and values
    transient_bytes: int  # of one prefill chunk or scoring block, or of a block of weights while it is dequantized
    framework_bytes: int
    row_bytes: int  # keys, values, scales and states of a row; on a rank that has it
    state_bytes: int  # the sampler's, of a row
    batch_bytes: int  # of one entry of a decode batch
    max_rows: int
    dequantized_bytes: int = 0  # of the buffer in which prefill dequantizes a layer's weights
    query_bytes: int = 0  # with hops: one layer's queries of all tokens of the pool
    adapter_bytes: int = 0  # of LoRA adapters
    reserved_bytes: int = 0  # for a draft on this device
    store_bytes: int = 0  # of the prefix store, where it is in the same memory
    bounce_bytes: int = 0  # where it is not: one layer of the pool's tokens, between device and host
    dp_size: int = 1  # ranks that rows are distributed over; each has a padding row

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of rows; the padding row is among them."""
        parts = self.weight_bytes, self.adapter_bytes, self.staging_bytes, self.transient_bytes, self.framework_bytes
        more = self.dequantized_bytes, self.query_bytes, self.reserved_bytes, self.store_bytes, self.bounce_bytes
        return sum(parts) + sum(more) + self.row_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        rank_rows = -(-self.max_rows // self.dp_size)
        return self.fixed_bytes + rank_rows * self.row_bytes + self.max_rows * self._bytes_everywhere

    @property
    def _bytes_everywhere(self) -> int:
        """Bytes of a row that every rank has."""
        return self.state_bytes + self.batch_bytes

    def rows_that_fit(self, free_bytes: int) -> int:
        """Rows on all ranks together; 0 or less if even the fixed bytes do not fit."""
        room = free_bytes - self.fixed_bytes
        rounds, left = divmod(room, self.row_bytes + self.dp_size * self._bytes_everywhere)  # a row on each rank
        last = max(0, min((left - self.row_bytes) // self._bytes_everywhere, self.dp_size - 1))
        return rounds * self.dp_size + last

    def describe(self) -> str:
        """The sum in words, for an error."""
        decode = self.max_rows * self.batch_bytes + (self.max_rows + 1) * self.state_bytes
        optional = (
            (self.adapter_bytes, "of LoRA adapters"),
            (self.dequantized_bytes, "for a dequantized layer"),
            (self.query_bytes, "of queries for hops"),
            (self.reserved_bytes, "for the draft"),
            (self.bounce_bytes, "for copies of the prefix store"),
            (self.store_bytes, "for the prefix store"),
        )
        parts = [
            f"{format_bytes(self.weight_bytes)} of weights",
            f"{-(-self.max_rows // self.dp_size)} + 1 rows of {format_bytes(self.row_bytes)}",
            f"{format_bytes(self.staging_bytes)} of staging",
            f"{format_bytes(self.transient_bytes)} of prefill temporaries",
            *(f"{format_bytes(size)} {purpose}" for size, purpose in optional if size),
            f"{format_bytes(decode + self.framework_bytes)} for decode and the framework",
        ]
        return f"{', '.join(parts[:-1])} and {parts[-1]} need {format_bytes(self.total_bytes)}"


def prefill_memory(
    model: ModelConfig, num_tokens: int, *, chunk_len: int, dtype: DType, selector: Selector
) -> PrefillMemory:
    """Peak memory of prefilling ``num_tokens`` tokens layer by layer; it does not grow with the number of layers."""
    spec = kv_spec_of(model, dtype)
    keys = min(SCORING_KEYS, num_tokens)
    scoring_bytes = 4 * (
        selector.observation_len * spec.num_heads * keys + spec.key_size * keys
    )  # fp32 block and its keys
    # Attention scores of all keys, pooled scores and a copy; with hops also the sum, the latest scores and their parts.
    scoring_bytes += 4 * (6 if selector.needs_all_queries else 3) * spec.num_kv_heads * num_tokens
    return PrefillMemory(
        hidden_bytes=num_tokens * model.stream_size * DTYPE_BYTES[dtype],
        staging_bytes=spec.staging_bytes(num_tokens),
        transient_bytes=max(chunk_bytes(model, min(chunk_len, num_tokens), dtype), scoring_bytes),
        query_bytes=spec.query_bytes(num_tokens) if selector.needs_all_queries else 0,
        expanded_bytes=spec.expanded_bytes(num_tokens),
    )


def engine_memory(model: ModelConfig, config: EngineConfig) -> EngineMemory:
    """Bytes of an engine of this ``config``; of several ranks, those of each. ``model`` is the whole one."""
    whole = model
    stored, model = (
        rank_config(whole, parallel, formats=config.weights)
        for parallel in (config.parallel, split_heads(config.parallel))
    )
    dp_size = config.parallel.dp_size
    spec = kv_spec_of(stored if dp_size > 1 else model, config.dtype, config.kv_dtype).limited(config.max_model_len)
    slots = config.budget.capacity
    if config.heads is not None:  # of the rank with the most slots
        slots = config.heads.mean_capacity(config.parallel.size)
    prefill = prefill_memory(
        model, config.pool_tokens, chunk_len=config.chunking.chunk_len, dtype=config.dtype, selector=config.selector
    )
    executor = executor_of(config.executor)
    kind = config.device.partition(":")[0]
    draft = None if config.speculator is None else speculator_memory(config.speculator, config.max_rows)
    return EngineMemory(
        weight_bytes=weight_bytes(stored, config.dtype, config.weights),
        dequantized_bytes=dequantized_bytes(stored, config.dtype, config.weights) if executor.dequantizes else 0,
        staging_bytes=prefill.hidden_bytes + prefill.staging_bytes,
        transient_bytes=max(
            prefill.transient_bytes,
            dequantizing_bytes(stored, config.dtype, config.weights, kind) if executor.dequantizes else 0,
        ),
        framework_bytes=executor.scratch_bytes(model, config) + (FRAMEWORK_BYTES if kind == "cuda" else 0),
        row_bytes=spec.row_bytes(slots) + (draft.row_bytes if draft else 0),
        state_bytes=row_state_bytes(model.vocab_size) + (draft.state_bytes if draft else 0),
        batch_bytes=executor.batch_bytes(model, config) + (draft.batch_bytes if draft else 0),
        max_rows=config.max_rows,
        query_bytes=prefill.query_bytes,
        adapter_bytes=adapter_bytes(config),
        reserved_bytes=config.reserved_bytes + (draft.fixed_bytes if draft else 0),
        bounce_bytes=bounce_bytes(model, config) if kind == "cuda" else 0,
        store_bytes=0 if kind == "cuda" else prefix_store_bytes(whole, config),
        dp_size=dp_size,
    )


def adapter_bytes(config: EngineConfig) -> int:
    """Bytes of the LoRA adapters; in panels rows and columns are filled up."""
    rows, columns = (1, 1) if executor_of(config.executor).make_matrix is None else (PANEL, ALIGN)
    numbers = (
        -(-shape[0] // rows) * rows * (-(-shape[1] // columns) * columns)
        for own in config.loras
        for shape in own.shapes
    )
    return sum(numbers) * DTYPE_BYTES[config.dtype]


def speculator_config(speculator: Speculator, max_rows: int) -> EngineConfig:
    """Config of the steps of a speculative draft model (``exec/draft_model.py``)."""
    slots, is_looped = speculator.num_slots, speculator.executor == "looped"
    return EngineConfig(
        budget=KVBudget.full(slots),
        max_model_len=slots,
        max_rows=max_rows,
        device=speculator.device,
        executor=speculator.executor,
        dtype=speculator.dtype,
        kv_dtype="int8" if is_looped and speculator.model.latent is None else "auto",
        num_speculative_tokens=MAX_DRAFTED,  # entries of a step, to feed what a row lacks
        weights=speculator.formats,
        staging_tokens=speculator.num_read,
        short_reserve=0,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculatorMemory:
    """Bytes of a draft model of speculative decoding; ``fixed_bytes`` has no padding row."""

    fixed_bytes: int
    row_bytes: int
    state_bytes: int
    batch_bytes: int


def speculator_memory(speculator: Speculator, max_rows: int) -> SpeculatorMemory:
    """As ``EngineMemory`` counts them, for as many rows as the engine has."""
    config = speculator_config(speculator, max_rows)
    memory = engine_memory(speculator.model, config)
    parts = memory.weight_bytes, memory.staging_bytes, memory.transient_bytes, memory.dequantized_bytes
    scratch = executor_of(speculator.executor).scratch_bytes(speculator.model, config)  # the framework is the engine's
    hidden = speculator.num_read * DTYPE_BYTES["bfloat16"] + DTYPE_BYTES[config.dtype]  # kept, and an input
    kept = speculator.is_own * speculator.model.hidden_size * hidden
    return SpeculatorMemory(
        fixed_bytes=sum(parts) + scratch, row_bytes=memory.row_bytes + kept, state_bytes=memory.state_bytes,
        batch_bytes=memory.batch_bytes,
    )  # fmt: skip


def split_heads(parallel: ParallelConfig) -> ParallelConfig:
    """How ranks share prefill and the work of decode, whatever ``attention`` is: by heads."""
    return replace(parallel, attention="tp")


def bounce_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The bounce buffer of a GPU's prefix store (``exec/prefix_store.py``): whole blocks of the staging pool."""
    if config.prefix_store is None:
        return 0
    size = config.prefix_store.block_len
    return kv_spec_of(model, config.dtype).layer_bytes(-(-config.pool_tokens // size) * size)


def store_token_bytes(
    model: ModelConfig, parallel: ParallelConfig, dtype: DType, snapshot_len: int = SNAPSHOT_LEN
) -> int:
    """Bytes of a token in the prefix stores of all ranks together, with its part of the snapshots of states. Latents,
    and kv heads that are fewer than ranks, are stored on several ranks each.
    """
    own = rank_config(model, split_heads(parallel))
    return parallel.size * kv_spec_of(own, dtype).stored_token_bytes(snapshot_len)


def prefix_store_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Host memory of one rank's prefix store when it is full; ``model`` is the whole one."""
    if config.prefix_store is None:
        return 0
    spec = kv_spec_of(rank_config(model, split_heads(config.parallel)), config.dtype)
    num_tokens = config.prefix_blocks * config.prefix_store.block_len
    return num_tokens * spec.prefix_token_bytes + config.prefix_snapshots * spec.state_bytes


@dataclass(frozen=True, kw_only=True)
class DraftMemory:
    weight_bytes: int
    working_bytes: int  # at most, while it scores a text

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.working_bytes


def draft_memory(model: ModelConfig, settings: ScoringSettings, *, dtype: DType, device: str) -> DraftMemory:
    """Bytes of a draft that scores texts of any length.

    The peak is a text longer than its context, of which as many passages as look ahead together are held at once. It is
    allocated when a prompt is scored, so the engine keeps it free.
    """
    kind, context_len = device.split(":")[0], settings.context_len or model.max_position
    spec, chunk_len = kv_spec_of(model, dtype), min(num_prefill_tokens(kind), context_len)
    held, num_queries = spec.staging_bytes(context_len), settings.look_ahead or OWN_QUERIES
    if settings.look_ahead:
        num = num_passages(kind)
        held += num * context_len * spec.token_bytes() + model.num_layers * spec.query_bytes(num * num_queries)
        held += _step_bytes(model, KVBudget.full(context_len), num, dtype, kind)
    hidden = context_len * model.stream_size * DTYPE_BYTES[dtype]
    return DraftMemory(
        weight_bytes=weight_bytes(model, dtype),
        working_bytes=held
        + hidden
        + chunk_bytes(model, chunk_len, dtype)
        + _scoring_bytes(spec, num_queries, context_len),
    )


def _step_bytes(model: ModelConfig, budget: KVBudget, num_rows: int, dtype: DType, kind: str) -> int:
    """Buffers of the draft's executor; the activations of eager decode are those of a chunk."""
    config = step_config(model, budget, num_rows, dtype=dtype, device=kind)
    if config is None:
        return 0
    executor = executor_of(config.executor)
    rows = num_rows * executor.batch_bytes(model, config) + (num_rows + 1) * row_state_bytes(model.vocab_size)
    return rows + executor.scratch_bytes(model, config)


def _scoring_bytes(spec: KVSpec, num_queries: int, context_len: int) -> int:
    """Probabilities of a block of keys as they are, padded and pooled, the keys in fp32; the best of every token."""
    keys = min(SCORING_KEYS, context_len)
    probabilities = 3 * num_queries * spec.num_heads * keys
    return 4 * (probabilities + spec.key_size * keys + num_queries * context_len)
