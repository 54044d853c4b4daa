"""Stand-ins for a checkpoint and for prompts: random weights at real shapes, and rows that look filled.

Benchmarks measure with them, and tests whose subject needs no trained model.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from snapstream.config import ModelConfig, WeightFormats
from snapstream.distributed.group import ReduceOp
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.memory import upload
from snapstream.models.registry import tensor_specs
from snapstream.models.sharding import Share, cuts_of
from snapstream.models.tensors import checkpoint_parts
from snapstream.models.weights import DecoderWeights
from snapstream.types import SamplingParams


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int) -> DecoderWeights:
    """Random weights of a whole model: every matrix keeps the size of its input."""
    weights = DecoderWeights.empty(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for role, tensor in weights.stored().items():
        if role.endswith("norm"):
            tensor.fill_(1.0)
        elif role.endswith("bias"):
            tensor.zero_()
        else:
            bound = _bound(role, tensor.shape[-1], config.num_layers)
            tensor.uniform_(-bound, bound, generator=generator)
    return weights


def random_share(
    share: Share, dtype: torch.dtype, device: torch.device | str, seed: int, formats: WeightFormats | None = None
) -> DecoderWeights:
    """Random weights of one rank's share: every matrix of the whole model keeps the size of its input.

    Each part is drawn from a seed of its own name and slice, so what several ranks hold - norms, routers, kv heads that
    are fewer than ranks - is the same on all of them. ``formats``: as ``DecoderWeights.empty`` has them.
    """
    weights = DecoderWeights.empty(share.own, dtype, device, formats)
    whole, generator = tensor_specs(share.whole), torch.Generator(device=device)
    for name, cut in cuts_of(share).items():
        role = cut.part.target
        numbers = torch.empty(cut.part.shape, dtype=torch.float32, device=device)
        if role.endswith("norm"):
            numbers.fill_(1.0)
        elif role.endswith("bias"):
            numbers.zero_()
        else:
            bound = _bound(role, whole[role].shape[-1], share.whole.num_layers)
            generator.manual_seed(crc32(f"{seed} {name} {cut.slices}".encode()))
            numbers.uniform_(-bound, bound, generator=generator)
        weights.fill(role, cut.part.place, numbers)
    return weights


def checkpoint_of(weights: DecoderWeights) -> dict[str, Tensor]:
    """The numbers by the names they have in a checkpoint of transformers."""
    stored, found = weights.stored(), {}
    for part in checkpoint_parts(tensor_specs(weights.config), weights.config.num_layers):
        numbers = stored[part.target][part.place] if part.place else stored[part.target]
        if part.row_order is not None:
            order = torch.tensor(part.row_order, device=numbers.device)
            numbers = torch.empty_like(numbers).index_copy_(0, order, numbers)
        found[part.name] = numbers
    return found


class Pretend:
    """One rank of many without the others, to measure its share alone: it cuts as that rank and communicates nothing.

    What it computes is not the model's answer.
    """

    def __init__(self, rank: int, size: int) -> None:
        """ValueError unless ``0 <= rank < size``."""
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {size - 1}, one of {size} ranks")
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """See ``Group.all_reduce``: ``x`` itself."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See ``Group.all_gather``: ``x`` in the place of every rank's."""
        return torch.cat([x] * self.size, dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Group.broadcast``: ``x`` itself."""
        return x

    def share_memory(self, num_bytes: int) -> Tensor | None:
        """See ``Group.share_memory``: None."""
        return None


def occupy(runner: ModelRunner, rows: Sequence[int], num_tokens: int, sampling: SamplingParams) -> None:
    """Let ``rows`` look as after a prompt of ``num_tokens``, without prefilling one."""
    counters = runner.rows.entry(num_tokens, runner.config.row_budget)
    device = runner.decoder.device
    runner.rows.admit(upload(rows, torch.int64, device), upload([counters] * len(rows), torch.int64, device))
    if runner.cache.heads is not None:
        runner.cache.heads.admit(rows, runner.config.budget, num_tokens)
    runner.first_tokens.params.update((row, sampling) for row in rows)


def _bound(role: str, num_in: int, num_layers: int) -> float:
    """Largest magnitude of random weights that are uniform, of a matrix with rows of ``num_in`` numbers."""
    bound = (3.0 / num_in) ** 0.5  # uniform on [-b, b] has variance b^2 / 3 = 1 / fan-in
    if role == "o" or role.endswith("down"):
        bound /= (2 * num_layers) ** 0.5  # 2L residual additions sum to order 1
    return float(bound)
