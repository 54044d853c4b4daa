"""The kernels that can attend a prefill chunk, each with its requirements. Two calls, the same for all:

* ``attend(q [T, H, E], k [G, N, E], v [G, N, E], window=None, sinks=None, cap=None) -> [T, H, E]``:
  ``reference.prefill_attention``, for one prompt;
* ``attend_packed(q, k, v, lens, window=None, sinks=None, cap=None) -> [T, H, E]``: the same for several prompts that
  lie one after the other, without padding. Only kernels that take a length per prompt have it; the others are called
  once per prompt.

K and V are ranges of the staging buffers: views, contiguous in E only. A call of FlashAttention imports its package.
``autotune.py`` chooses.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.kernels import pytorch, reference
from snapstream.kernels.cpu import attention as cpu_attention
from snapstream.kernels.cpu.looped import library, prompt
from snapstream.kernels.pytorch import share_sinks
from snapstream.kernels.rows import CosSin, HeadNorm, PackedLens

# All align the causal mask with the last key (flash-attn since 2.1), take fewer kv heads than query heads and strided K
# and V, so that a range of the staging buffers is passed without a copy. PyTorch's kernel alone takes learned attention
# sinks, and it has no cap of scores; FlashAttention is not asked for sinks (``prefill.Case``).


def flash_attn(
    package: str, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """``flash_attn`` (FlashAttention-2, 2.1 or newer) or ``flash_attn_interface`` (FlashAttention-3, for Hopper):
    ``q [1, T, H, E]``, ``k, v [1, N, G, E]``.
    """
    found = import_module(package).flash_attn_func(
        q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], causal=True, **_options(window, cap)
    )
    return _output(found)[0]


def flash_attn_packed(
    package: str, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """The same for packed prompts: ``q [T, H, E]``, ``k, v [N, G, E]``."""
    found = import_module(package).flash_attn_varlen_func(
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        cu_seqlens_q=lens.queries,
        cu_seqlens_k=lens.keys,
        max_seqlen_q=lens.max_queries,
        max_seqlen_k=lens.max_keys,
        causal=True,
        **_options(window, cap),
    )
    return _output(found)


def _options(window: int | None, cap: float | None) -> dict[str, Any]:
    """For flash-attn: how many keys are seen before a query's own, and after it (since 2.3); a cap of scores (2.6)."""
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    return options if cap is None else {**options, "softcap": cap}


def _output(found: Any) -> Tensor:
    """Some releases of FlashAttention-3 also return the log-sum-exp."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's flash kernel for packed prompts; a window of (-1, 0) is causal.

    Since 2.12 grouped heads must be announced; before, the kernel takes them as they come.
    """
    module = import_module("torch.nn.attention.varlen")
    call = module.varlen_attn
    if cap is not None:
        raise ValueError("varlen_attn of PyTorch has no cap of scores")
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[0]} if "enable_gqa" in _parameters(call) else {}
    if sinks is not None:
        options["return_aux"] = module.AuxRequest(lse=True)
    found = call(
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        lens.queries,
        lens.keys,
        lens.max_queries,
        lens.max_keys,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    if sinks is None:
        return _output(found)
    out, lse = found  # [T, H, E], [H, T]
    return share_sinks(out.transpose(0, 1), lse, sinks).transpose(0, 1)


def why_no_torch_varlen() -> str:
    """Empty if this PyTorch has it with a causal mask that is aligned with the last key."""
    try:
        call = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"PyTorch {torch.__version__} has no attention over packed sequences"
    has_window = "window_size" in _parameters(call)
    return "" if has_window else f"varlen_attn of PyTorch {torch.__version__} has no window_size"


@lru_cache(maxsize=4)
def _parameters(call: Callable[..., Any]) -> frozenset[str]:
    """Names; remembered, because a chunk asks for them in every layer."""
    return frozenset(inspect.signature(call).parameters)


# heads [T, H+2G, E] as projected, keys and values [G, P, E] of staging, runs of tokens and where they go -> queries
StageHeads = Callable[[Tensor, HeadNorm, CosSin, Tensor, Tensor, Sequence[tuple[int, int, int]]], Tensor]

HALF = (torch.bfloat16, torch.float16)


class Attend(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, /, *, window: int | None = None, sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor: ...  # fmt: skip


class AttendPacked(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens, /, *, window: int | None = None,
        sinks: Tensor | None = None, cap: float | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """The case that a kernel must serve."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group_size: int = 1  # query heads per kv head
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU
    window: int | None = None  # of the layers that have a sliding window
    has_sinks: bool = False  # learned attention sinks
    cap: float | None = None  # of attention scores

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, head_dim: int, group_size: int) -> Case:
        """The case of tensors on ``device``."""
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return cls(device, dtype, head_dim, group_size, torch.cuda.get_device_capability(device) if is_nvidia else None)

    @classmethod
    def of_model(cls, device: torch.device, dtype: torch.dtype, model: ModelConfig) -> Case:
        """The case of a model: latents are attended expanded, a key and a value per query head."""
        if model.latent is not None:
            return cls.of(device, dtype, model.latent.expanded_dim, 1)
        own = cls.of(device, dtype, model.widest_head, model.group_size)
        window = min(filter(None, model.layer_windows), default=None)
        return replace(own, window=window, has_sinks=model.has_sinks, cap=model.score_cap)


@dataclass(frozen=True, slots=True)
class Version:
    name: str
    attend: Attend
    why_not: Callable[[Case], str]  # what is missing for it; empty if nothing is
    attend_packed: AttendPacked | None = None
    why_not_packed: Callable[[], str] = lambda: ""  # beyond ``why_not``
    stage_heads: StageHeads | None = None  # norms, rotates and stages heads in one call
    takes_narrow_values: bool = False  # values may have fewer numbers than keys


def _needs(
    *, package: str = "", dtypes: tuple[torch.dtype, ...] = HALF, least: tuple[int, int] = (8, 0), head_dim: int = 256,
    major: int = 0, has_sinks: bool = False,
) -> Callable[[Case], str]:  # fmt: skip
    """Requirements of kernels for NVIDIA GPUs: a package, dtypes, a compute capability, head dimensions."""

    def why_not(case: Case) -> str:
        if case.capability is None:
            return f"needs an NVIDIA GPU, and the device is {case.device}"
        if package and importlib.util.find_spec(package) is None:
            return f"needs the package {package}, which is not installed"
        if case.has_sinks and not has_sinks:
            return "has no learned attention sinks, and this model has"
        if case.dtype not in dtypes:
            return f"takes {' and '.join(str(d)[6:] for d in dtypes)}, not {str(case.dtype)[6:]}"
        if case.capability < least or (major and case.capability[0] != major):
            wanted = f"{major}.x" if major else f"{least[0]}.{least[1]} or newer"
            return f"needs compute capability {wanted}; this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.head_dim > head_dim or case.head_dim % 8:
            return f"needs a head dimension that is a multiple of 8 up to {head_dim}; this model's is {case.head_dim}"
        return ""

    return why_not


def _on_cpu(case: Case) -> str:
    return "" if case.device.type == "cpu" else f"runs on a CPU, and the device is {case.device}"


def _on_cpu_in_fp32(case: Case) -> str:
    if problem := _on_cpu(case):
        return problem
    if case.dtype != torch.float32:
        return f"computes in float32, not {str(case.dtype)[6:]}"
    try:
        library.load()
    except ValueError as problem:
        return str(problem)
    return ""


def _on_cpu_in_bf16(case: Case) -> str:
    if problem := _on_cpu_in_fp32(case):
        return problem
    return "" if library.load().multiplies_bf16() else "this processor does not multiply bf16"


def _by_library(
    products: prompt.Products, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens | None = None, *,
    window: int | None = None, sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    ends = list(zip(lens.queries.tolist()[1:], lens.keys.tolist()[1:], strict=True)) if lens else ()
    return prompt.attend(library.load(), q, k, v, ends, products=products, window=window, sinks=sinks, cap=cap)


def _native(name: str, products: prompt.Products, why_not: Callable[[Case], str]) -> Version:
    attend = partial(_by_library, products)
    return Version(name, attend, why_not, attend, stage_heads=prompt.stage_heads, takes_narrow_values=True)


def _by_triton(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    from snapstream.kernels.triton.prefill import prefill_attention

    return prefill_attention(q, k, v, window=window, sinks=sinks, cap=cap)


VERSIONS: dict[str, Version] = {
    version.name: version
    for version in (
        Version("reference", reference.prefill_attention, lambda case: ""),
        Version("cpu", cpu_attention.prefill_attention, _on_cpu),
        _native("cpu_fp32", "float32", _on_cpu_in_fp32),
        _native("cpu_int16", "int16", _on_cpu_in_fp32),
        _native("cpu_bf16", "bfloat16", _on_cpu_in_bf16),
        Version(
            "sdpa_flash", pytorch.prefill_attention, _needs(has_sinks=True), torch_varlen,
            why_no_torch_varlen,
        ),
        Version("sdpa_cudnn", partial(pytorch.attend_by, pytorch.cudnn), _needs(head_dim=128, has_sinks=True)),
        Version(
            "sdpa_efficient", partial(pytorch.attend_by, pytorch.efficient),
            _needs(dtypes=(torch.float32, *HALF), least=(7, 0), has_sinks=True),
        ),
        Version("triton", _by_triton, _needs(package="triton", has_sinks=True)),
        Version(
            "flash_attn", partial(flash_attn, "flash_attn"), _needs(package="flash_attn"),
            partial(flash_attn_packed, "flash_attn"),
        ),
        Version(
            "flash_attn_3", partial(flash_attn, "flash_attn_interface"),
            _needs(package="flash_attn_interface", major=9), partial(flash_attn_packed, "flash_attn_interface"),
        ),
    )
}  # fmt: skip
