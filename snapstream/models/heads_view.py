"""Decode over rows whose kv heads have slots of their own: the ``KVView`` beside ``RowsView`` (``views.py``).

Heads are normed and rotated together; then every kv head goes to the kernel as a batch entry of its own, with its query
heads, its own slot and its own length (``cache/head_rows.py``). The kernel's own rotation then turns by nothing, which
changes no number. Of rows in FP8 the two scales of a head, powers of two, are left to its queries, its new token and
its result: the kernel knows heads by their addresses and would look for a scale at each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels import fp8
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, RowPlaces
from snapstream.models.views import QuerySink


class HeadsView:
    """Attention of one new token per row, kv head by kv head."""

    def __init__(
        self,
        cache: KVCache,
        rows: Tensor,
        places: Sequence[RowPlaces],
        kernels: Kernels,
        queries: QuerySink | None = None,
    ) -> None:
        """``rows [B]``; ``places``: of every layer, ``[B * G]`` entries each; ``queries`` as in ``RowsView``."""
        self._cache, self._rows, self._places, self._kernels = cache, rows, places, kernels
        self._queries = queries

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        """Write a slot per kv head, then attend: ``heads [B, H+2G, E]`` -> ``[B, H, E]``."""
        assert rope is not None, "rows of latents have equal heads"
        batch, _, size = heads.shape
        groups = self._cache.spec.num_kv_heads
        qk = self._kernels.norm_rope(heads, norm, rope, groups)  # [B, H+G, E]
        if self._queries is not None:
            self._queries.put(layer, qk[:, :-groups])
        q = qk[:, :-groups].reshape(batch, groups, -1, size)
        k, v = qk[:, -groups:, None], heads[:, -groups:, None]  # [B, G, 1, E]
        scales = self._head_scales(layer)
        if scales is not None:
            k_scale, v_scale = scales
            q, k, v = q * k_scale, fp8.saturated(k, k_scale), fp8.saturated(v, v_scale)
        entries = torch.cat([q, k, v], dim=2).flatten(0, 1).to(heads.dtype)  # [B * G, H/G + 2, E]
        still = torch.ones_like(rope[0][:1]).expand(len(entries), 1, size)
        out = self._kernels.attend_rows(
            entries, HeadNorm(None, norm.eps), (still, torch.zeros_like(still)), self._cache.layer(layer),
            self._places[layer], None,
        )  # fmt: skip
        if scales is not None:
            out = (out.view(batch, groups, -1, size) * scales[1]).to(heads.dtype)
        return out.reshape(batch, -1, size)

    def _head_scales(self, layer: int) -> fp8.Scales | None:
        """Scales of K and V of rows in FP8, ``[B, G, 1, 1]`` each; None for other rows."""
        k_scale, v_scale = self._cache.k_scale, self._cache.v_scale
        if self._cache.spec.kv_dtype != "fp8" or k_scale is None or v_scale is None:
            return None
        return k_scale[layer][self._rows][..., None, None], v_scale[layer][self._rows][..., None, None]
