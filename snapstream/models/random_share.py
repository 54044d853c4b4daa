"""Random weights at real shapes of one rank's share, for benchmarks: nothing is read, and no rank has the whole.

Each part is drawn from a seed of its own name and slice, so what several ranks hold - norms, routers, kv heads that are
fewer than ranks - is the same on all of them. ``DecoderWeights.random`` makes those of one device.
"""

from __future__ import annotations

from zlib import crc32

import torch

from snapstream.config import WeightForms
from snapstream.models.cuts import Share, cuts_of
from snapstream.models.families import roles_of
from snapstream.models.weights import DecoderWeights, random_bound


def random_share(
    share: Share, dtype: torch.dtype, device: torch.device | str, seed: int, forms: WeightForms | None = None
) -> DecoderWeights:
    """Every matrix of the whole model keeps the size of its input. ``forms``: as ``DecoderWeights.empty`` has them."""
    weights = DecoderWeights.empty(share.own, dtype, device, forms)
    whole, generator = roles_of(share.whole), torch.Generator(device=device)
    for name, cut in cuts_of(share).items():
        role = cut.part.role
        numbers = torch.empty(cut.own, dtype=torch.float32, device=device)
        if role.endswith("norm"):
            numbers.fill_(1.0)
        elif role.endswith("bias"):
            numbers.zero_()
        else:
            bound = random_bound(role, whole[role].shape[-1], share.whole.num_layers)
            generator.manual_seed(crc32(f"{seed} {name} {cut.slices}".encode()))
            numbers.uniform_(-bound, bound, generator=generator)
        weights.fill(role, cut.part.place, numbers)
    return weights
