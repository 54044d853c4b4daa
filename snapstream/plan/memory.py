"""What an engine allocates, from the integers of its config: what ``plan`` prints and what the start checks.

Bytes that do not depend on the number of rows: weights, the staging pool, the temporaries of one prefill chunk and of
one scoring block, the padding row. Bytes per row: keys and values, the sampler's state, and what one entry of a decode
batch needs - logits, the sampler's integer weights, activations - twice on a GPU whose graphs hold a copy of their own.
With hops a layer's queries of all staged tokens are held beside the pool. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.cache.layout import refresh_bytes, rescoring_bytes, row_bytes, staging_bytes
from snapstream.config import (
    DEFAULT_WINDOW,
    DTYPE_BYTES,
    EngineConfig,
    KVDType,
    ModelConfig,
    RescoringConfig,
    kv_dtype_bytes,
)
from snapstream.models.shapes import num_parameters
from snapstream.plan.sizes import format_bytes
from snapstream.request import MAX_LOGIT_BIAS, NUM_STOP_IDS

SCORING_KEYS = 4096  # keys that are scored at a time
MAX_AUTO_ROWS = 256  # more rows are given to those who ask for them
# Of one batch entry and token of the vocabulary, where top-p looks for its threshold: fp32 logits and scores, keys,
# integer weights, and the buckets of a histogram.
SAMPLING_BYTES = 52
FRAMEWORK_BYTES = 384 * 2**20  # on a GPU: workspaces of the matrix library, kernels, what the allocator cannot fill


def decode_weight_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Weights that a decode step must read: all but an untied embedding table (a line per row)."""
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (num_parameters(config) - lookup) * dtype_bytes


def sampling_state_bytes(vocab_size: int) -> int:
    """What a row's sampling parameters and counters take (``layers/sampling_state.py``)."""
    occurrences = vocab_size * (1 + 4)  # seen in the prompt, count in the output
    allowed = 4 * -(-vocab_size // 32)  # a bit for each token
    numbers = 1 + 3 * 4 + 7 * 8  # is_greedy; penalties; real parameters, counters and the random stream
    return occurrences + allowed + MAX_LOGIT_BIAS * (8 + 4) + NUM_STOP_IDS * 8 + numbers


def chunk_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Temporaries of a prefill unit of so many tokens."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Projected and rotated heads; the chunk's own keys and values repeated, queries folded, two outputs, their merge.
    attention = hidden + 2 * (query_size + 2 * kv_size) + 6 * query_size
    mlp = query_size + 4 * hidden + 3 * inner  # attended heads, residual, norm and its parts, gate and up, product
    return num_tokens * max(attention, mlp) * dtype_bytes


@dataclass(frozen=True, kw_only=True)
class PrefillMemory:
    """Peak bytes that one prompt's prefill needs beside weights and rows."""

    hidden_bytes: int  # residual stream [N, D]
    staging_bytes: int  # K and V [2, G, N, E] of one layer
    transient_bytes: int  # the larger of one chunk's activations and one scoring block
    query_bytes: int = 0  # with hops: the queries of one layer [N, H, E]

    @property
    def total_bytes(self) -> int:
        return self.hidden_bytes + self.staging_bytes + self.transient_bytes + self.query_bytes


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Where the bytes of an engine go."""

    weight_bytes: int
    staging_bytes: int  # the pool: hidden states and one layer's keys and values
    transient_bytes: int  # of one prefill chunk or scoring block
    framework_bytes: int
    row_bytes: int  # keys and values of a row, in FP8 their scales, and what rescoring keeps of it
    state_bytes: int  # the sampler's, of a row
    batch_bytes: int  # of one entry of a decode batch
    max_rows: int
    query_bytes: int = 0  # with hops: one layer's queries of all tokens of the pool
    reserved_bytes: int = 0  # what a draft will take on this device

    @property
    def fixed_bytes(self) -> int:
        """All that is there without a single row; the padding row is."""
        parts = self.weight_bytes, self.staging_bytes, self.transient_bytes, self.framework_bytes
        return sum(parts) + self.query_bytes + self.reserved_bytes + self.row_bytes + self.state_bytes

    @property
    def bytes_per_row(self) -> int:
        """What one more row costs."""
        return self.row_bytes + self.state_bytes + self.batch_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.max_rows * self.bytes_per_row

    def rows_that_fit(self, free_bytes: int) -> int:
        """Rows beside the fixed bytes; 0 or less where not even those fit."""
        return (free_bytes - self.fixed_bytes) // self.bytes_per_row

    def describe(self) -> str:
        """The sum in words, for an error."""
        decode = self.max_rows * self.batch_bytes + (self.max_rows + 1) * self.state_bytes
        parts = [
            f"{format_bytes(self.weight_bytes)} of weights",
            f"{self.max_rows} + 1 rows of {format_bytes(self.row_bytes)}",
            f"{format_bytes(self.staging_bytes)} of staging",
            f"{format_bytes(self.transient_bytes)} of prefill temporaries",
            *([f"{format_bytes(self.query_bytes)} of queries for hops"] if self.query_bytes else []),
            *([f"{format_bytes(self.reserved_bytes)} for the draft"] if self.reserved_bytes else []),
            f"{format_bytes(decode + self.framework_bytes)} for decode and the framework",
        ]
        return f"{', '.join(parts[:-1])} and {parts[-1]} need {format_bytes(self.total_bytes)}"


def auto_rows(memory: EngineMemory, free_bytes: int) -> int:
    """Rows that ``max_rows="auto"`` takes; 0 where not one fits."""
    return max(0, min(memory.rows_that_fit(free_bytes), MAX_AUTO_ROWS))


def prefill_memory(
    config: ModelConfig,
    prompt_len: int,
    *,
    chunk_len: int,
    dtype_bytes: int,
    window_len: int = DEFAULT_WINDOW,
    num_hops: int = 0,
) -> PrefillMemory:
    """Peak memory of prefilling one prompt layer by layer; it does not grow with the number of layers."""
    kv_size = config.num_kv_heads * config.head_dim
    keys = min(SCORING_KEYS, prompt_len)
    scoring_bytes = 4 * (window_len * config.num_heads * keys + kv_size * keys)  # fp32 block and its keys
    # Scores of all keys: as voted, pooled, carried ahead; with hops also the sum, the latest votes and their parts.
    scoring_bytes += 4 * (6 if num_hops else 3) * config.num_kv_heads * prompt_len
    return PrefillMemory(
        hidden_bytes=prompt_len * config.hidden_size * dtype_bytes,
        staging_bytes=prompt_len * 2 * kv_size * dtype_bytes,
        transient_bytes=max(chunk_bytes(config, min(chunk_len, prompt_len), dtype_bytes), scoring_bytes),
        query_bytes=prompt_len * config.num_heads * config.head_dim * dtype_bytes if num_hops else 0,
    )


def engine_memory(
    model: ModelConfig, capacity: int, max_model_len: int, *, max_rows: int = 0, staging_tokens: int = 0,
    chunk_len: int, dtype: str, device: str, window_len: int = DEFAULT_WINDOW, kv_dtype: KVDType = "auto",
    rescoring: RescoringConfig | None = None, num_hops: int = 0, reserved_bytes: int = 0,
) -> EngineMemory:  # fmt: skip
    """Bytes of an engine with rows of ``capacity`` slots; ``staging_tokens`` 0 is ``EngineConfig``'s default pool.

    ``reserved_bytes`` are kept free for what is not the engine's.
    """
    size = DTYPE_BYTES[dtype]
    pool = staging_tokens or max_model_len + EngineConfig.short_reserve
    prefill = prefill_memory(
        model, pool, chunk_len=chunk_len, dtype_bytes=size, window_len=window_len, num_hops=num_hops
    )
    is_gpu = device.startswith("cuda")
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = (4 * model.hidden_size + 3 * heads + 3 * model.intermediate_size) * size
    batch = model.vocab_size * SAMPLING_BYTES + activations
    if kv_dtype == "fp8" and not is_gpu:  # plain PyTorch widens the visible slots of one layer
        batch += 2 * model.num_kv_heads * model.head_dim * capacity * 4
    return EngineMemory(
        weight_bytes=num_parameters(model) * size,
        staging_bytes=staging_bytes(model, pool, size),
        transient_bytes=max(prefill.transient_bytes, refresh_bytes(model, rescoring, capacity, size)),
        framework_bytes=FRAMEWORK_BYTES if is_gpu else 0,
        row_bytes=row_bytes(model, capacity, kv_dtype_bytes(dtype, kv_dtype))
        + rescoring_bytes(model, rescoring, capacity, size),
        state_bytes=sampling_state_bytes(model.vocab_size),
        batch_bytes=2 * batch if is_gpu else batch,
        max_rows=max_rows,
        query_bytes=prefill.query_bytes,
        reserved_bytes=reserved_bytes,
    )
