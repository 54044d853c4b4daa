"""The kernels that can attend over rows of latents on a GPU, each with its requirements; none is loaded unasked.

``attend(q [B, H, E], latents [rows+1, 1, C, E], R, rows [B], lengths [B]) -> [B, H, R]`` is
``reference.decode_attention`` of one layer, whose values are the first R numbers of its keys. ``choice.py`` decides.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.kernels.bound import has_triton
from snapstream.kernels.latents import packages
from snapstream.kernels.prefill.versions import HALF

Attend = Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """The case that a kernel must serve."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    rank: int  # R
    rope_dim: int  # P
    nope_dim: int  # numbers of a query head that were absorbed
    slots: int  # C
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, model: ModelConfig, slots: int) -> Case | None:
        """None for a model without latents, or a device that is no NVIDIA GPU."""
        latent = model.latent
        if latent is None or device.type != "cuda" or torch.version.hip is not None:
            return None
        sizes = model.num_heads, latent.kv_rank, latent.rope_dim, latent.nope_dim
        return cls(device, dtype, *sizes, slots, torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class Version:
    """A kernel by name."""

    name: str
    make: Callable[[Case], Attend]
    why_not: Callable[[Case], str]  # what is missing for it; empty if nothing is


def _needs(package: str, major: int, dtypes: tuple[torch.dtype, ...], page_slots: int) -> Callable[[Case], str]:
    """Requirements of the packages: the GPUs that they are written for, DeepSeek's sizes, whole pages."""

    def why_not(case: Case) -> str:
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}, which is not installed"
        if case.capability[0] != major:
            return f"needs compute capability {major}.x; this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.dtype not in dtypes:
            return f"takes {' and '.join(str(d)[6:] for d in dtypes)}, not {str(case.dtype)[6:]}"
        if (case.rank, case.rope_dim) != (512, 64):
            return f"needs latents of 512 and 64 numbers; this model's have {case.rank} and {case.rope_dim}"
        if case.slots % page_slots:
            return f"needs rows of a multiple of {page_slots} slots; these have {case.slots}"
        return ""

    return why_not


def _triton(case: Case) -> Attend:
    from snapstream.kernels.triton.latent_attention import launch_latent_attention

    return launch_latent_attention


def _plain(case: Case) -> Attend:
    from snapstream.kernels.latents.plain import attend

    return attend


VERSIONS: dict[str, Version] = {
    version.name: version
    for version in (
        Version("triton", _triton, lambda case: "" if has_triton() else "needs Triton, which is not installed"),
        Version("flash_mla", lambda case: packages.flash_mla, _needs("flash_mla", 9, HALF, packages.PAGE)),
        # It wants a number of pages that fills 128 slots.
        Version(
            "flashinfer", lambda case: packages.FlashInfer(case.nope_dim, case.device),
            _needs("flashinfer", 10, (torch.bfloat16,), 2 * packages.PAGE),
        ),
        Version("reference", _plain, lambda case: ""),
    )
}  # fmt: skip
