"""Selectors of experiments, and how stored results spell them."""

from __future__ import annotations

import pytest
import torch

from evals.selectors import AS_KVPRESS, AS_PUBLISHED, Random, Variant, as_variant, random_scores, stored_settings
from snapstream.cache.selectors.hops import Hops
from snapstream.cache.selectors.snapkv import SnapKV


def test_random_selection_differs_by_layer_and_head_and_spreads_over_the_prompt() -> None:
    scores = torch.stack([random_scores(layer, 2, 4, 4004, "cpu") for layer in range(3)])  # [L, G, n]
    assert torch.equal(scores[1], random_scores(1, 2, 0, 5000, "cpu")[:, 4:4004])  # by position alone
    assert ((scores >= 0) & (scores < 1)).all()
    hits = torch.zeros_like(scores).scatter_(-1, scores.topk(1000).indices, 1.0)
    by_fifth = hits.unflatten(-1, (5, -1)).sum(-1)  # [L, G, 5]; 200 expected, standard deviation 12
    assert (by_fifth - 200).abs().max() < 50
    flat = hits.flatten(0, 1)
    shared = flat @ flat.T - 1000 * torch.eye(6)  # 250 expected of two independent choices
    assert (shared + 250 * torch.eye(6) - 250).abs().max() < 60
    assert (flat[:, 1:] * flat[:, :-1]).sum(-1).sub(250).abs().max() < 60  # neighbours are independent too


def test_stored_results_keep_their_spelling() -> None:
    """The keys of stored results were made from these words; renaming a field here must not change them."""
    common = {"selection": "snapkv", "group_reduce": "sum"}
    today = {"pool_kernel": 7, "pooling": "max", "pool_half_life": 8, "softmax_over": "candidates"}
    assert stored_settings(SnapKV()) == stored_settings(Variant()) == common | today | {"window_len": 32, "num_hops": 0}
    assert stored_settings(Hops(num_hops=4)) == stored_settings(SnapKV()) | {"num_hops": 4}
    assert stored_settings(Random()) == {"selection": "random"}
    published = {"pool_kernel": 7, "pooling": "max", "softmax_over": "row", "window_len": 32, "num_hops": 0}
    assert stored_settings(AS_PUBLISHED) == common | published  # nothing is carried ahead: the word is left out
    peer = {"pool_kernel": 5, "pooling": "avg", "softmax_over": "row", "window_len": 64, "num_hops": 0}
    assert stored_settings(AS_KVPRESS) == common | peer
    with pytest.raises(TypeError, match="'random' is no variant"):
        as_variant(Random())


@pytest.mark.parametrize(
    ("field", "value"),
    [("observation_len", 0), ("num_hops", -1), ("pool_width", 4), ("pool_width", 0), ("pool_half_life", -1),
     ("pool_half_life", 0.5), ("pooling", "mean"), ("softmax_over", "all"), ("group_reduce", "mean")],
)  # fmt: skip
def test_wrong_settings_are_refused_with_their_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        Variant(**{field: value})  # type: ignore[arg-type]
