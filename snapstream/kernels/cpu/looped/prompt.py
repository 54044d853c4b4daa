"""Attention of a chunk of a prompt, or of several, in products of bf16, by the library of steps (``prompt.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32

import torch
from torch import Tensor

from snapstream.kernels.cpu.looped.library import Library, Prompt, load
from snapstream.kernels.prefill.packages import PackedLens


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32.

    Queries, keys, values and the shares of keys are rounded to bf16, sums are fp32. A query's result is the same bits
    however the prompt is cut into chunks. Only for processors that multiply bf16.
    """
    return attend(load(), q, k, v, (0, q.shape[0]), (0, k.shape[1]))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lens: PackedLens) -> Tensor:
    """The same for prompts that lie one after the other, whose queries and keys end where ``lens`` says."""
    return attend(load(), q, k, v, lens.queries.tolist(), lens.keys.tolist())


def attend(
    library: Library, q: Tensor, k: Tensor, v: Tensor, query_ends: Sequence[int], key_ends: Sequence[int]
) -> Tensor:
    """The same by a library; the first prompt begins at the first end."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    num_queries, num_heads, size = q.shape
    num_kv_heads, num_keys, value_size = v.shape
    out = torch.empty(num_queries, num_heads, value_size)
    prompt = Prompt(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), queries=num_queries, heads=num_heads,
        kv_heads=num_kv_heads, keys=num_keys, size=size, value_size=value_size, q_token=q.stride(0),
        q_head=q.stride(1), k_head=k.stride(0), k_token=k.stride(1), v_head=v.stride(0), v_token=v.stride(1),
        scale=size**-0.5,
    )  # fmt: skip
    ends = [(c_int32 * len(part))(*part) for part in (query_ends, key_ends)]
    library.attend_prompts(byref(prompt), *ends, len(query_ends) - 1, torch.get_num_threads())
    return out
