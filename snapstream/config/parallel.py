"""How one engine is spread over several devices: how many ranks there are, and what each of them holds. No torch.

``models/shards.py`` cuts a model by it, ``distributed/group.py`` is what the ranks talk through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from snapstream.config.values import check, set_counts

SplitAttention = Literal["tp", "dp"]
SplitExperts = Literal["tp", "ep"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks of one engine; ``size`` 1 is an engine on one device."""

    size: int = 1  # W, ranks that compute every step together
    attention: SplitAttention = "tp"  # decode attention: heads are split, or rows (each row lives on one rank)
    experts: SplitExperts = "tp"  # the inner size of every expert is split, or whole experts are dealt out

    def __post_init__(self) -> None:
        set_counts(self, size=1)
        for name, known in (("attention", get_args(SplitAttention)), ("experts", get_args(SplitExperts))):
            given = getattr(self, name)
            check(given in known, f"{name} is {given!r}; it must be one of {', '.join(known)}")
