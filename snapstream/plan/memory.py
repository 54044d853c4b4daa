"""The bytes that an engine allocates, from the integers of its config: ``plan`` prints them, the start checks them.

Bytes that do not depend on the number of rows: weights, where they are narrow one layer of them as they are computed
with, staging buffers, the temporaries of one prefill chunk and of
one scoring block, the padding row. Bytes per row: keys and values, the sampler's state, and what one entry of a decode
batch needs - logits, the sampler's integer weights, activations - twice on a GPU whose graphs hold a copy of their own;
of looped steps on a CPU their workspace, for as many threads as there are processors.
With hops a layer's queries of all staged tokens are held beside the pool. No torch.

Of several ranks these are the bytes of each (``models/shards.py``): hidden states, the sampler's state and what a
decode batch needs for it are the same on all, weights and heads are split, and rows as the heads are or, where
attention is ``dp``, dealt out whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config import DTYPE_BYTES, DType, EngineConfig, ModelConfig, ParallelConfig, Selector
from snapstream.config.cores import num_cores
from snapstream.config.sizes import format_bytes
from snapstream.layers.row_state import row_state_bytes
from snapstream.models.families import kv_spec_of
from snapstream.models.shapes import weight_bytes, wide_bytes, widening_bytes
from snapstream.models.shards import rank_config
from snapstream.plan.workspace import looped_kernel_bytes, looped_workspace

SCORING_KEYS = 4096  # keys that are scored at a time
# Of one batch entry and token of the vocabulary, where top-p looks for its threshold: fp32 logits and scores, keys,
# integer weights, and the buckets of a histogram.
SAMPLING_BYTES = 52
_COUNTER_BYTES = 8  # int64
FRAMEWORK_BYTES = 384 * 2**20  # on a GPU: workspaces of the matrix library, kernels, what the allocator cannot fill


def chunk_bytes(model: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Temporaries of a prefill unit of so many tokens."""
    hidden = model.hidden_size
    if model.latent is None:
        query_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        projected = 2 * (query_size + 2 * kv_size)  # heads as projected and as rotated
    else:
        query_size = model.num_heads * model.latent.expanded_dim
        # Queries as projected, turned and scaled, beside them latents and what is expanded from them.
        projected = 4 * query_size + (model.latent.q_rank or 0) + 3 * model.latent.latent_dim
    # The chunk's own keys and values repeated, queries folded, two outputs, their merge.
    attention = hidden + projected + 6 * query_size
    mlp = query_size + 4 * hidden + mlp_size(model)  # attended heads, residual, norm and its parts
    return num_tokens * max(attention, mlp) * DTYPE_BYTES[dtype]


def mlp_size(model: ModelConfig) -> int:
    """Numbers that the MLP of a layer holds at a time per token, in the largest of the model's layers."""
    moe = model.moe
    sizes = [0 if moe is not None and moe.first_dense == 0 else 3 * model.intermediate_size]  # gate and up, product
    if moe is not None:
        hidden, inner = model.hidden_size, moe.inner
        # Of every pair: its token with gate and up; these with their product; that with the output; the output twice.
        pairs = moe.top_k * max(hidden + 2 * inner, 3 * inner, inner + hidden, 2 * hidden)
        sizes.append(pairs + 2 * moe.num_experts + 16 * moe.top_k)  # beside fp32 scores, and the order of the pairs
        sizes.append(hidden + 3 * moe.shared_inner)  # beside the sum of the chosen
    return max(sizes)


@dataclass(frozen=True, kw_only=True)
class PrefillMemory:
    """Peak bytes that one prompt's prefill needs beside weights and rows."""

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
    transient_bytes: int  # of one prefill chunk or scoring block, or of a block of weights while it is widened
    framework_bytes: int
    row_bytes: (
        int  # keys and values of a row, in FP8 their scales, and what rescoring keeps of it; on a rank that has it
    )
    state_bytes: int  # the sampler's, of a row
    batch_bytes: int  # of one entry of a decode batch
    max_rows: int
    wide_bytes: int = 0  # of the buffer in which prefill widens a layer's narrow weights
    query_bytes: int = 0  # with hops: one layer's queries of all tokens of the pool
    reserved_bytes: int = 0  # what a draft will take on this device
    store_bytes: int = 0  # of the prefix store, where it is in the same memory
    bounce_bytes: int = 0  # where it is not: one layer of the pool's tokens, on their way to and from the host
    dealt_to: int = 1  # ranks among which rows are dealt out; each has a padding row

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of rows; the padding row is among them."""
        parts = self.weight_bytes, self.staging_bytes, self.transient_bytes, self.framework_bytes
        more = self.wide_bytes, self.query_bytes, self.reserved_bytes, self.store_bytes, self.bounce_bytes
        return sum(parts) + sum(more) + self.row_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        own_rows = -(-self.max_rows // self.dealt_to)
        return self.fixed_bytes + own_rows * self.row_bytes + self.max_rows * self._bytes_everywhere

    @property
    def bytes_per_row(self) -> int:
        """What one more row costs the rank that gets it."""
        return self.row_bytes + self._bytes_everywhere

    @property
    def _bytes_everywhere(self) -> int:
        """Of a row, on every rank."""
        return self.state_bytes + self.batch_bytes

    def rows_that_fit(self, free_bytes: int) -> int:
        """Rows beside the fixed bytes, on all ranks together; 0 or less where not even those fit."""
        room = free_bytes - self.fixed_bytes
        rounds, left = divmod(room, self.row_bytes + self.dealt_to * self._bytes_everywhere)  # a row on each rank
        last = max(0, min((left - self.row_bytes) // self._bytes_everywhere, self.dealt_to - 1))
        return rounds * self.dealt_to + last

    def describe(self) -> str:
        """The sum in words, for an error."""
        decode = self.max_rows * self.batch_bytes + (self.max_rows + 1) * self.state_bytes
        parts = [
            f"{format_bytes(self.weight_bytes)} of weights",
            f"{-(-self.max_rows // self.dealt_to)} + 1 rows of {format_bytes(self.row_bytes)}",
            f"{format_bytes(self.staging_bytes)} of staging",
            f"{format_bytes(self.transient_bytes)} of prefill temporaries",
            *([f"{format_bytes(self.wide_bytes)} for a widened layer"] if self.wide_bytes else []),
            *([f"{format_bytes(self.query_bytes)} of queries for hops"] if self.query_bytes else []),
            *([f"{format_bytes(self.reserved_bytes)} for the draft"] if self.reserved_bytes else []),
            *([f"{format_bytes(self.bounce_bytes)} for copies of the prefix store"] if self.bounce_bytes else []),
            *([f"{format_bytes(self.store_bytes)} for the prefix store"] if self.store_bytes else []),
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
    # Scores of all keys: as voted, pooled, carried ahead; with hops also the sum, the latest votes and their parts.
    scoring_bytes += 4 * (6 if selector.needs_all_queries else 3) * spec.num_kv_heads * num_tokens
    return PrefillMemory(
        hidden_bytes=num_tokens * model.hidden_size * DTYPE_BYTES[dtype],
        staging_bytes=spec.staging_bytes(num_tokens),
        transient_bytes=max(chunk_bytes(model, min(chunk_len, num_tokens), dtype), scoring_bytes),
        query_bytes=spec.query_bytes(num_tokens) if selector.needs_all_queries else 0,
        expanded_bytes=spec.expanded_bytes(num_tokens),
    )


def batch_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """What one entry of a decode batch takes: logits, the sampler's work, activations."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = (4 * model.hidden_size + 3 * heads + mlp_size(model)) * DTYPE_BYTES[config.dtype]
    batch = model.vocab_size * SAMPLING_BYTES + activations
    if config.device.startswith("cuda"):
        return 2 * batch + (looped_kernel_bytes(model, config) if config.executor == "looped" else 0)
    if config.executor == "looped":  # which reads rows as they are stored
        return model.vocab_size * SAMPLING_BYTES + looped_workspace(model, config, num_cores()).entry_bytes
    if config.kv_dtype != "auto":  # plain PyTorch widens the visible slots of one layer, of unlike heads one by one
        widened = kv_spec_of(model, "float32").layer_bytes(config.row_budget.capacity)
        batch += widened if config.heads is None else widened // model.num_kv_heads
    return batch


def engine_memory(model: ModelConfig, config: EngineConfig) -> EngineMemory:
    """Bytes of an engine of this ``config``; of several ranks, those of each. ``model`` is the whole one."""
    stored, model = rank_config(model, config.parallel), rank_config(model, split_heads(config.parallel))
    is_dealt = config.parallel.attention == "dp"
    spec = kv_spec_of(stored if is_dealt else model, config.dtype, config.kv_dtype)
    capacity = slots = config.budget.capacity
    if config.heads is not None:  # of the rank whose heads have most
        slots = config.heads.mean_capacity(config.parallel.size)
    refreshed, counted = spec.refresh_bytes(config.rescoring, capacity), 0
    if config.heads is not None and config.rescoring is not None:  # which choose again head by head, and are counted so
        refreshed = spec.refresh_bytes(config.rescoring, config.heads.widest.capacity) // spec.num_kv_heads
        counted = _COUNTER_BYTES * spec.num_layers * spec.num_kv_heads
    prefill = prefill_memory(
        model, config.pool_tokens, chunk_len=config.chunking.chunk_len, dtype=config.dtype, selector=config.selector
    )
    is_looped = config.executor == "looped" and config.device == "cpu"  # whose products widen as they go
    return EngineMemory(
        weight_bytes=weight_bytes(stored, config.dtype, config.weights),
        wide_bytes=0 if is_looped else wide_bytes(stored, config.dtype, config.weights),
        staging_bytes=prefill.hidden_bytes + prefill.staging_bytes,
        transient_bytes=max(
            prefill.transient_bytes,
            refreshed,
            0 if is_looped else widening_bytes(stored, config.dtype, config.weights, config.device.split(":")[0]),
        ),
        framework_bytes=FRAMEWORK_BYTES
        if config.device.startswith("cuda")
        else looped_workspace(model, config, num_cores()).scratch_bytes
        if is_looped
        else 0,
        row_bytes=spec.row_bytes(slots) + spec.rescoring_bytes(config.rescoring, capacity) + counted,
        state_bytes=row_state_bytes(model.vocab_size),
        batch_bytes=batch_bytes(model, config),
        max_rows=config.max_rows,
        query_bytes=prefill.query_bytes,
        reserved_bytes=config.reserved_bytes,
        bounce_bytes=bounce_bytes(model, config) if config.device.startswith("cuda") else 0,
        store_bytes=0 if config.device.startswith("cuda") else prefix_store_bytes(model, config),
        dealt_to=config.parallel.size if is_dealt else 1,
    )


def split_heads(parallel: ParallelConfig) -> ParallelConfig:
    """As the ranks prefill, and as they share the work of decode: with their part of the heads."""
    return replace(parallel, attention="tp")


def bounce_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The bounce buffer of a GPU's prefix store (``runner/prefix_device.py``): whole blocks for the staging pool."""
    if config.prefix_store is None:
        return 0
    size = config.prefix_store.block_len
    return kv_spec_of(model, config.dtype).layer_bytes(-(-config.pool_tokens // size) * size)


def prefix_store_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Host memory of the prefix store once it is full."""
    if config.prefix_store is None:
        return 0
    return config.prefix_blocks * config.prefix_store.block_len * kv_spec_of(model, config.dtype).prefix_token_bytes
