"""Storage by spec: bytes are those that the spec counts; latents lie in one tensor whose first numbers are values."""

from __future__ import annotations

import pytest
import torch

from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.kernels import fp8, reference
from snapstream.kernels.bound import HeadNorm, KernelVersion, RowPlaces, bind
from snapstream.kernels.cpu import attention

GROUPED = KVSpec(num_layers=3, num_heads=6, num_kv_heads=2, key_dim=16, value_dim=16)
UNEVEN = KVSpec(num_layers=2, num_heads=4, num_kv_heads=2, key_dim=24, value_dim=16, dtype="bfloat16")
LATENT = KVSpec(num_layers=2, num_heads=4, num_kv_heads=1, key_dim=40, value_dim=32, values_are_keys=True)
BF16 = KVSpec(num_layers=2, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, kv_dtype="bfloat16")
INT8 = KVSpec(num_layers=2, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, kv_dtype="int8")
FP8 = KVSpec(num_layers=2, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16", kv_dtype="fp8")
LATENT_FP8 = KVSpec(
    num_layers=2, num_heads=4, num_kv_heads=1, key_dim=40, value_dim=32, values_are_keys=True, kv_dtype="fp8"
)


@pytest.mark.parametrize("spec", [GROUPED, UNEVEN, LATENT, FP8, LATENT_FP8, BF16, INT8])
@pytest.mark.parametrize(("num_rows", "capacity"), [(0, 1), (3, 50)])
def test_bytes_are_those_of_the_spec(spec: KVSpec, num_rows: int, capacity: int) -> None:
    cache = KVCache(spec, num_rows, capacity, "cpu")
    assert cache.num_bytes == (num_rows + 1) * spec.row_bytes(capacity)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale) if tensor is not None}  # fmt: skip
    assert sum(held.values()) == cache.num_bytes  # counted once, allocated once
    assert cache.k.shape == (spec.num_layers, num_rows + 1, spec.num_kv_heads, capacity, spec.key_dim)
    assert cache.v.shape == (*cache.k.shape[:-1], spec.value_dim)
    assert (cache.layer(1).scales is not None) == (spec.kv_dtype in ("fp8", "int8"))


def test_a_cache_has_the_kernels_that_it_is_given() -> None:
    kernels = bind("cpu", "torch")
    assert KVCache(GROUPED, 1, 4, "cpu", kernels).kernels is kernels
    assert KVCache(GROUPED, 1, 4, "cpu").kernels.version == "cpu"


def numbers(cache: KVCache, layer: int) -> torch.Tensor:
    """Keys of a layer as the numbers that they stand for."""
    rows = cache.layer(layer)
    return rows.k.float() if rows.scales is None else fp8.dequantise(rows.k, rows.scales[0][..., None, None])


@pytest.mark.parametrize("spec", [LATENT, LATENT_FP8])
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
    keys, read = cache.tokens(1, 2, torch.tensor([0, 2]))
    assert torch.equal(read.view(torch.uint8), keys[..., :32].contiguous().view(torch.uint8))


@pytest.mark.parametrize("spec", [LATENT, LATENT_FP8])
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


def test_kernels_that_rotate_heads_refuse_latents() -> None:
    cache = KVCache(LATENT, 1, 8, "cpu")
    index = torch.zeros(1, dtype=torch.int64)
    still = torch.ones(1, 1, 40), torch.zeros(1, 1, 40)
    places, kernels = RowPlaces(index, index, index + 1), bind("cpu", "compiled_cpu")
    with pytest.raises(ValueError, match="two tensors; in these rows the values are the keys"):
        kernels.attend_rows(torch.zeros(1, 5, 40), HeadNorm(None, 0.0), still, cache.layer(0), places, None)
