"""What a model costs before it is loaded: bytes per row, rows that fit, prefill memory, byte-bound speed.

Everything follows from the config's integers, so the figures are bounds, not measurements. No torch.

* a row: ``2 L G C E`` numbers (keys and values), however long the prompt was; in FP8 also ``2 L G`` fp32 scales; with
  rescoring also ``L w H E`` numbers (its last queries) and ``L G C`` fp32 votes;
* weights: the shapes of ``models/shapes.py``;
* a prefill of N tokens: hidden states ``N D``, staging of the one layer in work ``2 N G E``, and the larger
  of one chunk's temporaries, ``T max(D + (8 H + 4 G) E, H E + 4 D + 3 I)``, and one fp32 scoring block,
  ``window H`` by 4096 keys (``memory.py``); with hops also one layer's queries ``N H E``;
* rows that fit: ``(memory - fixed) / (row + decode of a row)``, as the engine itself counts (``memory.py``): fixed are
  weights, prefill, the padding row, the framework and a draft; prefill is here the pool that the engine allocates
  once, for ``max_model_len`` and a reserve for short prompts;
* tokens per second at most: ``B bandwidth / (weights read + B visible row bytes)``. A step reads every weight
  once (an untied embedding table is left out: B lines of it) and the visible slots of every row once.

``plan_report.py`` prints a ``Plan`` for people; ``Plan.as_dict`` is what ``snapstream plan --json`` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from snapstream.cache.layout import num_visible, rescoring_bytes, row_bytes, token_bytes
from snapstream.config import (
    DEFAULT_SINK,
    DEFAULT_WINDOW,
    DTYPE_BYTES,
    KVBudget,
    KVDType,
    ModelConfig,
    RescoringConfig,
    SnapKVConfig,
    kv_dtype_bytes,
)
from snapstream.engine.pace import job_chunk_len
from snapstream.models.shapes import num_parameters
from snapstream.plan.chunking import ChunkLen, resolve_chunking
from snapstream.plan.draft_memory import DraftMemory
from snapstream.plan.memory import (
    EngineMemory,
    PrefillMemory,
    auto_rows,
    decode_weight_bytes,
    engine_memory,
    prefill_memory,
)

MAX_PLANNED_LEN = 131_072  # default prompt length where the model's window is longer
DEFAULT_FRACTIONS = (2, 4, 8, 16)  # budgets of the default table: this part of the prompt


@dataclass(frozen=True, kw_only=True)
class Here:
    """The machine that asks."""

    device: str
    free_bytes: int  # now


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One line of the table: a row of ``capacity`` slots."""

    name: str  # "full", or the number of slots
    capacity: int
    visible_slots: int  # slots that a decode step reads right after the prompt
    row_bytes: int  # with what rescoring keeps of it
    full_fraction: float  # of the full row's bytes
    max_rows: int  # rows that fit the memory, the padding row already taken off
    tokens_per_s_one: float  # byte bound, one row decoding
    tokens_per_s_max: float  # byte bound, max_rows rows decoding; 0 if none fits
    rows_here: int | None = None  # what --max-rows auto gives on this machine; 0 where not one row fits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer; sizes in bytes, lengths in tokens."""

    architecture: str
    num_parameters: int
    dtype: str
    kv_dtype: KVDType  # of rows; "auto" is dtype
    prompt_len: int
    max_model_len: int
    chunk_len: int  # of a prompt of prompt_len
    short_chunk_len: int  # of a short prompt
    here: Here | None
    memory_bytes: int
    bandwidth_bytes_per_s: int
    weight_bytes: int
    token_bytes: int  # K and V of one token, all layers
    prefill: PrefillMemory  # one prompt of prompt_len
    prefill_pool_bytes: int  # what the engine sets aside: the same for max_model_len + EngineConfig.short_reserve
    all_layers_staging_bytes: int  # what chunk-major prefill of this prompt would stage
    draft: DraftMemory | None
    rows: tuple[RowPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields above under their names; ``prefill`` also has ``total_bytes``, ``rows`` is a list."""
        plain = asdict(self)
        plain["prefill"]["total_bytes"] = self.prefill.total_bytes
        plain["rows"] = list(plain["rows"])
        return plain


def default_budgets(prompt_len: int) -> tuple[int, ...]:
    """Slots of the default table: 1/2 to 1/16 of the prompt, as far as a budget may be that small."""
    parts = (prompt_len // part for part in DEFAULT_FRACTIONS)
    return tuple(part for part in parts if part >= DEFAULT_SINK + DEFAULT_WINDOW)


def _check_len(name: str, value: int, limit: int, of_what: str) -> None:
    if not 1 <= value <= limit:
        raise ValueError(f"{name} is {value}; it must be from 1 to {limit} ({of_what})")


def make_plan(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    kv_dtype: KVDType = "auto",
    budgets: Sequence[int] = (),
    prompt_len: int | None = None,
    max_model_len: int | None = None,
    chunk_len: ChunkLen = "auto",
    memory_bytes: int,
    bandwidth: int,
    here: Here | None = None,
    snapkv: SnapKVConfig | None = None,
    rescoring: RescoringConfig | None = None,
    draft: DraftMemory | None = None,
) -> Plan:
    """Cost of full rows and of each budget (slots); without budgets, of the default table.

    ``prompt_len`` defaults to the model's window, at most 131,072; ``max_model_len``, the capacity of a full
    row, to ``prompt_len``. ``rescoring`` holds for the rows of budgets; full rows have nothing to choose again.
    """
    snapkv = snapkv or SnapKVConfig()
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    if prompt_len is None:
        prompt_len = min(max_model_len or config.max_position, config.max_position, MAX_PLANNED_LEN)
    _check_len("prompt_len", prompt_len, config.max_position, "the model's window")
    if max_model_len is None:
        max_model_len = prompt_len
    _check_len("max_model_len", max_model_len, config.max_position, "the model's window")
    _check_len("prompt_len", prompt_len, max_model_len, "max_model_len")
    if chunk_len != "auto":
        _check_len("chunk_len", chunk_len, config.max_position, "the model's window")
    size, kv_size = DTYPE_BYTES[dtype], kv_dtype_bytes(dtype, kv_dtype)
    chunking = resolve_chunking(config, dtype=dtype, device="cuda", chunk_len=chunk_len)
    own_chunk_len = job_chunk_len(chunking, prompt_len)
    prefill = prefill_memory(
        config, prompt_len, chunk_len=own_chunk_len, dtype_bytes=size, window_len=snapkv.window_len,
        num_hops=snapkv.num_hops,
    )  # fmt: skip
    weights = num_parameters(config) * size
    step_weights = decode_weight_bytes(config, size)

    def engine(  # memory and bandwidth are a GPU's by default
        capacity: int, rescoring: RescoringConfig | None, device: str = "cuda"
    ) -> EngineMemory:
        own = resolve_chunking(config, dtype=dtype, device=device, chunk_len=chunk_len).chunk_len
        return engine_memory(
            config, capacity, max_model_len, chunk_len=own, dtype=dtype, device=device, kv_dtype=kv_dtype,
            window_len=snapkv.window_len, num_hops=snapkv.num_hops, rescoring=rescoring,
            reserved_bytes=0 if draft is None else draft.total_bytes,
        )  # fmt: skip

    full_bytes = row_bytes(config, max_model_len, kv_size)

    def row_plan(name: str, capacity: int, rescoring: RescoringConfig | None) -> RowPlan:
        of_row = row_bytes(config, capacity, kv_size) + rescoring_bytes(config, rescoring, capacity, size)
        visible = num_visible(prompt_len, capacity)
        read = row_bytes(config, visible, kv_size)
        max_rows = max(0, engine(capacity, rescoring).rows_that_fit(memory_bytes))
        return RowPlan(
            name=name,
            capacity=capacity,
            visible_slots=visible,
            row_bytes=of_row,
            full_fraction=of_row / full_bytes,
            max_rows=max_rows,
            tokens_per_s_one=bandwidth / (step_weights + read),
            tokens_per_s_max=max_rows * bandwidth / (step_weights + max_rows * read),
            rows_here=None if here is None else auto_rows(engine(capacity, rescoring, here.device), here.free_bytes),
        )

    of_full = engine(max_model_len, None)
    rows = [KVBudget.of(capacity, window_len=snapkv.window_len) for capacity in budgets or default_budgets(prompt_len)]
    if rescoring is not None:
        for budget in rows:
            rescoring.check_budget(budget)
    return Plan(
        architecture=config.architecture,
        num_parameters=num_parameters(config),
        dtype=dtype,
        kv_dtype=kv_dtype,
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        chunk_len=own_chunk_len,
        short_chunk_len=chunking.chunk_len,
        here=here,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bandwidth,
        weight_bytes=weights,
        token_bytes=token_bytes(config, kv_size),
        prefill=prefill,
        prefill_pool_bytes=of_full.staging_bytes + of_full.transient_bytes + of_full.query_bytes,
        all_layers_staging_bytes=config.num_layers * prefill.staging_bytes,
        draft=draft,
        rows=(
            row_plan("full", max_model_len, None),
            *(
                row_plan(str(budget.capacity), budget.capacity, rescoring if budget.num_topk else None)
                for budget in rows
            ),
        ),
    )
