"""The config of an engine that follows from options, a device and a budget, and how many of its rows fit.

``startup/resolve.py`` builds an engine by this and ``plan.py`` plans one: one formula for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from snapstream.config import (
    AutoCount,
    Chunking,
    DType,
    EngineConfig,
    EngineOptions,
    KVBudget,
    KVDType,
    ModelConfig,
    PrefixStoreConfig,
    Settings,
    StoredWeights,
    WeightFormat,
    WeightFormats,
    as_count,
    make_selector,
    row_formats,
)
from snapstream.config.engine import SPECULATIVE_TOKENS, Adapter, Speculator
from snapstream.config.kv import HEADS_SELECTOR, HeadProfile, HeadSlots
from snapstream.exec.executors import (
    FALLBACK,
    alternatives,
    executor_of,
    preferred_executor,
    why_not_rounded_inputs,
    why_not_speculative,
)
from snapstream.models.hub import local_folder
from snapstream.models.registry import kv_spec_of, prediction_config, read_model_config
from snapstream.models.sharding import check_groups, decode_weight_bytes, layer_parameters, rank_config
from snapstream.plan.memory import (
    chunk_bytes,
    engine_memory,
    speculator_config,
    split_heads,
    store_token_bytes,
)

CPU_CHUNK_LEN = 512
LEAST_CHUNK_LEN, MOST_CHUNK_LEN = 512, 4096  # at most what is reserved for short prompts
MOST_TRANSIENT_BYTES = 256 * 2**20
FLOP_PER_BYTE = 140  # 55 % of 989 TFLOP/s of products over 80 % of 4.8 TB/s of reads
STEP_SHARE = 0.8
_DRAFT_TABLES = WeightFormats.of("int4").layers  # of a prediction layer: its output embedding


def resolve_chunking(
    model: ModelConfig,
    *,
    dtype: str,
    device: str,
    chunk_len: AutoCount = "auto",
    prefill_quantum: int = 0,
    formats: WeightFormats | None = None,
) -> Chunking:
    """How prefill is cut: tokens of a unit, and how much prefill a step with decode may hold.

    A number given as ``chunk_len`` holds for every prompt, as ``prefill_quantum`` for every step; ValueError for
    anything else. On a CPU a unit is 512 tokens and a step holds as many units as the model has layers. On a GPU both
    follow from the model. The work of a unit is counted in query-key pairs, ``T (A + N)``: T tokens attend to N keys,
    and their GEMMs weigh as ``A = P / (2 H E)`` keys (P parameters of a layer; a pair costs ``4 H E`` flop, a token
    ``2 P``).

    * ``chunk_len``: the largest power of two, from 512 to 4096, whose temporaries stay within ``MOST_TRANSIENT_BYTES``:
      enough for GEMMs to be bound by arithmetic (T flop per byte of weights, where a GPU has about 150).
    * ``step_work``: the work that takes ``STEP_SHARE`` of the time in which a decode step reads the weights, so that a
      step with prefill lasts less than two without. ``FLOP_PER_BYTE`` turns one into the other.
    * Prompts so long that one such unit would exceed ``step_work`` are cut shorter (``engine/admission.py``), down to
      ``LEAST_CHUNK_LEN``.

    The constants are those of an H200 and predictions; ``docs/research/gpu.md`` has the arithmetic for an 8B model.
    """
    if chunk_len != "auto":
        as_count("chunk_len", chunk_len, 1)
    if not device.startswith("cuda"):
        size = CPU_CHUNK_LEN if chunk_len == "auto" else chunk_len
        return Chunking(chunk_len=size, short_len=size, prefill_quantum=prefill_quantum)
    head_dim = model.widest_head if model.latent is None else model.latent.expanded_dim
    pair_flop = 4 * model.most_heads * head_dim
    size = _largest_chunk(model, dtype) if chunk_len == "auto" else chunk_len
    step_work = int(STEP_SHARE * FLOP_PER_BYTE * decode_weight_bytes(model, dtype, formats) / pair_flop)
    return Chunking(
        chunk_len=size,
        short_len=size,
        prefill_quantum=prefill_quantum,
        step_work=0 if prefill_quantum else step_work,
        token_keys=2 * layer_parameters(model) // pair_flop,
        least_chunk_len=LEAST_CHUNK_LEN if chunk_len == "auto" else 0,
    )


def _largest_chunk(model: ModelConfig, dtype: str) -> int:
    size = MOST_CHUNK_LEN
    while size > LEAST_CHUNK_LEN and chunk_bytes(model, size, dtype) > MOST_TRANSIENT_BYTES:
        size //= 2
    return size


def weight_formats(model: ModelConfig, options: EngineOptions, *, device: str) -> WeightFormats:
    """Formats of the matrices in memory; ValueError for those that the model or the dtype cannot have.

    ``auto`` keeps what the checkpoint stores where a CPU computes in fp32: 16-bit floats convert exactly, and a step
    reads half the bytes, and quantized matrices of a GGUF file keep their integers, each in its own format. Types of
    GGUF files that no format here holds, of at most six bits, become int8: what that rounds is little compared with
    what they have lost, and floats would take two to four times the memory of the file.
    Otherwise it is the dtype of the computation.
    """
    formats = _matrices(model, options, device)
    if options.activations == "dtype":
        return formats
    problem = why_not_rounded_inputs(model, formats, dtype=options.dtype, device=device)
    if problem is None:
        return formats.rounding_inputs()
    if options.activations == "int8":
        raise ValueError(f"activations is 'int8': {problem}; use 'dtype'")
    return formats


def _matrices(model: ModelConfig, options: EngineOptions, device: str) -> WeightFormats:
    stored, wanted, dtype = model.stored, options.weights, options.dtype
    is_cpu = not device.startswith("cuda")
    keeps_stored = dtype == "float32" and is_cpu
    formats = WeightFormats.of(((stored.dtype if keeps_stored else None) or dtype) if wanted == "auto" else wanted)
    if wanted == "auto" and keeps_stored and _is_quantized_again(model):
        formats = WeightFormats.of("int8")
    quantized, tables = stored.quantized, formats.tables
    if wanted == "auto" and stored.tables is not None and (quantized is not None or keeps_stored):
        tables = stored.tables
    if quantized is not None:
        formats = _quantized_formats(quantized, stored, wanted, formats.layers)
    own = tuple(form for form, _ in stored.own) if wanted == "auto" and keeps_stored else ()
    formats = replace(formats, tables=tables, own=own)
    if formats.layers.is_quantized or formats.tables.is_quantized or own:
        check_groups(model, formats)
    if not formats.layers.is_quantized and formats.layers.dtype != dtype and dtype != "float32":
        raise ValueError(f"weights is {wanted!r} and dtype {dtype!r}; weights must be {dtype}, int8, int4 or auto")
    return formats


def _is_quantized_again(model: ModelConfig) -> bool:
    """Whether a checkpoint has quantized layers that no format here holds, and int8 groups fit its matrices."""
    stored = model.stored
    no_own_format = set(stored.dequantized) - set(stored.in_own)
    if not no_own_format or stored.quantized is not None or stored.packing is not None:
        return False
    try:
        check_groups(model, WeightFormats.of("int8"))
    except ValueError:
        return False
    return True


def _quantized_formats(
    quantized: WeightFormat, stored: StoredWeights, wanted: str, other: WeightFormat
) -> WeightFormats:
    """Layers as a quantized checkpoint has them; ``other``: of attention in floats, which MXFP4 experts allow."""
    if wanted not in ("auto", quantized.dtype):
        known = "'auto'" if quantized.is_fp8 or quantized.is_mxfp4 else f"'auto' or {quantized.dtype!r}"
        raise ValueError(f"weights is {wanted!r}; the checkpoint has {stored.describe_quantized()}: use {known}")
    attention = stored.attention or (other if quantized.is_mxfp4 else None)
    return WeightFormats(layers=quantized, attention=attention, tables=other)


MAX_AUTO_ROWS = 256  # more rows only on request


def engine_config(
    model: ModelConfig,
    options: EngineOptions,
    budget: KVBudget,
    max_model_len: int,
    *,
    device: str,
    max_rows: int = 1,
    reserved_bytes: int = 0,
    executor_problems: Mapping[str, str] | None = None,
) -> EngineConfig:
    """All that follows from the options once budget and max_model_len are known. ValueError where they contradict.

    ``executor_problems``: see ``Machine``.

    A prefix store that is "auto" is none here: ``startup/resolve.py`` sizes it.
    """
    heads = None
    if isinstance(options.heads, HeadProfile):
        heads = head_slots(model, options.heads, budget, max_model_len)
    store = options.prefix_store.on(device) if isinstance(options.prefix_store, PrefixStoreConfig) else None
    kept = {setting.name: getattr(options, setting.name) for setting in fields(Settings)}
    executor = options.executor or preferred_executor(device)
    formats, kept["kv_dtype"] = resolve_formats(model, options, device=device)
    chunking = resolve_chunking(
        rank_config(model, split_heads(options.parallel), formats=formats),
        dtype=options.dtype,
        device=device,
        chunk_len=options.chunk_len,
        prefill_quantum=options.prefill_quantum,
        formats=formats,
    )
    num_blocks = num_snapshots = 0
    if store is not None:
        num_blocks = store.num_blocks(store_token_bytes(model, options.parallel, options.dtype, store.snapshot_len))
        num_snapshots = store.num_snapshots(num_blocks) if model.recurrent_layers else 0
    config = EngineConfig(
        budget=budget,
        heads=heads,
        max_model_len=max_model_len,
        selector=make_selector(options.selector or (HEADS_SELECTOR if heads else None)),
        max_rows=max_rows,
        chunking=chunking,
        device=device,
        executor=executor,
        weights=formats,
        reserved_bytes=reserved_bytes,
        prefix_store=store,
        prefix_dir="" if store is None else options.prefix_dir or "",
        prefix_disk=cast(int, options.prefix_disk),
        prefix_blocks=num_blocks,
        prefix_snapshots=num_snapshots,
        loras=_adapters(options),
        parallel=options.parallel,
        # A rotation that depends on the whole length gives keys beyond the original context to one prompt alone.
        prefix_max_len=model.rope.original_max_position if model.rope.depends_on_length else 0,
        prefix_row_len=0 if store is None else _exact_row_len(model, kept["kv_dtype"], options, max_model_len),
        **kept,
    )
    if store is not None and (no_store := why_no_store(model, device)) is not None:
        raise ValueError(f"a prefix_store is set, and {no_store}")
    problems = executor_problems or {}
    problem = executor_of(executor).problem(model, config) or problems.get(executor)
    if problem is None:
        return _with_drafts(model, config, options, problems)
    if options.executor is None:
        return _with_drafts(model, replace(config, executor=FALLBACK), options, problems)
    raise ValueError(f"executor {executor!r}: {problem}; use {alternatives(executor, device)}")


def _adapters(options: EngineOptions) -> tuple[Adapter, ...]:
    """Those of options from ``with_loras``. ValueError for several ranks."""
    if options.loras and options.tensor_parallel > 1:
        raise ValueError(f"loras: {len(options.loras)} adapters are given, and tensor_parallel is "
            f"{options.tensor_parallel}; adapters are served by one rank")  # fmt: skip
    assert all(isinstance(own, Adapter) for own in options.loras), "options come from with_loras"
    return options.loras


def why_no_store(model: ModelConfig, device: str) -> str | None:
    """Why an engine of this model has no prefix store on a device; None where it can have one."""
    if not device.startswith("cuda") or not (model.recurrent_layers or model.has_uneven_layers):
        return None
    layers = "recurrent layers" if model.recurrent_layers else "layers that differ in their heads"
    return f"{model.architecture} has {layers}, which a prefix store does not support on a GPU"


def _exact_row_len(model: ModelConfig, kv_dtype: str, options: EngineOptions, max_model_len: int) -> int:
    """``EngineConfig.prefix_row_len``."""
    if model.recurrent_layers or options.parallel.dp_size > 1 or kv_dtype != "auto":
        return 0
    windows = [window for window in model.windows or () if window is not None]
    return min([max_model_len, *windows])


def with_speculator(
    options: EngineOptions, target: tuple[Path, ModelConfig] | None = None, *, config_only: bool = False
) -> EngineOptions:
    """The options with the config of their draft model, if they name one; ``target``: the model, which may have it.
    ValueError where it cannot be read.
    """
    if options.speculative_model is None or isinstance(options.speculative_model, Speculator):
        return options
    if options.speculative_model == Speculator.OWN and target is not None:
        try:
            own = prediction_config(*target)
        except ValueError as error:
            raise ValueError(f"speculative_model is {Speculator.OWN!r}: {error}") from error
        return replace(options, speculative_model=Speculator(folder=str(target[0]), model=own))
    folder = local_folder(options.speculative_model, config_only=config_only)
    return replace(options, speculative_model=Speculator(folder=str(folder), model=read_model_config(folder)))


def _speculator(
    own: Speculator, config: EngineConfig, options: EngineOptions, problems: Mapping[str, str]
) -> Speculator:
    """The draft model with its executor: on a GPU that of the engine, on a CPU the preferred one, where it supports the
    model; ValueError for a model that drafts nothing.
    """
    if own.model.recurrent_layers:
        raise ValueError(f"{own.model.architecture} has recurrent layers; such a model takes drafts, and drafts none")
    if own.is_own and (config.executor != "looped" or config.parallel.size > 1):
        raise ValueError(
            "a prediction layer drafts on one rank with executor 'looped'; there are "
            f"{config.parallel.size} with {config.executor!r}"
        )
    is_gpu, preferred = config.device.startswith("cuda"), preferred_executor(config.device)
    first: tuple[str, DType] = (config.executor, config.dtype) if is_gpu else (preferred, "float32")
    for executor, dtype in (first, (FALLBACK, config.dtype)):
        formats = weight_formats(own.model, replace(options, dtype=dtype), device=config.device)
        if own.is_own and own.model.hidden_size % _DRAFT_TABLES.group == 0:
            formats = replace(formats, tables=_DRAFT_TABLES)
        own = replace(own, executor=executor, device=config.device, dtype=dtype, formats=formats)
        steps = speculator_config(own, config.max_rows)
        if executor_of(executor).why_not(own.model, steps) is None and executor not in problems:
            break
    if (reason := why_not_speculative(own.model, steps)) is not None:
        raise ValueError(reason)
    return own


def _with_drafts(
    model: ModelConfig, config: EngineConfig, options: EngineOptions, problems: Mapping[str, str]
) -> EngineConfig:
    """With as many drafted tokens as the user or the default wants; ValueError where the engine cannot verify any."""
    speculator = options.speculative_model
    wanted, problem = options.num_speculative_tokens, why_not_speculative(model, config)
    if isinstance(speculator, Speculator):
        try:
            if problem is not None:
                raise ValueError(problem)
            speculator = _speculator(speculator, config, options, problems)
        except ValueError as error:
            name = Speculator.OWN if speculator.is_own else speculator.folder
            raise ValueError(f"speculative_model is {name!r}: {error}") from error
    if wanted == "auto":
        # By itself where it was measured; and products of wider steps round differently in other executors.
        is_on = problem is None and (config.executor == "looped" or speculator is not None)
        wanted = SPECULATIVE_TOKENS if is_on else 0
    elif wanted and problem is not None:
        raise ValueError(f"num_speculative_tokens is {wanted}: {problem}; leave it out")
    assert not isinstance(speculator, str), "options come from with_speculator"
    return replace(config, num_speculative_tokens=wanted, speculator=speculator)


def why_no_heads(model: ModelConfig) -> str | None:
    """Why the kv heads of a model cannot have budgets of their own; None where they can."""
    spec = kv_spec_of(model, "float32")
    if model.has_uneven_layers:
        return f"per-head KV budgets are not supported for {model.architecture}, whose layers differ in their heads"
    if not spec.budget_layers:
        layers = f"all {spec.num_layers} layers of {model.architecture}"
        return f"{layers} have sliding windows, to which no budget applies; it needs no profile"
    if spec.values_are_keys:
        return "this model keeps latents, one for all heads of a layer; it needs no profile"
    return None


def head_slots(model: ModelConfig, profile: HeadProfile, budget: KVBudget, max_model_len: int) -> HeadSlots:
    """The slots of the model's kv heads; ValueError for a profile of other heads, or a budget without top-k slots."""
    if (problem := why_no_heads(model)) is not None:
        raise ValueError(f"heads: {problem}")
    spec = kv_spec_of(model, "float32")
    shape, own = (len(profile.shares), len(profile.shares[0])), (len(spec.budget_layers), spec.num_kv_heads)
    if shape != own:
        raise ValueError(
            f"heads: the profile has {shape[0]} layers of {shape[1]} kv heads; this model has {own[0]} of {own[1]} to "
            "which a budget applies"
        )
    return profile.slots(budget, max_model_len).spread(spec.budget_layers, spec.num_layers)


def resolve_formats(model: ModelConfig, options: EngineOptions, *, device: str) -> tuple[WeightFormats, KVDType]:
    """Formats of weights and rows; rows are ``"auto"`` in the compute dtype. ValueError where they conflict.

    Keys and values are products of weights: where a CPU has these in less than fp32, rows are bf16. The evals found no
    accuracy that this costs (docs/research/accuracy.md).
    """
    _check_rows(model, options, device)
    formats = weight_formats(model, options, device=device)
    if options.kv_dtype != "auto":
        return formats, "auto" if options.kv_dtype == options.dtype else options.kv_dtype
    narrow = bool(formats.own) or (formats.attention or formats.layers).dtype != "float32"
    follows = device == "cpu" and options.dtype == "float32" and narrow
    executor = executor_of(options.executor or preferred_executor(device))
    reads = executor.reads_row_formats and model.latent is None
    return formats, "bfloat16" if follows and reads else "auto"


def _check_rows(model: ModelConfig, options: EngineOptions, device: str) -> None:
    """ValueError for rows that the model or the device cannot have."""
    wanted = options.kv_dtype
    if wanted == "float32" and options.dtype != "float32":
        raise ValueError(f"kv_dtype is {wanted!r} and dtype {options.dtype!r}; such rows need dtype 'float32'")
    formats = row_formats(options.dtype, wanted)
    is_cpu_only = wanted != "auto" and any(form.cpu_only for form in formats)
    is_integer = any(form.is_integer for form in formats)
    if model.latent is not None and (is_cpu_only or is_integer):
        raise ValueError(f"kv_dtype is {wanted!r}, and this model keeps latents, which rows hold as 'auto' or 'fp8'")
    is_wide_cpu = device == "cpu" and options.dtype == "float32"
    if not is_wide_cpu and (is_cpu_only or (is_integer and device == "cpu")):
        raise ValueError(
            f"kv_dtype is {wanted!r}, device {device!r} and dtype {options.dtype!r}; such rows are for a CPU that "
            f"computes in float32{' or a GPU' if is_integer else ''}: use 'fp8' or 'auto'"
        )
    group = max(form.group for form in formats)
    uneven = next((own.head_dim for own in model.all_heads if own.head_dim % group), None)
    if model.latent is None and uneven:
        raise ValueError(
            f"kv_dtype is {wanted!r}, and the heads of this model have {uneven} numbers; such rows need a "
            f"multiple of {group}: use 'int8'"
        )


def num_rows(model: ModelConfig, config: EngineConfig, wanted: AutoCount, free_bytes: int) -> int:
    """Rows that were asked for, or with ``"auto"`` those that fit with all else of ``config``; at least one."""
    if wanted != "auto":
        return wanted
    return max(min(engine_memory(model, config).rows_that_fit(free_bytes), MAX_AUTO_ROWS), 1)
