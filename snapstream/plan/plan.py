"""The costs of a model before it is loaded: bytes per row, rows that fit, prefill memory, byte-bound speed.

Everything follows from the config's integers, so the figures are bounds, not measurements. No torch.

* a row: ``2 L G C E`` numbers (keys and values), however long the prompt was; in FP8 also ``2 L G`` fp32 scales;
* weights, a prefill of N tokens, rows that fit: as ``memory.py`` counts them, for the engine too. For rows that fit,
  prefill is the pool that the engine allocates once, for ``max_model_len`` and a reserve for short prompts;
* tokens per second at most: ``B bandwidth / (weights read + B visible row bytes)``. A step reads every weight
  once (an untied embedding table is left out: B lines of it; of X experts, ``X (1 - (1 - k / X)^B)`` are read) and
  the visible slots of every row once;
* with several ranks all of it is one rank's; rows and tokens per second are those of all ranks together.

``Plan.as_dict`` is what ``snapstream plan --json`` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from snapstream.config import (
    DEFAULT_OBSERVATION,
    DEFAULT_SINK,
    EngineConfig,
    EngineOptions,
    KVBudget,
    KVDType,
    ModelConfig,
    ParallelConfig,
    PrefixStoreConfig,
    make_selector,
)
from snapstream.engine.admission import job_chunk_len
from snapstream.kv.layout import num_visible
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import (
    active_parameters,
    decode_weight_bytes,
    num_parameters,
    rank_config,
    tensor_bytes,
)
from snapstream.plan.fit import engine_config, resolve_formats
from snapstream.plan.memory import (
    DraftMemory,
    PrefillMemory,
    engine_memory,
    prefill_memory,
    row_sizes,
    split_heads,
)


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """How an engine is spread over ranks."""

    parallel: ParallelConfig
    tensor_bytes: dict[str, int]  # weights of one rank


@dataclass(frozen=True, kw_only=True)
class PrefixPlan:
    """What a prefix store in host memory holds; sizes in bytes."""

    store_bytes: int
    num_tokens: int
    num_prompts: int  # of the planned length
    prompt_bytes: int  # what a hit of the planned prompt copies


def prefix_plan(model: ModelConfig, options: EngineOptions, prompt_len: int, device: str) -> PrefixPlan | None:
    """The plan for prompts of ``prompt_len`` tokens; None without a store.

    ``model``: of one rank; all of them share the size of the store. ValueError for a store of less than a block.
    """
    if options.prefix_store == "auto":
        raise ValueError("prefix_store is 'auto'; a plan needs a size, such as 8GiB")
    if not isinstance(options.prefix_store, PrefixStoreConfig):
        return None
    store, spec = options.prefix_store.on(device), kv_spec_of(model, options.dtype)
    stored = options.tensor_parallel * spec.stored_token_bytes(store.snapshot_len)
    num_tokens = store.num_blocks(stored) * store.block_len
    num_copied = prompt_len // store.block_len * store.block_len
    return PrefixPlan(
        store_bytes=num_tokens * stored,
        num_tokens=num_tokens,
        num_prompts=num_tokens // num_copied if num_copied else 0,
        prompt_bytes=num_copied * spec.prefix_token_bytes + spec.state_bytes,
    )


MAX_PLANNED_LEN = 131_072  # default prompt length where the model's context is longer
DEFAULT_FRACTIONS = (2, 4, 8, 16)  # budgets of the default table: this part of the prompt


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that is planned for, by default a GPU of 80 GiB."""

    kind: Literal["cpu", "cuda"] = "cuda"
    memory_bytes: int = 80 * 2**30
    bandwidth_bytes_per_s: int = 3_350_000_000_000


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One line of the table: a row of ``capacity`` slots."""

    name: str  # "full", or the number of slots
    capacity: int
    visible_slots: int  # slots that a decode step reads right after the prompt
    row_bytes: int
    full_fraction: float  # of the full row's bytes
    max_rows: int  # rows that fit the memory, the padding row already taken off
    tokens_per_s_one: float  # byte bound, one row decoding
    tokens_per_s_max: float  # byte bound, max_rows rows decoding; 0 if none fits
    transfer_bytes: int  # host memory of a KV transfer of the planned prompt's row, on either side


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes in bytes, lengths in tokens."""

    architecture: str
    num_parameters: int
    active_parameters: int  # with which a token is multiplied
    dtype: str
    weights: str  # format of the matrices in the GPU's memory
    kv_dtype: KVDType  # of rows; "auto" is dtype
    windows: str  # which layers have sliding windows, in a line; empty without
    prompt_len: int
    max_model_len: int
    chunk_len: int  # of a prompt of prompt_len
    short_chunk_len: int  # of a short prompt
    memory_bytes: int
    bandwidth_bytes_per_s: int
    weight_bytes: int
    dequantized_bytes: int  # of one layer, in prefill
    token_bytes: int  # K and V of one token, all layers
    prefill: PrefillMemory  # one prompt of prompt_len
    prefill_pool_bytes: int  # what the engine sets aside: the same for max_model_len + EngineConfig.short_reserve
    all_layers_staging_bytes: int  # what chunk-major prefill of this prompt would stage
    draft: DraftMemory | None
    prefix: PrefixPlan | None  # of hits of prompt_len tokens
    rows: tuple[RowPlan, ...]
    ranks: RanksPlan | None = None  # with several

    def as_dict(self) -> dict[str, Any]:
        """The fields above under their names; ``prefill`` also has ``total_bytes``, ``rows`` is a list."""
        plain = asdict(self)
        plain["prefill"]["total_bytes"] = self.prefill.total_bytes
        plain["rows"] = list(plain["rows"])
        return plain


def default_budgets(prompt_len: int) -> tuple[int, ...]:
    """Slots of the default table: 1/2 to 1/16 of the prompt, where a budget may be that small."""
    parts = (prompt_len // part for part in DEFAULT_FRACTIONS)
    return tuple(part for part in parts if part >= DEFAULT_SINK + DEFAULT_OBSERVATION)


def _check_len(name: str, value: int, limit: int, of_what: str) -> None:
    if not 1 <= value <= limit:
        raise ValueError(f"{name} is {value}; it must be from 1 to {limit} ({of_what})")


class _Planner:
    """What the lines of a plan share: a model, options, the lengths of a prompt and of a full row."""

    def __init__(
        self,
        model: ModelConfig,
        options: EngineOptions,
        prompt_len: int,
        max_model_len: int,
        gpu: Device,
        draft: DraftMemory | None,
    ) -> None:
        self.model, self.options, self.gpu = model, options, gpu
        self.prompt_len, self.max_model_len = prompt_len, max_model_len
        self.formats, self.kv_dtype = resolve_formats(model, options, device=gpu.kind)
        self.stored = rank_config(model, options.parallel, formats=self.formats)
        self.own = rank_config(model, split_heads(options.parallel), formats=self.formats)
        row_model = self.stored if options.parallel.dp_size > 1 else self.own
        self._reserved_bytes = 0 if draft is None else draft.total_bytes
        self.spec = kv_spec_of(row_model, options.dtype, self.kv_dtype).limited(max_model_len)

    def budgets(self, given: Sequence[int]) -> list[KVBudget]:
        """Budgets of all lines of the table but the first."""
        if not self.model.full_layers:
            return []  # sliding windows alone: no budget changes a row
        queries = make_selector(self.options.selector).observation_len
        return [KVBudget.of(slots, observation_len=queries) for slots in given or default_budgets(self.prompt_len)]

    def config(self, budget: KVBudget) -> EngineConfig:
        """Config of an engine with such rows."""
        options, device = self.options, self.gpu.kind
        config = partial(
            engine_config, self.model, max_model_len=self.max_model_len, device=device,
            reserved_bytes=self._reserved_bytes,
        )  # fmt: skip
        if budget.num_topk:
            return config(options, budget)
        return config(replace(options, heads=None), budget)  # full rows have nothing to divide among heads

    def row(self, name: str, budget: KVBudget) -> RowPlan:
        config = self.config(budget)
        memory, visible = engine_memory(self.model, config), num_visible(self.prompt_len, budget.capacity)
        if config.heads is not None:
            visible = config.heads.of(budget, self.prompt_len).mean_visible(self.prompt_len)
        read = self.spec.visible_bytes(visible, self.prompt_len)
        max_rows, bandwidth = max(0, memory.rows_that_fit(self.gpu.memory_bytes)), self.gpu.bandwidth_bytes_per_s
        one, all_rows = (
            decode_weight_bytes(self.stored, self.options.dtype, self.formats, rows) for rows in (1, max_rows)
        )
        rank_rows = -(-max_rows // memory.dp_size)
        return RowPlan(
            name=name,
            capacity=budget.capacity,
            visible_slots=visible,
            row_bytes=memory.row_bytes,
            full_fraction=memory.row_bytes / self.spec.row_bytes(self.max_model_len),
            max_rows=max_rows,
            tokens_per_s_one=bandwidth / (one + read),
            tokens_per_s_max=max_rows * bandwidth / (all_rows + rank_rows * read),
            transfer_bytes=row_sizes(self.model, config).row_bytes(self.prompt_len, budget),
        )


def _lengths(model: ModelConfig, options: EngineOptions, prompt_len: int | None) -> tuple[int, int]:
    """Lengths of the prompt and of a full row."""
    limit, max_model_len = model.max_position, options.max_model_len
    if prompt_len is None:
        prompt_len = min(max_model_len or limit, limit, MAX_PLANNED_LEN)
    _check_len("prompt_len", prompt_len, limit, "the model's context")
    if max_model_len is None:
        max_model_len = prompt_len
    _check_len("max_model_len", max_model_len, limit, "the model's context")
    _check_len("prompt_len", prompt_len, max_model_len, "max_model_len")
    if options.chunk_len != "auto":
        _check_len("chunk_len", options.chunk_len, limit, "the model's context")
    return prompt_len, max_model_len


def make_plan(
    model: ModelConfig,
    options: EngineOptions | None = None,
    *,
    budgets: Sequence[int] = (),
    prompt_len: int | None = None,
    gpu: Device | None = None,
    draft: DraftMemory | None = None,
) -> Plan:
    """Cost of full rows and of each of ``budgets`` (slots); without budgets, of the default table.

    ``prompt_len`` defaults to the model's context, at most 131,072; ``options.max_model_len``, the capacity of a full
    row, to ``prompt_len``. The options' own budget, rows and device are ignored: the lines are for ``gpu``.
    """
    options, gpu = options or EngineOptions(dtype="bfloat16"), gpu or Device()
    prompt_len, max_model_len = _lengths(model, options, prompt_len)
    planner = _Planner(model, options, prompt_len, max_model_len, gpu, draft)
    full = KVBudget.full(max_model_len)
    full_config = planner.config(full)
    chunking = full_config.chunking
    chunk_len = job_chunk_len(chunking, prompt_len)
    selector = make_selector(options.selector)
    prefill = prefill_memory(planner.own, prompt_len, chunk_len=chunk_len, dtype=options.dtype, selector=selector)
    of_full = engine_memory(model, full_config)
    budgeted = (planner.row(str(budget.capacity), budget) for budget in planner.budgets(budgets))
    rows = (planner.row("full", full), *budgeted)
    ranks = None
    if options.tensor_parallel > 1:
        sizes = tensor_bytes(planner.stored, options.dtype, planner.formats)
        ranks = RanksPlan(parallel=options.parallel, tensor_bytes=sizes)
    return Plan(
        architecture=model.architecture,
        num_parameters=num_parameters(model),
        active_parameters=active_parameters(model),
        dtype=options.dtype,
        weights=planner.formats.describe(),
        kv_dtype=planner.kv_dtype,
        windows=kv_spec_of(model, options.dtype).describe(),
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        chunk_len=chunk_len,
        short_chunk_len=chunking.chunk_len,
        memory_bytes=gpu.memory_bytes,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        weight_bytes=of_full.weight_bytes,
        dequantized_bytes=of_full.dequantized_bytes,
        token_bytes=planner.spec.token_bytes(),
        prefill=prefill,
        prefill_pool_bytes=of_full.staging_bytes + of_full.transient_bytes + of_full.query_bytes,
        all_layers_staging_bytes=model.num_layers * (prefill.staging_bytes - prefill.expanded_bytes),
        draft=draft,
        prefix=prefix_plan(planner.own, options, prompt_len, gpu.kind),
        rows=rows,
        ranks=ranks,
    )
