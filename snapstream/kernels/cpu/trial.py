"""Which way of ``linear.py`` is fastest on this machine: a trial at load, on the model's own weights.

A choice is made per shape of a weight and per bucket of tokens. The ways take turns, and each turn multiplies with a
piece of another layer, so that no cache helps. The best turn counts, because other programs disturb it least, and
``F.linear`` stays unless another way is faster by a tenth. Invariant: what a process has measured holds until it ends,
so two engines of one process compute alike, and nothing is remembered for another process, which may run on another
machine. Ways differ by rounding alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from snapstream.kernels.cpu import native
from snapstream.kernels.cpu.linear import BLOCK, BUCKETS, WAYS, ChosenLinear, Shape, bucket, ways_for

logger = logging.getLogger(__name__)

Timer = Callable[[str, Tensor, Tensor], float]  # name of a way, x [T, D], weight [O, D] -> seconds
Agree = Callable[[Tensor], Tensor]
Known = dict[tuple[Shape, int], str]  # with the number of threads: the way

_MARGIN = 0.9  # share of F.linear's time that another way must stay below
_PIECE_BYTES = 2 * 2**20  # read by a turn
_ALL_BYTES = 256 * 2**20  # read by turns before they begin again
_FEWEST, _MOST = 5, 16  # turns of each way
_LIMIT_S = 0.02  # after the fewest turns a choice ends when its products have taken so long


@cache
def known() -> Known:
    """The measurements of this process."""
    return {}


def tuned_linear(weights: Sequence[Tensor], max_tokens: int, agree: Agree = lambda found: found) -> ChosenLinear:
    """Products of up to ``max_tokens`` tokens with ``weights`` (``[O, D]``, all of a model) by the fastest way here.

    Some tenths of a second for a model, once per process. Weights that are not fp32 on a CPU are ``F.linear``'s.
    ``agree`` sums votes over ranks.
    """
    began = perf_counter()
    if native.find_compiler() is None:
        logger.info("no C++ compiler ($CXX or g++): products of few tokens are left to PyTorch")
    choice = agreed(choose(weights, max_tokens), agree)
    if choice:
        found = sorted(set(choice.values()))
        counts = ", ".join(f"{list(choice.values()).count(way)} by {way}" for way in found)
        logger.info("products of few tokens, tried in %.2f s: %s", perf_counter() - began, counts)
    return ChosenLinear(choice)


def choose(
    weights: Sequence[Tensor], max_tokens: int, timer: Timer | None = None, measured: Known | None = None
) -> dict[Shape, str]:
    """The fastest way per shape and bucket; ``timer`` and ``measured`` are for tests."""
    timer = timer or seconds
    measured = known() if measured is None else measured
    threads, choice = torch.get_num_threads(), dict[Shape, str]()
    for (num_out, num_in), own in _by_shape(weights).items():
        for num_tokens in BUCKETS:
            if num_tokens > bucket(min(max_tokens, BUCKETS[-1])):
                break
            shape = num_out, num_in, num_tokens
            if (shape, threads) not in measured:
                measured[shape, threads] = _fastest(shape, own, timer)
            choice[shape] = measured[shape, threads]
    return choice


def agreed(choice: dict[Shape, str], agree: Agree) -> dict[Shape, str]:
    """The way that most ranks chose; of equal ones the first of ``WAYS``. Products that every rank makes of the same
    numbers then round alike everywhere: what a router chooses must not differ.

    Ranks have shares of one size, so all have the same shapes in the same order.
    """
    if not choice:
        return choice
    names = list(WAYS)
    votes = torch.zeros(len(choice), len(names))
    for line, way in enumerate(choice.values()):
        votes[line, names.index(way)] = 1.0
    best = agree(votes).sub_(torch.arange(len(names)) / 2**10).argmax(-1)  # the subtraction: the first of equal ones
    return {shape: names[way] for shape, way in zip(choice, best.tolist(), strict=True)}


@torch.inference_mode()
def seconds(way: str, x: Tensor, weight: Tensor) -> float:
    """Time of one product."""
    multiply = WAYS[way]
    began = perf_counter()
    multiply(x, weight, None)
    return perf_counter() - began


def pieces_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights ``[O, D]`` of one shape, whole or in ranges of rows, one of each layer before the next of any."""
    num_out, num_in = weights[0].shape
    row_bytes = num_in * weights[0].element_size()
    rows = min(num_out, max(_PIECE_BYTES // row_bytes // BLOCK, 1) * BLOCK)
    starts = range(0, num_out - rows + 1, rows)
    return [weight[start : start + rows] for start in starts for weight in weights][
        : _ALL_BYTES // (rows * row_bytes) + 1
    ]


def _by_shape(weights: Sequence[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
    found: dict[tuple[int, int], list[Tensor]] = {}
    for weight in weights:
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
            found.setdefault((weight.shape[0], weight.shape[1]), []).append(weight)
    return found


def _fastest(shape: Shape, weights: Sequence[Tensor], timer: Timer) -> str:
    num_out, num_in, num_tokens = shape
    x = torch.linspace(-1.0, 1.0, num_tokens * num_in).view(num_tokens, num_in)
    pieces = itertools.cycle(pieces_of(weights))
    best: dict[str, float] = {}
    for way in ways_for(num_out, num_in, num_tokens):
        try:
            timer(way, x, next(pieces))  # compiles, starts threads
        except ValueError as problem:
            logger.info("products by %s are not tried: %s", way, problem)
            continue
        best[way] = float("inf")
    spent = 0.0
    for turn in range(_MOST):
        if turn >= _FEWEST and spent >= _LIMIT_S:
            break
        for way in best:
            time = timer(way, x, next(pieces))
            best[way], spent = min(best[way], time), spent + time
    winner = min(best, key=lambda way: best[way])
    return winner if best[winner] < _MARGIN * best["torch"] else "torch"
