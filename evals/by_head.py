"""Models of latents whose rows keep expanded keys and values per head: the oracle of one selection per head.

Rows of latents make all heads of a layer agree on the tokens that stay (docs/research/latents.md). Here every head
keeps its own tokens, as it could if the row had a key and a value per head: the same model, the same number
of slots, rows several times as large. What this gains over rows of latents is the price of agreeing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from snapstream.config import DType, EngineConfig, KVDType, ModelConfig
from snapstream.exec.runner import ModelRunner
from snapstream.grammar import GrammarCompiler
from snapstream.kernels.interface import CosSin
from snapstream.kv.spec import Full, KVSpec
from snapstream.models.decoder import Decoder
from snapstream.models.latent import LatentLayer
from snapstream.models.layers import KVView
from snapstream.models.registry import FAMILIES, kv_spec_of

_SUFFIX = "ByHead"


class ByHeadLayer(LatentLayer):
    """A ``models.decoder.Layer`` that expands every token before a view sees it, in prefill and in decode."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """See ``models.decoder.Layer.attend``: ``[T', H, U]``."""
        normed = self._kernels.sum_norm(residual, pending, self._input_norm, self._eps)
        queries, latents = self._project(normed, rope)
        assert self._gates is None and self._head_norm.sinks is None, "gates and sinks of heads are not supported"
        asked = self._heads.expanded(queries)  # [T, H, X]
        num_tokens, num_heads, size = asked.shape
        keys, values = asked.new_zeros(2, num_heads, num_tokens, size)
        self._heads.expand(latents[:, 0], keys, values)
        heads = torch.cat((asked, keys.transpose(0, 1), values.transpose(0, 1)), 1)  # [T, 3H, X]
        identity = torch.ones(num_tokens, 1, size), torch.zeros(num_tokens, 1, size)  # heads are already rotated
        return view.attend(self._index, heads, self._head_norm, identity)[..., : self._heads.value_dim]


def by_head_spec(config: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
    """A key and a value for every query head, both of the larger size of the two."""
    latents = kv_spec_of(replace(config, architecture=config.architecture.removesuffix(_SUFFIX)), dtype, kv_dtype)
    size = latents.expanded_dim
    layer = Full(num_kv_heads=latents.num_heads, key_dim=size, value_dim=size)
    return replace(latents, layers=(layer,) * latents.num_layers)


def by_head_runner(
    folder: Path, model: ModelConfig, config: EngineConfig, grammars: GrammarCompiler | None, progress: bool
) -> ModelRunner:
    """A ``MakeRunner``. ValueError for a model that keeps no latents: its heads choose for themselves anyway."""
    if model.latent is None:
        raise ValueError(
            f"{folder.name} is a {model.architecture}; only models of latents have one selection per layer"
        )
    name = model.architecture + _SUFFIX
    if name not in FAMILIES.names:
        FAMILIES.add(name, replace(FAMILIES.get(model.architecture), layer=ByHeadLayer, kv_spec=by_head_spec))
    decoder = Decoder.load(
        folder, replace(model, architecture=name), config.dtype, config.device,
        progress=progress, formats=config.weights,
    )  # fmt: skip
    return ModelRunner(decoder, config, grammars, progress=progress)
