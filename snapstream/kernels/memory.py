"""Host memory and devices: large zeroed buffers in huge pages, uploads of small data without synchronization.

Weights and rows are read end to end at every step. With 4 KiB pages each page costs a TLB lookup and stops hardware
prefetch; a huge page has 2 MiB. Uploads to a GPU go through pinned memory in stream order; torch reuses a pinned buffer
only after its copy. One upload per purpose and step, never one per row.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a huge page, on the processors that the looped library is built for
LEAST = 4 * HUGE  # smaller buffers would waste too much of their last page


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros ``shape``; large buffers are allocated page by page on first use, and freed with the last tensor over them.

    OSError if the system cannot allocate them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(shape)
    try:
        memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(f"the system gives no {num_bytes:,} bytes of memory: {error.strerror}") from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=first).view(dtype).view(shape)


def upload(values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` (numbers, lists of numbers, or a CPU tensor) as a tensor of ``dtype`` on ``device``."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def check_usable(device: str) -> None:
    """ValueError for a device that torch does not know or this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # which of them depends on how torch was built
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
