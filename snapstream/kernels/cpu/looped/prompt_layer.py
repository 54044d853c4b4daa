"""What of a layer stands around attention while prompts are read, in native calls (``prompt_layer.cpp``).

Norms, products and SwiGLU are one call, heads are normed, rotated and staged in another: between them nothing is
written that only the next would read. ``models/weight.py`` and ``kernels/plain.py`` say the same in plain calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64

import torch
from torch import Tensor

from snapstream.kernels.cpu.looped.library import ALIGN_COLS, Heads, Library, Passing, Routed, Stack, address, load
from snapstream.kernels.rows import CosSin, HeadNorm, Pairs, SumNorm


def normed_linear(library: Library, stack: Stack, given: SumNorm, bias: Tensor | None) -> Tensor:
    """The norm that ``given`` means, ``[T, in]``, times a matrix transposed, plus ``bias [out]``: ``[T, out]`` fp32."""
    out = torch.empty(len(given.residual), stack.rows)
    _pass(library, given, Passing(matrix=stack, bias=address(bias), out=address(out)))
    return out


def swiglu(
    library: Library, matrices: tuple[Stack, Stack], given: SumNorm | Tensor,
    biases: tuple[Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    """``down(silu(gate x) * up x)``, ``[T, D]`` fp32: x is the norm that ``given`` means, ``[T, D]``, or ``given``.

    ``matrices``: gate and up in one, each of whole panels, and down.
    """
    gate_up, down = matrices
    out = torch.empty(len(given if isinstance(given, Tensor) else given.residual), down.rows)
    bias, down_bias = biases
    _pass(
        library, given,
        Passing(matrix=gate_up, down=down, bias=address(bias), down_bias=address(down_bias), out=address(out)),
    )  # fmt: skip
    return out


def swiglu_grouped(library: Library, matrices: tuple[Stack, Stack], x: Tensor, pairs: Pairs) -> Tensor:
    """See ``models.weight.Weight.swiglu_grouped``: ``x [T, D]`` to ``[T, D]`` fp32; gate and up are whole panels."""
    gate_up, down = matrices
    x, order, ends, weights = (part.contiguous() for part in (x, pairs.order, pairs.ends, pairs.weights))
    (tokens, top_k), out = weights.shape, torch.empty(len(x), down.rows)
    routed = Routed(
        x=address(x), gate_up=gate_up, down=down, order=address(order), ends=address(ends), weights=address(weights),
        out=address(out), tokens=tokens, top_k=top_k, experts=len(ends),
    )  # fmt: skip
    buffer = library.scratch(tokens * top_k * (gate_up.cols + down.cols + 2 * (ALIGN_COLS - 1)))
    library.pass_experts(byref(routed), address(buffer), torch.get_num_threads())
    return out


def _pass(library: Library, given: SumNorm | Tensor, passing: Passing) -> None:
    x: Tensor | None
    if isinstance(given, Tensor):
        tokens, x = len(given), given
    else:
        tokens, x = len(given.residual), given.x
        passing.residual, passing.norm, passing.eps = address(given.residual), address(given.weight), given.eps
    x = None if x is None else x.contiguous()
    passing.x, passing.tokens = address(x), tokens
    buffer = library.scratch(tokens * (passing.matrix.cols + ALIGN_COLS - 1 + passing.down.cols))
    library.pass_tokens(byref(passing), address(buffer), torch.get_num_threads())


def stage_heads(
    heads: Tensor, norm: HeadNorm, rope: CosSin, keys: Tensor, values: Tensor, runs: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Norm and rotate q and k of ``heads [T, H+2G, E]`` fp32, and store k and v in ``keys, values [G, P, E]``; returns
    the queries ``[T, H, E]``.

    ``runs``: the first of some tokens, their number, and where they go in staging. They cover all T.
    """
    num_kv_heads, _, size = keys.shape
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries = torch.empty(heads.shape[0], num_heads, size)
    cos, sin = rope
    flat = (c_int64 * (3 * len(runs)))(*(number for run in runs for number in run))
    native = Heads(
        heads=address(heads), norm=address(norm.weight), cos=address(cos), sin=address(sin), queries=address(queries),
        keys=address(keys), values=address(values), num_runs=len(runs), num_heads=num_heads, kv_heads=num_kv_heads,
        runs=addressof(flat), size=size, stride=keys.stride(0), eps=norm.eps,
    )  # fmt: skip
    load().stage_heads(byref(native), torch.get_num_threads())
    return queries
