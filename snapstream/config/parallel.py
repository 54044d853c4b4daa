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
    num_local: int = 0  # ranks on the leader's machine; 0: all
    address: str = ""  # HOST:PORT at which the leader waits for those of other machines

    def __post_init__(self) -> None:
        set_counts(self, size=1, num_local=0)
        check(self.num_local <= self.size, f"local_ranks is {self.num_local}; tensor_parallel is {self.size}")
        is_spread = 0 < self.num_local < self.size
        check(
            is_spread == bool(self.address),
            f"local_ranks is {self.num_local} of tensor_parallel {self.size}, and leader_address is {self.address!r}; "
            "ranks on other machines need both, and others neither",
        )
        for name, known in (("attention", get_args(SplitAttention)), ("experts", get_args(SplitExperts))):
            given = getattr(self, name)
            check(given in known, f"{name} is {given!r}; it must be one of {', '.join(known)}")

    @property
    def ranks_here(self) -> int:
        """Ranks on the leader's machine."""
        return self.num_local or self.size
