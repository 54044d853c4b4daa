"""Rows in FP8 hold what rows in fp32 hold, within the bounds of the format, and count their bytes."""

from __future__ import annotations

import pytest
import torch

from snapstream.cache.compress import write_rows
from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.config import KVBudget, ModelConfig
from snapstream.kernels import fp8
from tests.unit.cache.test_compress import BUDGET, MODEL, SELECTOR

WIDE, NARROW = KVSpec.of(MODEL, "float32"), KVSpec.of(MODEL, "float32", "fp8")


def caches() -> tuple[KVCache, KVCache]:
    return KVCache(WIDE, 3, 16, "cpu"), KVCache(NARROW, 3, 16, "cpu")


def meant(cache: KVCache, layer: int) -> list[torch.Tensor]:
    """K and V of a layer as numbers ``[rows+1, G, C, E]``."""
    scales = cache.scales(layer)
    assert scales is not None
    pairs = zip((cache.k[layer], cache.v[layer]), scales, strict=True)
    return [fp8.dequantise(stored, scale[..., None, None]) for stored, scale in pairs]


@pytest.mark.parametrize("prompt_len", [1, 9, 12, 40])
@pytest.mark.parametrize("budget", [BUDGET, KVBudget(num_sink=2, num_topk=4, num_window=3, num_recent=5)])
def test_a_row_is_the_fp32_row_within_a_sixteenth(prompt_len: int, budget: KVBudget) -> None:
    torch.manual_seed(prompt_len)
    wide, narrow = caches()
    keys, values = (
        torch.randn(2, prompt_len, 4) * torch.tensor([0.1, 30.0])[:, None, None],
        torch.randn(2, prompt_len, 4),
    )
    queries = torch.randn(4, 4, 4)
    kept = [write_rows(cache, 1, (0, 2), keys, values, queries, budget, SELECTOR) for cache in (wide, narrow)]
    assert kept[0] is kept[1] is None or torch.equal(kept[0], kept[1])  # type: ignore[arg-type]
    for got, want, tokens in zip(meant(narrow, 1), (wide.k[1], wide.v[1]), (keys, values), strict=True):
        bound = want.abs() / 16 + tokens.abs().amax((1, 2))[None, :, None, None] * 2**-16
        assert ((got - want).abs() <= bound).all()
        assert want[[0, 2]].any() and not got[[1, 3]].any()


def test_scales_are_of_the_whole_prompt_and_of_its_rows_alone() -> None:
    """A large token that was not kept counts: more like it may follow."""
    _, cache = caches()
    keys, values = torch.ones(2, 40, 4), torch.ones(2, 40, 4)
    keys[1, 20], values[0, 21] = -1000.0, 5000.0
    write_rows(cache, 0, (1,), keys, values, None, KVBudget(num_sink=2, num_topk=0, num_recent=6), SELECTOR)
    assert cache.k_scale is not None and cache.v_scale is not None
    assert torch.equal(cache.k_scale[0, 1], fp8.scale_of(keys)) and cache.k_scale[0, 1, 1] == 8.0
    assert torch.equal(cache.v_scale[0, 1], fp8.scale_of(values)) and cache.v_scale[0, 1, 0] == 64.0
    for scale in (cache.k_scale, cache.v_scale):
        assert (scale[1] == 1).all() and (scale[0, [0, 2, 3]] == 1).all()


def test_a_new_owner_brings_new_scales() -> None:
    _, cache = caches()
    for size in (1e4, 1e-4):
        tokens = torch.full((2, 5, 4), size)
        write_rows(cache, 0, (1,), tokens, tokens, None, BUDGET, SELECTOR)
    for got in meant(cache, 0):
        torch.testing.assert_close(got[1, :, :5], tokens, rtol=1 / 16, atol=0)


def test_bytes_are_counted_with_the_scales() -> None:
    for rows, capacity in ((3, 16), (1, 100)):
        cache = KVCache(NARROW, rows, capacity, "cpu")
        assert cache.num_bytes == (rows + 1) * NARROW.row_bytes(capacity)
        assert NARROW.row_bytes(capacity) == 2 * 2 * 2 * (capacity * 4 + 4)
        wide = KVCache(WIDE, rows, capacity, "cpu")
        assert wide.num_bytes == (rows + 1) * WIDE.row_bytes(capacity)


def test_model_of_the_bytes() -> None:
    llama = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=8, max_position=131072,
    )  # fmt: skip
    row_bytes = KVSpec.of(llama, "bfloat16", "fp8").row_bytes(8192)
    assert row_bytes == 2**29 + 32 * 8 * 2 * 4  # half of a bf16 row, and 2 KiB
