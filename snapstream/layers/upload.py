"""Small data of the host on its way to the device, without waiting for either.

On a GPU the copy goes through pinned memory and runs in the order of the stream; torch's allocator of pinned memory
hands a buffer out again only when the event of its copy has passed. One upload per purpose and step, never one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` (numbers, lists of numbers, or a CPU tensor) as a tensor of ``dtype`` on ``device``."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
