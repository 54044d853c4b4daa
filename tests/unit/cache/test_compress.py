"""Rows hold the right keys and values after prefill, whatever else is in the cache."""

from __future__ import annotations

import pytest
import torch

from evals.selectors import Variant
from snapstream.cache.compress import kept_positions, write_rows
from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.config import KVBudget, ModelConfig
from snapstream.kernels.bound import bind

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=8, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=8, max_position=64,
)  # fmt: skip
BUDGET = KVBudget(num_sink=2, num_topk=4, num_recent=6)
SELECTOR = Variant(observation_len=4, pool_width=3)
KERNELS = bind("cpu")


def _cache() -> KVCache:
    cache = KVCache(KVSpec.of(MODEL, "float32"), num_rows=3, capacity=16, device="cpu")
    cache.k.fill_(float("nan"))  # poison: a slot that nobody wrote must never be read
    cache.v.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("prompt_len", [1, 2, 11, 12])
def test_a_prompt_that_fits_is_kept_whole(prompt_len: int) -> None:
    cache, keys, values = _cache(), torch.randn(2, prompt_len, 4), torch.randn(2, prompt_len, 4)
    assert write_rows(cache, 1, (0, 2), keys, values, None, BUDGET, SELECTOR) is None
    for row in (0, 2):
        assert torch.equal(cache.k[1, row, :, :prompt_len], keys)
        assert torch.equal(cache.v[1, row, :, :prompt_len], values)
    assert cache.k[0].isnan().all() and cache.k[1, 1].isnan().all() and cache.k[1, 0, :, prompt_len:].isnan().all()


def test_a_prompt_that_fits_moves_its_window_in_front_of_the_ring() -> None:
    cache, keys, values = _cache(), torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    budget = KVBudget(num_sink=2, num_topk=4, num_window=3, num_recent=5)
    assert write_rows(cache, 1, (0, 2), keys, values, None, budget, SELECTOR) is None
    order = [0, 1, 6, 7, 8, 2, 3, 4, 5]  # no token is selected yet; 2 will be the first to be overwritten
    for row in (0, 2):
        assert torch.equal(cache.k[1, row, :, :9], keys[:, order])
        assert torch.equal(cache.v[1, row, :, :9], values[:, order])
    assert cache.k[1, 1].isnan().all() and cache.k[1, 0, :, 9:].isnan().all()


@pytest.mark.parametrize("prompt_len", [13, 14, 40])
@pytest.mark.parametrize(
    "budget",
    [BUDGET, KVBudget(num_sink=2, num_topk=0, num_recent=3), KVBudget(num_topk=2, num_window=3, num_recent=2)],
)
def test_a_longer_prompt_is_gathered_slot_by_slot(prompt_len: int, budget: KVBudget) -> None:
    torch.manual_seed(prompt_len)
    cache, keys, values = _cache(), torch.randn(2, prompt_len, 4), torch.randn(2, prompt_len, 4)
    queries = torch.randn(4, 4, 4) if budget.num_topk else None
    index = write_rows(cache, 0, (1,), keys, values, queries, budget, SELECTOR)
    assert index is not None and torch.equal(index, kept_positions(queries, keys, 0, budget, SELECTOR, KERNELS))
    for head in range(2):
        for slot, position in enumerate(index[head].tolist()):
            assert torch.equal(cache.k[0, 1, head, slot], keys[head, position])
            assert torch.equal(cache.v[0, 1, head, slot], values[head, position])
    assert cache.k[0, 1, :, budget.capacity :].isnan().all()  # a smaller budget leaves the rest of the row alone
    assert cache.k[0, 0].isnan().all() and cache.k[1].isnan().all()


def test_selection_follows_the_attention() -> None:
    """A key that the last queries point at is kept, in the head that points at it."""
    keys, queries = torch.zeros(2, 40, 4), torch.zeros(4, 4, 4)
    keys[0, 17], keys[1, 23] = 10.0, 10.0
    queries[:, :2], queries[:, 2:] = 1.0, 1.0
    index = kept_positions(queries, keys, 0, BUDGET, SELECTOR, KERNELS)
    assert {16, 17, 18} <= set(index[0].tolist()) and {22, 23, 24} <= set(index[1].tolist())
    assert 23 not in index[0].tolist()[2:6] and 17 not in index[1].tolist()[2:6]
