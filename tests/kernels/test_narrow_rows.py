"""Rows in bf16 and int8: what int8 stands for, and attention on a CPU over both against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.config import EngineOptions, KVBudget, KVDType
from snapstream.kernels import int8, reference
from snapstream.kernels.cpu import attention
from snapstream.llm import LLM
from snapstream.models.registry import read_model_config
from snapstream.plan.fit import engine_config
from snapstream.request import SamplingParams
from tests.parity.checkpoints import make_model, save

KINDS: tuple[KVDType, ...] = ("bfloat16", "int8")


def cache_of(kv_dtype: KVDType, capacity: int) -> KVCache:
    spec = KVSpec(num_layers=2, num_heads=6, num_kv_heads=2, key_dim=12, value_dim=12, kv_dtype=kv_dtype)
    return KVCache(spec, 3, capacity, "cpu")


def widened(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = cache.layer(layer)
    if rows.scales is None:
        return rows.k.float(), rows.v.float()
    return int8.dequantise(rows.k, rows.scales[0]), int8.dequantise(rows.v, rows.scales[1])


def test_a_slot_keeps_its_numbers_within_half_a_step() -> None:
    x = torch.randn(50, 32) * 10.0 ** torch.randint(-30, 30, (50, 1))
    x[3] = 0.0
    scale = int8.scale_of(x)
    back = int8.dequantise(int8.quantise(x, scale), scale)
    assert ((back - x).abs() <= 0.5001 * scale[:, None]).all()
    assert torch.equal(back[3], x[3]) and (back - x).norm() > 0
    for wrong in (torch.nan, torch.inf):
        x[5, 7] = wrong
        scale = int8.scale_of(x)
        assert int8.dequantise(int8.quantise(x, scale), scale)[5].isnan().all()


@pytest.mark.parametrize("kv_dtype", KINDS)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_attention_over_what_was_written(kv_dtype: KVDType, lengths: list[int], seed: int) -> None:
    """A prompt written by ``store`` or ``gather_rows`` and a token by ``write_slots``: the CPU's attention equals the
    reference's, which equals attention over fp32 rows of the same numbers. NaN past the end disturbs nobody.
    """
    torch.manual_seed(seed)
    cache, wide, layer = cache_of(kv_dtype, 9), cache_of("auto", 9), 1
    keys, values = torch.randn(2, 2, 9, 12)
    index = torch.arange(9).expand(2, -1)
    handle = cache.layer(layer)
    for row, length in enumerate(lengths):
        if row % 2:
            cache.store(layer, row, slice(0, length), keys[:, :length], values[:, :length])
        else:
            cache.kernels.gather_rows(handle, [row], keys, values, index[:, :length])
    rows, ends = torch.arange(len(lengths)), torch.tensor(lengths)
    new = torch.randn(2, len(lengths), 2, 12)
    reference.write_slots(new[0], new[1], handle, rows, ends - 1)
    near = 2.0**-8 if kv_dtype == "bfloat16" else 0.0
    for own, prompt, token in zip(widened(cache, layer), (keys, values), new, strict=True):
        for row, length in enumerate(lengths):
            want = torch.cat((prompt[:, : length - 1], token[row][:, None]), 1)
            step = 0.501 * want.abs().amax(-1, keepdim=True) / 127 if kv_dtype == "int8" else 0.0
            assert ((own[row, :, :length] - want).abs() <= near * want.abs() + step).all()
    for stored, own in zip((wide.k, wide.v), widened(cache, layer), strict=True):
        stored[layer] = own
    for tensor in (cache.k_scale, cache.v_scale) if kv_dtype == "int8" else (cache.k, cache.v):
        assert tensor is not None
        for row, length in enumerate(lengths):
            tensor[layer, row, :, length:] = float("nan")
    q = torch.randn(len(lengths), 6, 12)
    want = reference.decode_attention(q, wide.layer(layer), rows, ends)
    torch.testing.assert_close(reference.decode_attention(q, handle, rows, ends), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attention.decode_attention(q, handle, rows, ends), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", *KINDS])
def test_tokens_are_gathered_whole_as_the_reference_does(kv_dtype: KVDType) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 30, 12)[:, :, 2:25]  # a range of staging
    index = torch.stack([torch.randperm(23)[:7] for _ in range(2)])
    native, plain = cache_of(kv_dtype, 9), cache_of(kv_dtype, 9)
    for cache, gather in ((native, native.kernels.gather_rows), (plain, reference.gather_rows)):
        cache.begin_rows(1, [0, 2], keys, values)
        gather(cache.layer(1), [0, 2], keys, values, index)
    assert native.kernels.gather_rows is not reference.gather_rows
    for own, want in ((native.k, plain.k), (native.v, plain.v), (native.k_scale, plain.k_scale)):
        assert (own is None and want is None) or torch.equal(own.float(), want.float())
    assert native.k[1, 2].float().abs().sum() > 0 and not native.k[1, 1].float().any()


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("bfloat16", 2 * 2 * 16), ("int8", 2 * (16 + 4))])
def test_an_engine_counts_them(kv_dtype: KVDType, token_bytes: int, tmp_path: Path) -> None:
    folder = save(make_model("qwen3", head_dim=16), tmp_path)
    model = read_model_config(folder)
    with LLM(folder, budget=40, max_model_len=90, kv_dtype=kv_dtype, executor="eager", progress=False) as llm:
        (output,) = llm.generate([[5 + i for i in range(60)]], SamplingParams(max_tokens=5, temperature=0.0))
        cache = llm.engine.runner.cache  # type: ignore[attr-defined]
    assert output.compression is not None
    assert output.compression.row_bytes == 40 * model.num_layers * model.num_kv_heads * token_bytes
    assert cache.num_bytes == 9 * output.compression.row_bytes  # eight rows and the padding row


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "such rows are for a CPU that computes in float32: use 'fp8' or 'auto'"),
        ({"device": "cuda"}, "device 'cuda' and dtype 'float32'; such rows are for a CPU"),
        ({"executor": "graph"}, "which executor 'graph' does not read; use 'eager'"),
    ],
)
def test_what_is_refused(kv_dtype: KVDType, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = read_model_config(save(make_model("qwen3"), tmp_path))
    own = EngineOptions(kv_dtype=kv_dtype, **options)
    with pytest.raises(ValueError, match=words):
        engine_config(model, own, KVBudget.full(64), 64, device=own.device)
