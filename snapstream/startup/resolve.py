"""How an engine is built, decided before a weight is read: from the model, the user's options and the machine.

``resolve`` is a function of plain data. Invariant: options that cannot be served are refused here, with the numbers,
and not in the middle of an answer. The formulas are those of ``plan/``, which ``snapstream plan`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from snapstream.config import (
    Budget,
    EngineConfig,
    EngineOptions,
    KVBudget,
    ModelConfig,
    PrefixStoreConfig,
    make_selector,
)
from snapstream.config.engine import check_budget
from snapstream.config.kv import is_shipped
from snapstream.config.values import FP8_CAPABILITY, format_bytes, row_formats
from snapstream.exec.executors import alternatives, executor_of, why_not_bf16_inputs
from snapstream.plan.fit import engine_config, num_rows, why_no_store
from snapstream.plan.memory import (
    DraftMemory,
    engine_memory,
    prefix_store_bytes,
    speculator_config,
    store_token_bytes,
)

# prefix_store="auto" takes this part of the host memory that the engine leaves free; less on a CPU, where page cache
# and other processes need the same memory.
AUTO_STORE_PART = {"cpu": 8, "gpu": 4}
AUTO_STORE_TOKENS = 4096  # at least


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decisions depend on, as ``measure.py`` finds it; sizes in bytes."""

    device: str  # as torch names it: cpu or cuda
    free_bytes: int  # on that device, now
    total_bytes: int  # of that device
    name: str = ""  # of the GPU
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    executor_problems: Mapping[str, str] = field(default_factory=dict)  # executors that it cannot run, and why
    gains_by_bf16: bool = False  # whether a CPU's prefill GEMMs are faster with inputs in bf16
    gains_by_int8: bool = False  # and those of int8 and int4 weights with inputs in int8 than with any other
    gains_by_int16: bool = False  # and those of weights of 16 bits in int16 than in fp32
    attends_in_int16: bool = False  # whether a CPU attends prompts faster in products of int16 than in fp32
    host_free_bytes: int | None = None  # of the host, now; None where the device is the host
    draft: DraftMemory | None = None  # of a draft that is loaded on this device, perhaps by another process
    num_gpus: int = 1  # that this process sees; 0 on a CPU

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


def resolve(model: ModelConfig, options: EngineOptions, machine: Machine) -> EngineConfig:
    """The config of the engine. ValueError for options that the model or the machine cannot serve."""
    if machine.device != options.device:
        raise ValueError(f"device is {options.device!r}; the machine was measured for {machine.device!r}")
    _check_ranks(options, machine)
    max_model_len = model.max_position if options.max_model_len is None else options.max_model_len
    if max_model_len > model.max_position:
        raise ValueError(f"max_model_len is {max_model_len}; the model's context is {model.max_position} tokens")
    budget = resolve_budget(options.budget, max_model_len, make_selector(options.selector).observation_len)
    if not model.full_layers:  # no layer has slots that a budget could cut
        budget = KVBudget.full(max_model_len)
    reserved_bytes = _reserved_bytes(options, machine)

    def config_of(max_rows: int, options: EngineOptions) -> EngineConfig:
        return engine_config(
            model,
            options,
            budget,
            max_model_len,
            device=machine.device,
            max_rows=max_rows,
            reserved_bytes=reserved_bytes,
            executor_problems=machine.executor_problems,
        )

    if options.prefix_store == "auto":
        without = config_of(options.max_rows if options.max_rows != "auto" else 1, options)
        store = auto_prefix_store(model, without, machine)
        if store is None and options.prefix_dir is not None:
            raise ValueError(
                f"prefix_dir is {options.prefix_dir!r}, and prefix_store 'auto' found no memory for a store, or the "
                "model cannot have one; give prefix_store a size"
            )
        options = replace(options, prefix_store=store)
    one_row = config_of(1, options)
    _check_machine(model, one_row, machine)
    max_rows = num_rows(model, one_row, options.max_rows, machine.free_bytes)
    config = config_of(max_rows, options)
    config = _with_rounded_inputs(model, config, options, machine)
    if (draft := config.speculator) is not None:
        steps = _with_rounded_inputs(draft.model, speculator_config(draft, max_rows), options, machine)
        config = replace(config, speculator=replace(draft, formats=steps.weights or draft.formats))
    _check_memory(model, config, options, machine)
    _check_store(model, config, machine)
    return config


def _with_rounded_inputs(
    model: ModelConfig, config: EngineConfig, options: EngineOptions, machine: Machine
) -> EngineConfig:
    """Rounds inputs of prefill GEMMs, and with bf16 weights of decode's, where that is faster and the user has not set
    ``activations``: to int8 where decode does, else to bf16 or int16. The eager executor does the same, so that
    executors give the same tokens.
    """
    formats = config.weights
    if formats is None or options.activations != "auto" or config.dtype != "float32":
        return config
    if not formats.has_groups and formats.layers.rounded("int16") is None:
        return config
    # fp16 has more bits than bf16, and nothing multiplies FP8 and bf16
    rounds_to_bf16 = machine.gains_by_bf16 and (formats.has_groups or formats.layers.dtype == "bfloat16")
    if config.prefill_attention == "auto" and (rounds_to_bf16 or machine.attends_in_int16):
        config = replace(config, prefill_attention="cpu_bf16" if rounds_to_bf16 else "cpu_int16")
    if formats.decode_inputs == "int8" and machine.gains_by_int8:
        return replace(config, weights=replace(formats, prefill_inputs="int8"))
    if not rounds_to_bf16:
        in_int16 = machine.gains_by_int16 and formats.layers.rounded("int16") is not None
        return replace(config, weights=replace(formats, prefill_inputs="int16")) if in_int16 else config
    if why_not_bf16_inputs(model, dtype=config.dtype, device=config.device) is None:
        formats = formats.rounding_to_bf16()
    return replace(config, weights=replace(formats, prefill_inputs="bfloat16"))


def auto_prefix_store(model: ModelConfig, config: EngineConfig, machine: Machine) -> PrefixStoreConfig | None:
    """The store that ``"auto"`` gives the engine of ``config``, which has none; None where it cannot have one."""
    if why_no_store(model, config.device) is not None:
        return None
    free, kind = machine.host_free_bytes, "gpu"
    if free is None:
        free, kind = machine.free_bytes - engine_memory(model, config).total_bytes, "cpu"
    num_bytes = free // AUTO_STORE_PART[kind] * config.parallel.size  # of all ranks, what is free is of one
    token_bytes = store_token_bytes(model, config.parallel, config.dtype)
    return PrefixStoreConfig(num_bytes=num_bytes) if num_bytes >= AUTO_STORE_TOKENS * token_bytes else None


def resolve_budget(budget: Budget, max_model_len: int, observation_len: int) -> KVBudget:
    """``"full"``, a number of slots, or a budget. Slots for a whole sequence or more mean full attention."""
    budget = check_budget(budget)
    if isinstance(budget, KVBudget):
        return budget
    if isinstance(budget, str) or budget >= max_model_len:
        return KVBudget.full(max_model_len)
    return KVBudget.of(budget, observation_len=observation_len)


def _check_ranks(options: EngineOptions, machine: Machine) -> None:
    """ValueError for what several ranks do not support; sizes of the model are checked with the config."""
    size = options.tensor_parallel
    if size == 1:
        return
    here = options.parallel.ranks_here
    if machine.is_gpu and here > machine.num_gpus:
        raise ValueError(
            f"{'local_ranks' if options.local_ranks else 'tensor_parallel'} is {here}; this process sees "
            f"{machine.num_gpus} GPUs, and each rank needs one"
        )
    if options.executor is not None and not executor_of(options.executor).supports_ranks:
        raise ValueError(
            f"executor is {options.executor!r}, which does not support several ranks (tensor_parallel {size}); use "
            f"{alternatives(options.executor, machine.device)}"
        )
    if not is_shipped(make_selector(options.selector)):
        raise ValueError(f"selector is {options.selector!r}; {size} ranks support only the package's own selectors")


def check_rank(model: ModelConfig, config: EngineConfig, machine: Machine) -> None:
    """ValueError where a worker rank's device cannot hold its shard of the engine that rank 0 has resolved."""
    memory = engine_memory(model, config)
    room, has = (machine.free_bytes, "free") if machine.is_gpu else (machine.total_bytes, "in all")
    if memory.total_bytes > room:
        raise ValueError(f"{memory.describe()}; there are {format_bytes(room)} {has}")


def _counts_free(options: EngineOptions, machine: Machine) -> bool:
    """Whether rows must fit what is free now: always on a GPU; on a CPU, rows asked for by number may use it all."""
    return machine.is_gpu or options.max_rows == "auto"


def _reserved_bytes(options: EngineOptions, machine: Machine) -> int:
    """Bytes of the draft in the memory counted here; what is free now already excludes its weights."""
    if machine.draft is None:
        return 0
    return machine.draft.working_bytes if _counts_free(options, machine) else machine.draft.total_bytes


def _check_machine(model: ModelConfig, config: EngineConfig, machine: Machine) -> None:
    capability = (machine.capability or (0, 0)) if machine.is_gpu else (99, 0)
    if config.weights is not None and config.weights.layers.is_fp8 and capability < FP8_CAPABILITY:
        raise ValueError(
            f"the checkpoint's weights are {config.weights.describe()}, and FP8 (e4m3) needs an NVIDIA GPU of compute "
            f"capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer; this is {machine.name}"
        )
    needed = max(form.capability for form in row_formats(config.dtype, config.kv_dtype))
    if capability < needed:
        has = "is not NVIDIA's"
        if machine.capability is not None:
            has = f"has compute capability {machine.capability[0]}.{machine.capability[1]}"
        raise ValueError(
            f"kv_dtype is {config.kv_dtype!r}; {machine.name} {has}, and such rows need "
            f"an NVIDIA GPU of {needed[0]}.{needed[1]} or newer; use kv_dtype 'auto'"
        )


def _check_store(model: ModelConfig, config: EngineConfig, machine: Machine) -> None:
    """ValueError for a prefix store that is larger than what is free on the host."""
    needed = prefix_store_bytes(model, config)
    free = machine.free_bytes if machine.host_free_bytes is None else machine.host_free_bytes
    if needed > free:
        raise ValueError(
            f"prefix_store takes {format_bytes(needed)} of host memory; {format_bytes(free)} are free. Lower it"
        )


def _check_memory(model: ModelConfig, config: EngineConfig, options: EngineOptions, machine: Machine) -> None:
    """ValueError with the sum where the memory cannot hold the engine."""
    counts_free = _counts_free(options, machine)
    memory, room = engine_memory(model, config), machine.free_bytes if counts_free else machine.total_bytes
    if memory.total_bytes <= room:
        return
    what = "this GPU has" if machine.is_gpu else "this machine has"
    raise ValueError(
        f"{memory.describe()}; {what} {format_bytes(room)}{' free' if counts_free else ''}. "
        f"Lower max_rows, the budget{', prefix_store' if memory.store_bytes else ''} or max_model_len"
        f"{', or the context of the draft' if config.reserved_bytes else ''}"
    )
