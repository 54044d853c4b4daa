"""What a layer computes while prompts are read, in native calls: attention; norms, products and
SwiGLU in one call; heads normed, rotated and staged in another; recurrences.

Reference: ``models/matrix.py``, ``kernels/pytorch.py`` and ``kernels/reference.py``. Every result is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import Literal

import torch
from torch import Tensor

from snapstream.config.model import SwiGLUClamp
from snapstream.kernels import pytorch, reference
from snapstream.kernels.cpu.looped.library import (
    ACTIVATIONS,
    ALIGN_COLS,
    Convolving,
    DeltaRule,
    Heads,
    Library,
    Passing,
    Prompt,
    Routed,
    Stack,
    address,
    library_problem,
    load,
)
from snapstream.kernels.rows import (
    CosSin,
    ExpertParts,
    HeadNorm,
    LayerActivation,
    Pairs,
    SumNorm,
    Xielu,
    activation_numbers,
)

Products = Literal["float32", "bfloat16", "int16"]


def attend(
    library: Library, q: Tensor, k: Tensor, v: Tensor, ends: Sequence[tuple[int, int]] = (), *,
    products: Products = "float32", window: int | None = None, sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32, of
    one prompt, or of several that lie one after the other: then ``ends`` says where the queries and keys of each end.

    For products of bf16, of processors that have them, queries, keys, values and shares are rounded to it; sums are
    fp32. For products of int16, queries, keys and values are rounded to 11 bits or more, relative to the largest number
    of their head, shares to 12, relative to the largest of 96 keys. Bitwise equal on any number of threads, and however
    the prompt is cut into chunks.
    """
    (num_queries, num_heads, size), (num_kv_heads, num_keys, value_size) = q.shape, v.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, ends = torch.empty(num_queries, num_heads, value_size), ends or ((num_queries, num_keys),)
    every = Prompt(
        heads=num_heads, kv_heads=num_kv_heads, size=size, value_size=value_size, q_token=q.stride(0),
        q_head=q.stride(1), k_head=k.stride(0), k_token=k.stride(1), v_head=v.stride(0), v_token=v.stride(1),
        scale=size**-0.5, sinks=address(sinks), cap=cap or 0.0,
    )  # fmt: skip
    prompts = (Prompt * len(ends))(*[every] * len(ends))
    query = key = 0  # first ones of a prompt
    for own, (query_end, key_end) in zip(prompts, ends, strict=True):
        own.q, own.out = _at(q, 0, query), _at(out, 0, query)
        own.k, own.v = _at(k, 1, key), _at(v, 1, key)
        own.queries, own.keys = query_end - query, key_end - key
        own.window = min(window or 0, own.keys)
        query, key = query_end, key_end
    getattr(library, f"attend_{products}")(prompts, len(ends), torch.get_num_threads())
    return out


def _at(x: Tensor, dim: int, index: int) -> int:
    """The address of ``x.select(dim, index)``, without a view."""
    return x.data_ptr() + index * x.stride(dim) * x.element_size()


def linear(library: Library, stack: Stack, given: SumNorm | Tensor, bias: Tensor | None) -> Tensor:
    """``given [T, in]`` fp32, or its norm, times one matrix transposed, plus ``bias [out]``: ``[T, out]`` fp32."""
    return _pass(library, given, Passing(matrix=stack, bias=address(bias)), stack.rows)


def swiglu(
    library: Library, matrices: tuple[Stack, Stack], given: SumNorm | Tensor,
    biases: tuple[Tensor | None, Tensor | None], activation: LayerActivation = "silu",
) -> Tensor:  # fmt: skip
    """See ``models.matrix.Matrix.swiglu``: ``[T, D]`` fp32; x is the norm of a ``SumNorm``, ``[T, D]``, or ``given``.

    ``matrices``: gate and up in one, or up alone, each of whole panels, and down.
    """
    gate_up, down = matrices
    bias, down_bias = biases
    numbers = activation_numbers(activation)
    passing = Passing(
        matrix=gate_up, down=down, bias=address(bias), down_bias=address(down_bias), activation=_kind(activation),
        numbers=address(numbers),
    )  # fmt: skip
    return _pass(library, given, passing, down.rows)


def swiglu_grouped(
    library: Library, matrices: tuple[Stack, Stack], x: Tensor, pairs: Pairs, parts: ExpertParts
) -> Tensor:
    """See ``models.weight.Weight.swiglu_grouped``: ``x [T, D]`` to ``[T, D]`` fp32; gate and up are whole panels."""
    gate_up, down = matrices
    x, order, ends, weights = (part.contiguous() for part in (x, pairs.order, pairs.ends, pairs.weights))
    numbers = activation_numbers(parts.activation)
    (tokens, top_k), out = weights.shape, torch.empty(len(x), down.rows)
    routed = Routed(
        x=address(x), gate_up=gate_up, down=down, order=address(order), ends=address(ends), weights=address(weights),
        out=address(out), tokens=tokens, top_k=top_k, experts=len(ends), gate_up_bias=address(parts.gate_up_bias),
        down_bias=address(parts.down_bias), activation=_kind(parts.activation), numbers=address(numbers),
        scales_inputs=parts.scales_inputs,
    )  # fmt: skip
    buffer = library.scratch(tokens * top_k * (gate_up.cols + down.cols + 2 * (ALIGN_COLS - 1)))
    library.pass_experts(byref(routed), address(buffer), torch.get_num_threads())
    return out


def _kind(activation: LayerActivation) -> int:
    if isinstance(activation, Xielu):
        return ACTIVATIONS["xielu"]
    return ACTIVATIONS["silu" if isinstance(activation, SwiGLUClamp) else activation]


def _pass(library: Library, given: SumNorm | Tensor, passing: Passing, num_out: int) -> Tensor:
    x: Tensor | None
    if isinstance(given, Tensor):
        tokens, x = len(given), given
    else:
        tokens, x = len(given.residual), given.x
        passing.residual, passing.norm, passing.eps = address(given.residual), address(given.weight), given.eps
    x, out = None if x is None else x.contiguous(), torch.empty(tokens, num_out)
    passing.x, passing.out, passing.tokens = address(x), address(out), tokens
    buffer = library.scratch(tokens * (passing.matrix.cols + ALIGN_COLS - 1 + passing.down.cols))
    library.pass_tokens(byref(passing), address(buffer), torch.get_num_threads())
    return out


def stage_heads(
    heads: Tensor, norm: HeadNorm, rope: CosSin, keys: Tensor, values: Tensor, runs: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Norm and rotate q and k of ``heads [T, H+2G, E]`` fp32, and store k and v in ``keys, values [G, P, E]``; returns
    the queries ``[T, H, E]``.

    ``runs``: first token, number of tokens, and where they go in staging. They cover all T.
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


def causal_conv(x: Tensor, state: Tensor, taps: Tensor, bias: Tensor | None = None, silu: bool = False) -> Tensor:
    """See ``reference.causal_conv``, in fp32 and where the library runs: about six times as fast."""
    num_sequences, num_tokens, channels = x.shape
    if not (_is_native(x, state) and _is_run(x, num_tokens)):
        return reference.causal_conv(x, state, taps, bias, silu)
    out = torch.empty(x.shape)
    native = Convolving(
        x=x.data_ptr(), state=address(state), taps=address(taps), bias=address(bias), out=address(out),
        sequences=num_sequences, tokens=num_tokens, channels=channels, kernel=len(taps), stride=x.stride(1),
        is_silu=silu,
    )  # fmt: skip
    load().convolve(byref(native), torch.get_num_threads())
    return out


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """See ``reference.gated_delta``; token by token, each task with some columns of a state in its nearest cache."""
    if not (q.shape[1] and _is_native(q, state)):
        return pytorch.gated_delta(q, k, v, decay, beta, state)
    return _apply(q, k, v, decay, beta.contiguous(), state)


def selective_scan(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """See ``reference.selective_scan``; as ``gated_delta``."""
    if not (x.shape[1] and _is_native(x, state)):
        return pytorch.selective_scan(c, b, x, decay, state)
    return _apply(c, b, x, decay, None, state)


def _apply(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor) -> Tensor:
    (num_sequences, num_tokens, key_heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    q, k, v, decay = (part.contiguous() for part in (q, k, v, decay.exp()))
    decayed = None  # keys, by decays per element
    if decay.dim() == 4:
        decayed = k.repeat_interleave(value_heads // key_heads, dim=2) * decay
    out = torch.empty(v.shape)
    native = DeltaRule(
        q=address(q), k=address(k), v=address(v), decay=address(decay), beta=address(beta), state=address(state),
        out=address(out), sequences=num_sequences, tokens=num_tokens, key_heads=key_heads, value_heads=value_heads,
        key_dim=key_dim, value_dim=value_dim, decayed=address(decayed),
    )  # fmt: skip
    load().delta_rule(byref(native), torch.get_num_threads())
    return out


def _is_native(x: Tensor, state: Tensor) -> bool:
    """Whether the library can take them."""
    return x.dtype == torch.float32 and state.is_contiguous() and library_problem() is None


def _is_run(x: Tensor, num_tokens: int) -> bool:
    """Whether tokens of ``x [S, n, C]`` follow each other at one stride."""
    return x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == num_tokens * x.stride(1))
