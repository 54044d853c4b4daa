"""Selection against the list-based program on random cases, edge cases among them; votes against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evals.selectors import Random, Variant, as_variant
from snapstream.cache.compress import kept_positions
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget, Selector
from snapstream.kernels import reference
from snapstream.kernels.bound import bind
from snapstream.kernels.scores import snapkv_scores
from tests.unit.cache import row_by_lists

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
