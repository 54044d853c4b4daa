"""Attention of chunks of prompts in fp32, by the library of looped steps (``prompt_f32.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels.cpu.looped.library import Library, Prompt, load

Ends = list[tuple[int, int]]  # of each prompt: where its queries and its keys end, behind those of the prompt before


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k [G, N, E]``, ``v [G, N, U]`` -> ``[T, H, U]``, fp32.

    A query's result is the same bits however the prompt is cut into chunks, and by any number of threads.
    """
    return attend(load(), q, k, v, [(q.shape[0], k.shape[1])])


def attend(library: Library, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> Tensor:
    """The same by a library, of prompts that lie one after the other."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    size, value_size = q.shape[2], v.shape[2]
    out = torch.empty(q.shape[0], q.shape[1], value_size)
    prompts = (Prompt * len(ends))()
    query = key = 0  # first ones of a prompt
    for index, (query_end, key_end) in enumerate(ends):
        prompts[index] = Prompt(
            q=q[query:].data_ptr(), k=k[:, key:].data_ptr(), v=v[:, key:].data_ptr(), out=out[query:].data_ptr(),
            queries=query_end - query, heads=q.shape[1], kv_heads=k.shape[0], keys=key_end - key, size=size,
            value_size=value_size, q_token=q.stride(0), q_head=q.stride(1), k_head=k.stride(0), k_token=k.stride(1),
            v_head=v.stride(0), v_token=v.stride(1), scale=size**-0.5,
        )  # fmt: skip
        query, key = query_end, key_end
    library.attend_prompts_f32(prompts, len(ends), torch.get_num_threads())
    return out
