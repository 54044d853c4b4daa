"""What one of several ranks stores of a model: its own ``ModelConfig``, and which slice of each checkpoint tensor.

``rank_config`` is the whole rule. It gives the model as one rank sees it - its heads, its part of the MLPs, its
experts, its lines of the vocabulary's tables - and from this config everything follows that follows from any: roles and
their shapes (``families.py``), bytes (``shapes.py``), what is cached, what ``plan`` counts. ``slice_of`` compares the
two configs' shapes of a tensor. Invariant: the slices of all ranks together are the tensor, each number once, but for
kv heads fewer than ranks, which several ranks hold. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig, WeightForms
from snapstream.config.moe import MoEConfig
from snapstream.config.parallel import ParallelConfig
from snapstream.config.weights import FP8_BLOCK
from snapstream.models.families import roles_of
from snapstream.models.roles import Role
from snapstream.models.shapes import form_of


def rank_config(model: ModelConfig, parallel: ParallelConfig, rank: int = 0) -> ModelConfig:
    """The model as rank ``rank`` stores it; the model itself where there is one.

    ``hidden_size``, ``vocab_size`` and the router's number of experts stay whole. ValueError where the ranks cannot
    have equal shares.
    """
    size = parallel.size
    if size == 1:
        return model
    if model.vocab_size <= (size - 1) * -(-model.vocab_size // size):
        raise ValueError(f"a vocabulary of {model.vocab_size} leaves some of {size} ranks without a line")
    if parallel.attention == "dp" and model.latent is None:
        raise ValueError(
            "attention is 'dp', which deals out rows of latents; this model keeps keys and values per head"
        )
    num_heads, num_kv_heads = (
        (model.num_heads, model.num_kv_heads) if parallel.attention == "dp" else _own_heads(model, size)
    )
    moe = None if model.moe is None else _own_experts(model.moe, parallel, rank)
    inner = model.intermediate_size
    if moe is None or moe.layers(model.num_layers).start > 0:
        inner = _share("intermediate_size", inner, size)
    return replace(
        model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        moe=moe,
        intermediate_size=inner,
        table_lines=-(-model.vocab_size // size),
    )


def _own_heads(model: ModelConfig, size: int) -> tuple[int, int]:
    """Query heads are split; kv heads too, or where they are fewer than ranks each is held by several."""
    kv_heads = model.num_kv_heads
    if max(kv_heads, size) % min(kv_heads, size):
        raise ValueError(f"{kv_heads} kv heads cannot be split over {size} ranks")
    return _share("num_heads", model.num_heads, size), max(kv_heads // size, 1)


def _own_experts(moe: MoEConfig, parallel: ParallelConfig, rank: int) -> MoEConfig:
    """A part of every expert, or whole experts; of the shared ones a part in either case."""
    size = parallel.size
    if parallel.experts == "tp":
        return replace(moe, inner=_share("the inner size of an expert", moe.inner, size))
    if moe.num_shared:
        _share("the inner size of the shared experts", moe.shared_inner, size)
    own = _share("num_experts", moe.num_experts, size)
    return replace(moe, held=range(rank * own, (rank + 1) * own), shared_parts=size)


def _share(name: str, whole: int, size: int) -> int:
    if whole % size:
        raise ValueError(f"{name} is {whole}; it cannot be split over {size} ranks")
    return whole // size


def check_cuts(model: ModelConfig, parallel: ParallelConfig, forms: WeightForms | None) -> None:
    """ValueError where a rank's share of a matrix would cut through a block or a group of numbers with one scale."""
    whole, own = roles_of(model), roles_of(rank_config(model, parallel))
    for name, role in own.items():
        form = form_of(role, "float32", forms)
        if not form.is_codes:
            continue
        for part in role.parts:
            of_whole, of_rank = part_shape(whole[name], part), part_shape(role, part)
            for dim, (total, size) in enumerate(zip(of_whole, of_rank, strict=True)):
                unit = FP8_BLOCK if form.is_blocks else form.group if dim == len(of_rank) - 1 else 1
                if total != size and size % unit:
                    raise ValueError(
                        f"{parallel.size} ranks would have {size} of the {total} numbers of {name} each; weights in "
                        f"{form.describe()} can be cut every {unit}"
                    )


def part_shape(role: Role, part: str) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that fills ``part`` of a role."""
    place = role.parts[part]
    sizes = [size if dim >= len(place) else place[dim] for dim, size in enumerate(role.shape)]
    return tuple(
        len(range(*size.indices(role.shape[dim]))) if isinstance(size, slice) else size
        for dim, size in enumerate(sizes)
        if dim >= len(place) or isinstance(size, slice)
    )


def slice_of(whole: tuple[int, ...], own: tuple[int, ...], rank: int, num_ranks: int) -> tuple[slice, ...]:
    """Which numbers of a checkpoint tensor of shape ``whole`` fill a rank's tensor of shape ``own``.

    Along a dimension in which they differ the rank takes one of ``whole / own`` shares; where these are fewer than
    ranks (kv heads), neighbours take the same. The last share of a table may be short: the rest of ``own`` is padding.
    """
    cuts = []
    for total, size in zip(whole, own, strict=True):
        shares = -(-total // size)
        start = rank * shares // num_ranks * size
        cuts.append(slice(start, min(start + size, total)))
    return tuple(cuts)
