"""Prefill attention through PyTorch's fused kernels: flash or cuDNN on a GPU, no matrix of scores.

The T queries of a chunk are the last of N tokens. A chunk that is the whole prompt is plainly causal and one query sees
every key; between, ``causal_lower_right`` picks a kernel that can align the mask with the last key. ``split`` is the
other way: keys before the chunk unmasked, the chunk as one causal square, merged by their log-sum-exp; it works with
kernels that know only the plain causal mask, cuDNN's among them. Extra memory is ``O(T)``, where the reference holds
``[H, T, N]`` fp32 scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

# q, k, v [1, heads, tokens, E] and whether causal -> output and log-sum-exp [1, H, T]
Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = num_heads != num_kv_heads
    queries, keys, values = q.transpose(0, 1)[None], k[None], v[None]  # [1, H, T, E], [1, G, N, E]
    if num_queries == num_keys:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    elif num_queries == 1:
        out = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=grouped)
    else:
        mask = causal_lower_right(num_queries, num_keys)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def split(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """The same through two calls of ``kernel``."""
    prefix = k.shape[1] - q.shape[0]
    queries = q.transpose(0, 1)[None]
    own, own_lse = kernel(queries, k[None, :, prefix:], v[None, :, prefix:], True)
    if prefix == 0:
        return own[0].transpose(0, 1)
    before, before_lse = kernel(queries, k[None, :, :prefix], v[None, :, :prefix], False)
    share = torch.sigmoid(before_lse.float() - own_lse.float())[..., None].to(own.dtype)
    return torch.lerp(own, before, share)[0].transpose(0, 1)


def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's kernel for ``split``; half precision on an NVIDIA GPU."""
    found: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    return found[0], found[1].reshape(q.shape[:3])


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The flash kernel for ``split``; half precision on an NVIDIA GPU."""
    found: Any = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return found[0], found[1]
