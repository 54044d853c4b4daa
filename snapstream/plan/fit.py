"""The config of an engine that follows from options, a device and a budget, and how many of its rows fit.

``start/resolve.py`` builds an engine by this and ``plan.py`` plans one: one formula for both.
"""

from __future__ import annotations

from dataclasses import fields
from typing import cast

from snapstream.config import (
    AutoCount,
    EngineConfig,
    EngineOptions,
    KVBudget,
    KVDType,
    ModelConfig,
    PrefixStoreConfig,
    Settings,
    make_selector,
)
from snapstream.config.heads import HeadProfile, HeadSlots
from snapstream.models.families import kv_spec_of
from snapstream.models.looping import problem_of_capture, problem_of_looped_ranks, problem_of_looping
from snapstream.models.shards import check_cuts, rank_config
from snapstream.plan.chunking import resolve_chunking
from snapstream.plan.memory import EngineMemory, engine_memory, split_heads
from snapstream.plan.widths import weight_forms

ON_CPU: tuple[KVDType, ...] = ("bfloat16", "int8")  # rows that no kernel of a GPU reads
MAX_AUTO_ROWS = 256  # more rows are given to those who ask for them


def default_executor(model: ModelConfig, options: EngineOptions, device: str) -> str:
    """On a GPU graphs, which take seconds to capture, where steps can be captured. On a CPU looped steps, whose library
    takes seconds to compile once, where they know the model; else plain calls: what ``graph`` compiles takes a minute.
    """
    if device.startswith("cuda"):
        forms = weight_forms(model, options, device=device, executor="graph")
        return "eager" if problem_of_capture(model, forms) else "graph"
    if problem_of_looped_ranks(options.parallel) is not None:
        return "eager"
    return "eager" if problem_of_looping(model, dtype=options.dtype, device=device) else "looped"


def engine_config(
    model: ModelConfig,
    options: EngineOptions,
    budget: KVBudget,
    max_model_len: int,
    *,
    device: str,
    max_rows: int = 1,
    reserved_bytes: int = 0,
) -> EngineConfig:
    """All that follows from the options once budget and max_model_len are known. ValueError where they contradict.

    A prefix store that is "auto" is none here: who has measured the machine decides (``start/resolve.py``).
    """
    _check_rows(model, options, device)
    heads = None
    if isinstance(options.heads, HeadProfile):
        heads = head_slots(model, options.heads, budget, max_model_len)
    store = options.prefix_store if isinstance(options.prefix_store, PrefixStoreConfig) else None
    kept = {setting.name: getattr(options, setting.name) for setting in fields(Settings)}
    executor = options.executor or default_executor(model, options, device)
    if executor == "graph" and options.kv_dtype in ON_CPU:
        raise ValueError(f"kv_dtype is {options.kv_dtype!r}, which executor 'graph' does not read; use 'eager'")
    forms = weight_forms(model, options, device=device, executor=executor)
    check_cuts(model, options.parallel, forms)
    chunking = resolve_chunking(
        rank_config(model, split_heads(options.parallel)),
        dtype=options.dtype,
        device=device,
        chunk_len=options.chunk_len,
        prefill_quantum=options.prefill_quantum,
        forms=forms,
    )
    return EngineConfig(
        budget=budget,
        heads=heads,
        max_model_len=max_model_len,
        selector=make_selector(options.selector),
        max_rows=max_rows,
        chunking=chunking,
        device=device,
        executor=executor,
        weights=forms,
        reserved_bytes=reserved_bytes,
        prefix_store=store,
        prefix_dir="" if store is None else options.prefix_dir or "",
        prefix_disk=cast(int, options.prefix_disk),
        prefix_blocks=0 if store is None else store.num_blocks(kv_spec_of(model, options.dtype).prefix_token_bytes),
        parallel=options.parallel,
        # A rotation that depends on the whole length gives keys beyond the original context to one prompt alone.
        prefix_max_len=model.rope.original_max_position if model.rope.kind == "dynamic" else 0,
        **kept,
    )


def head_slots(model: ModelConfig, profile: HeadProfile, budget: KVBudget, max_model_len: int) -> HeadSlots:
    """The slots of the model's kv heads; ValueError for a profile of other heads, or a budget without top-k slots."""
    spec = kv_spec_of(model, "float32")
    if spec.values_are_keys:
        raise ValueError("heads: this model keeps latents, one for all heads of a layer; it needs no profile")
    shape, own = (len(profile.shares), len(profile.shares[0])), (spec.num_layers, spec.num_kv_heads)
    if shape != own:
        raise ValueError(
            f"heads: the profile has {shape[0]} layers of {shape[1]} kv heads; this model has {own[0]} of {own[1]}"
        )
    return profile.slots(budget, max_model_len)


def _check_rows(model: ModelConfig, options: EngineOptions, device: str) -> None:
    """ValueError for rows that the model or the device cannot have."""
    wanted = options.kv_dtype
    if model.latent is not None and wanted in ON_CPU:
        raise ValueError(f"kv_dtype is {wanted!r}, and this model keeps latents, which rows hold as 'auto' or 'fp8'")
    if wanted in ON_CPU and (device != "cpu" or options.dtype != "float32"):
        raise ValueError(
            f"kv_dtype is {wanted!r}, device {device!r} and dtype {options.dtype!r}; such rows are for a CPU that "
            "computes in float32: use 'fp8' or 'auto'"
        )


def auto_rows(memory: EngineMemory, free_bytes: int) -> int:
    """Rows that ``max_rows="auto"`` takes; 0 where not one fits."""
    return max(0, min(memory.rows_that_fit(free_bytes), MAX_AUTO_ROWS))


def num_rows(model: ModelConfig, config: EngineConfig, wanted: AutoCount, free_bytes: int) -> int:
    """Rows that were asked for, or with ``"auto"`` those that fit beside all else of ``config``; at least one."""
    if wanted != "auto":
        return wanted
    return max(auto_rows(engine_memory(model, config), free_bytes), 1)
