"""What an engine prints at its start: choices that were made for its user, and the flags that change them."""

from __future__ import annotations

from snapstream.config import EngineConfig, EngineOptions, ModelConfig, WeightFormats
from snapstream.config.values import format_bytes
from snapstream.exec.executors import FALLBACK, executor_of, preferred_executor
from snapstream.models.registry import kv_spec_of
from snapstream.plan.fit import why_no_store
from snapstream.plan.memory import adapter_bytes, engine_memory, prefix_store_bytes, speculator_memory
from snapstream.startup.build import threads_of_rank
from snapstream.startup.measure import describe_prefill


def start_notes(model: ModelConfig, options: EngineOptions, config: EngineConfig) -> tuple[str, ...]:
    """At most six lines: ranks, executor, how weights are read, rows, prefill, and what helps decode; those that have
    something to say. ValueError for a prefill kernel that cannot serve here.
    """
    executor, rows = describe_engine(model, config)
    lines = (
        (describe_ranks(config),),
        (executor, describe_decode(model, options, config)),
        (describe_dequantized(model, config), describe_inputs(config)),
        (rows, describe_budget(options, config), kv_spec_of(model, config.dtype).describe()),
        (
            f"{describe_prefill(model, config)} (--prefill-attention)",
            describe_indexer(model, config),
        ),
        (describe_speculator(config), describe_store(model, options, config), describe_adapters(config)),
    )
    joined = ("; ".join(part for part in line if part) for line in lines)
    return tuple(line for line in joined if line)


def describe_engine(model: ModelConfig, config: EngineConfig) -> tuple[str, str]:
    """Executor, weights and rows, with their bytes on a rank and the flags that change them."""
    memory = engine_memory(model, config)
    weights = config.dtype if config.weights is None else config.weights.describe()
    kv_dtype = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    rows = f"{config.max_rows} row{'s' * (config.max_rows > 1)} of {config.budget.capacity:,} slots"
    return (
        f"executor: {config.executor}; weights: {weights}, {format_bytes(memory.weight_bytes)} (--executor, --weights)",
        f"rows: {rows}, {format_bytes(memory.row_bytes)} each, KV dtype {kv_dtype}; requests of at most "
        f"{config.max_model_len:,} tokens (--max-rows, --budget, --kv-dtype, --max-model-len)",
    )


def describe_dequantized(model: ModelConfig, config: EngineConfig) -> str:
    """Which quantized formats of a checkpoint are not kept as they are stored."""
    formats = config.weights or WeightFormats.of(config.dtype)
    types, stored, own = model.stored.dequantized_in(formats), model.stored.quantized, formats.layers.describe()
    if not types:
        return ""
    is_kept = stored is not None and stored.describe() == own
    kept = "the other matrices are as stored" if is_kept else f"layers are kept in {own}"
    return f"weights: {', '.join(types)} are dequantized as they are read; {kept} (--weights)"


def describe_budget(options: EngineOptions, config: EngineConfig) -> str:
    """Whether a row is smaller than the requested budget, because no sequence is longer."""
    given, most = options.budget, config.budget.capacity
    if not isinstance(given, int) or given in (EngineOptions.budget, most) or given < config.max_model_len:
        return ""
    return f"budget: {given:,} slots were requested; a row has {most:,}, because no sequence is longer (max_model_len)"


def describe_ranks(config: EngineConfig) -> str:
    """How many ranks there are and what each has; nothing for one."""
    size, here, device = config.parallel.size, config.parallel.ranks_here, config.device.split(":")[0]
    if size == 1:
        return ""
    num_threads = threads_of_rank(here)
    where = "a GPU each" if device == "cuda" else f"{device}, {num_threads} thread{'s' * (num_threads > 1)} each"
    if here < size:
        where += f"; {here} here, {size - here} join at {config.parallel.address}"
    return f"ranks: {size} ({where})"


def describe_inputs(config: EngineConfig) -> str:
    """Whether GEMMs of prefill, and of decode with them, round their inputs."""
    if config.weights is None or config.weights.prefill_inputs is None:
        return ""
    inputs = config.weights.prefill_inputs
    who = "prefill and decode" if config.weights.decode_inputs == inputs else "prefill"
    return f"{who}: {inputs} inputs, faster here (--activations dtype: float32)"


def describe_indexer(model: ModelConfig, config: EngineConfig) -> str:
    """What of sparse attention is left out; nothing where no sequence is long enough for it to choose."""
    most = model.index_topk
    if most is None or config.max_model_len <= most:
        return ""
    return (
        f"sparse attention: the indexer, which chooses {most:,} tokens for a query, is left out: prompts are attended "
        f"whole, and so are rows (--budget {most} or less is what the model attends)"
    )


def describe_decode(model: ModelConfig, options: EngineOptions, config: EngineConfig) -> str:
    """Why decode is eager, where the options did not ask for that."""
    if options.executor is not None or config.executor != FALLBACK:
        return ""
    preferred = executor_of(preferred_executor(config.device))
    problem = preferred.problem(model, config) or preferred.problem_here(config.parallel.ranks_here)
    return f"decode: {FALLBACK}, because {problem}"


def describe_adapters(config: EngineConfig) -> str:
    """LoRA adapters, if there are any."""
    names = ", ".join(own.name for own in config.loras)
    return names and f"LoRA adapters: {names}, {format_bytes(adapter_bytes(config))} (--lora)"


def describe_speculator(config: EngineConfig) -> str:
    """The draft model of speculative decoding, if there is one."""
    draft = config.speculator
    if draft is None:
        return ""
    memory = speculator_memory(draft, config.max_rows)
    name = "the model's own prediction layer" if draft.is_own else draft.folder
    return (
        f"draft model: {name}, {format_bytes(memory.fixed_bytes)} and {format_bytes(memory.row_bytes)} a row, "
        f"at most {config.num_speculative_tokens} tokens a step (--speculative-model, --num-speculative-tokens)"
    )


def describe_store(model: ModelConfig, options: EngineOptions, config: EngineConfig) -> str:
    """How large the prefix store is; nothing where none was asked for."""
    if options.prefix_store is None:
        return ""
    how, store = " (auto)" if options.prefix_store == "auto" else "", config.prefix_store
    if store is None:
        return f"prefix store: none{how}, because {why_no_store(model, config.device) or 'too little memory is free'}"
    size = format_bytes(config.parallel.size * prefix_store_bytes(model, config))
    states = f" and {config.prefix_snapshots:,} snapshots of states" if config.prefix_snapshots else ""
    return f"prefix store: {size}{how}, {config.prefix_blocks * store.block_len:,} tokens{states} (--prefix-store)"
