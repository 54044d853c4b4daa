"""Attention of a chunk of a prompt whose products are of bf16, by the library of looped steps (``prompt.cpp``)."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from snapstream.kernels.cpu.looped.library import Library, Prompt, load


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32.

    Queries, keys, values and the shares of keys are rounded to bf16, sums are fp32. A query's result is the same bits
    however the prompt is cut into chunks. Only for processors that multiply bf16.
    """
    return attend(load(), q, k, v)


def attend(library: Library, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by a library."""
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
    library.attend_prompt(byref(prompt), torch.get_num_threads())
    return out
