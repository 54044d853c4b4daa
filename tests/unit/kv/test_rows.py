"""Slot arithmetic against the list-based program, and the paper's own worked example."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evals.selectors import Variant
from snapstream.config import KVBudget, KVDType, ModelConfig
from snapstream.exec.rows import Rows
from snapstream.kernels import reference
from snapstream.kernels.cpu import attention
from snapstream.kernels.formats import FP8
from snapstream.kernels.interface import HeadNorm, KernelVersion, RowPlaces, bind
from snapstream.kv import layout
from snapstream.kv.cache import KVCache, RowPartition
from snapstream.kv.compress import as_bitmap, as_positions, kept_positions, packed_bits, selected, write_rows
from snapstream.kv.prefix_store import PrefixBlocks
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.kv.spec import Full, KVSpec, Latent, Window
from snapstream.types import KeptBitmap
from tests.unit.kv.row_by_lists import feed, frozen_positions, row_after_prefill

budgets = st.builds(
    KVBudget,
    num_sink=st.integers(0, 6),
    num_topk=st.integers(0, 9),
    num_window=st.integers(0, 5),
    num_recent=st.integers(1, 9),
)


def ring_positions(budget: KVBudget, prompt_len: int) -> list[int]:
    """Prompt positions in the ring of a compressed row, in slot order (a rotation of the R before the window)."""
    first = prompt_len - budget.num_window - budget.num_recent
    shift = (prompt_len - layout.ring_start(budget, prompt_len)) % budget.num_recent  # slot of the oldest
    return [first + (i - shift) % budget.num_recent for i in range(budget.num_recent)]


@settings(max_examples=500)
@given(budget=budgets, prompt_len=st.integers(1, 60), fed=st.integers(0, 40))
@example(budget=KVBudget(num_sink=2, num_topk=3, num_recent=4), prompt_len=9, fed=9)  # N = C
@example(budget=KVBudget(num_sink=2, num_topk=3, num_recent=4), prompt_len=10, fed=9)  # N = C + 1
@example(budget=KVBudget(num_sink=6, num_topk=3, num_recent=1), prompt_len=1, fed=30)  # N < S, R = 1
@example(budget=KVBudget(num_sink=0, num_topk=0, num_recent=1), prompt_len=3, fed=5)
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=1), prompt_len=5, fed=9)  # N < S + W
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=3), prompt_len=12, fed=9)  # N = C, W > R
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=3), prompt_len=13, fed=9)  # N = C + 1
def test_slots_of_a_row_equal_the_list_based_program(budget: KVBudget, prompt_len: int, fed: int) -> None:
    selected = list(layout.candidates(budget, prompt_len))[: budget.num_topk]
    parts = (budget.num_sink, budget.num_topk, budget.num_window, budget.num_recent)
    want = row_after_prefill(prompt_len, *parts, selected)
    if layout.is_compressed(budget, prompt_len):
        window = list(range(prompt_len - budget.num_window, prompt_len))
        got = list(range(budget.num_sink)) + selected + window + ring_positions(budget, prompt_len)
    else:
        got = [None] * budget.capacity
        for slot, part in layout.uncompressed_parts(budget, prompt_len):
            got[slot : slot + len(part)] = part
    assert got == want

    start = layout.ring_start(budget, prompt_len)
    for step in range(fed):
        ordinal = prompt_len + step
        got[layout.slot_of(ordinal, start, budget.capacity)] = ordinal
        visible = layout.num_visible(ordinal + 1, budget.capacity)
        assert None not in got[:visible] and all(p is None for p in got[visible:])
    frozen = frozen_positions(prompt_len, *parts, selected)
    if prompt_len < budget.num_sink:  # output tokens complete the sinks
        frozen = range(budget.num_sink)
    want, _ = feed(want, frozen, prompt_len, fed)
    assert got == want


def test_without_a_window_region_a_prompt_that_fits_is_one_part_in_order() -> None:
    budget = KVBudget(num_sink=2, num_topk=3, num_recent=4)
    assert layout.uncompressed_parts(budget, 8) == [(0, range(8))]
    assert layout.uncompressed_parts(KVBudget(num_sink=2, num_topk=3, num_window=2, num_recent=4), 8) == [
        (0, range(2)), (2, range(6, 8)), (4, range(2, 6)),
    ]  # fmt: skip


def test_ring_of_the_papers_example() -> None:
    """S=1, R=4: after 26 tokens the ring holds 25, 26, 23, 24 (counted from 1) and token 27 replaces 23."""
    budget = KVBudget(num_sink=1, num_topk=0, num_recent=4)
    ring = {layout.slot_of(p, 1, budget.capacity): p for p in range(1, 27)}
    assert [ring[slot] for slot in (1, 2, 3, 4)] == [25, 26, 23, 24]
    assert layout.slot_of(27, 1, budget.capacity) == 3


def test_candidates_are_what_neither_sinks_nor_ring_hold() -> None:
    budget = KVBudget(num_sink=4, num_topk=8, num_recent=16)
    assert layout.candidates(budget, 28) == range(0)  # fits
    assert layout.candidates(budget, 29) == range(4, 13)
    assert layout.candidates(KVBudget(num_sink=4, num_topk=8, num_window=5, num_recent=11), 29) == range(4, 13)
    assert layout.candidates(KVBudget(num_sink=4, num_topk=0, num_recent=16), 100) == range(0)


def test_bytes_of_a_row() -> None:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=64, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=64, max_position=8,
    )  # fmt: skip
    spec = KVSpec.of(model, "bfloat16")
    assert spec.token_bytes() == 128 * 1024  # Llama-3.1-8B in bf16: 128 KiB per token
    assert spec.row_bytes(8192) == 2**30


def test_slots_for_the_window_come_out_of_the_ring() -> None:
    assert KVBudget.of(256) == KVBudget(num_sink=4, num_topk=188, num_recent=64)
    assert KVBudget.of(256, num_window=48) == KVBudget(num_sink=4, num_topk=188, num_window=48, num_recent=16)


@pytest.mark.parametrize("field", ["num_sink", "num_topk", "num_window", "num_recent"])
def test_negative_or_empty_regions_are_refused(field: str) -> None:
    sizes = {"num_sink": 4, "num_topk": 8, "num_window": 2, "num_recent": 8, field: -1}
    with pytest.raises(ValueError, match=f"{field} is -1"):
        KVBudget(**sizes)
    with pytest.raises(ValueError, match="num_recent is 0"):
        KVBudget(num_topk=3, num_recent=0)
    with pytest.raises(ValueError, match="num_window is 64; it must be a whole number from 0 to 63"):
        KVBudget.of(256, num_window=64)
    with pytest.raises(ValueError, match=r"35 slots is smaller than sinks \+ observation_len \(4 \+ 32 = 36\)"):
        KVBudget.of(35)


# Sizes of a cached token, by hand.

GROUPED = KVSpec(layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 3, num_heads=8, dtype="bfloat16")
LATENT = KVSpec(layers=(Latent(num_kv_heads=1, key_dim=576, value_dim=512),) * 3, num_heads=8)


def test_bytes_of_grouped_attention() -> None:
    assert GROUPED.token_size == 2 * 2 * 16
    assert GROUPED.row_bytes(10) == 10 * GROUPED.token_bytes() == 10 * 3 * 64 * 2
    assert GROUPED.staging_bytes(7) == 7 * 64 * 2  # one layer
    assert GROUPED.query_bytes(5) == 5 * 8 * 16 * 2


def test_fp8_rows_have_a_byte_per_number_and_two_scales_per_head() -> None:
    narrow = replace(GROUPED, kv_dtype="fp8")
    assert narrow.row_bytes(10) == 10 * 3 * 64 + 2 * 3 * 2 * 4
    assert narrow.staging_bytes(7) == GROUPED.staging_bytes(7)


def test_latents_are_stored_once() -> None:
    """As DeepSeek V3 stores them: 576 numbers for all heads, of which the values are the first 512."""
    assert LATENT.token_size == 576
    assert LATENT.row_bytes(10) == 10 * 3 * 576 * 4
    assert replace(LATENT, kv_dtype="fp8").scale_bytes() == 3 * 4


WINDOWS = replace(
    GROUPED,
    layers=tuple(
        Full(num_kv_heads=2, key_dim=16, value_dim=16)
        if size is None
        else Window(num_kv_heads=2, key_dim=16, value_dim=16, num_tokens=size)
        for size in (5, None, 3)
    ),
)


def test_windows_have_their_own_slots_whatever_the_budget() -> None:
    assert WINDOWS.row_bytes(10) == (5 + 10 + 3) * 64 * 2 and WINDOWS.row_bytes(2) == (5 + 2 + 3) * 64 * 2
    assert WINDOWS.limited(4).row_bytes(10) == (4 + 10 + 3) * 64 * 2  # no sequence is longer
    assert WINDOWS.visible_bytes(8, 20) == (5 + 8 + 3) * 64 * 2
    assert WINDOWS.visible_bytes(2, 2) == 3 * 2 * 64 * 2 == WINDOWS.visible_bytes(4, 4) - (4 + 4 + 3 - 6) * 64 * 2
    assert WINDOWS.max_slots(4) == 5 and WINDOWS.max_slots(6) == 6
    assert WINDOWS.token_bytes() == GROUPED.token_bytes() and WINDOWS.has_windows and not GROUPED.has_windows


def test_latents_of_several_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="latents of several sizes"):
        replace(LATENT, layers=(*LATENT.layers, Latent(num_kv_heads=1, key_dim=40, value_dim=32)))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 9, 30])
def test_a_window_holds_the_last_tokens_of_a_prompt(prompt_len: int, kv_dtype: KVDType) -> None:
    """Token p lies in slot p mod n, in each format, in every row that the prompt is written to and in no other."""
    spec = replace(WINDOWS, dtype="float32", kv_dtype=kv_dtype)
    cache = KVCache(spec, 3, 6, "cpu")
    assert cache.num_bytes == 4 * spec.row_bytes(6)
    budget = KVBudget(num_sink=1, num_topk=0, num_recent=5)
    whole = {}
    for layer in range(3):
        keys, values = torch.randn(2, 2, prompt_len, 16)
        whole[layer] = keys, values
        write_rows(cache, layer, (0, 2), keys, values, None, budget, SnapKV())
    for layer, size in ((0, 5), (2, 3)):
        seen = range(max(0, prompt_len - size), prompt_len)
        for row in (0, 2):
            for (stored, scale), tokens in zip(cache.parts(layer, row), whole[layer], strict=True):
                by_slot = scale if kv_dtype == "int8" else scale if scale is None else scale[:, None]
                found = stored.float() if by_slot is None else stored.float() * by_slot[..., None]
                assert stored.shape[1] == size
                for p in seen:
                    torch.testing.assert_close(found[:, p % size], tokens[:, p], rtol=0.07, atol=0.05)
        assert not cache.parts(layer, 1)[0][0].float().any()
        rows = cache.layer(layer)
        assert rows.k.shape == (4, 2, size, 16) and rows.k[2].data_ptr() == cache.parts(layer, 2)[0][0].data_ptr()


def test_places_of_the_next_token_by_layer() -> None:
    state = Rows(2, "cpu")
    state.admit(torch.tensor([0, 1]), torch.tensor([[4, 1, 6], [20, 1, 6]]))
    first, full, last = state.places(torch.tensor([0, 1]), WINDOWS)
    assert first.slots.tolist() == [4, 0] and first.lengths.tolist() == [5, 5]
    assert full.slots.tolist() == [4, 1 + 19 % 5] and full.lengths.tolist() == [5, 6]
    assert last.slots.tolist() == [1, 2] and last.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("spec", [GROUPED, replace(LATENT, layers=(replace(LATENT.layers[0], expanded_dim=192),))])
def test_the_prefix_store_takes_what_it_is_said_to_take(spec: KVSpec) -> None:
    """Of latents nothing that is expanded from them."""
    blocks = PrefixBlocks(spec, 4, 16)
    for block in range(4):
        blocks.whole(block)
    assert blocks.num_bytes == 4 * 16 * spec.prefix_token_bytes


# Storage by spec: bytes are those that the spec counts; latents lie in one tensor whose first numbers are values.

KV_CACHE_GROUPED = KVSpec(layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 3, num_heads=6)
UNEVEN = KVSpec(layers=(Full(num_kv_heads=2, key_dim=24, value_dim=16),) * 2, num_heads=4, dtype="bfloat16")
KV_CACHE_LATENT = KVSpec(layers=(Latent(num_kv_heads=1, key_dim=40, value_dim=32),) * 2, num_heads=4)
BF16 = KVSpec(layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 2, num_heads=4, kv_dtype="bfloat16")
INT8 = KVSpec(layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 2, num_heads=4, kv_dtype="int8")
FP8_SPEC = KVSpec(
    layers=(Full(num_kv_heads=2, key_dim=16, value_dim=16),) * 2, num_heads=4, dtype="bfloat16", kv_dtype="fp8"
)
LATENT_FP8 = KVSpec(layers=(Latent(num_kv_heads=1, key_dim=40, value_dim=32),) * 2, num_heads=4, kv_dtype="fp8")


@pytest.mark.parametrize("spec", [KV_CACHE_GROUPED, UNEVEN, KV_CACHE_LATENT, FP8_SPEC, LATENT_FP8, BF16, INT8])
@pytest.mark.parametrize(("num_rows", "capacity"), [(0, 1), (3, 50)])
def test_bytes_are_those_of_the_spec(spec: KVSpec, num_rows: int, capacity: int) -> None:
    cache = KVCache(spec, num_rows, capacity, "cpu")
    assert cache.num_bytes == (num_rows + 1) * spec.row_bytes(capacity)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale) if tensor is not None}  # fmt: skip
    assert sum(held.values()) == cache.num_bytes  # counted once, allocated once
    assert cache.k.shape == (spec.num_layers, num_rows + 1, spec.num_kv_heads, capacity, spec.key_dim)
    assert cache.v.shape == (*cache.k.shape[:-1], spec.value_dim)
    assert (cache.layer(1).key_scales is not None) == (spec.kv_dtype in ("fp8", "int8"))


def test_a_cache_has_the_kernels_that_it_is_given() -> None:
    kernels = bind("cpu", "torch")
    assert KVCache(KV_CACHE_GROUPED, 1, 4, "cpu", kernels).kernels is kernels
    assert KVCache(KV_CACHE_GROUPED, 1, 4, "cpu").kernels.version == "cpu"


def numbers(cache: KVCache, layer: int) -> torch.Tensor:
    """Keys of a layer as the numbers that they stand for."""
    rows = cache.layer(layer)
    scale = rows.scales[0]
    return rows.k.float() if scale is None else FP8.decode(rows.k, scale[..., None, None])


@pytest.mark.parametrize("spec", [KV_CACHE_LATENT, LATENT_FP8])
def test_latents_are_stored_and_gathered_once(spec: KVSpec) -> None:
    torch.manual_seed(0)
    cache, latents = KVCache(spec, 3, 8, "cpu"), torch.randn(1, 30, 40)
    values = torch.full((1, 30, 32), float("nan"))  # never looked at
    cache.begin_rows(1, (0, 2), latents, values)
    cache.store(1, 0, slice(2, 5), latents[:, :3], values[:, :3])
    index = torch.tensor([[29, 3, 4]])
    cache.kernels.gather_rows(cache.layer(1), [2], latents, values, index)
    stored = numbers(cache, 1)
    error = {"rtol": 1e-6, "atol": 0.0} if spec.kv_dtype == "auto" else {"rtol": 1 / 16, "atol": 1e-3}
    torch.testing.assert_close(stored[0, :, 2:5], latents[:, :3], **error)
    torch.testing.assert_close(stored[2, :, :3], latents[:, index[0]], **error)
    assert not stored[1].any() and not cache.k.float()[0].any() and stored.isfinite().all()
    keys, read = (cache.slots(own, 1, 2)[:, :3].contiguous() for own in (cache.k, cache.v))
    assert torch.equal(read.view(torch.uint8), keys[..., :32].contiguous().view(torch.uint8))


@pytest.mark.parametrize("spec", [KV_CACHE_LATENT, LATENT_FP8])
@pytest.mark.parametrize("version", ["cpu", "torch"])
def test_attention_over_latents(spec: KVSpec, version: KernelVersion) -> None:
    """Scores by all numbers of a key, output of the first; the new token is written and seen."""
    torch.manual_seed(1)
    cache = KVCache(spec, 3, 8, "cpu")
    latents, heads = torch.randn(4, 1, 8, 40), torch.randn(3, 5, 40)  # 4 heads of q, one latent
    for row in range(4):
        cache.begin_rows(1, (row,), latents[row], latents[row])
        cache.store(1, row, slice(0, 8), latents[row], latents[row])
    places = RowPlaces(torch.tensor([2, 0, 1]), torch.tensor([7, 0, 4]), torch.tensor([8, 1, 5]))
    still = torch.ones(3, 1, 40), torch.zeros(3, 1, 40)  # a rotation by nothing
    kept: list[torch.Tensor] = []
    rows = cache.layer(1)
    got = bind("cpu", version).attend_rows(heads, HeadNorm(None, 0.0), still, rows, places, kept.append)
    assert got.shape == (3, 4, 32) and torch.equal(kept[0], heads[:, :4])
    stored = numbers(cache, 1)
    for entry, (row, slot, length) in enumerate(zip(*(x.tolist() for x in places), strict=True)):
        torch.testing.assert_close(stored[row, 0, slot], heads[entry, 4], rtol=1 / 8, atol=1e-2)
        logits = heads[entry, :4] @ stored[row, 0, :length].T * 40**-0.5
        want = logits.softmax(-1) @ stored[row, 0, :length, :32]
        torch.testing.assert_close(got[entry], want, rtol=1e-5, atol=1e-5)
    for decode in (reference.decode_attention, attention.decode_attention):
        torch.testing.assert_close(decode(heads[:, :4], rows, places.rows, places.lengths), got, rtol=1e-5, atol=1e-5)


# Rows hold the right keys and values after prefill, whatever else is in the cache.

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
    assert write_rows(cache, 1, (0, 2), keys, values, None, BUDGET, SELECTOR) == [None]
    for row in (0, 2):
        assert torch.equal(cache.k[1, row, :, :prompt_len], keys)
        assert torch.equal(cache.v[1, row, :, :prompt_len], values)
    assert cache.k[0].isnan().all() and cache.k[1, 1].isnan().all() and cache.k[1, 0, :, prompt_len:].isnan().all()


def test_a_prompt_that_fits_moves_its_window_in_front_of_the_ring() -> None:
    cache, keys, values = _cache(), torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    budget = KVBudget(num_sink=2, num_topk=4, num_window=3, num_recent=5)
    assert write_rows(cache, 1, (0, 2), keys, values, None, budget, SELECTOR) == [None]
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
    [index] = write_rows(cache, 0, (1,), keys, values, queries, budget, SELECTOR)
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


# What a row kept, as lists and as bits, against the slot order they come from.

KEPT_BUDGET = KVBudget(num_sink=2, num_topk=4, num_recent=3)


def tokens_of(bitmap: KeptBitmap, layer: int, head: int) -> list[int]:
    """The kept tokens of one head, read as the docstring of ``KeptBitmap`` says."""
    width = (bitmap.num_tokens + 7) // 8
    place = (layer * bitmap.num_kv_heads + head) * width
    part = bitmap.bits[place : place + width]
    return [token for token in range(bitmap.num_tokens) if part[token // 8] >> (token % 8) & 1]


@pytest.mark.parametrize("prompt_len", [10, 16, 17, 60])
def test_both_forms_tell_the_same(prompt_len: int) -> None:
    torch.manual_seed(prompt_len)
    num_middle = prompt_len - KEPT_BUDGET.num_sink - KEPT_BUDGET.num_recent
    kept = []
    for _ in range(3):
        heads = []
        for _ in range(2):
            middle = torch.randperm(num_middle)[: KEPT_BUDGET.num_topk].sort().values + KEPT_BUDGET.num_sink
            ring = torch.arange(prompt_len - KEPT_BUDGET.num_recent, prompt_len).roll(1)
            heads.append(torch.cat([torch.arange(KEPT_BUDGET.num_sink), middle, ring]))
        kept.append(torch.stack(heads))  # [G, C]
    budgets, flat = [[KEPT_BUDGET] * 2] * 3, [layer.flatten() for layer in kept]
    bitmap = as_bitmap(packed_bits(flat, budgets, prompt_len), prompt_len)
    positions = as_positions(selected(flat, budgets, prompt_len), budgets, prompt_len)
    assert (bitmap.num_layers, bitmap.num_kv_heads, bitmap.num_tokens) == (3, 2, prompt_len)
    assert len(bitmap.bits) == 3 * 2 * -(-prompt_len // 8)
    assert sum(byte.bit_count() for byte in bitmap.bits) == 3 * 2 * KEPT_BUDGET.capacity  # nothing in the padding
    for layer in range(3):
        for head in range(2):
            tokens = tokens_of(bitmap, layer, head)
            assert tokens == sorted(kept[layer][head].tolist())
            assert tokens == [0, 1, *positions[layer][head], *range(prompt_len - 3, prompt_len)]


# Which rows lie on which rank, and a batch put together again from what the ranks attended.


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_every_row_lies_on_one_rank(num_ranks: int) -> None:
    partitions = [RowPartition(37, rank, num_ranks) for rank in range(num_ranks)]
    found = [(rank, row) for rank, partition in enumerate(partitions) for row in partition.local_rows(range(37))]
    assert len(set(found)) == len(found) == 37
    assert max(row for _, row in found) < partitions[0].num_local == -(-37 // num_ranks)
    assert all(partition.local_rows([37]) == (partition.num_local,) for partition in partitions)  # the padding row


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
@pytest.mark.parametrize("batch", [1, 4, 23, 37])
def test_a_batch_is_put_together_again(num_ranks: int, batch: int) -> None:
    """Each rank hands in its own entries, which name row, slot and length; ``order`` finds each where it belongs.
    Entries of the padding row come back as anything.
    """
    drawn = random.Random(batch)
    for num_padding in (0, 2):
        rows = torch.tensor(drawn.sample(range(37), batch) + [37] * num_padding)
        batch_places = RowPlaces(rows, rows + 100, rows + 200)
        shares = [RowPartition(37, rank, num_ranks).shard(batch_places) for rank in range(num_ranks)]
        sizes = {len(share.entries) for share in shares}
        assert sizes == {min(batch + num_padding, -(-37 // num_ranks))}
        gathered = []
        for rank, (entries, places, order) in enumerate(shares):
            is_padding = places.rows == RowPartition(37, rank, num_ranks).num_local
            assert (places.slots[is_padding] == 0).all() and (places.lengths[is_padding] == 1).all()
            row = places.rows * num_ranks + rank
            assert torch.equal(rows[entries][~is_padding], row[~is_padding])
            assert torch.equal(places.slots[~is_padding], row[~is_padding] + 100)
            assert torch.equal(places.lengths[~is_padding], row[~is_padding] + 200)
            assert torch.equal(order, shares[0].order)
            gathered.append(row)
        together = torch.cat(gathered)[shares[0].order]
        assert torch.equal(together[:batch], rows[:batch])


def test_a_share_is_made_without_a_look_at_the_rows() -> None:
    """It can be captured: nothing of it is read on the host, so no size depends on which rows a batch has."""
    share = RowPartition(12, 1, 3).shard
    traced = torch.compile(share, fullgraph=True, backend="eager")
    for rows in ([0, 3, 6, 9], [1, 4, 7, 10], [5, 12, 12, 12]):
        places = RowPlaces(torch.tensor(rows), torch.arange(4), torch.arange(4) + 1)
        ours, theirs = share(places), traced(places)
        assert torch.equal(ours.entries, theirs.entries) and torch.equal(ours.order, theirs.order)
        assert all(map(torch.equal, ours.places, theirs.places))


# Rows in FP8 hold what rows in fp32 hold, within the bounds of the format, and count their bytes.

WIDE, NARROW = KVSpec.of(MODEL, "float32"), KVSpec.of(MODEL, "float32", "fp8")


def caches() -> tuple[KVCache, KVCache]:
    return KVCache(WIDE, 3, 16, "cpu"), KVCache(NARROW, 3, 16, "cpu")


def meant(cache: KVCache, layer: int) -> list[torch.Tensor]:
    """K and V of a layer as numbers ``[rows+1, G, C, E]``."""
    scales = cache.layer(layer).scales
    pairs = zip((cache.k[layer], cache.v[layer]), scales, strict=True)
    return [FP8.decode(stored, scale[..., None, None]) for stored, scale in pairs if scale is not None]


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
    kept = [write_rows(cache, 1, (0, 2), keys, values, queries, budget, SELECTOR)[0] for cache in (wide, narrow)]
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
    assert torch.equal(cache.k_scale[0, 1], FP8.scale_of(keys)) and cache.k_scale[0, 1, 1] == 8.0
    assert torch.equal(cache.v_scale[0, 1], FP8.scale_of(values)) and cache.v_scale[0, 1, 0] == 64.0
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
