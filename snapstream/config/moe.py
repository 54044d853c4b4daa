"""A mixture of experts as numbers: how many there are, how a token's are chosen, which layers have them. No torch.

``models/moe_config.py`` reads it off a config.json, ``layers/router.py`` routes by it, ``plan/`` counts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapstream.config.values import check

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a model; every layer from ``first_dense`` on has them in the place of its MLP."""

    num_experts: int  # X, those that the router chooses among
    top_k: int  # k, chosen per token
    inner: int  # M, inner size of one expert
    num_shared: int = 0  # experts that every token passes, stored as one MLP of inner size num_shared * M
    first_dense: int = 0  # so many first layers have an MLP of intermediate_size instead
    scoring: Scoring = "softmax"  # of the router's logits
    num_groups: int = 1  # experts are chosen inside the best top_groups of so many groups
    top_groups: int = 1
    group_score: GroupScore = "max"  # of a group: its best expert, or the sum of its two best
    normalise: bool = False  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # of the weights
    has_bias: bool = False  # a correction of the scores, for the choice alone (DeepSeek-V3, arXiv 2412.19437, 2.1.2)
    held: range | None = None  # those of the num_experts that lie on this rank; None: all
    shared_parts: int = 1  # ranks that hold a part of the shared experts each, where the others are dealt out whole

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "inner", "num_groups", "top_groups"):
            check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be >= 1")
        for name in ("num_shared", "first_dense"):
            check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be >= 0")
        check(
            self.num_experts % self.num_groups == 0,
            f"num_experts ({self.num_experts}) is not a multiple of num_groups ({self.num_groups})",
        )
        check(
            self.top_groups <= self.num_groups,
            f"top_groups is {self.top_groups}; there are {self.num_groups} groups",
        )
        check(
            self.top_k <= self.top_groups * self.group_len,
            f"top_k is {self.top_k}; it must be <= {self.top_groups * self.group_len}, the experts to choose among",
        )
        fewest = 2 if self.num_groups > 1 and self.group_score == "top2" else 1
        check(self.group_len >= fewest, f"a group has {self.group_len} experts; group_score 'top2' needs 2")

    @property
    def group_len(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def shared_inner(self) -> int:
        """Inner size of the shared experts together, as far as they lie on this rank; 0 without."""
        return self.num_shared * self.inner // self.shared_parts

    @property
    def own(self) -> range:
        """The experts that lie on this rank."""
        return range(self.num_experts) if self.held is None else self.held

    def layers(self, num_layers: int) -> range:
        """The layers that have experts."""
        return range(min(self.first_dense, num_layers), num_layers)

    def num_read(self, num_tokens: int) -> float:
        """How many experts of a layer a step of ``num_tokens`` tokens reads, if tokens choose apart and evenly."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)
