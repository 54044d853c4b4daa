"""Fills the stacked weights from a checkpoint folder, tensor by tensor.

Invariants: the checkpoint's tensors are compared with those that the model needs before anything is allocated; each
tensor goes from the mapped file straight to its place in a stack, so host memory never exceeds the model plus
one shard. A rank reads only its part of each. Next: ``checkpoint.py`` (files and headers), ``cuts.py`` (parts),
``packed.py`` (matrices in codes), ``weights.py`` (the stacks).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapstream.config import ModelConfig, WeightForm, WeightForms
from snapstream.kernels import fp8
from snapstream.kernels.groups import SCALE_DTYPE, largest_code
from snapstream.models.checkpoint import FLOAT_DTYPES, StoredTensor, open_shard, read_manifest, read_part
from snapstream.models.cuts import Cut, Share, cuts_of, needed_shapes
from snapstream.models.families import roles_of
from snapstream.models.narrow import MakeWeight, make_weight
from snapstream.models.packed import (
    Wanted,
    codes_of,
    keeps_blocks,
    packed_tensors,
    plain_name,
    read_block_scales,
    read_scales,
)
from snapstream.models.quantization import SCALES
from snapstream.models.roles import Part, Role, checkpoint_parts
from snapstream.models.shapes import form_of
from snapstream.models.weights import DecoderWeights

logger = logging.getLogger(__name__)

LM_HEAD = "lm_head.weight"
ROTARY_BUFFER = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the config


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool,
    forms: WeightForms | None = None,
    make: MakeWeight = make_weight,
    share: Share | None = None,
) -> DecoderWeights:
    """Read a checkpoint into stacks on ``device``, computed with in ``dtype``.

    ``forms``: how the matrices lie in memory, by default in ``dtype``; ``make`` makes the storage of a form. ``share``:
    the part of the model ``config`` that is read, by default all of it. A ValueError names the tensor or file.
    """
    manifest = check_checkpoint(Path(folder), config)
    share = Share(whole=config, own=config) if share is None else share
    cuts = cuts_of(share)
    weights = DecoderWeights.empty(share.own, dtype, device, forms, make)
    name_of_dtype = str(dtype).removeprefix("torch.")
    roles = roles_of(share.own)
    form = {name: form_of(role, name_of_dtype, forms) for name, role in roles.items()}
    bounds: dict[str, Tensor] = {}
    with _progress_bar(len(cuts), progress) as bar:
        for file in dict.fromkeys(stored.file for name, stored in manifest.items() if plain_name(name) in cuts):
            with open_shard(file) as shard:
                for name in shard.offset_keys():  # in the order of the file, so that a disk reads ahead
                    own = plain_name(name)
                    if own not in cuts:
                        continue
                    cut, part = cuts[own], cuts[own].part
                    codes = _codes_of(roles[part.role], config)
                    if name != own and codes is not None:
                        scales = read_scales(own, cut, codes.group, manifest).to(SCALE_DTYPE)
                        bounds[own + SCALES] = torch.stack(torch.aminmax(scales))
                        packed = codes_of(read_part(shard, name, cut.scaled((1, 32 // codes.bits))))
                        weights.fill_codes(part.role, part.place, _in_order(packed, part), _in_order(scales, part))
                    else:
                        stored = read_part(shard, name, cut.slices)
                        if stored.dtype == fp8.DTYPE:
                            scales = read_block_scales(own, cut, manifest)
                            bounds[own] = _block_bounds(stored, scales)
                            weights.fill_codes(part.role, part.place, _blocks_in_order(stored, part), scales)
                        else:
                            bounds[own] = _bounds(stored, form[part.role])
                            weights.fill(part.role, part.place, _padded(_in_order(stored, part), cut))
                    bar.update()
    _check_finite(manifest, bounds)
    return weights


def check_checkpoint(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors by name; ValueError unless they are exactly this model's, codes where it has codes."""
    manifest = read_manifest(folder)
    roles = roles_of(config)
    plan = {part.name: part for part in checkpoint_parts(roles, config.num_layers)}
    needed: dict[str, Wanted] = {}
    for name, shape in needed_shapes(roles, config.num_layers).items():
        codes = _codes_of(roles[plan[name].role], config)
        needed |= {name: (shape, FLOAT_DTYPES)} if codes is None else packed_tensors(name, shape, codes)
    _check(manifest, needed, config)
    return manifest


def _codes_of(role: Role, config: ModelConfig) -> WeightForm | None:
    """How the files have the matrices of a role; None for plain floats."""
    return config.stored.codes_of(is_attention=role.is_attention) if role.is_quantized else None


def _in_order(rows: Tensor, part: Part) -> Tensor:
    """Rows of a checkpoint tensor in the order in which they are stored."""
    return rows if part.row_order is None else rows[list(part.row_order)]


def _blocks_in_order(codes: Tensor, part: Part) -> Tensor:
    """The same of FP8 numbers, whose scales stay where they are."""
    if part.row_order is None:
        return codes
    if not keeps_blocks(part.row_order):
        raise ValueError(f"rows of {part.name} change their order across the blocks that share an FP8 scale")
    return codes.view(torch.uint8)[list(part.row_order)].view(fp8.DTYPE)


def _padded(rows: Tensor, cut: Cut) -> Tensor:
    """With rows of zeros for the token ids that the vocabulary does not have."""
    if not cut.num_missing:
        return rows
    return torch.cat((rows, rows.new_zeros(cut.num_missing, *rows.shape[1:])))


def _check(manifest: Mapping[str, StoredTensor], needed: Mapping[str, Wanted], config: ModelConfig) -> None:
    """Refuse a checkpoint that is not exactly this model."""
    missing = [name for name in needed if name not in manifest]
    if missing:
        raise ValueError(f"checkpoint lacks {_listed(missing)}; {config.architecture} needs {len(needed)} tensors")
    skipped = sum(_is_mtp(name, config) for name in manifest)
    if skipped:
        logger.info("%d tensors of multi-token prediction (layers behind the last) are not loaded", skipped)
    extra = [name for name in manifest if name not in needed and not _is_redundant(name, config)]
    if extra:
        raise ValueError(f"checkpoint holds {_listed(extra)}, which {config.architecture} does not use")
    for name, (shape, dtypes) in needed.items():
        stored = manifest[name]
        if stored.shape != shape:
            raise ValueError(
                f"{name} in {stored.file.name} has shape {list(stored.shape)}; the config asks for {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise ValueError(f"{name} in {stored.file.name} is stored as {stored.dtype}; known: {', '.join(dtypes)}")


def _bounds(numbers: Tensor, form: WeightForm) -> Tensor:
    """Least and greatest weight ``[2]`` in the dtype of the storage, of codes as scales; both are NaN where one is.

    They cost one more reading of a tensor that is about to be copied: somewhat less than the copy itself, little beside
    a disk.
    """
    bounds = torch.stack(torch.aminmax(numbers)) if numbers.numel() else torch.zeros(2)
    if form.is_codes:
        return (bounds / largest_code(form.bits)).to(SCALE_DTYPE)
    return bounds.to(getattr(torch, form.width))


def _block_bounds(codes: Tensor, scales: Tensor) -> Tensor:
    """Least and greatest scale of an FP8 matrix; NaN where one of its numbers is. FP8 has no infinity."""
    has_nan = bool((codes.view(torch.uint8) & 127).eq(127).any())
    bounds = torch.stack(torch.aminmax(scales))
    return bounds.fill_(torch.nan) if has_nan else bounds


def _check_finite(manifest: Mapping[str, StoredTensor], bounds: Mapping[str, Tensor]) -> None:
    """Refuse weights that hold NaN or infinity, as stored or in memory: every answer would be noise."""
    wrong = [name for name, bound in bounds.items() if not bound.isfinite().all()]
    if wrong:
        bound = bounds[wrong[0]]
        what = "NaN" if bool(bound.isnan().any()) else f"infinity as {str(bound.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"{manifest[wrong[0]].file}: {wrong[0]} holds {what}; weights must be finite "
            f"({len(wrong)} of {len(bounds)} tensors are not)"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith(ROTARY_BUFFER) or (config.tie_word_embeddings and name == LM_HEAD) or _is_mtp(name, config)


def _is_mtp(name: str, config: ModelConfig) -> bool:
    """True for a tensor of the layers behind the last one that predict further tokens (multi-token prediction)."""
    last = config.num_layers + config.num_mtp_layers
    return any(name.startswith(f"model.layers.{layer}.") for layer in range(config.num_layers, last))


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
