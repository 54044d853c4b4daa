"""Attention of prompts in bf16 on a CPU: near the exact one, at the rounded one's, and the same bits in any chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapstream.assets import TINY_MODEL
from snapstream.kernels import reference
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import VERSIONS, Case
from snapstream.kernels.cpu.looped import library
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.kernels.layers import multiplies_bf16

pytestmark = pytest.mark.skipif(
    find_compiler() is None or not multiplies_bf16(), reason="these instructions do not multiply bf16"
)
prefill_attention = VERSIONS["cpu_bf16"].attend


def sample(queries: int, heads: int, kv_heads: int, keys: int, size: int, value_size: int, seed: int) -> list[Tensor]:
    """Ranges of larger buffers, as staging is: contiguous in the last dimension only."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads + 1, size, generator=generator)[:, :heads]
    k = torch.randn(kv_heads, keys + 3, size, generator=generator)[:, :keys]
    v = torch.randn(kv_heads, keys + 3, value_size, generator=generator)[:, :keys]
    return [q, k, v]


@settings(max_examples=40)
@given(
    queries=st.integers(1, 60), kv_heads=st.integers(1, 3), shared=st.integers(1, 3), before=st.integers(0, 600),
    size=st.integers(1, 70), value_size=st.integers(1, 70), scale=st.sampled_from([1.0, 30.0]),
    threads=st.integers(1, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_as_the_reference_of_rounded_numbers(
    queries: int, kv_heads: int, shared: int, before: int, size: int, value_size: int, scale: float, threads: int,
    seed: int,
) -> None:  # fmt: skip
    q, k, v = sample(queries, kv_heads * shared, kv_heads, before + queries, size, value_size, seed)
    q = (q * scale).bfloat16().float()
    k, v = k.bfloat16().float(), v.bfloat16().float()
    count = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = prefill_attention(q, k, v)
    finally:
        torch.set_num_threads(count)
    wide = torch.zeros(kv_heads, before + queries, size)  # the reference wants values of the size of keys
    parts = []
    for start in range(0, value_size, size):
        part = v[..., start : start + size]
        wide[..., : part.shape[-1]] = part
        parts.append(reference.prefill_attention(q.double(), k.double(), wide.double())[..., : part.shape[-1]])
    # What is left to round are the shares, each by a 256th of itself at most: the rest is their sum.
    limit = float(v.abs().max()) / 256
    torch.testing.assert_close(got.double(), torch.cat(parts, -1), rtol=0, atol=limit)


def test_the_same_bits_in_any_chunks() -> None:
    q, k, v = sample(900, 6, 2, 900, 40, 24, seed=0)
    whole = prefill_attention(q, k, v)
    for cut in (1, 255, 256, 300, 611):
        assert torch.equal(prefill_attention(q[:cut], k[:, :cut], v[:, :cut]), whole[:cut])
        assert torch.equal(prefill_attention(q[cut:], k, v), whole[cut:])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_seen(wrong: float) -> None:
    q, k, v = sample(20, 2, 1, 30, 16, 16, seed=1)
    q[4, 1, 3] = wrong
    got = prefill_attention(q, k, v)
    assert not got[4, 1].isfinite().any()
    got[4, 1] = 0.0
    assert got.isfinite().all()


def test_it_is_a_kernel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(TINY_MODEL, prefill_attention="cpu_bf16", max_model_len=128, progress=False) as llm:
        assert any("prefill attention: cpu_bf16" in note for note in llm.notes)
        named = llm.generate("The code of the vault is 4821907.", SamplingParams(max_tokens=1, logprobs=1))[0]
    assert named.logprobs is not None
    bare = SimpleNamespace(multiplies_bf16=lambda: 0)
    monkeypatch.setattr(library, "load", lambda: bare)
    with pytest.raises(ValueError, match="'cpu_bf16' cannot be used: this processor does not multiply bf16"):
        choose("cpu_bf16", Case(torch.device("cpu"), torch.float32, 32))
    with pytest.raises(ValueError, match="computes in float32, not bfloat16"):
        choose("cpu_bf16", Case(torch.device("cpu"), torch.bfloat16, 32))
