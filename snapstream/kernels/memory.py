"""Small data of the host on its way to the device, without waiting for either.

On a GPU the copy goes through pinned memory and runs in the order of the stream; torch's allocator of pinned memory
hands a buffer out again only when the event of its copy has passed. One upload per purpose and step, never one per row.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# Large memory of a CPU: in huge pages where the system has them, from a cache line's border on, zero until it is used.
#
# Weights and rows are read from end to end at every step. In pages of 4 KiB each read of a page begins with a search
# for its address and ends whatever the processor had fetched ahead; a huge page has 2 MiB.

HUGE = 2 << 20  # bytes of a huge page, on the processors that the looped library is built for
LEAST = 4 * HUGE  # below, pages that are used in part would weigh too much


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros ``shape``; the system hands out what is not small piece by piece on first use, so that untouched memory
    costs nothing. The memory goes back to the system with the last tensor over it. OSError where it gives none.
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
