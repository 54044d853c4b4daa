"""Fills the stacked weights from a checkpoint folder, tensor by tensor.

Invariants: what the checkpoint holds is compared with what the model needs before anything is allocated; each
tensor goes from the mapped file straight to its place in a stack, so host memory never exceeds the model plus
one shard. Next: ``checkpoint.py`` (files and headers), ``weights.py`` (the stacks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.models.checkpoint import FLOAT_DTYPES, StoredTensor, open_shard, read_manifest
from snapstream.models.weights import DecoderWeights, LayerWeights

LM_HEAD = "lm_head.weight"
ROTARY_BUFFER = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the config


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, progress: bool
) -> DecoderWeights:
    """Read a checkpoint into stacks of ``dtype`` on ``device``. A ValueError names the tensor or file."""
    manifest = read_manifest(Path(folder))
    plan = named_views(config, DecoderWeights.empty(config, dtype, "meta"))
    _check(manifest, plan, config)
    weights = DecoderWeights.empty(config, dtype, device)
    targets = named_views(config, weights)
    bounds: dict[str, Tensor] = {}
    with _progress_bar(len(targets), progress) as bar:
        for file in dict.fromkeys(manifest[name].file for name in targets):
            with open_shard(file) as shard:
                for name in shard.offset_keys():  # in the order of the file, so that a disk reads ahead
                    if name in targets:
                        targets[name].copy_(shard.get_tensor(name))
                        bounds[name] = torch.stack(torch.aminmax(targets[name]))
                        bar.update()
    _check_finite(manifest, bounds, dtype)
    return weights


def named_views(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """The place of every checkpoint tensor, by its name in a transformers checkpoint."""
    views = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not config.tie_word_embeddings:
        views[LM_HEAD] = weights.lm_head
    for index in range(config.num_layers):
        for name, view in _layer_views(config, weights.layer(index)).items():
            if view is not None:
                views[f"model.layers.{index}.{name}"] = view
    return views


def _layer_views(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor | None]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    views = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            q, k, v = qkv.split((queries, keys, keys))
            views |= {f"self_attn.{part}_proj.{kind}": view for part, view in zip("qkv", (q, k, v), strict=True)}
        if gate_up is not None:
            views[f"mlp.gate_proj.{kind}"], views[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
    return views


def _check(manifest: Mapping[str, StoredTensor], plan: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuse a checkpoint that is not exactly this model."""
    missing = [name for name in plan if name not in manifest]
    if missing:
        raise ValueError(f"checkpoint lacks {_listed(missing)}; {config.architecture} needs {len(plan)} tensors")
    extra = [name for name in manifest if name not in plan and not _is_redundant(name, config)]
    if extra:
        raise ValueError(f"checkpoint holds {_listed(extra)}, which {config.architecture} does not use")
    for name, view in plan.items():
        stored = manifest[name]
        if stored.shape != tuple(view.shape):
            raise ValueError(
                f"{name} in {stored.file.name} has shape {list(stored.shape)}; the config asks for {list(view.shape)}"
            )
        if stored.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} in {stored.file.name} is stored as {stored.dtype}; known: {', '.join(FLOAT_DTYPES)}"
            )


def _check_finite(manifest: Mapping[str, StoredTensor], bounds: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse weights that hold NaN or infinity, as stored or once they are ``dtype``: every answer would be noise.

    ``bounds``: least and greatest weight of each tensor, ``[2]``; both are NaN where one is. They cost one more
    reading of a tensor that was just written - on a CPU somewhat less than the copy itself, little beside a disk - and
    the device is waited for once, here.
    """
    is_finite = torch.stack(list(bounds.values())).isfinite().all(1).tolist()
    wrong = [name for name, is_sound in zip(bounds, is_finite, strict=True) if not is_sound]
    if wrong:
        low, high = bounds[wrong[0]].tolist()
        what = "NaN" if low != low else f"infinity as {str(dtype).removeprefix('torch.')}"
        raise ValueError(
            f"{manifest[wrong[0]].file}: {wrong[0]} holds {what}; weights must be finite "
            f"({len(wrong)} of {len(bounds)} tensors are not)"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith(ROTARY_BUFFER) or (config.tie_word_embeddings and name == LM_HEAD)


def _listed(names: list[str], most: int = 3) -> str:
    """A few names and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


class _NoBar:
    def update(self) -> None:
        """Nothing is shown."""


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Any]:
    if not is_shown:
        yield _NoBar()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="Loading weights", unit="tensor") as bar:
        yield bar
