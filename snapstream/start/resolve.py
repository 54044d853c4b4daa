"""What is checked and settled before a weight is read: device, executor, rows that fit the memory.

Invariant: what cannot be served is refused here, with the numbers, and not in the middle of an answer. The formula is
``memory.py``, which ``plan`` prints too. Used by ``llm.py``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Literal

from snapstream.config import EngineConfig, Executor, KVBudget, ModelConfig, as_count
from snapstream.plan.chunking import ChunkLen, resolve_chunking
from snapstream.plan.draft_memory import DraftMemory
from snapstream.plan.host import host_memory
from snapstream.plan.memory import EngineMemory, auto_rows, engine_memory
from snapstream.plan.sizes import format_bytes

MaxRows = int | Literal["auto"]
Budget = KVBudget | int | str  # the only text is "full"

FP8_CAPABILITY = (8, 9)  # Ada, Hopper and newer convert e4m3
DEFAULT_BUDGET = 8192  # slots; what the paper keeps of a 128k prompt


def resolve_budget(budget: Budget, max_model_len: int, window_len: int) -> KVBudget:
    """``"full"``, a number of slots, or a budget. Slots for a whole sequence or more mean full attention."""
    if isinstance(budget, KVBudget):
        return budget
    if budget == "full":
        return KVBudget.full(max_model_len)
    if isinstance(budget, str):
        raise ValueError(f"budget is {budget!r}; it must be a KVBudget, a number of slots or 'full'")
    if as_count("budget", budget, 1) >= max_model_len:
        return KVBudget.full(max_model_len)
    return KVBudget.of(budget, window_len=window_len)


def resolve_executor(executor: Executor | None, device: str) -> Executor:
    """The executor that was asked for, or the device's default.

    On a GPU graphs, which take seconds to capture. On a CPU plain calls: a first start of ``graph`` compiles for a
    minute and later ones load for seconds, which pays for a server but not for one prompt.
    """
    if executor is not None:
        return executor
    return "graph" if device.startswith("cuda") else "eager"


def check_device(device: str) -> None:
    """Refuse a device that this engine does not know, cannot choose or that this machine does not have."""
    import torch

    if not isinstance(device, str) or device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    _, _, index = device.partition(":")
    if index not in ("", "0"):  # streams, captures and kernels are made on the current GPU, which is the first
        raise ValueError(
            f"device is {device!r}; the engine runs on the first GPU that it sees: "
            f"set CUDA_VISIBLE_DEVICES={index} and use 'cuda'"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # which of the two depends on how torch was built
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def check_executor(config: EngineConfig) -> None:
    """Refuse compiled decode on a CPU without a compiler."""
    from snapstream.kernels.cpu.native import find_compiler

    if config.executor == "graph" and config.device == "cpu" and find_compiler() is None:
        raise ValueError("executor 'graph' compiles C++ on a CPU, and neither $CXX nor g++ is here; use 'eager'")


def check_prefill_attention(model: ModelConfig, config: EngineConfig) -> str:
    """Refuse a kernel that cannot serve on this device; returns the line that says which one will, and why."""
    import torch

    from snapstream.kernels.prefill.choice import choose
    from snapstream.kernels.prefill.versions import Case

    case = Case.of(torch.device(config.device), getattr(torch, config.dtype), model.head_dim, model.group_size)
    return choose(config.prefill_attention, case).describe()


def cut_prefill(model: ModelConfig, config: EngineConfig, chunk_len: ChunkLen) -> EngineConfig:
    """``config`` with units of ``chunk_len`` tokens, or of the device's default, and packs of short prompts as long."""
    chunking = resolve_chunking(
        model,
        dtype=config.dtype,
        device=config.device,
        chunk_len=chunk_len,
        prefill_quantum=config.prefill_quantum,
    )
    return replace(config, **asdict(chunking), short_len=chunking.chunk_len)


def check_kv_dtype(config: EngineConfig) -> None:
    """Refuse rows in FP8 on a GPU that cannot convert them; on a CPU they always work."""
    if config.kv_dtype != "fp8" or not config.device.startswith("cuda"):
        return
    import torch

    capability = torch.cuda.get_device_capability(config.device)
    if torch.version.hip is not None or capability < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(config.device)
        raise ValueError(
            f"kv_dtype is 'fp8'; {name} has compute capability {capability[0]}.{capability[1]}, and FP8 (e4m3) needs "
            f"an NVIDIA GPU of {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer; use kv_dtype 'auto'"
        )


def fit_rows(
    model: ModelConfig, config: EngineConfig, max_rows: MaxRows, draft: DraftMemory | None = None
) -> EngineConfig:
    """``config`` with as many rows as were asked for, or as fit (``"auto"``, at most 256).

    ``draft`` is loaded already: where the memory is what is free now, only what it works with is still to come.

    ValueError with the sum where the memory cannot hold that. On a GPU the memory is what is free now, on a CPU all
    that the machine or its container has (``"auto"``: what is available).
    """
    if max_rows != "auto":
        config = replace(config, max_rows=max_rows)
    free = _free_bytes(config.device, only_free=max_rows == "auto")
    reserved = 0
    if draft is not None:
        is_counted = config.device.startswith("cuda") or max_rows == "auto"
        reserved = draft.working_bytes + (0 if is_counted else draft.weight_bytes)
    memory = _memory_of(model, config, reserved)
    if max_rows == "auto":
        config = replace(config, max_rows=max(auto_rows(memory, free), 1))
        memory = _memory_of(model, config, reserved)
    if memory.total_bytes > free:
        what = "this GPU has" if config.device.startswith("cuda") else "this machine has"
        raise ValueError(
            f"{memory.describe()}; {what} {format_bytes(free)}"
            f"{' free' if config.device.startswith('cuda') or max_rows == 'auto' else ''}. "
            f"Lower max_rows, the budget or max_model_len{', or the window of the draft' if reserved else ''}"
        )
    return config


def _memory_of(model: ModelConfig, config: EngineConfig, reserved_bytes: int = 0) -> EngineMemory:
    return engine_memory(
        model,
        config.budget.capacity,
        config.max_model_len,
        max_rows=config.max_rows,
        staging_tokens=config.pool_tokens,
        chunk_len=config.chunk_len,
        dtype=config.dtype,
        device=config.device,
        window_len=config.snapkv.window_len,
        kv_dtype=config.kv_dtype,
        rescoring=config.rescoring,
        num_hops=config.snapkv.num_hops,
        reserved_bytes=reserved_bytes,
    )


def available_bytes(device: str) -> int:
    """What ``max_rows="auto"`` may fill on this machine now."""
    return _free_bytes(device, only_free=True)


def _free_bytes(device: str, *, only_free: bool) -> int:
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free
    memory = host_memory()
    return memory.available if only_free else memory.total
