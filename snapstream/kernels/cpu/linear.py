"""Products of a few tokens with a large weight matrix in fp32, at the speed of reading the weights.

``F.linear`` hands the weight to the matrix library as the transposed right operand. For one to about sixty-four tokens
that reads it at a fraction of the bandwidth (one token: with one thread only). The same product with the weight as the
left operand, or cut into blocks of rows that a batched product spreads over the threads, comes 1.5 to 4 times nearer to
it; figures are in ``docs/log.md``. From 64 tokens on ``F.linear`` is at the arithmetic limit and stays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels.cpu import ops

MAX_TOKENS = 64  # beyond this the product is bound by arithmetic and F.linear is best
BLOCK = 64  # rows of the weight per block of a batched product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, D] weight [O, D]^T + bias [O]`` as a contiguous ``[T, O]``; the meaning of ``F.linear``."""
    if torch.compiler.is_compiling() and ops.takes_linear(x, weight):  # a compiled graph has a C++ compiler
        out: Tensor = torch.ops.snapstream.linear_cpu(x, weight, bias)
        return out
    num_tokens, (num_out, num_in) = x.shape[0], weight.shape
    if num_tokens > MAX_TOKENS or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    num_blocks, rest = divmod(num_out, BLOCK)
    if rest == 0 and num_tokens == 1:  # a matrix times a vector runs on one thread, a batch of them on all
        out = torch.bmm(weight.view(num_blocks, BLOCK, num_in), x.t().expand(num_blocks, -1, -1)).view(1, num_out)
    elif rest == 0 and 4 < num_tokens <= 16 and num_in >= 512:
        blocks = weight.view(num_blocks, BLOCK, num_in).transpose(1, 2)
        out = torch.bmm(x.expand(num_blocks, -1, -1), blocks).transpose(0, 1).reshape(num_tokens, num_out)
    else:
        out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)
