"""What a layer computes while prompts are read, in native calls (``prompt.h``): attention; norms, products and
SwiGLU in one call; heads normed, rotated and staged in another; recurrences.

Reference: ``models/matrix.py``, ``kernels/pytorch.py`` and ``kernels/reference.py``. Every result is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64
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
    PackedLens,
    Pairs,
    SumNorm,
    Xielu,
    activation_numbers,
)

Ends = list[tuple[int, int]]  # of each prompt: where its queries and its keys end, after those of the prompts before


Products = Literal["float32", "int16"]


def attend_lanes(
    library: Library, q: Tensor, k: Tensor, v: Tensor, ends: Ends | None = None, *, products: Products = "float32",
    window: int | None = None, sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32, of
    one prompt, or of several that lie one after the other.

    For products of int16, queries, keys and values are rounded to 11 bits or more, relative to the largest number of
    their head, shares to 12, relative to the largest of 96 keys. Bitwise equal however the prompt is cut into chunks,
    and on any number of threads.
    """
    ends = [(q.shape[0], k.shape[1])] if ends is None else ends
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(*q.shape[:2], v.shape[2])
    prompts = (Prompt * len(ends))()
    query = key = 0  # first ones of a prompt
    for index, (query_end, key_end) in enumerate(ends):
        own = q[query:query_end], k[:, key:key_end], v[:, key:key_end], out[query:query_end]
        prompts[index] = _prompt(*own, window, sinks, cap)
        query, key = query_end, key_end
    attend = library.attend_prompts_int16 if products == "int16" else library.attend_prompts_f32
    attend(prompts, len(ends), torch.get_num_threads())
    return out


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32.

    Queries, keys, values and probabilities are rounded to bf16, sums are fp32. Bitwise equal however the prompt is cut
    into chunks. Only for processors that multiply bf16.
    """
    return attend(load(), q, k, v, (0, q.shape[0]), (0, k.shape[1]), window=window, sinks=sinks, cap=cap)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """The same for prompts that lie one after the other, whose queries and keys end where ``lens`` says."""
    return attend(load(), q, k, v, lens.queries.tolist(), lens.keys.tolist(), window=window, sinks=sinks, cap=cap)


def attend(
    library: Library, q: Tensor, k: Tensor, v: Tensor, query_ends: Sequence[int], key_ends: Sequence[int], *,
    window: int | None = None, sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """``prefill_attention`` of prompts; the first begins at the first end."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(*q.shape[:2], v.shape[2])
    ends = [(c_int32 * len(part))(*part) for part in (query_ends, key_ends)]
    library.attend_prompts(
        byref(_prompt(q, k, v, out, window, sinks, cap)), *ends, len(query_ends) - 1, torch.get_num_threads()
    )
    return out


def _prompt(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int | None, sinks: Tensor | None, cap: float | None
) -> Prompt:
    (num_queries, num_heads, size), (num_kv_heads, num_keys, value_size) = q.shape, v.shape
    return Prompt(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), queries=num_queries, heads=num_heads,
        kv_heads=num_kv_heads, keys=num_keys, size=size, value_size=value_size, q_token=q.stride(0),
        q_head=q.stride(1), k_head=k.stride(0), k_token=k.stride(1), v_head=v.stride(0), v_token=v.stride(1),
        window=min(window or 0, num_keys), scale=size**-0.5,
        sinks=address(sinks), cap=cap or 0.0,
    )  # fmt: skip


def normed_linear(library: Library, stack: Stack, given: SumNorm, bias: Tensor | None) -> Tensor:
    """The norm of ``given``, ``[T, in]``, times a matrix transposed, plus ``bias [out]``: ``[T, out]`` fp32."""
    out = torch.empty(len(given.residual), stack.rows)
    _pass(library, given, Passing(matrix=stack, bias=address(bias), out=address(out)))
    return out


def swiglu(
    library: Library, matrices: tuple[Stack, Stack], given: SumNorm | Tensor,
    biases: tuple[Tensor | None, Tensor | None], activation: LayerActivation = "silu",
) -> Tensor:  # fmt: skip
    """See ``models.matrix.Matrix.swiglu``: ``[T, D]`` fp32; x is the norm of a ``SumNorm``, ``[T, D]``, or ``given``.

    ``matrices``: gate and up in one, or up alone, each of whole panels, and down.
    """
    gate_up, down = matrices
    out = torch.empty(len(given if isinstance(given, Tensor) else given.residual), down.rows)
    bias, down_bias = biases
    numbers = activation_numbers(activation)
    _pass(
        library, given,
        Passing(matrix=gate_up, down=down, bias=address(bias), down_bias=address(down_bias), out=address(out),
                activation=_kind(activation), numbers=address(numbers)),
    )  # fmt: skip
    return out


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
