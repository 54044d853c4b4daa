"""The costs of a model before it is loaded: bytes per row, rows that fit, prefill memory, byte-bound speed.

Everything follows from the config's integers, so the figures are bounds or predictions, not measurements. No torch.

* a row: ``2 L G C E`` numbers (keys and values), however long the prompt was; in FP8 also ``2 L G`` fp32 scales; with
  KV re-selection also ``L w H E`` numbers (its last queries) and ``L G C`` fp32 scores;
* weights, a prefill of N tokens, rows that fit: as ``memory.py`` counts them, for the engine too. For rows that fit,
  prefill is the pool that the engine allocates once, for ``max_model_len`` and a reserve for short prompts;
* tokens per second at most: ``B bandwidth / (weights read + B visible row bytes)``. A step reads every weight
  once (an untied embedding table is left out: B lines of it; of X experts, ``X (1 - (1 - k / X)^B)`` are read) and
  the visible slots of every row once;
* with several ranks all of it is one rank's, rows and tokens per second are those of all ranks together, and
  ``Predictor`` says how long steps would take.

``Plan.as_dict`` is what ``snapstream plan --json`` prints.

``Predictor`` predicts the times of decode steps and prompts on a group of ranks, with every assumption here. A part of
a step takes the longer of two times: its bytes at ``READ_SHARE`` of the memory's bandwidth, and its products at
``PRODUCT_SHARE`` of what the device does in dense bf16. Parts run one after the other:

* weights: every matrix a rank stores is read once, of its experts those that the step's rows chose
  (``MoEConfig.num_read``: evenly, so no rank waits for one with more work);
* rows: the visible slots of a rank's rows. Latents of a row are read once for all heads, and multiplied with all of
  them: with 128 heads that is bound by products;
* collectives: two per layer, one for the embedding, one for the logits, each the latency of its ``Link`` and the time
  of its bytes. Two links bound what people have;
* ``HOST_S``: the scheduler, the launch of a captured step, sampling.

A prompt passes each layer in chunks: products of a chunk, or reading the layer's weights once more, whichever takes
longer; attention of all pairs; two collectives of a chunk's hidden states. Nothing is overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from snapstream.config import (
    DEFAULT_OBSERVATION,
    DEFAULT_SINK,
    DTYPE_BYTES,
    DType,
    EngineConfig,
    EngineOptions,
    KVBudget,
    KVDType,
    ModelConfig,
    ParallelConfig,
    PrefixStoreConfig,
    WeightFormats,
    make_selector,
)
from snapstream.engine.admission import job_chunk_len
from snapstream.kv.layout import num_visible
from snapstream.kv.spec import State
from snapstream.models.registry import kv_spec_of
from snapstream.models.sharding import (
    active_parameters,
    decode_weight_bytes,
    layer_parameters,
    layers_read_bytes,
    num_parameters,
    rank_config,
    tensor_bytes,
)
from snapstream.plan.fit import FLOP_PER_BYTE, auto_rows, engine_config, resolve_formats
from snapstream.plan.memory import (
    DraftMemory,
    EngineMemory,
    PrefillMemory,
    engine_memory,
    prefill_memory,
    row_sizes,
    split_heads,
)

READ_SHARE = 0.8  # of the memory's bandwidth
PRODUCT_SHARE = 0.6  # of dense products in bf16
HOST_S = 0.6e-3


@dataclass(frozen=True, kw_only=True)
class Link:
    """Interconnect: seconds of a collective of no bytes, and bytes per second that a rank sends."""

    name: str
    latency_s: float
    bytes_per_s: float

    def all_gather_s(self, num_bytes: float, size: int) -> float:
        """Seconds to gather ``num_bytes`` in total: in a ring, every rank forwards all parts but one."""
        return 0.0 if size == 1 else self.latency_s + num_bytes * (size - 1) / size / self.bytes_per_s

    def all_reduce_s(self, num_bytes: float, size: int) -> float:
        """Seconds to reduce ``num_bytes`` on every rank: twice the bytes of a gather."""
        return 0.0 if size == 1 else self.latency_s + 2 * num_bytes * (size - 1) / size / self.bytes_per_s


# Latencies are assumed: 12 us is usual among GPUs on one switch of NVLink; 180 us follows from a report of two nodes at
# batch 1. Bandwidths are those on paper, in one direction: NVLink 4, and one port of 400 Gb/s per GPU.
LINKS = (Link(name="one switch", latency_s=12e-6, bytes_per_s=450e9),
         Link(name="two nodes", latency_s=180e-6, bytes_per_s=50e9))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One decode step, in seconds; of the rank that has most rows."""

    num_rows: int
    weights_s: float
    rows_s: float
    host_s: float
    num_collectives: int
    collectives_s: tuple[float, ...]  # over each of LINKS

    @property
    def seconds(self) -> tuple[float, ...]:
        """The whole step over each of LINKS."""
        return tuple(self.weights_s + self.rows_s + self.host_s + over for over in self.collectives_s)

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of all rows, over each of LINKS."""
        return tuple(self.num_rows / seconds for seconds in self.seconds)


@dataclass(frozen=True, kw_only=True)
class PromptTime:
    """The prefill of one prompt, in seconds."""

    num_tokens: int
    layers_s: float  # matrix products of all tokens, or reading the weights once per chunk
    attention_s: float
    collectives_s: tuple[float, ...]  # over each of LINKS

    @property
    def seconds(self) -> tuple[float, ...]:
        """The whole prompt over each of LINKS."""
        return tuple(self.layers_s + self.attention_s + over for over in self.collectives_s)


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model on ranks of one kind of device."""

    model: ModelConfig  # the whole one
    parallel: ParallelConfig
    formats: WeightFormats | None
    dtype: DType
    kv_dtype: KVDType = "auto"
    bandwidth_bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(
        cls, model: ModelConfig, options: EngineOptions, formats: WeightFormats, bandwidth: float, flop_per_s: float
    ) -> Predictor:
        """Predictor of an engine with these options, on devices of ``bandwidth`` bytes per second."""
        return cls(
            model=model,
            parallel=options.parallel,
            formats=formats,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            bandwidth_bytes_per_s=bandwidth,
            flop_per_s=flop_per_s,
        )

    def step(self, num_rows: int, visible_slots: int, num_tokens: int | None = None) -> StepTime:
        """A step of so many rows, each of which reads ``visible_slots`` in layers without a sliding window;
        ``num_tokens`` were fed to it, by default as many.
        """
        stored, own, size = self._stored, self._own, self.parallel.size
        weights = decode_weight_bytes(stored, self.dtype, self.formats, num_rows)
        is_dp = self.parallel.attention == "dp"
        spec = kv_spec_of(stored if is_dp else own, self.dtype, self.kv_dtype)
        rows = -(-num_rows // size) if is_dp else num_rows
        num_tokens = visible_slots if num_tokens is None else num_tokens
        flop = rows * spec.attention_flop(visible_slots, num_tokens)
        hidden = num_rows * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        logits = num_rows * self.model.vocab_size * DTYPE_BYTES[self.dtype]
        layers = self.model.num_layers
        return StepTime(
            num_rows=num_rows,
            weights_s=self._longer(weights, 2 * num_rows * active_parameters(own)),
            rows_s=self._longer(rows * spec.visible_bytes(visible_slots, num_tokens), flop),
            host_s=HOST_S,
            num_collectives=2 * layers + 2 if size > 1 else 0,
            collectives_s=tuple(
                (layers + 1) * link.all_reduce_s(hidden, size)
                + layers * (link.all_gather_s if is_dp else link.all_reduce_s)(hidden, size)
                + link.all_gather_s(logits, size)
                for link in LINKS
            ),
        )

    def prompt(self, num_tokens: int, chunk_len: int, num_restored: int = 0) -> PromptTime:
        """One prompt alone, in chunks of ``chunk_len`` tokens; attention computes what the engine's does.

        ``num_restored`` tokens at its begin come from the prefix store, and are attended to.
        """
        own, size, layers = self._own, self.parallel.size, self.model.num_layers
        num_new = num_tokens - num_restored
        chunk = min(chunk_len, num_new)
        num_chunks = -(-num_new // chunk)
        weights = layers_read_bytes(own, self.dtype, self.formats, chunk) / layers
        spec = kv_spec_of(own, self.dtype)
        flop = 0.0
        for layer in range(spec.num_prefill_layers):
            if isinstance(spec.layers[layer], State):
                continue
            window = own.layer_windows[layer] or num_tokens
            pairs = _num_pairs(num_tokens, window) - _num_pairs(num_restored, window)
            flop += pairs * (4 * spec.num_heads * spec.expanded_dim or spec.pair_flop(layer))
        hidden = chunk * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        return PromptTime(
            num_tokens=num_tokens,
            layers_s=spec.num_prefill_layers * num_chunks * self._longer(weights, 2 * chunk * layer_parameters(own)),
            attention_s=self._longer(0, flop),
            collectives_s=tuple((2 * layers + 1) * num_chunks * link.all_reduce_s(hidden, size) for link in LINKS),
        )

    @property
    def _stored(self) -> ModelConfig:
        return rank_config(self.model, self.parallel, formats=self.formats)

    @property
    def _own(self) -> ModelConfig:
        """What a rank computes: its heads, with ``attention="dp"`` as much work as these."""
        return rank_config(self.model, split_heads(self.parallel), formats=self.formats)

    def _longer(self, num_bytes: float, flop: float) -> float:
        """Seconds of what is bound by the slower of memory and products."""
        return max(num_bytes / (READ_SHARE * self.bandwidth_bytes_per_s), flop / (PRODUCT_SHARE * self.flop_per_s))


def _num_pairs(num_tokens: int, window: int) -> float:
    """Queries of a prompt and the keys that each sees, at most ``window``, in one layer."""
    seen = min(num_tokens, window)
    return seen * (seen + 1) / 2 + (num_tokens - seen) * seen


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """Sizes in bytes, times in seconds."""

    parallel: ParallelConfig
    tensor_bytes: dict[str, int]  # weights of one rank
    bandwidth_bytes_per_s: float  # of one device
    flop_per_s: float
    steps: dict[str, StepTime]  # by the name of a line of the plan: all rows that fit (where one does), after prompts
    prompt: PromptTime  # alone

    def as_dict(self) -> dict[str, Any]:
        """The fields above under their names, with what follows from them: whole times over each of ``links``."""
        plain = asdict(self)
        plain["links"] = [asdict(link) for link in LINKS]
        plain["prompt"]["seconds"] = self.prompt.seconds
        for name, step in self.steps.items():
            plain["steps"][name] |= {"seconds": step.seconds, "tokens_per_s": step.tokens_per_s}
        return plain


@dataclass(frozen=True, kw_only=True)
class PrefixPlan:
    """A prefix store in host memory; sizes in bytes.

    A hit of N tokens copies ``N b`` bytes over the link between host and device instead of computing them, which takes
    ``N (2 P + 2 H E L N)`` flop (P parameters read per token; causal attention over N keys), at ``F`` flop per second
    predicted from the memory bandwidth. It pays where ``link > b F / (2 P + 2 H E L N)``; on a CPU always.
    """

    store_bytes: int
    num_tokens: int  # that it holds
    num_prompts: int  # of the planned length
    link_bytes_per_s: int
    prompt_bytes: int  # what a hit of the planned prompt copies
    restore_ms: float  # and how long that takes
    compute_ms: float  # what it spares, predicted
    break_even_bytes_per_s: float  # of a link at which both are equal


def prefix_plan(
    model: ModelConfig,
    dtype: DType,
    store: PrefixStoreConfig,
    prompt_len: int,
    *,
    bandwidth: int,
    link: int,
    num_ranks: int = 1,
) -> PrefixPlan:
    """The plan for prompts of ``prompt_len`` tokens on a device of ``bandwidth`` bytes per second.

    ``model``: of one of ``num_ranks``, which share the size of the store. ValueError for a store of less than a block.
    """
    spec = kv_spec_of(model, dtype)
    token_bytes, stored = spec.prefix_token_bytes, num_ranks * spec.stored_token_bytes(store.snapshot_len)
    num_tokens = store.num_blocks(stored) * store.block_len
    prompt_blocks = prompt_len // store.block_len
    token_flop = 2 * model.num_layers * (layer_parameters(model) + model.num_heads * model.head_dim * prompt_len)
    flop_per_s = FLOP_PER_BYTE * READ_SHARE * bandwidth
    num_copied = prompt_blocks * store.block_len
    return PrefixPlan(
        store_bytes=num_tokens * stored,
        num_tokens=num_tokens,
        num_prompts=num_tokens // num_copied if num_copied else 0,
        link_bytes_per_s=link,
        prompt_bytes=num_copied * token_bytes + spec.state_bytes,
        restore_ms=1e3 * (num_copied * token_bytes + spec.state_bytes) / link,
        compute_ms=1e3 * num_copied * token_flop / flop_per_s,
        break_even_bytes_per_s=token_bytes * flop_per_s / token_flop,
    )


MAX_PLANNED_LEN = 131_072  # default prompt length where the model's context is longer
DEFAULT_FRACTIONS = (2, 4, 8, 16)  # budgets of the default table: this part of the prompt


@dataclass(frozen=True, kw_only=True)
class Here:
    """This machine."""

    device: str
    free_bytes: int  # now
    dtype: DType | None = None  # of its engine; None: the plan's


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that is planned for, by default a GPU of 80 GiB."""

    kind: Literal["cpu", "cuda"] = "cuda"
    memory_bytes: int = 80 * 2**30
    bandwidth_bytes_per_s: int = 3_350_000_000_000
    link_bytes_per_s: int = 50_000_000_000  # between it and the host's memory
    flop_per_s: int = 989_000_000_000_000  # dense products in bf16


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One line of the table: a row of ``capacity`` slots."""

    name: str  # "full", or the number of slots
    capacity: int
    visible_slots: int  # slots that a decode step reads right after the prompt
    row_bytes: int  # with what KV re-selection keeps of it
    full_fraction: float  # of the full row's bytes
    max_rows: int  # rows that fit the memory, the padding row already taken off
    tokens_per_s_one: float  # byte bound, one row decoding
    tokens_per_s_max: float  # byte bound, max_rows rows decoding; 0 if none fits
    transfer_bytes: int  # host memory of a KV transfer of the planned prompt's row, on either side
    rows_here: int | None = None  # what --max-rows auto gives on this machine; 0 where not one row fits


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
    here: Here | None
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
        if self.ranks is not None:
            plain["ranks"] = self.ranks.as_dict()
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
        here: Here | None,
        draft: DraftMemory | None,
    ) -> None:
        self.model, self.options, self.gpu, self.here = model, options, gpu, here
        self.prompt_len, self.max_model_len = prompt_len, max_model_len
        self.formats, self.kv_dtype = resolve_formats(model, options, device=gpu.kind)
        self.stored = rank_config(model, options.parallel, formats=self.formats)
        self.own = rank_config(model, split_heads(options.parallel), formats=self.formats)
        row_model = self.stored if options.attention == "dp" else self.own
        self._reserved_bytes = 0 if draft is None else draft.total_bytes
        self.spec = kv_spec_of(row_model, options.dtype, self.kv_dtype).limited(max_model_len)

    def budgets(self, given: Sequence[int]) -> list[KVBudget]:
        """Budgets of all lines of the table but the first."""
        if None not in self.model.layer_windows:
            return []  # sliding windows alone: no budget changes a row
        queries = make_selector(self.options.selector).observation_len
        budgets = [KVBudget.of(slots, observation_len=queries) for slots in given or default_budgets(self.prompt_len)]
        if self.options.reselection is not None:
            for budget in budgets:
                self.options.reselection.check_budget(budget)
        return budgets

    def config(self, budget: KVBudget, here: Here | None = None) -> EngineConfig:
        """Config of an engine with such rows, on the planned device or on this machine."""
        options, device = self.options, self.gpu.kind if here is None else here.device
        if here is not None and here.dtype is not None:
            options = replace(options, dtype=here.dtype)
        config = partial(
            engine_config, self.model, max_model_len=self.max_model_len, device=device,
            reserved_bytes=self._reserved_bytes,
        )  # fmt: skip
        if budget.num_topk:
            return config(options, budget)
        # Full rows have nothing to re-select or to divide among heads, and have the same dtype as the others.
        full = config(replace(options, reselection=None, heads=None), budget)
        return replace(full, kv_dtype=resolve_formats(self.model, options, device=device)[1])

    def memory(self, budget: KVBudget, here: Here | None = None) -> EngineMemory:
        """Memory of that engine."""
        return engine_memory(self.model, self.config(budget, here))

    def row(self, name: str, budget: KVBudget) -> RowPlan:
        """A line of the table."""
        memory, here, heads = self.memory(budget), self.here, self.config(budget).heads
        visible = (
            heads.of(budget, self.prompt_len).mean_visible(self.prompt_len)
            if heads
            else num_visible(self.prompt_len, budget.capacity)
        )
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
            transfer_bytes=row_sizes(self.model, self.config(budget)).row_bytes(self.prompt_len, budget),
            rows_here=None if here is None else auto_rows(self.memory(budget, here), here.free_bytes),
        )

    def ranks(self, rows: Sequence[RowPlan], chunk_len: int) -> RanksPlan | None:
        """What each of several ranks does, and how long their steps would take; None for one."""
        options = self.options
        if options.tensor_parallel == 1:
            return None
        gpu, own = self.gpu, replace(options, kv_dtype=self.kv_dtype)
        predictor = Predictor.of(self.model, own, self.formats, gpu.bandwidth_bytes_per_s, gpu.flop_per_s)
        return RanksPlan(
            parallel=options.parallel,
            tensor_bytes=tensor_bytes(self.stored, options.dtype, self.formats),
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
            flop_per_s=gpu.flop_per_s,
            steps={
                row.name: predictor.step(row.max_rows, row.visible_slots, self.prompt_len)
                for row in rows
                if row.max_rows > 0
            },
            prompt=predictor.prompt(self.prompt_len, chunk_len),
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


def _prefix_plan(model: ModelConfig, options: EngineOptions, prompt_len: int, gpu: Device) -> PrefixPlan | None:
    store = options.prefix_store
    if store == "auto":
        raise ValueError("prefix_store is 'auto'; a plan needs a size, such as 8GiB")
    if not isinstance(store, PrefixStoreConfig):
        return None
    bandwidth, link = gpu.bandwidth_bytes_per_s, gpu.link_bytes_per_s
    store = store.on("cuda")
    return prefix_plan(
        model, options.dtype, store, prompt_len, bandwidth=bandwidth, link=link, num_ranks=options.tensor_parallel
    )


def make_plan(
    model: ModelConfig,
    options: EngineOptions | None = None,
    *,
    budgets: Sequence[int] = (),
    prompt_len: int | None = None,
    gpu: Device | None = None,
    here: Here | None = None,
    draft: DraftMemory | None = None,
) -> Plan:
    """Cost of full rows and of each of ``budgets`` (slots); without budgets, of the default table.

    ``prompt_len`` defaults to the model's context, at most 131,072; ``options.max_model_len``, the capacity of a full
    row, to ``prompt_len``. The options' own budget, rows and device are ignored: the lines are for ``gpu``, one column
    for ``here``. KV re-selection applies to rows with budgets only.
    """
    options, gpu = options or EngineOptions(dtype="bfloat16"), gpu or Device()
    prompt_len, max_model_len = _lengths(model, options, prompt_len)
    if options.tensor_parallel > 1:
        here = None  # the number of devices here is unknown
    planner = _Planner(model, options, prompt_len, max_model_len, gpu, here, draft)
    full = KVBudget.full(max_model_len)
    chunking = planner.config(full).chunking
    chunk_len = job_chunk_len(chunking, prompt_len)
    selector = make_selector(options.selector)
    prefill = prefill_memory(planner.own, prompt_len, chunk_len=chunk_len, dtype=options.dtype, selector=selector)
    of_full = planner.memory(full)
    budgeted = (planner.row(str(budget.capacity), budget) for budget in planner.budgets(budgets))
    rows = (planner.row("full", full), *budgeted)
    return Plan(
        architecture=model.architecture,
        num_parameters=num_parameters(model),
        active_parameters=active_parameters(model),
        dtype=options.dtype,
        weights=planner.formats.describe(),
        kv_dtype=planner.kv_dtype,
        windows=model.describe_windows(),
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        chunk_len=chunk_len,
        short_chunk_len=chunking.chunk_len,
        here=here,
        memory_bytes=gpu.memory_bytes,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        weight_bytes=of_full.weight_bytes,
        dequantized_bytes=of_full.dequantized_bytes,
        token_bytes=planner.spec.token_bytes(),
        prefill=prefill,
        prefill_pool_bytes=of_full.staging_bytes + of_full.transient_bytes + of_full.query_bytes,
        all_layers_staging_bytes=model.num_layers * (prefill.staging_bytes - prefill.expanded_bytes),
        draft=draft,
        prefix=_prefix_plan(planner.own, options, prompt_len, gpu),
        rows=rows,
        ranks=planner.ranks(rows, chunk_len),
    )
