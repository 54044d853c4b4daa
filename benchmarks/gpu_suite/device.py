"""The device under test: time, memory and what it is called. A CPU stands in for it in a smoke run."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from snapstream.config import DType

# Dense products in bf16 as the makers state them; MFU is a share of these.
PEAK_TFLOP_PER_S = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100": 312.0}  # by a part of the device's name


class Device:
    """``cuda`` or, for a smoke run, ``cpu``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name.startswith("cuda")
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.dtype_name: DType = "bfloat16" if self.is_cuda else "float32"
        name_of_gpu = torch.cuda.get_device_properties(0).name if self.is_cuda else ""
        self.peak_tflop_per_s = next((peak for key, peak in PEAK_TFLOP_PER_S.items() if key in name_of_gpu), None)

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 256 * 2**20

    def reset_peak(self) -> int:
        """Forget the peak; returns the bytes allocated now."""
        if not self.is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0

    def seconds(self, work: Callable[[], Any], repeats: int, warm_ups: int = 2) -> float:
        """Mean seconds of ``repeats`` calls, all submitted, then waited for; on a CPU of two: its times say nothing."""
        if not self.is_cuda:
            repeats, warm_ups = 2, 1
        for _ in range(warm_ups):
            work()
        self.sync()
        began = perf_counter()
        for _ in range(repeats):
            work()
        self.sync()
        return (perf_counter() - began) / repeats

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "device": properties.name,
                "memory_gib": properties.total_memory / 2**30,
                "multiprocessors": properties.multi_processor_count,
                "peak_tflop_per_s": self.peak_tflop_per_s,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        return found
