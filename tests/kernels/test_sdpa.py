"""Prefill attention through fused kernels equals the reference (on a CPU through the same calls, other kernels)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from snapstream.kernels import reference, sdpa


def by_flash_of_the_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    repeated = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *repeated, 0.0, is_causal)
    return out, lse


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (7, 7), (7, 40), (39, 40), (40, 40)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_both_ways_equal_the_reference(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, num_heads, 16)
    pool = torch.randn(2, num_kv_heads, num_keys + 9, 16)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging buffers
    expected = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(sdpa.prefill_attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sdpa.split(q, k, v, by_flash_of_the_cpu), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 2), (1, 40), (7, 8), (7, 40), (40, 40)])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_cudnn_never_gets_a_single_key(
    num_queries: int, num_keys: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a prompt attends alone, and a chunk may begin at a prompt's second token."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, is_causal: bool) -> Any:
        assert with_lse and bias is None and k.shape[2] > 1
        out, lse = by_flash_of_the_cpu(q, k, v, is_causal)
        return out, lse[..., None]  # as cuDNN returns it

    monkeypatch.setattr(sdpa, "cudnn_operator", kernel)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(num_queries, num_heads, 16), torch.randn(2, 2, num_keys, 16)
    expected = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(sdpa.by_cudnn(q, k, v), expected, rtol=1e-5, atol=1e-5)


class Called(TorchDispatchMode):
    """Names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
def test_on_a_gpu_the_flash_kernel_is_called_by_name(num_queries: int, num_keys: int) -> None:
    """Left to choose, PyTorch may take cuDNN, which plans every new pair of lengths. The tensors have no values."""
    with FakeTensorMode(), Called() as called:
        q = torch.empty(num_queries, 8, 64, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, num_keys, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        out = sdpa.prefill_attention(q, k, v)
    assert out.shape == q.shape and out.is_contiguous()
    assert sum("attention" in name for name in called.names) == 1
    assert "_scaled_dot_product_flash_attention.default" in called.names
