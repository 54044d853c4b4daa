"""Section on the kernels that can attend a prefill chunk: all that this machine has, at the heads of three models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.suite import Bench, Figures
from snapstream.kernels.backends.autotune import problem_of
from snapstream.kernels.backends.prefill import VERSIONS, Case, Version
from snapstream.kernels.rows import PackedLens

HEADS = {128: (32, 8), 64: (32, 8)}  # by head dimension: query and kv heads of Llama-3.1-8B and Llama-3.2-1B
CHUNKS = [(512, 8192), (2048, 32_768), (512, 131_072), (4096, 4096)]  # tokens of a chunk, keys with it
PACK = [48, 300, 17, 120, 512, 64, 230, 9, 400, 348]  # prompts that share a chunk of 2,048 tokens
TOO_SLOW = 2**31  # scores that the reference would hold; more are left out


def attention(bench: Bench) -> Figures:
    """Milliseconds of each kernel for chunks behind earlier keys, and for a chunk of several short prompts."""
    device = torch.device(bench.device.name)
    for head_dim, heads in {16: (4, 2)}.items() if bench.is_smoke else HEADS.items():
        case = Case.of(device, bench.device.dtype, head_dim, heads[0] // heads[1])
        place = {"dtype": bench.device.dtype_name, "head_dim": head_dim,
                 "capability": ".".join(map(str, case.capability)) if case.capability else None}  # fmt: skip
        usable = []
        for version in VERSIONS.values():
            if problem := problem_of(version, case):
                yield {"way": version.name, **place, "error": problem}
            else:
                usable.append(version)
        for figure in (*_chunks(bench, case, heads, usable), *_packs(bench, case, heads, usable)):
            yield {**figure, **place}


def _chunks(bench: Bench, case: Case, heads: tuple[int, int], usable: list[Version]) -> Iterator[dict[str, Any]]:
    for chunk, keys in [(32, 96)] if bench.is_smoke else CHUNKS:
        q, k, v = _numbers(case, heads, chunk, keys)
        flop = 4 * heads[0] * case.head_dim * chunk * (keys - chunk / 2)
        for version in usable:
            if version.name == "reference" and heads[0] * chunk * keys > TOO_SLOW:
                continue
            figure = {"way": version.name, "kind": "chunk", "chunk": chunk, "keys": keys}
            yield _timed(bench, figure, lambda version=version: version.attend(q, k, v), flop)  # type: ignore[misc]  # noqa: B023


def _packs(bench: Bench, case: Case, heads: tuple[int, int], usable: list[Version]) -> Iterator[dict[str, Any]]:
    lens = [5, 20, 7] if bench.is_smoke else PACK
    q, k, v = _numbers(case, heads, sum(lens), sum(lens))
    ends = list(accumulate(lens, initial=0))
    uploaded = torch.tensor(ends, dtype=torch.int32, device=case.device)
    packed = PackedLens(uploaded, uploaded, max(lens), max(lens))
    flop = sum(2 * heads[0] * case.head_dim * n * n for n in lens)
    for version in usable:

        def loop(version: Version = version) -> Tensor:
            spans = zip(ends, ends[1:], strict=False)
            return torch.cat([version.attend(q[a:b], k[:, a:b], v[:, a:b]) for a, b in spans])

        figure = {"way": version.name, "chunk": sum(lens), "prompts": len(lens)}
        yield _timed(bench, figure | {"kind": "loop"}, loop, flop)
        if version.attend_packed is not None and not version.why_not_packed():
            one = version.attend_packed
            yield _timed(bench, figure | {"kind": "packed"}, lambda one=one: one(q, k, v, packed), flop)  # type: ignore[misc]


def _numbers(case: Case, heads: tuple[int, int], queries: int, keys: int) -> tuple[Tensor, ...]:
    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=case.device, dtype=case.dtype)

    pool = make(2, heads[1], keys + 64, case.head_dim)  # a range of a larger pool, as the engine passes it
    return make(queries, heads[0], case.head_dim), pool[0, :, 32 : 32 + keys], pool[1, :, 32 : 32 + keys]


def _timed(bench: Bench, figure: dict[str, Any], run: Callable[[], Tensor], flop: float) -> dict[str, Any]:
    """Adds the milliseconds of the first call with these lengths, which may plan or compile, and of later ones."""
    try:
        bench.device.sync()
        began = perf_counter()
        run()
        bench.device.sync()
        first = perf_counter() - began
        seconds = bench.device.seconds(run, 5)
    except RuntimeError as error:  # shapes that the kernel does not have after all, or no memory
        return {**figure, "error": str(error).splitlines()[0]}
    return {**figure, "first_ms": first * 1e3, "ms": seconds * 1e3, "tflop_per_s": flop / seconds / 1e12}
