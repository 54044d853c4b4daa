"""What a selection method is to the rest of the system: its name, what it needs, and one call that chooses.

A selector fills the top-k slots of a row, once, when a layer of a prompt has been staged. Methods are classes in
``cache/selectors/``, a file each, frozen dataclasses whose fields are their settings; ``SELECTORS`` names them. This
module is free of torch, so that plans and settings can ask a selector what it will take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from snapstream.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_OBSERVATION = 32  # voting queries; SnapKV (arXiv 2404.14469) uses 16 to 64


class Selector(ABC):
    """Chooses which prompt tokens a row keeps in its top-k slots, per layer and kv head."""

    name: ClassVar[str]  # as in SELECTORS, on the command line and in requests
    can_rescore: ClassVar[bool] = False  # whether a full row may choose again by the votes of this method
    observation_len: int = DEFAULT_OBSERVATION  # the last prompt queries, which vote

    def num_queries(self, prompt_len: int) -> int:
        """How many of the last queries of a prompt ``select`` needs; a layer keeps them until it is staged."""
        return min(self.observation_len, prompt_len)

    @property
    def needs_all_queries(self) -> bool:
        """True when ``select`` needs the queries of the whole prompt, which ``plan`` then counts."""
        return False

    @abstractmethod
    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Any
    ) -> Tensor:
        """Prompt positions ``[G, K]`` int64 to keep, ascending; ``K = num_topk``.

        ``queries [w, H, E]`` are the last ``num_queries`` of the prompt after RoPE, ``keys [G, N, E]`` all its keys
        after RoPE; ``candidates`` are the positions that compete; ``kernels`` are the functions of the device
        (``kernels/bound.py``). The host must not wait for the device.
        """


SELECTORS: Registry[type[Selector]] = Registry(
    "selector",
    {
        "snapkv": "snapstream.cache.selectors.snapkv:SnapKV",
        "hops": "snapstream.cache.selectors.hops:Hops",
    },
)


def make_selector(selector: str | Selector) -> Selector:
    """A selector itself, or the one of that name with its default settings. ValueError or TypeError for others."""
    if isinstance(selector, Selector):
        return selector
    if not isinstance(selector, str):
        raise TypeError(f"selector is {selector!r}; it must be a Selector or one of {', '.join(SELECTORS.names)}")
    return SELECTORS.get(selector)()
