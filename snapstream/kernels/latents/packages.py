"""Decode attention over latents by FlashMLA and FlashInfer, which read pages of 64 slots.

A row whose capacity is a multiple of 64 is a run of such pages: nothing is copied, and the table of pages follows from
the number of the row. Neither package is required; a call imports its own, ``versions.py`` asks beforehand whether it
is there. All that they are handed lies on the device, so that a step which calls them can be captured.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

PAGE = 64  # slots
WORKSPACE_BYTES = 128 * 2**20  # as FlashInfer recommends


def page_table(rows: Tensor, capacity: int) -> Tensor:
    """``rows [B]`` to the pages of each ``[B, C / 64]`` int32."""
    pages = capacity // PAGE
    first = rows.to(torch.int32)[:, None] * pages
    return first + torch.arange(pages, dtype=torch.int32, device=rows.device)


def flash_mla(q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
    """FlashMLA's dense decode: ``q [B, H, E]`` over ``latents [rows+1, 1, C, E]`` -> ``[B, H, R]``.

    Its schedule follows from the lengths and is made on the device in every call, since lengths change with every step.
    """
    package = import_module("flash_mla")
    capacity, size = latents.shape[2:]
    seen = lengths.to(torch.int32)
    schedule = package.get_mla_metadata(seen, q.shape[1], 1)
    out, _ = package.flash_mla_with_kvcache(
        q[:, None],
        latents.view(-1, PAGE, 1, size),
        page_table(rows, capacity),
        seen,
        rank,
        *schedule,
        softmax_scale=size**-0.5,
        causal=False,
    )
    result: Tensor = out[:, 0]
    return result


class FlashInfer:
    """FlashInfer's decode that needs no plan from the host (``trtllm_batch_decode_with_kv_cache_mla``)."""

    def __init__(self, nope_dim: int, device: torch.device) -> None:
        """``nope_dim``: numbers of a query head before it was absorbed, which FlashInfer wants to know."""
        self._nope_dim, self._device = nope_dim, device
        self._workspace: Tensor | None = None  # zeros before its first use

    def __call__(self, q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
        """As ``flash_mla``."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        capacity, size = latents.shape[2:]
        out: Tensor = import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
            query=q[:, None],
            kv_cache=latents.view(-1, PAGE, size),
            workspace_buffer=self._workspace,
            qk_nope_head_dim=self._nope_dim,
            kv_lora_rank=rank,
            qk_rope_head_dim=size - rank,
            block_tables=page_table(rows, capacity),
            seq_lens=lengths.to(torch.int32),
            max_seq_len=capacity,
            bmm1_scale=size**-0.5,
        )
        return out.view(len(q), -1, rank)
