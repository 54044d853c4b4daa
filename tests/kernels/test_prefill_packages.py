"""Adapters of optional packages: stand-ins check arguments and layout, and answer through the reference."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snapstream.kernels import reference, sdpa
from snapstream.kernels.prefill import packages
from snapstream.kernels.prefill.packages import PackedLens

HEADS, KV_HEADS, SIZE = 4, 2, 16


def inputs(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    pool = torch.randn(2, KV_HEADS, num_keys + 9, SIZE)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging buffers
    return torch.randn(num_queries, HEADS, SIZE), k, v


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.stride(-1) == 1


def attend_parts(q: Tensor, k: Tensor, v: Tensor, ends_q: list[int], ends_k: list[int]) -> Tensor:
    """Packed attention by the reference; ``k, v [N, G, E]`` as the packages take them."""
    parts = [
        reference.prefill_attention(q[a:b], k[c:d].transpose(0, 1), v[c:d].transpose(0, 1))
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    return torch.cat(parts)


class Stand:
    """What the packages would be; every method insists on names and shapes of the real one."""

    def __init__(self, pool: Tensor, *, is_third: bool = False) -> None:
        self.pool, self.is_third, self.calls = pool, is_third, 0

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Any:
        self.calls += 1
        assert causal and q.shape[0] == k.shape[0] == 1
        assert q.shape[2:] == (HEADS, SIZE) and k.shape[2:] == v.shape[2:] == (KV_HEADS, SIZE)
        assert is_same_memory(k, self.pool) and is_same_memory(v, self.pool)
        out = reference.prefill_attention(q[0], k[0].transpose(0, 1), v[0].transpose(0, 1))[None]
        return (out, None) if self.is_third else out

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, causal: bool,
    ) -> Any:  # fmt: skip
        out = self.varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               window_size=(-1, 0) if causal else (-1, -1), enable_gqa=True)  # fmt: skip
        return (out, None) if self.is_third else out

    def varlen_attn(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        assert window_size == (-1, 0) and enable_gqa
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert query.shape[1:] == (HEADS, SIZE) and key.shape[1:] == (KV_HEADS, SIZE)
        assert is_same_memory(key, self.pool) and is_same_memory(value, self.pool)
        ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert (ends_q[-1], ends_k[-1]) == (len(query), len(key))
        assert max_q == max(b - a for a, b in zip(ends_q, ends_q[1:], strict=False))
        assert max_k == max(b - a for a, b in zip(ends_k, ends_k[1:], strict=False))
        return attend_parts(query, key, value, ends_q, ends_k)

    def single_prefill_with_kv_cache(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, kv_layout: str) -> Tensor:
        self.calls += 1
        assert causal and kv_layout == "HND"
        assert q.shape[1:] == (HEADS, SIZE) and (k.shape[0], k.shape[2]) == (KV_HEADS, SIZE)
        assert is_same_memory(k, self.pool) and is_same_memory(v, self.pool)
        return reference.prefill_attention(q, k, v)

    def install(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        module: Any = ModuleType(name)
        for function in ("flash_attn_func", "flash_attn_varlen_func", "varlen_attn", "single_prefill_with_kv_cache"):
            setattr(module, function, getattr(self, function))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface"), ("flashinfer", "flashinfer")],
)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
def test_one_prompt(name: str, module: str, num_queries: int, num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(num_queries, num_keys)
    stand = Stand(k, is_third=name == "flash_attn_3")
    stand.install(monkeypatch, module)
    got = getattr(packages, name)(q, k, v)
    assert stand.calls == 1
    assert torch.equal(got, reference.prefill_attention(q, k, v))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attn_packed", "flash_attn"),
        ("flash_attn_3_packed", "flash_attn_interface"),
        ("torch_varlen", "torch.nn.attention.varlen"),
    ],
)
def test_packed_prompts(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts; of the first, only the last 3 tokens are queries."""
    q, k, v = inputs(20, 29)
    stand = Stand(k, is_third=name == "flash_attn_3_packed")
    stand.install(monkeypatch, module)
    lens = PackedLens(
        torch.tensor([0, 3, 8, 20], dtype=torch.int32), torch.tensor([0, 12, 17, 29], dtype=torch.int32), 12, 12
    )
    got = getattr(packages, name)(q, k, v, lens)
    assert stand.calls == 1
    expected = attend_parts(q, k.transpose(0, 1), v.transpose(0, 1), [0, 3, 8, 20], [0, 12, 17, 29])
    assert torch.equal(got, expected)


def test_varlen_of_a_pytorch_that_takes_grouped_heads_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 has no word for them, and its kernel needs none."""
    q, k, v = inputs(8, 8)
    stand = Stand(k)

    def of_2_11(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
        return stand.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size,
                                 enable_gqa=True)  # fmt: skip

    monkeypatch.setattr(packages, "import_module", lambda name: SimpleNamespace(varlen_attn=of_2_11))
    assert packages.why_no_torch_varlen() == ""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    got = packages.torch_varlen(q, k, v, PackedLens(ends, ends, 5, 5))
    assert torch.equal(got, attend_parts(q, k.transpose(0, 1), v.transpose(0, 1), [0, 3, 8], [0, 3, 8]))


def test_varlen_of_an_older_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.why_no_torch_varlen() == ""  # the one installed here

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
              is_causal: bool = False) -> None: ...  # fmt: skip

    monkeypatch.setattr(packages, "import_module", lambda name: SimpleNamespace(varlen_attn=older))
    assert "has no window_size" in packages.why_no_torch_varlen()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
@pytest.mark.parametrize("num_heads", [2, 4, 6])
def test_efficient_kernel(num_queries: int, num_keys: int, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in insists on equal numbers of heads and pads its log-sum-exp, as the real one does."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, wants_lse: bool, dropout: float, causal: bool) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1] and wants_lse and dropout == 0.0 and bias is None
        assert not causal or q.shape[2] == k.shape[2]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))

    monkeypatch.setattr(sdpa, "efficient_operator", kernel)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(num_queries, num_heads, SIZE), torch.randn(2, KV_HEADS, num_keys, SIZE)
    torch.testing.assert_close(sdpa.by_efficient(q, k, v), reference.prefill_attention(q, k, v), rtol=1e-5, atol=1e-5)
