"""Selection that only experiments use: random tokens, and SnapKV with every part of it open to change.

``Variant()`` keeps what ``SnapKV()`` keeps; ``AS_PUBLISHED`` and ``AS_KVPRESS`` are settings of others in its terms.
The package has one selector for each method that a user would choose; what these measure decides which.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from snapstream.config import DEFAULT_OBSERVATION, Selector, as_count, as_number, make_selector
from snapstream.kernels.interface import Kernels
from snapstream.kv.selectors.diverse import Diverse, choose
from snapstream.kv.selectors.hops import Hops, add_hops
from snapstream.kv.selectors.scoring import carry_ahead, pool_max, select_topk
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV

Pooling = Literal["avg", "max"]
SoftmaxOver = Literal["candidates", "row"]
GroupReduce = Literal["sum", "max"]


@dataclass(frozen=True, kw_only=True)
class Random(Selector):
    """Random tokens: the floor that a selection must beat. They depend on layer, head and position alone."""

    name: ClassVar[str] = "random"
    observation_len: int = DEFAULT_OBSERVATION  # not used; budgets are split as the default's

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        chance = random_scores(layer, keys.shape[0], candidates.start, candidates.stop, keys.device)  # [G, n]
        return select_topk(chance, num_topk) + candidates.start


@dataclass(frozen=True, kw_only=True)
class Variant(Selector):
    """SnapKV, hops and the diverse share with their constants open; the defaults are the package's."""

    name: ClassVar[str] = "variant"
    observation_len: int = DEFAULT_OBSERVATION
    pool_width: int = POOL_WIDTH  # odd width of the centred pooling, stride 1, zero padding
    pooling: Pooling = "max"  # SnapKV's code has both
    pool_half_life: int = SnapKV.pool_half_life
    softmax_over: SoftmaxOver = "candidates"  # or over the whole visible row, as SnapKV has it
    group_reduce: GroupReduce = "sum"  # how query heads that share a kv head merge, after the softmax
    num_hops: int = 0
    diverse_share: float = 0.0  # of the slots, for keys unlike the rest; not together with hops
    diverse_after: int = 0  # slots that are not shared

    def __post_init__(self) -> None:
        for name, least in (
            ("observation_len", 1),
            ("pool_width", 1),
            ("pool_half_life", 0),
            ("num_hops", 0),
            ("diverse_after", 0),
        ):
            as_count(name, getattr(self, name), least)
        if self.pool_width % 2 == 0:
            raise ValueError(f"pool_width is {self.pool_width}; it must be odd")
        for name, known in (
            ("pooling", ("avg", "max")), ("softmax_over", ("candidates", "row")), ("group_reduce", ("sum", "max")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {known[0]!r} or {known[1]!r}")
        as_number("diverse_share", self.diverse_share, 0.0, 1.0)
        if self.num_hops and self.diverse_share:
            raise ValueError(
                f"num_hops is {self.num_hops}; with a diverse_share of {self.diverse_share:g} it must be 0"
            )

    @property
    def needs_all_queries(self) -> bool:
        return self.num_hops > 0

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        scores = self.scores(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        if self.num_hops == 0:
            by_scores = Diverse(share=self.diverse_share, num_scored=self.diverse_after).by_scores(num_topk)
            return choose(self.pool(scores), keys, candidates, num_topk, by_scores, kernels) + candidates.start
        first = select_topk(self.pool(scores), -(-num_topk // 2))
        total = add_hops(scores, queries, keys, candidates, self.num_hops, self.observation_len, kernels)
        return select_topk(self._centred(total).scatter_(1, first, float("inf")), num_topk) + candidates.start

    def scores(self, queries: Tensor, keys: Tensor, candidates: range, kernels: Kernels) -> Tensor:
        return kernels.snapkv_scores(
            queries, keys, keys.shape[1] - queries.shape[0], candidates.start, candidates.stop,
            over_row=self.softmax_over == "row", group_max=self.group_reduce == "max",
        )  # fmt: skip

    def pool(self, scores: Tensor) -> Tensor:
        return carry_ahead(self._centred(scores), self.pool_half_life)

    def _centred(self, scores: Tensor) -> Tensor:
        if self.pooling == "max":
            return pool_max(scores, self.pool_width)
        return F.avg_pool1d(scores[None], self.pool_width, stride=1, padding=self.pool_width // 2)[0]


def as_variant(selector: Selector) -> Variant:
    """The variant that keeps what ``selector`` keeps; TypeError for a method of another kind."""
    if isinstance(selector, Variant):
        return selector
    if not isinstance(selector, SnapKV):
        raise TypeError(f"selector {selector.name!r} is no variant of SnapKV")
    return Variant(
        observation_len=selector.observation_len,
        pool_half_life=selector.pool_half_life,
        num_hops=selector.num_hops if isinstance(selector, Hops) else 0,
        diverse_share=selector.share if isinstance(selector, Diverse) else 0.0,
        diverse_after=selector.num_scored if isinstance(selector, Diverse) else 0,
    )


AS_PUBLISHED = Variant(pool_width=7, pooling="max", pool_half_life=0, softmax_over="row")  # arXiv 2404.14469
# What kvpress's SnapKVPress does by default, in this project's terms; written out, as our defaults may change.
AS_KVPRESS = Variant(
    observation_len=64, pool_width=5, pooling="avg", pool_half_life=0, softmax_over="row", group_reduce="sum"
)


def load_selector(text: str) -> Selector:
    """A selector of the package by its name, or ``module:Class`` (or an object) from outside. ValueError for others."""
    if ":" not in text:
        return make_selector(text)
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"selector {text!r} cannot be imported: {error}") from None
    selector = found() if isinstance(found, type) and issubclass(found, Selector) else found
    if not isinstance(selector, Selector):
        raise ValueError(f"selector {text!r} is a {type(found).__name__}; it must be a Selector")
    return selector


def random_scores(layer: int, num_kv_heads: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """A score in [0, 1) for every candidate that depends on layer, head and position alone: ``[G, stop - start]`` fp32.

    A hash (the finaliser of MurmurHash3 in 32 bits), so that it is the same in every batch and on every device.
    """
    position = torch.arange(start, stop, device=device)
    head = torch.arange(num_kv_heads, device=device)[:, None]
    word = (position * 0x1E3779B1 + head * 0x05EBCA6B + (layer + 1) * 0x42B2AE35) & 0xFFFFFFFF  # [G, n]
    for shift, factor in ((16, 0x05EBCA6B), (13, 0x42B2AE35)):  # below 2**31: products fit in 63 bits
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    return (word ^ (word >> 16)).bitwise_right_shift(8).float() / 2**24


def stored_settings(selector: Selector) -> dict[str, Any]:
    """What decides what is kept, spelled as in stored results: their keys outlive the names of classes and fields.

    Settings that came later stand there only if they do something: older results do not know them.
    """
    if isinstance(selector, Random):
        return {"selection": "random"}
    if not isinstance(selector, (Variant, SnapKV)):  # from outside: by its class and its settings
        settings: dict[str, Any] = asdict(selector) if is_dataclass(selector) else {}
        return {"selection": f"{type(selector).__module__}:{type(selector).__qualname__}", **settings}
    stored = {"selection": "snapkv", **asdict(as_variant(selector))}
    stored["window_len"] = stored.pop("observation_len")
    stored["pool_kernel"] = stored.pop("pool_width")
    for name in ("pool_half_life", "diverse_share", "diverse_after"):
        if stored[name] == 0:
            del stored[name]
    return stored
