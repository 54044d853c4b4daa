"""Scores and selection against the list-based program on random cases, edge cases among them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.cache.compress import kept_positions
from snapstream.cache.snapkv import MAX_HALVINGS, carry_ahead, pool_scores, select_topk
from snapstream.config import KVBudget, SnapKVConfig
from snapstream.kernels import reference
from snapstream.kernels.scores import hop_scores, snapkv_scores
from tests.unit.cache import row_by_lists

configs = st.builds(
    SnapKVConfig,
    window_len=st.integers(1, 9),
    pool_kernel=st.sampled_from([1, 3, 5, 7, 63]),
    pooling=st.sampled_from(["avg", "max"]),
    pool_half_life=st.sampled_from([0, 1, 3, 8]),
    softmax_over=st.sampled_from(["candidates", "row"]),
    group_reduce=st.sampled_from(["sum", "max"]),
    selection=st.sampled_from(["snapkv", "snapkv", "random"]),
)
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
    config=configs,
    extra=st.integers(1, 14),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    seed=st.integers(0, 2**31),
)
@example(KVBudget(num_sink=0, num_topk=3, num_recent=1), SnapKVConfig(window_len=9), 1, (4, 2), 0)  # window > N, R = 1
@example(KVBudget(num_sink=3, num_topk=0, num_recent=2), SnapKVConfig(window_len=2), 5, (4, 2), 1)  # K = 0
@example(KVBudget(num_sink=1, num_topk=4, num_recent=2), SnapKVConfig(window_len=4), 1, (2, 1), 2)  # N = C + 1
def test_kept_positions_equal_the_list_based_program(
    budget: KVBudget, config: SnapKVConfig, extra: int, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), width = heads, 4
    prompt_len = budget.capacity + extra
    window = min(config.window_len, prompt_len)
    # float64 lists and fp32 tensors must not disagree on near ties, so numbers are few and far apart.
    queries = torch.randint(-3, 4, (window, num_heads, width), generator=generator).float()
    keys = torch.randint(-3, 4, (num_kv_heads, prompt_len, width), generator=generator).float()
    layer = seed % 5
    got = kept_positions(queries, keys, layer, budget, config)

    start, stop = budget.num_sink, prompt_len - budget.num_window - budget.num_recent
    scores = row_by_lists.votes(
        queries.tolist(),
        keys.tolist(),
        start,
        stop,
        config.softmax_over == "row",
        config.group_reduce == "max",
    )
    for head in range(num_kv_heads):
        if config.selection == "random":
            smooth = [row_by_lists.chance(layer, head, p) for p in range(start, stop)]
        else:
            smooth = row_by_lists.pooled(scores[head], config.pool_kernel, config.pooling, config.pool_half_life)
        row = got[head].tolist()
        selected = row[budget.num_sink : budget.num_sink + budget.num_topk]
        assert selected == sorted(set(selected)) and all(start <= p < stop for p in selected)
        _assert_best(selected, smooth, start, budget.num_topk)
        parts = (budget.num_sink, budget.num_topk, budget.num_window, budget.num_recent)
        want = row_by_lists.row_after_prefill(prompt_len, *parts, selected)
        assert row == want


def _assert_best(selected: list[int], scores: list[float], start: int, count: int) -> None:
    """``selected`` is the list program's choice, up to scores that differ by rounding only."""
    want = [start + i for i in row_by_lists.best(scores, count)]
    if selected == want:
        return
    chosen = sorted(scores[p - start] for p in selected)
    ideal = sorted(scores[p - start] for p in want)
    assert chosen == pytest.approx(ideal, rel=1e-4, abs=1e-6), (selected, want)


@settings(max_examples=300)
@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3),
    count=st.integers(1, 14),
)
def test_ties_go_to_the_lower_position(scores: list[list[int]], count: int) -> None:
    got = select_topk(torch.tensor(scores, dtype=torch.float32), count)
    assert got.tolist() == [row_by_lists.best(row, count) for row in scores]


@pytest.mark.parametrize("over_row", [False, True])
@pytest.mark.parametrize("group_max", [False, True])
@pytest.mark.parametrize("chunk", [7, 64, 4096])
@pytest.mark.parametrize("window", [1, 16, 40])
def test_chunked_scores_equal_the_reference(over_row: bool, group_max: bool, chunk: int, window: int) -> None:
    torch.manual_seed(window + chunk)
    queries, keys = torch.randn(window, 6, 16), torch.randn(2, 200, 16)
    for start, stop in ((0, 199), (4, 190), (30, 31)):
        args = (queries, keys, 200 - window, start, stop)
        want = reference.snapkv_scores(*args, over_row=over_row, group_max=group_max)
        got = snapkv_scores(*args, over_row=over_row, group_max=group_max, chunk=chunk)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


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
@pytest.mark.parametrize("window", [1, 4, 50])
def test_hops_equal_the_list_based_program(num_hops: int, heads: tuple[int, int], window: int) -> None:
    torch.manual_seed(num_hops)
    budget = KVBudget(num_sink=2, num_topk=7, num_recent=3)
    config = SnapKVConfig(window_len=window, num_hops=num_hops, pool_kernel=3, pooling="avg", pool_half_life=2)
    queries, keys = 2 * torch.randn(40, heads[0], 8), torch.randn(heads[1], 40, 8)
    got = kept_positions(queries, keys, 0, budget, config)
    scores = row_by_lists.votes(queries[-window:].tolist(), keys.tolist(), 2, 37, False, False)
    latest = [row_by_lists.normalised(own) for own in scores]
    total = latest
    for _ in range(num_hops):
        latest = row_by_lists.hop(latest, queries.tolist(), keys.tolist(), 2, window)
        total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, latest, strict=True)]
    for head in range(heads[1]):
        own = row_by_lists.pooled(scores[head], 3, "avg", 2)
        smooth = row_by_lists.pooled(total[head], 3, "avg", 0)  # what hops find is not carried ahead
        assert got[head, 2:9].tolist() == [2 + i for i in row_by_lists.best_with_hops(own, smooth, 7)]


def test_a_hop_finds_what_the_question_does_not_look_at() -> None:
    """The window points at token 20, whose own query points at token 30."""
    queries, keys = torch.zeros(60, 1, 4), torch.zeros(1, 60, 4)
    queries[-4:, 0, 0] = keys[0, 20, 0] = 10.0
    queries[20, 0, 1] = keys[0, 30, 1] = 10.0
    budget = KVBudget(num_sink=0, num_topk=2, num_recent=8)
    configs = [SnapKVConfig(window_len=4, pool_kernel=1, pool_half_life=0, num_hops=hops) for hops in (0, 1)]
    kept = [kept_positions(queries, keys, 0, budget, config)[0, :2] for config in configs]
    assert kept[0].tolist() == [0, 20] and kept[1].tolist() == [20, 30]


def test_half_of_the_slots_are_the_windows_whatever_hops_find() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(200, 4, 16), torch.randn(2, 200, 16)
    kept = [
        kept_positions(queries, keys, 0, KVBudget(num_sink=0, num_topk=size, num_recent=8),
                       SnapKVConfig(window_len=8, num_hops=hops))
        for hops, size in ((0, 20), (9, 40), (9, 39))
    ]  # fmt: skip
    for head in range(2):
        first, even, odd = (set(row[head, : len(row[head]) - 8].tolist()) for row in kept)
        assert first <= even and first <= odd and len(even) == 40 and len(odd) == 39


def test_scores_are_fp32_whatever_the_storage() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(8, 4, 16), torch.randn(2, 100, 16)
    half = snapkv_scores(queries.bfloat16(), keys.bfloat16(), 92, 4, 90, over_row=False, group_max=False)
    assert half.dtype == torch.float32
    want = reference.snapkv_scores(
        queries.bfloat16().float(), keys.bfloat16().float(), 92, 4, 90, over_row=False, group_max=False
    )
    torch.testing.assert_close(half, want, atol=1e-5, rtol=1e-5)


def test_votes_of_a_window_sum_to_its_length() -> None:
    """Over the candidates every query hands out exactly one vote per head."""
    queries, keys = torch.randn(8, 4, 16), torch.randn(2, 100, 16)
    scores = snapkv_scores(queries, keys, 92, 4, 90, over_row=False, group_max=False)
    torch.testing.assert_close(scores.sum(-1), torch.full((2,), 16.0))


def test_pooling_keeps_the_neighbours_of_a_hit() -> None:
    scores = torch.zeros(1, 20)
    scores[0, 10] = 1.0
    for pooling in ("avg", "max"):
        config = SnapKVConfig(pool_kernel=5, pooling=pooling, pool_half_life=0)
        assert select_topk(pool_scores(scores, config), 5).tolist() == [[8, 9, 10, 11, 12]]


def test_a_hit_reaches_further_ahead_than_behind() -> None:
    """The stronger of two hits gets the longer tail; a slot more goes to whoever has more votes left."""
    scores = torch.zeros(1, 100)
    scores[0, 20], scores[0, 60] = 8.0, 1.0
    config = SnapKVConfig(pool_kernel=3, pool_half_life=4)
    pooled = pool_scores(scores, config)
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


def test_random_selection_differs_by_layer_and_head_and_spreads_over_the_prompt() -> None:
    scores = torch.stack([reference.random_scores(layer, 2, 4, 4004, "cpu") for layer in range(3)])  # [L, G, n]
    assert torch.equal(scores[1], reference.random_scores(1, 2, 0, 5000, "cpu")[:, 4:4004])  # by position alone
    assert ((scores >= 0) & (scores < 1)).all()
    hits = torch.zeros_like(scores).scatter_(-1, scores.topk(1000).indices, 1.0)
    by_fifth = hits.unflatten(-1, (5, -1)).sum(-1)  # [L, G, 5]; 200 expected, standard deviation 12
    assert (by_fifth - 200).abs().max() < 50
    flat = hits.flatten(0, 1)
    shared = flat @ flat.T - 1000 * torch.eye(6)  # 250 expected of two independent choices
    assert (shared + 250 * torch.eye(6) - 250).abs().max() < 60
    assert (flat[:, 1:] * flat[:, :-1]).sum(-1).sub(250).abs().max() < 60  # neighbours are independent too


@pytest.mark.parametrize(
    ("field", "value"),
    [("window_len", 0), ("num_hops", -1), ("selection", "best"), ("pool_kernel", 4), ("pool_kernel", 0),
     ("pool_half_life", -1), ("pool_half_life", 0.5),
     ("pooling", "mean"), ("softmax_over", "all"), ("group_reduce", "mean")],
)  # fmt: skip
def test_wrong_settings_are_refused_with_their_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SnapKVConfig(**{field: value})
