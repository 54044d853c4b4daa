"""The interface between the runner and an executor of the decode step.

An executor is a function from ``StepParts`` to a ``DecodeStep``; ``config.EXECUTORS`` names them. ``decode_eager.py``
is the definition that every other one equals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.config import EngineConfig
from snapstream.layers.sampler import Sampled
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.models.decoder import Decoder
from snapstream.runner.rescoring import RecentQueries
from snapstream.runner.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Everything a decode step works on; its tensors keep their addresses for the life of the engine."""

    decoder: Decoder
    cache: KVCache
    rows: Rows
    sampling: SamplingState
    config: EngineConfig
    queries: RecentQueries | None = None  # keeps the last queries of every row, where rows are rescored

    @property
    def padding_row(self) -> int:
        """The row that belongs to nobody, as a batch names it."""
        return self.config.max_rows


class DecodeStep(Protocol):
    """One token for each row of a batch: feed, draw, advance."""

    def warm_up(self, progress: bool) -> None:
        """Do all that must be done once, before the first step; only the padding row is fed.

        ``progress`` shows on stderr what takes long.
        """
        ...

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each of ``rows [B]`` int64 its last token and draw the next one."""
        ...


@runtime_checkable
class OwnSampler(Protocol):
    """What a decode step has besides, where it draws by other means than ``sampler.sample``: first tokens go there."""

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``sampler.sample``, over the engine's own state: ``logits [B, V]`` fp32, ``rows [B]`` int64, distinct."""
        ...


MakeDecode = Callable[[StepParts], DecodeStep]
