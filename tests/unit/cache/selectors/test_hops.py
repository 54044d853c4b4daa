"""Hops: the tokens voted for vote in turn, as the list-based program and the reference have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evals.selectors import Variant, as_variant
from snapstream.cache.compress import kept_positions
from snapstream.cache.selectors.hops import Hops
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget
from snapstream.kernels import reference
from snapstream.kernels.bound import bind
from snapstream.kernels.scores import hop_scores
from tests.unit.cache import row_by_lists

KERNELS = bind("cpu")


@pytest.mark.parametrize("chunk", [7, 64, 4096])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
def test_chunked_hops_equal_the_reference(chunk: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(chunk)
    queries, keys = torch.randn(100, heads[0], 16), torch.randn(heads[1], 100, 16)
    for start, stop in ((0, 99), (4, 90), (30, 32), (30, 31)):
        voters = torch.stack([torch.randperm(stop - start)[:8] for _ in range(heads[1])])
        weights = torch.rand(voters.shape)
        want = reference.hop_scores(weights, voters, queries, keys, start, stop)
        torch.testing.assert_close(hop_scores(weights, voters, queries, keys, start, stop, chunk=chunk), want)


@pytest.mark.parametrize("num_hops", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("num_queries", [1, 4, 50])
@pytest.mark.parametrize("is_variant", [False, True])
def test_hops_equal_the_list_based_program(
    num_hops: int, heads: tuple[int, int], num_queries: int, is_variant: bool
) -> None:
    torch.manual_seed(num_hops)
    budget = KVBudget(num_sink=2, num_topk=7, num_recent=3)
    rule = as_variant(Hops(observation_len=num_queries, num_hops=num_hops, pool_half_life=2))
    if is_variant:
        rule = replace(rule, pool_width=3, pooling="avg")
    selector = rule if is_variant else Hops(observation_len=num_queries, num_hops=num_hops, pool_half_life=2)
    queries, keys = 2 * torch.randn(40, heads[0], 8), torch.randn(heads[1], 40, 8)
    got = kept_positions(queries, keys, 0, budget, selector, KERNELS)
    scores = row_by_lists.votes(queries[-num_queries:].tolist(), keys.tolist(), 2, 37, False, False)
    latest = [row_by_lists.normalised(own) for own in scores]
    total = latest
    for _ in range(num_hops):
        latest = row_by_lists.hop(latest, queries.tolist(), keys.tolist(), 2, num_queries)
        total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, latest, strict=True)]
    for head in range(heads[1]):
        own = row_by_lists.pooled(scores[head], rule.pool_width, rule.pooling, 2)
        smooth = row_by_lists.pooled(total[head], rule.pool_width, rule.pooling, 0)  # hops carry nothing ahead
        assert got[head, 2:9].tolist() == [2 + i for i in row_by_lists.best_with_hops(own, smooth, 7)]


def test_a_hop_finds_what_the_question_does_not_look_at() -> None:
    """The end of the prompt points at token 20, whose own query points at token 30."""
    queries, keys = torch.zeros(60, 1, 4), torch.zeros(1, 60, 4)
    queries[-4:, 0, 0] = keys[0, 20, 0] = 10.0
    queries[20, 0, 1] = keys[0, 30, 1] = 10.0
    budget = KVBudget(num_sink=0, num_topk=2, num_recent=8)
    rules = [Variant(observation_len=4, pool_width=1, pool_half_life=0, num_hops=hops) for hops in (0, 1)]
    kept = [kept_positions(queries, keys, 0, budget, rule, KERNELS)[0, :2] for rule in rules]
    assert kept[0].tolist() == [0, 20] and kept[1].tolist() == [20, 30]


def test_half_of_the_slots_are_snapkvs_whatever_hops_find() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(200, 4, 16), torch.randn(2, 200, 16)
    many = Hops(observation_len=8, num_hops=9)
    kept = [
        kept_positions(queries, keys, 0, KVBudget(num_sink=0, num_topk=size, num_recent=8), selector, KERNELS)
        for selector, size in ((SnapKV(observation_len=8), 20), (many, 40), (many, 39))
    ]
    for head in range(2):
        first, even, odd = (set(row[head, : len(row[head]) - 8].tolist()) for row in kept)
        assert first <= even and first <= odd and len(even) == 40 and len(odd) == 39


def test_hops_need_every_query_and_at_least_one_round() -> None:
    assert Hops().needs_all_queries and Hops().num_queries(5000) == 5000
    assert not SnapKV().needs_all_queries and SnapKV().num_queries(5000) == 32 and SnapKV().num_queries(7) == 7
    with pytest.raises(ValueError, match="num_hops is 0"):
        Hops(num_hops=0)
