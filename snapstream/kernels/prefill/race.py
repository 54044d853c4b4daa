"""Which of the prefill kernels that can serve is fastest here: a trial at load, of some tens of milliseconds on a GPU
and a few on a CPU.

Each attends a chunk of a long prompt, on a GPU at a few lengths, twice each: a kernel may plan every new pair of
lengths on the host, and a pair comes once per layer. The first stays unless another is faster by a tenth. Invariant:
what a process has measured holds until it ends, so two engines of one process choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter

import torch

from snapstream.kernels.prefill.samples import random_chunk
from snapstream.kernels.prefill.versions import Case, Version

Timer = Callable[[Version, Case], float]  # -> seconds of a chunk
Known = dict[tuple[Case, tuple[str, ...]], dict[str, float]]

_MARGIN = 0.9  # share of the first one's time that another must stay below
_QUERIES = 2048  # a unit of prefill
_KEYS = (8192, 8128, 8064)
_TURNS = 5  # on a CPU
_LAYERS = 32  # of an 8B model: how often a pair of lengths comes


@cache
def known() -> Known:
    """The measurements of this process."""
    return {}


def race(serving: Sequence[Version], case: Case, timer: Timer, measured: Known) -> dict[str, float]:
    """Seconds of each of ``serving``; one that fails beside a model's weights has infinitely many."""
    names = tuple(version.name for version in serving)
    if (case, names) not in measured:
        measured[case, names] = {version.name: _time_of(version, case, timer) for version in serving}
    return measured[case, names]


def winner(times: dict[str, float]) -> str:
    """The first, or the fastest if it is faster by a tenth."""
    first, fastest = next(iter(times)), min(times, key=lambda name: times[name])
    return fastest if times[fastest] < _MARGIN * times[first] else first


def seconds(version: Version, case: Case) -> float:
    """Time of a call on the device, with its share of what new lengths cost; the best of a few lengths."""
    q, k, v = random_chunk(case, _QUERIES, _KEYS[0], num_kv_heads=4)

    def timed(num_keys: int) -> float:
        torch.cuda.synchronize(case.device)
        began = perf_counter()
        version.attend(q, k[:, :num_keys], v[:, :num_keys])
        torch.cuda.synchronize(case.device)
        return perf_counter() - began

    version.attend(q, k[:, :-1], v[:, :-1])  # loads, compiles
    costs = []
    for num_keys in _KEYS:
        first, again = timed(num_keys), timed(num_keys)
        costs.append(again + max(0.0, first - again) / _LAYERS)
    return min(costs)


def seconds_on_a_cpu(version: Version, case: Case) -> float:
    """Time of a short chunk behind other tokens: the best of some turns, which other programs disturb least."""
    q, k, v = random_chunk(case, 64, 512)
    version.attend(q, k, v)  # loads, starts threads
    times = []
    for _ in range(_TURNS):
        began = perf_counter()
        version.attend(q, k, v)
        times.append(perf_counter() - began)
    return min(times)


def describe(times: dict[str, float]) -> str:
    """Of those that ran."""
    return ", ".join(f"{name} {time * 1e3:.2f} ms" for name, time in times.items() if time < float("inf"))


def _time_of(version: Version, case: Case, timer: Timer) -> float:
    try:
        return timer(version, case)
    except Exception:  # a foreign package may raise anything; the next kernel may serve
        return float("inf")
