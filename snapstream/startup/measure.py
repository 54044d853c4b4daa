"""Measures the machine that ``resolve.py`` decides for, and refuses a device that cannot be used.

torch is imported only for a GPU, so that a plan on a CPU starts at once.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.exec.executors import problems_here
from snapstream.models.adapters import with_loras
from snapstream.models.sharding import rank_config
from snapstream.plan.fit import with_speculator
from snapstream.plan.memory import DraftMemory
from snapstream.startup.resolve import Machine, resolve


class HostMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class _Kind(NamedTuple):
    """Names of one version of cgroups: folder under /sys/fs/cgroup, files, and the count of reclaimable pages."""

    folder: str
    limit: str
    usage: str
    reclaimable: str


UNIFIED = _Kind("", "memory.max", "memory.current", "inactive_file")
LEGACY = _Kind("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine, or of the container around this process; ``root``: where proc and sys are.

    The smallest limit of the process's cgroups bounds both figures. Page cache counts as available, because the kernel
    gives it back.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    meminfo = _table(root / "proc/meminfo")
    total = meminfo["MemTotal"] * 1024 if "MemTotal" in meminfo else page * os.sysconf("SC_PHYS_PAGES")
    available = meminfo["MemAvailable"] * 1024 if "MemAvailable" in meminfo else page * os.sysconf("SC_AVPHYS_PAGES")
    for kind, folder in _cgroups(root):
        limit = _number(folder / kind.limit)
        if limit is not None:
            used = (_number(folder / kind.usage) or 0) - _table(folder / "memory.stat").get(kind.reclaimable, 0)
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _cgroups(root: Path) -> Iterator[tuple[_Kind, Path]]:
    """This process's cgroups with memory, and all above them; a container sees its own as the topmost."""
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = LEGACY if controllers else UNIFIED
        top = root / "sys/fs/cgroup" / kind.folder
        own = top / path.strip("/")
        yield from ((kind, folder) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.replace(":", " ").split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def check_device(device: str) -> None:
    """ValueError for a device that is unknown, not the first, or not on this machine."""
    if not isinstance(device, str) or device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if device == "cpu":
        return
    from snapstream.kernels.memory import check_usable

    _, _, index = device.partition(":")
    if index not in ("", "0"):  # streams, captures and kernels are made on the current GPU, which is the first
        raise ValueError(
            f"device is {device!r}; the engine runs on the first GPU that it sees: "
            f"set CUDA_VISIBLE_DEVICES={index} and use 'cuda'"
        )
    check_usable(device)


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names; empty where it is not set, and all of this machine are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in visible.split(",")] if visible else []


def device_memory(device: str) -> tuple[int, int]:
    """Bytes of a device that are free now, and all that it has."""
    if not device.startswith("cuda"):
        memory = host_memory()
        return memory.available, memory.total
    import torch

    return torch.cuda.mem_get_info(device)


READ_BYTES, READ_REPEATS = 2**29, 5


def read_bandwidth(device: str = "cpu") -> float:
    """Bytes per second at which all threads, or the GPU, read 512 MiB once (a sum): the best of ``READ_REPEATS``."""
    import torch

    from snapstream.kernels import memory

    is_gpu = device.startswith("cuda")
    data = torch.ones(READ_BYTES // 4, device=device) if is_gpu else memory.zeros((READ_BYTES // 4,), torch.float32)
    data.fill_(1.0)  # touches every page
    times: list[float] = []
    for _ in range(READ_REPEATS + 1):
        began = perf_counter()
        data.sum()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return data.nbytes / min(times[1:])


def machine_name(device: str = "cpu") -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure_machine(device: str, draft: DraftMemory | None = None, *, num_ranks: int = 1) -> Machine:
    """This machine; ValueError for a device that cannot be used.

    Of ``num_ranks`` ranks on this machine each has a GPU of its own, and a part of the host's memory.
    """
    check_device(device)
    free, total = device_memory(device)
    if not device.startswith("cuda"):
        return Machine(
            device=device,
            free_bytes=free // num_ranks,
            total_bytes=total // num_ranks,
            executor_problems=problems_here(num_ranks),
            draft=draft,
            num_gpus=0,
            **gains(),
        )
    import torch

    return Machine(
        device=device,
        free_bytes=free,
        total_bytes=total,
        executor_problems=problems_here(num_ranks),
        name=torch.cuda.get_device_name(device),
        host_free_bytes=host_memory().available // num_ranks,
        capability=None if torch.version.hip is not None else torch.cuda.get_device_capability(device),
        draft=draft,
        num_gpus=torch.cuda.device_count(),
    )


def decide(model: ModelConfig, options: EngineOptions, draft: DraftMemory | None = None) -> EngineConfig:
    """``resolve`` for this machine as it is now; ``draft``: one that is loaded on the same device."""
    options = with_loras(model, with_speculator(options))
    return resolve(model, options, measure_machine(options.device, draft, num_ranks=options.parallel.ranks_here))


GAINS = ("gains_by_bf16", "gains_by_int8", "gains_by_int16", "attends_in_int16")  # of ``Machine``


def gains() -> dict[str, Any]:
    """Booleans: in which products the native library's prefill is faster here. The first call measures them."""
    from snapstream.kernels.cpu.looped.library import library_problem, load

    return {} if library_problem() else {name: bool(getattr(load(), name)()) for name in GAINS}


def describe_prefill(model: ModelConfig, config: EngineConfig) -> str:
    """Which kernel attends prompts, and why. ValueError for one that this machine does not support."""
    import torch

    from snapstream.kernels.backends.autotune import choose
    from snapstream.kernels.backends.prefill import Case

    own = rank_config(model, config.parallel)
    case = Case.of_model(torch.device(config.device), getattr(torch, config.dtype), own)
    return choose(config.prefill_attention, case).describe()
