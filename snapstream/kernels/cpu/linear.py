"""Ways to multiply a few tokens with a large weight matrix in fp32; a trial at load finds the fastest one.

``F.linear`` hands the weight to the matrix library as the transposed right operand. For one to about sixty-four tokens
some libraries read it at a fraction of the bandwidth (one token: with one thread only), others at all of it. The same
product with the weight as the left operand, cut into blocks of rows that a batched product spreads over the threads, or
by our own C++ is then up to four times as fast, or slower. ``trial.py`` measures; without a trial ``F.linear`` stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels.cpu import native

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [T, D], weight [O, D], bias [O] -> [T, O]
Shape = tuple[int, int, int]  # O, D and the bucket of tokens

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # beyond the last the product is bound by arithmetic, and F.linear stays
BLOCK = 64  # rows of the weight per block of a batched product
NATIVE_TOKENS = 32  # from here on the matrix library is better at the arithmetic
_LANES = 16  # of linear.cpp, in both directions of the weight
_GROUP = 8  # tokens that linear.cpp takes at a time, and a power of two below


def bucket(num_tokens: int) -> int:
    """The number of tokens that was measured for ``num_tokens``, 1 to 64: the next power of two."""
    return 1 << (num_tokens - 1).bit_length()


def by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Blocks of rows of the weight in a batched product; O is a multiple of ``BLOCK``."""
    num_tokens, (num_out, num_in) = x.shape[0], weight.shape
    blocks = weight.view(num_out // BLOCK, BLOCK, num_in)
    if num_tokens == 1:  # a matrix times a vector runs on one thread, a batch of them on all
        out = torch.bmm(blocks, x.t().expand(len(blocks), -1, -1)).view(1, num_out)
    else:
        out = torch.bmm(x.expand(len(blocks), -1, -1), blocks.transpose(1, 2))  # [O/64, T, 64]
        out = out.transpose(0, 1).reshape(num_tokens, num_out)
    return out if bias is None else out.add_(bias)


def weight_left(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weight as the left operand."""
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def takes_native(x: Tensor, weight: Tensor) -> bool:
    """True where ``by_native`` computes this product as it is; a view of some columns it does not."""
    tokens = x.shape[0]
    is_size = tokens in (1, 2, 4) or (tokens % _GROUP == 0 and tokens <= NATIVE_TOKENS)
    is_fp32 = x.dtype == torch.float32 and weight.dtype == torch.float32 and weight.is_contiguous()
    return is_fp32 and is_size and weight.shape[0] % _LANES == 0 and weight.shape[1] % _LANES == 0


def by_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear.cpp`` where ``takes_native``; the weight is contiguous."""
    tokens, (num_out, num_in) = x.shape[0], weight.shape
    group = min(tokens, _GROUP)
    x = x.contiguous()
    out = torch.empty(tokens, num_out)
    native.linear(group)(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens // group,
        num_in,
        num_out,
        torch.get_num_threads(),
    )
    return out


def native_padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``by_native`` for any number of tokens up to 32: tokens of zeros fill the bucket."""
    num_tokens = x.shape[0]
    size = bucket(num_tokens)
    if size == num_tokens:
        return by_native(x, weight, bias)
    return by_native(F.pad(x, (0, 0, 0, size - num_tokens)), weight, bias)[:num_tokens]


WAYS: Mapping[str, Linear] = {
    "torch": F.linear,
    "blocks": by_blocks,
    "left": weight_left,
    "native": native_padded,
}


def ways_for(num_out: int, num_in: int, num_tokens: int) -> tuple[str, ...]:
    """Names of the ways that can compute such a product in fp32 here; ``"torch"`` first."""
    ways = ["torch", "left"]
    if num_out % BLOCK == 0:
        ways.append("blocks")
    fits = num_tokens <= NATIVE_TOKENS and num_out % _LANES == 0 and num_in % _LANES == 0
    if fits and native.find_compiler() is not None:
        ways.append("native")
    return tuple(ways)


class ChosenLinear:
    """``F.linear``, or for the shapes in ``choice`` the way that it names."""

    def __init__(self, choice: Mapping[Shape, str]) -> None:
        self.choice = choice
        self._ways = {shape: WAYS[way] for shape, way in choice.items() if way != "torch"}

    def way(self, num_tokens: int, num_out: int, num_in: int) -> str | None:
        """The way that was found fastest for so many tokens; None where nobody looked."""
        if num_tokens > BUCKETS[-1]:
            return None
        return self.choice.get((num_out, num_in, bucket(num_tokens)))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_tokens, num_out = x.shape[0], weight.shape[0]
        if num_tokens > BUCKETS[-1] or x.dtype != torch.float32:
            return F.linear(x, weight, bias)
        way = self._ways.get((num_out, weight.shape[1], bucket(num_tokens)))
        return F.linear(x, weight, bias) if way is None else way(x, weight, bias)
