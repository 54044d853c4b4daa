"""Time that the device spends on something, read only once the device is known to be past it."""

from __future__ import annotations

from time import perf_counter

import torch


class Stopwatch:
    """Sum of the stretches between ``start`` and ``stop``: of the stream on a GPU, of the host on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0
        self._sum_ms = 0.0

    def start(self) -> None:
        if self._is_cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events.append(pair)
            pair[0].record()
        else:
            self._began = perf_counter()

    def stop(self) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._sum_ms += (perf_counter() - self._began) * 1e3

    def milliseconds(self) -> float:
        """The sum so far; on a GPU every ``stop`` must have been reached by the device."""
        return self._sum_ms + sum(start.elapsed_time(stop) for start, stop in self._events)
