"""The interface of a selection method: its name, its needs, and one call that chooses.

A selector fills the top-k slots of a row, once, when a layer of a prompt has been staged. Methods are classes in
``cache/selectors/``, a file each, frozen dataclasses whose fields are their settings; ``SELECTORS`` names them. This
module is free of torch, and so are the files of the methods until one of them chooses: plans and settings can ask a
selector what it will take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from snapstream.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SELECTOR = "snapkv"
DEFAULT_OBSERVATION = 32  # voting queries; SnapKV (arXiv 2404.14469) uses 16 to 64


class Selector(ABC):
    """Chooses which prompt tokens a row keeps in its top-k slots, per layer and kv head.

    Two selectors are equal when their settings are: requests carry them, and they cross the border between processes.
    """

    name: ClassVar[str]  # as in SELECTORS, on the command line and in requests
    can_rescore: ClassVar[bool] = False  # whether a full row may choose again by ``votes`` and ``pool``
    observation_len: int = DEFAULT_OBSERVATION  # the last prompt queries, which vote

    def num_queries(self, prompt_len: int) -> int:
        """How many of the last queries of a prompt ``select`` needs; a layer keeps them until it is staged."""
        return prompt_len if self.needs_all_queries else min(self.observation_len, prompt_len)

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

    def votes(self, queries: Tensor, keys: Tensor, candidates: range, kernels: Any) -> Tensor:
        """Votes of ``queries [w, H, E]`` for the candidates among ``keys [G, N, E]``: ``[G, n]`` fp32, >= 0.

        The queries are those of the last ``w`` keys; they may be fewer or more than ``observation_len``. Votes are
        summed over the queries. Needed where ``can_rescore``: rescoring remembers them from one refresh to the next.
        """
        raise NotImplementedError(f"selector {self.name!r} has no votes; it cannot rescore")

    def pool(self, votes: Tensor) -> Tensor:
        """The form of ``votes [G, n]`` by which the best are chosen: smoothed along the candidates, or unchanged."""
        return votes


SELECTORS: Registry[type[Selector]] = Registry(
    "selector",
    {
        "snapkv": "snapstream.cache.selectors.snapkv:SnapKV",
        "hops": "snapstream.cache.selectors.hops:Hops",
        "diverse": "snapstream.cache.selectors.diverse:Diverse",
    },
)


def is_shipped(selector: Selector) -> bool:
    """Whether a selector's class is the package's own, so that other processes can make an equal one by its name."""
    return SELECTORS.is_shipped(selector.name) and SELECTORS.get(selector.name) is type(selector)


def make_selector(selector: str | Selector = DEFAULT_SELECTOR) -> Selector:
    """A selector itself, or the one of that name with its default settings. ValueError or TypeError for others."""
    if isinstance(selector, Selector):
        return selector
    if not isinstance(selector, str):
        raise TypeError(f"selector is {selector!r}; it must be a Selector or one of {', '.join(SELECTORS.names)}")
    return SELECTORS.get(selector)()
