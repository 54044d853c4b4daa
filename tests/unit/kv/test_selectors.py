"""Which settings give the selection of SnapKV's authors (their public code, commit e216ddc, was run beside ours).

There: every query head keeps a set of its own, the softmax runs over the whole row, the voting tokens are cut off after
it, there are no sinks, and the voting tokens themselves are kept. Here: as many kv heads as query heads,
``softmax_over="row"``, ``pool_half_life=0``, no sinks, a ring for the voting tokens. On 240 heads of random tensors the
sets were equal with average pooling; with max pooling they differed in 137 of 240, always among tied scores, of which
ours takes the lowest positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evals.selectors import Random, Variant, as_variant
from snapstream.assets import TINY_MODEL
from snapstream.config import SELECTORS, KVBudget, Selector, make_selector
from snapstream.kernels import reference
from snapstream.kernels.interface import Kernels, bind
from snapstream.kernels.pytorch import hop_scores, key_diversity, snapkv_scores
from snapstream.kv.compress import kept_positions
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.scoring import MAX_HALVINGS, carry_ahead, pool_max, select_topk
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV
from snapstream.llm import LLM
from snapstream.types import RequestOutput, SamplingParams
from tests.unit.kv import row_by_lists


def authors_scores(queries: Tensor, keys: Tensor, num_queries: int, width: int) -> Tensor:
    """The published rule for one head, from its description: scores of the tokens before those that vote."""
    num_keys, head_dim = keys.shape
    scores = torch.zeros(num_keys - num_queries, dtype=torch.float64)
    for i in range(num_keys - num_queries, num_keys):
        weights = (keys[: i + 1].double() @ queries[i].double() / head_dim**0.5).softmax(0)
        scores += weights[: num_keys - num_queries]
    padded = torch.nn.functional.pad(scores, (width // 2, width // 2))
    return padded.unfold(0, width, 1).mean(-1)


@pytest.mark.parametrize("width", [1, 5, 7, 13])
@pytest.mark.parametrize("num_queries", [8, 32])
def test_settings_of_the_authors_give_their_tokens(width: int, num_queries: int) -> None:
    torch.manual_seed(width)
    num_kept, num_keys, num_heads = 60, 300, 4
    queries, keys = 3 * torch.randn(num_keys, num_heads, 16), torch.randn(num_heads, num_keys, 16)
    budget = KVBudget(num_sink=0, num_topk=num_kept, num_recent=num_queries)
    selector = Variant(
        observation_len=num_queries, pool_width=width, pooling="avg", pool_half_life=0, softmax_over="row"
    )
    kernels, candidates_alone = bind("cpu"), replace(selector, softmax_over="candidates")
    row = kept_positions(queries[-num_queries:], keys, 0, budget, selector, kernels)
    other = kept_positions(queries[-num_queries:], keys, 0, budget, candidates_alone, kernels)
    num_different = 0
    for head in range(num_heads):
        want = authors_scores(queries[:, head], keys[head], num_queries, width).topk(num_kept).indices
        last_positions = set(range(num_keys - num_queries, num_keys))
        assert set(row[head].tolist()) == set(want.tolist()) | last_positions
        num_different += set(other[head].tolist()) != set(row[head].tolist())
    assert num_different > 0  # the default, a softmax over the candidates alone, is another rule


# What selectors share: the best with their ties, pooling, scores carried ahead.


@settings(max_examples=300)
@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3),
    count=st.integers(1, 14),
)
def test_ties_go_to_the_lower_position(scores: list[list[int]], count: int) -> None:
    got = select_topk(torch.tensor(scores, dtype=torch.float32), count)
    assert got.tolist() == [row_by_lists.best(row, count) for row in scores]


def test_pooling_keeps_the_neighbours_of_a_hit() -> None:
    scores = torch.zeros(1, 20)
    scores[0, 10] = 1.0
    for pooling in ("avg", "max"):
        rule = Variant(pool_width=5, pooling=pooling, pool_half_life=0)
        assert select_topk(rule.pool(scores), 5).tolist() == [[8, 9, 10, 11, 12]]


def test_a_hit_reaches_further_ahead_than_behind() -> None:
    """The stronger of two hits gets the longer tail; a slot more goes to whoever has more votes left."""
    scores = torch.zeros(1, 100)
    scores[0, 20], scores[0, 60] = 8.0, 1.0
    pooled = carry_ahead(pool_max(scores, 3), 4)
    assert pooled[0, 18] == 0 and pooled[0, [19, 20, 21]].tolist() == [8.0, 8.0, 8.0]
    assert pooled[0, [25, 29, 33, 61, 65]].tolist() == [4.0, 2.0, 1.0, 1.0, 0.5]
    # 19 to 21 at full strength, 22 to 32 above 1; of the four tied at 1 the first, 33.
    assert select_topk(pooled, 15).tolist() == [[*range(19, 34)]]
    assert select_topk(pooled, 18).tolist() == [[*range(19, 34), 59, 60, 61]]


@pytest.mark.parametrize("half_life", [1, 3, 8, 64])
@pytest.mark.parametrize("length", [1, 2, 31, 700])
def test_carrying_ahead_in_doubling_steps_equals_the_reference(half_life: int, length: int) -> None:
    torch.manual_seed(half_life)
    scores = torch.rand(3, length) ** 20  # a few hits, much noise
    before = scores.clone()
    got = carry_ahead(scores, half_life)
    torch.testing.assert_close(got, reference.carry_ahead(scores, half_life), rtol=1e-5, atol=2.0**-MAX_HALVINGS)
    assert torch.equal(scores, before)  # hops add to the scores after pooling them


# Selection against the list-based program on random cases, edge cases among them; votes against the reference.

KERNELS = bind("cpu")
half_lives, observed = st.sampled_from([0, 1, 3, 8]), st.integers(1, 9)
variants = st.builds(
    Variant,
    observation_len=observed,
    pool_width=st.sampled_from([1, 3, 5, 7, 63]),
    pooling=st.sampled_from(["avg", "max"]),
    pool_half_life=half_lives,
    softmax_over=st.sampled_from(["candidates", "row"]),
    group_reduce=st.sampled_from(["sum", "max"]),
)
plain = st.builds(SnapKV, observation_len=observed, pool_half_life=half_lives)
selectors = st.one_of(plain, variants, st.builds(Random, observation_len=observed))
budgets = st.builds(
    KVBudget,
    num_sink=st.integers(0, 4),
    num_topk=st.integers(0, 8),
    num_window=st.integers(0, 4),
    num_recent=st.integers(1, 6),
)


@settings(max_examples=1000, deadline=None)
@given(
    budget=budgets,
    selector=selectors,
    extra=st.integers(1, 14),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    seed=st.integers(0, 2**31),
)
@example(KVBudget(num_sink=0, num_topk=3, num_recent=1), SnapKV(observation_len=9), 1, (4, 2), 0)  # 9 > N, R = 1
@example(KVBudget(num_sink=3, num_topk=0, num_recent=2), SnapKV(observation_len=2), 5, (4, 2), 1)  # K = 0
@example(KVBudget(num_sink=1, num_topk=4, num_recent=2), SnapKV(observation_len=4), 1, (2, 1), 2)  # N = C + 1
def test_kept_positions_equal_the_list_based_program(
    budget: KVBudget, selector: Selector, extra: int, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), width = heads, 4
    prompt_len = budget.capacity + extra
    num_queries = selector.num_queries(prompt_len)
    # float64 lists and fp32 tensors must not disagree on near ties, so numbers are few and far apart.
    queries = torch.randint(-3, 4, (num_queries, num_heads, width), generator=generator).float()
    keys = torch.randint(-3, 4, (num_kv_heads, prompt_len, width), generator=generator).float()
    layer = seed % 5
    got = kept_positions(queries, keys, layer, budget, selector, KERNELS)

    start, stop = budget.num_sink, prompt_len - budget.num_window - budget.num_recent
    for head in range(num_kv_heads):
        if isinstance(selector, Random):
            smooth = [row_by_lists.chance(layer, head, p) for p in range(start, stop)]
        else:
            smooth = _smoothed(as_variant(selector), queries, keys, start, stop)[head]
        row = got[head].tolist()
        selected = row[budget.num_sink : budget.num_sink + budget.num_topk]
        assert selected == sorted(set(selected)) and all(start <= p < stop for p in selected)
        _assert_best(selected, smooth, start, budget.num_topk)
        parts = (budget.num_sink, budget.num_topk, budget.num_window, budget.num_recent)
        want = row_by_lists.row_after_prefill(prompt_len, *parts, selected)
        assert row == want


def _smoothed(rule: Variant, queries: torch.Tensor, keys: torch.Tensor, start: int, stop: int) -> list[list[float]]:
    over_row, group_max = rule.softmax_over == "row", rule.group_reduce == "max"
    votes = row_by_lists.votes(queries.tolist(), keys.tolist(), start, stop, over_row, group_max)
    return [row_by_lists.pooled(own, rule.pool_width, rule.pooling, rule.pool_half_life) for own in votes]


def _assert_best(selected: list[int], scores: list[float], start: int, count: int) -> None:
    """``selected`` is the list program's choice, up to scores that differ by rounding only."""
    want = [start + i for i in row_by_lists.best(scores, count)]
    if selected == want:
        return
    chosen = sorted(scores[p - start] for p in selected)
    ideal = sorted(scores[p - start] for p in want)
    assert chosen == pytest.approx(ideal, rel=1e-4, abs=1e-6), (selected, want)


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("group_max", [False, True])
@pytest.mark.parametrize("chunk", [7, 64, 4096])
@pytest.mark.parametrize("num_queries", [1, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # met as they lie, and widened chunk by chunk
def test_chunked_scores_equal_the_reference(
    over_row: bool, group_max: bool, chunk: int, num_queries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_queries + chunk)
    queries, keys = torch.randn(num_queries, 6, 16), torch.randn(2, 200, 16).to(dtype)
    for start, stop in ((0, 199), (4, 190), (30, 31), (190, 198)):  # of the last some queries see nothing
        args = (queries, keys, 200 - num_queries, start, stop)
        want = reference.snapkv_scores(*args, over_row=over_row, group_max=group_max)
        got = snapkv_scores(*args, over_row=over_row, group_max=group_max, chunk=chunk)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_with_learned_sinks(over_row: bool, chunk: int, dtype: torch.dtype) -> None:
    """As the list-based program has them, and every chunking; kernels of a layer carry its sinks."""
    torch.manual_seed(chunk)
    queries, keys, sinks = torch.randn(9, 6, 16), torch.randn(2, 60, 16).to(dtype), 2 * torch.randn(6)
    kernels = bind("cpu").with_sinks(sinks)
    for start, stop in ((0, 59), (4, 50), (30, 31), (52, 58)):
        for group_max in (False, True):
            args, options = (queries, keys, 51, start, stop), {"over_row": over_row, "group_max": group_max}
            want = reference.snapkv_scores(*args, **options, sinks=sinks)
            listed = row_by_lists.votes(
                queries.tolist(), keys.tolist(), start, stop, over_row, group_max, sinks.tolist()
            )
            torch.testing.assert_close(want, torch.tensor(listed), atol=1e-5, rtol=1e-5)
            got = snapkv_scores(*args, **options, sinks=sinks, chunk=chunk)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            assert torch.equal(kernels.snapkv_scores(*args, **options), snapkv_scores(*args, **options, sinks=sinks))


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_with_a_cap(over_row: bool, chunk: int, dtype: torch.dtype) -> None:
    """As the list-based program has them, and every chunking; kernels carry a cap, with sinks and without."""
    torch.manual_seed(chunk)
    queries, keys, sinks = torch.randn(9, 6, 16), torch.randn(2, 60, 16).to(dtype), 2 * torch.randn(6)
    capped, cap = bind("cpu").with_cap(0.7), 0.7
    for start, stop in ((0, 59), (4, 50), (30, 31), (52, 58)):
        for own, kernels in ((None, capped), (sinks, capped.with_sinks(sinks))):
            args, options = (queries, keys, 51, start, stop), {"over_row": over_row, "group_max": own is None}
            want = reference.snapkv_scores(*args, **options, sinks=own, cap=cap)
            lists = queries.tolist(), keys.tolist(), start, stop, over_row, own is None
            listed = row_by_lists.votes(*lists, None if own is None else own.tolist(), cap)
            torch.testing.assert_close(want, torch.tensor(listed), atol=1e-5, rtol=1e-5)
            got = snapkv_scores(*args, **options, sinks=own, cap=cap, chunk=chunk)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            found = snapkv_scores(*args, **options, sinks=own, cap=cap)
            assert torch.equal(kernels.snapkv_scores(*args, **options), found)


def test_scores_are_fp32_whatever_the_storage() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(8, 4, 16), torch.randn(2, 100, 16)
    half = snapkv_scores(queries.bfloat16(), keys.bfloat16(), 92, 4, 90, over_row=False, group_max=False)
    assert half.dtype == torch.float32
    want = reference.snapkv_scores(
        queries.bfloat16().float(), keys.bfloat16().float(), 92, 4, 90, over_row=False, group_max=False
    )
    torch.testing.assert_close(half, want, atol=1e-5, rtol=1e-5)


def test_a_query_that_is_no_number_has_no_vote() -> None:
    queries, keys = torch.randn(8, 4, 16), torch.randn(2, 100, 16)
    queries[3, 2] = float("nan")
    scores = snapkv_scores(queries, keys, 92, 4, 90, over_row=False, group_max=False)
    torch.testing.assert_close(scores.sum(-1), torch.tensor([16.0, 15.0]))


def test_votes_sum_to_the_number_of_queries() -> None:
    """Over the candidates every query hands out exactly one vote per head."""
    queries, keys = torch.randn(8, 4, 16), torch.randn(2, 100, 16)
    scores = snapkv_scores(queries, keys, 92, 4, 90, over_row=False, group_max=False)
    torch.testing.assert_close(scores.sum(-1), torch.full((2,), 16.0))


@pytest.mark.parametrize(("field", "value"), [("observation_len", 0), ("pool_half_life", -1), ("pool_half_life", 0.5)])
def test_wrong_settings_are_refused_with_their_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SnapKV(**{field: value})  # type: ignore[arg-type]


# The diverse share: votes choose first, then the keys that are most unlike the rest.


@pytest.mark.parametrize("chunk", [7, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_diversity_equals_the_reference(chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(chunk)
    keys = (torch.randn(3, 100, 16) + 0.5).to(dtype)
    keys[1, 30] = 0.0  # no direction
    for start, stop in ((0, 100), (4, 90), (30, 31)):
        want = reference.key_diversity(keys, start, stop)
        torch.testing.assert_close(key_diversity(keys, start, stop, chunk=chunk), want)
        assert want.dtype == torch.float32 and want.isfinite().all()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("num_scored", [0, 3, 9])
def test_diverse_equals_the_list_based_program(share: float, heads: tuple[int, int], num_scored: int) -> None:
    torch.manual_seed(heads[0])
    budget = KVBudget(num_sink=2, num_topk=7, num_recent=3)
    selector = Diverse(observation_len=4, pool_half_life=2, share=share, num_scored=num_scored)
    queries, keys = 2 * torch.randn(40, heads[0], 8), torch.randn(heads[1], 40, 8) + 0.3
    got = kept_positions(queries[-4:], keys, 0, budget, selector, KERNELS)
    assert torch.equal(got, kept_positions(queries[-4:], keys, 0, budget, as_variant(selector), KERNELS))
    votes = row_by_lists.votes(queries[-4:].tolist(), keys.tolist(), 2, 37, False, False)
    for head in range(heads[1]):
        pooled = row_by_lists.pooled(votes[head], POOL_WIDTH, "max", 2)
        own = sorted(range(35), key=lambda i: (-pooled[i], i))[
            : min(num_scored, 7) + math.ceil((1 - share) * max(7 - num_scored, 0))
        ]
        unlike = row_by_lists.pooled(unlike_mean(keys[head].tolist())[2:37], POOL_WIDTH, "max", 0)
        others = sorted((i for i in range(35) if i not in own), key=lambda i: (-unlike[i], i))
        assert got[head, 2:9].tolist() == sorted(2 + i for i in [*own, *others[: 7 - len(own)]])


def unlike_mean(keys: list[list[float]]) -> list[float]:
    """``-cos`` of each key and the mean of all directions, in plain numbers."""
    directions = [[x / math.hypot(*key) for x in key] for key in keys]
    mean = [sum(column) / len(keys) for column in zip(*directions, strict=True)]
    return [-sum(x * m for x, m in zip(own, mean, strict=True)) / math.hypot(*mean) for own in directions]


def test_an_unlike_key_stays_that_no_query_looks_at() -> None:
    queries, keys = torch.zeros(8, 1, 4), torch.zeros(1, 60, 4)
    keys[..., 1] = 1.0
    queries[-4:, 0, 0] = keys[0, 20, 0] = 10.0  # the question points at token 20
    keys[0, 40] = torch.tensor([0.0, 0.0, 3.0, 0.0])  # nothing points at token 40
    budget = KVBudget(num_sink=0, num_topk=2 * POOL_WIDTH, num_recent=8)
    kept = [
        kept_positions(queries, keys, 0, budget, selector, KERNELS)[0].tolist()
        for selector in (SnapKV(pool_half_life=0), Diverse(pool_half_life=0, share=0.5, num_scored=0))
    ]
    assert 20 in kept[0] and 40 not in kept[0]
    assert 20 in kept[1] and 40 in kept[1]


def test_no_share_is_snapkv_and_it_needs_no_more_queries() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(32, 4, 16), torch.randn(2, 200, 16)
    budget = KVBudget.of(64)
    alike = SnapKV(), Diverse(share=0, num_scored=0), Diverse()  # 44 top-k slots, and the first 128 are SnapKV's
    kept = [kept_positions(queries, keys, 0, budget, own, KERNELS) for own in alike]
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])
    assert make_selector("diverse") == Diverse(share=0.75, num_scored=128)
    assert Diverse().num_queries(1000) == 32 and not Diverse().needs_all_queries


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True])
def test_a_share_outside_0_to_1_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match="share is .*; it must be a number from 0 to 1"):
        Diverse(share=share)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="diverse_share is .*; it must be a number from 0 to 1"):
        Variant(diverse_share=share)  # type: ignore[arg-type]


# Hops: the tokens voted for vote in turn, as the list-based program and the reference have it.


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


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1)])
def test_hops_with_learned_sinks(chunk: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(chunk)
    queries, keys, sinks = torch.randn(100, heads[0], 16), torch.randn(heads[1], 100, 16), 2 * torch.randn(heads[0])
    for start, stop in ((0, 99), (30, 32), (30, 31)):
        voters = torch.stack([torch.randperm(stop - start)[:8] for _ in range(heads[1])])
        args = torch.rand(voters.shape), voters, queries, keys, start, stop
        want = reference.hop_scores(*args, sinks=sinks)
        assert not torch.allclose(want, reference.hop_scores(*args)) or stop - start == 1
        torch.testing.assert_close(hop_scores(*args, sinks=sinks, chunk=chunk), want)
        capped = reference.hop_scores(*args, sinks=sinks, cap=0.7)
        assert not torch.allclose(want, capped) or stop - start == 1
        torch.testing.assert_close(hop_scores(*args, sinks=sinks, cap=0.7, chunk=chunk), capped)
        torch.testing.assert_close(bind("cpu").with_cap(0.7).hop_scores(*args, sinks=sinks), capped)


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


# A selector that this file brings along: registered from outside, used by its name, the package untouched.

BUDGET = KVBudget(num_sink=2, num_topk=30, num_recent=32)
PROMPT = [5 + 7 * i % 900 for i in range(200)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, return_kept=True, ignore_eos=True)
CANDIDATES = range(2, 200 - 32)
SETTINGS = {"budget": BUDGET, "max_model_len": 256, "max_rows": 2, "progress": False}


@dataclass(frozen=True, kw_only=True)
class Spread(Selector):
    """Every so many-th candidate, further along by one in every layer."""

    name: ClassVar[str] = "spread"

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        assert queries.shape[0] == self.num_queries(keys.shape[1])
        step = len(candidates) // num_topk
        kept = candidates.start + layer + step * torch.arange(num_topk, device=keys.device)
        return kept.expand(keys.shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class Loudest(Selector):
    """The longest keys, whatever the query."""

    name: ClassVar[str] = "loudest"

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        best = self.scores(queries, keys, candidates, kernels).topk(num_topk).indices.sort().values
        return best + candidates.start

    def scores(self, queries: Tensor, keys: Tensor, candidates: range, kernels: Kernels) -> Tensor:
        return keys[:, candidates.start : candidates.stop].float().norm(dim=-1) * queries.shape[0]


@pytest.fixture
def _registered() -> Iterator[None]:
    SELECTORS.add("spread", Spread)
    SELECTORS.add("loudest", Loudest)
    yield
    SELECTORS.remove("spread")
    SELECTORS.remove("loudest")


def spread_positions(layer: int) -> tuple[int, ...]:
    step = len(CANDIDATES) // BUDGET.num_topk
    return tuple(CANDIDATES.start + layer + step * i for i in range(BUDGET.num_topk))


def kept(output: RequestOutput) -> tuple[tuple[tuple[int, ...], ...], ...]:
    assert output.compression is not None and output.compression.kept_positions is not None
    return output.compression.kept_positions


@pytest.mark.usefixtures("_registered")
def test_an_engine_and_a_request_name_a_selector_from_outside() -> None:
    with LLM(TINY_MODEL, selector="spread", **SETTINGS) as llm:  # type: ignore[arg-type]
        (own,) = llm.generate([PROMPT], PARAMS)
        num_heads = llm.model_config.num_kv_heads
        (default_on_it,) = llm.generate([PROMPT], PARAMS, selector="snapkv")
    assert kept(own) == tuple((spread_positions(layer),) * num_heads for layer in range(len(kept(own))))
    with LLM(TINY_MODEL, heads="none", **SETTINGS) as llm:  # type: ignore[arg-type]
        (default,) = llm.generate([PROMPT], PARAMS)
        both = llm.generate([PROMPT, PROMPT], PARAMS, selector=Spread())
        *_, streamed = llm.stream(PROMPT, PARAMS, selector="spread")
    assert kept(both[0]) == kept(both[1]) == kept(streamed) == kept(own)
    assert [output.token_ids for output in (*both, streamed)] == [own.token_ids] * 3
    assert kept(default_on_it) == kept(default) != kept(own)
    assert default_on_it.token_ids == default.token_ids


def test_a_name_that_nobody_registered_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="selector is 'spread'; it must be one of snapkv, hops, diverse"):
        LLM(TINY_MODEL, selector="spread", **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="selector is 5; it must be a Selector or one of snapkv, hops, diverse"):
        LLM(TINY_MODEL, selector=5, **SETTINGS)  # type: ignore[arg-type]
