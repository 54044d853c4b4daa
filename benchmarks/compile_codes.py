"""The launches of products with int8 and int4 weights that ``benchmarks.compile_kernels`` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

NUM_OUT, NUM_IN = 4096, 4096  # o of Llama-3.1-8B
NARROW_OUT = 2048  # of Llama-3.2-1B: programs take fewer rows


def code_launchers(dtype: torch.dtype, groups: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Both widths, every tile of tokens, and the sizes of groups, each with what it is."""
    from snapstream.kernels.triton import configs, products

    def empty(*size: int, kind: torch.dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    def launcher(num_tokens: int, num_out: int, bits: int, group: int) -> Callable[[], object]:
        x, stored = empty(num_tokens, NUM_IN, kind=dtype), empty(num_out, NUM_IN * bits // 8, kind=torch.uint8)
        scales = empty(num_out, NUM_IN // group, kind=torch.float16)
        return lambda: products.launch_code_linear(x, stored, scales, None)

    tiles = configs.CODE_TOKENS[:1] if dtype == torch.float32 else configs.CODE_TOKENS
    for group in groups:
        for bits in (8, 4):
            for tokens in tiles:
                yield f"int{bits} in groups of {group}, {tokens} tokens", launcher(tokens, NUM_OUT, bits, group)
            yield f"int{bits} in groups of {group}, narrow", launcher(1, NARROW_OUT, bits, group)
