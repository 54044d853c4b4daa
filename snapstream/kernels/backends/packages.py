"""Prefill attention by FlashAttention, where it is installed, and by PyTorch's kernel for packed sequences.

A call imports its package; whether that is installed is checked beforehand (``prefill.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from snapstream.kernels.pytorch import share_sinks

# All align the causal mask with the last key (flash-attn since 2.1), take fewer kv heads than query heads and strided K
# and V, so that a range of the staging buffers is passed without a copy. PyTorch's kernel alone takes learned attention
# sinks, and it has no cap of scores; FlashAttention is not asked for sinks (``prefill.Case``).


@dataclass(frozen=True, slots=True)
class PackedLens:
    """Where prompts begin and end in packed tensors; the last entry is the total."""

    queries: Tensor  # [prompts + 1] int32: cumulative query tokens
    keys: Tensor  # [prompts + 1] int32: cumulative keys
    max_queries: int
    max_keys: int


def flash_attn(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """``flash_attn`` (FlashAttention-2, 2.1 or newer): ``q [1, T, H, E]``, ``k, v [1, N, G, E]``."""
    return _flash_single("flash_attn", q, k, v, window, cap)


def flash_attn_packed(
    q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """The same for packed prompts: ``q [T, H, E]``, ``k, v [N, G, E]``."""
    return _flash_packed("flash_attn", q, k, v, lens, window, cap)


def flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """``flash_attn_interface`` (FlashAttention-3, for Hopper); layouts as FlashAttention-2."""
    return _flash_single("flash_attn_interface", q, k, v, window, cap)


def flash_attn_3_packed(
    q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """The same for packed prompts."""
    return _flash_packed("flash_attn_interface", q, k, v, lens, window, cap)


def _flash_single(package: str, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None) -> Tensor:
    found = import_module(package).flash_attn_func(
        q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], causal=True, **_options(window, cap)
    )
    return _output(found)[0]


def _flash_packed(
    package: str, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, window: int | None, cap: float | None
) -> Tensor:
    found = import_module(package).flash_attn_varlen_func(
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        cu_seqlens_q=lens.queries,
        cu_seqlens_k=lens.keys,
        max_seqlen_q=lens.max_queries,
        max_seqlen_k=lens.max_keys,
        causal=True,
        **_options(window, cap),
    )
    return _output(found)


def _options(window: int | None, cap: float | None) -> dict[str, Any]:
    """For flash-attn: how many keys are seen before a query's own, and after it (since 2.3); a cap of scores (2.6)."""
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    return options if cap is None else {**options, "softcap": cap}


def _output(found: Any) -> Tensor:
    """Some releases of FlashAttention-3 also return the log-sum-exp."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's flash kernel for packed prompts; a window of (-1, 0) is causal.

    Since 2.12 grouped heads must be announced; before, the kernel takes them as they come.
    """
    module = import_module("torch.nn.attention.varlen")
    call = module.varlen_attn
    if cap is not None:
        raise ValueError("varlen_attn of PyTorch has no cap of scores")
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[0]} if "enable_gqa" in _parameters(call) else {}
    if sinks is not None:
        options["return_aux"] = module.AuxRequest(lse=True)
    found = call(
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        lens.queries,
        lens.keys,
        lens.max_queries,
        lens.max_keys,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    if sinks is None:
        return _output(found)
    out, lse = found  # [T, H, E], [H, T]
    return share_sinks(out.transpose(0, 1), lse, sinks).transpose(0, 1)


def why_no_torch_varlen() -> str:
    """Empty if this PyTorch has it with a causal mask that is aligned with the last key."""
    try:
        call = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"PyTorch {torch.__version__} has no attention over packed sequences"
    has_window = "window_size" in _parameters(call)
    return "" if has_window else f"varlen_attn of PyTorch {torch.__version__} has no window_size"


@lru_cache(maxsize=4)
def _parameters(call: Callable[..., Any]) -> frozenset[str]:
    """Names; remembered, because a chunk asks for them in every layer."""
    return frozenset(inspect.signature(call).parameters)
