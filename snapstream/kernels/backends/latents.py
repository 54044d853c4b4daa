"""Which kernel attends over rows of latents: the fastest that this GPU has and that answers rightly.

As for prompts (``prefill.py``): every candidate of the table's order answers a small case, those that do so are timed,
and the first stays unless another is faster by a tenth. Invariant: a choice holds for the life of the process and says
why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.kernels import reference
from snapstream.kernels.backends import packages
from snapstream.kernels.backends.autotune import TOLERANCE, Entry, find, read, winner
from snapstream.kernels.backends.prefill import HALF
from snapstream.kernels.interface import CosSin, HeadNorm, Keep, Kernels, LayerRows, RowPlaces, has_triton


def attend_plain(q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor) -> Tensor:
    """The reference of ``Attend``: ``reference.decode_attention`` over ``latents [rows+1, 1, C, E]``."""
    stored = latents[None]
    own = LayerRows(stored, stored[..., :rank], 0, values_are_keys=True)
    return reference.decode_attention(q, own, rows, lengths)


# The kernels that can attend over rows of latents on a GPU, each with its requirements; none is loaded until tried.
#
# ``attend(q [B, H, E], latents [rows+1, 1, C, E], R, rows [B], lengths [B]) -> [B, H, R]`` is
# ``reference.decode_attention`` of one layer, whose values are the first R numbers of its keys.

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

    return attend_plain


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

FILE = Path(__file__).with_name("latents_table.json")
_RACE_ROWS, _RACE_SLOTS, _REPEATS = 8, 4096, 3

Timer = Callable[[Attend, Case], float]  # -> seconds of a call


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The kernel of an engine's decode."""

    name: str
    attend: Attend
    why: str

    @property
    def is_ours(self) -> bool:
        """Whether kernels that are bound to the device do it anyway."""
        return self.name in ("triton", "reference")

    def describe(self) -> str:
        """One line for the start."""
        return f"attention over latents: {self.name} ({self.why})"


@lru_cache(maxsize=8)
def choose(case: Case) -> LatentAttention:
    """The fastest one here."""
    major, minor = case.capability
    dtype = str(case.dtype).removeprefix("torch.")
    return choose_from(find(read(FILE), f"{major}.{minor}", dtype, case.rank + case.rope_dim), case, seconds)


def choose_from(entry: Entry, case: Case, timer: Timer) -> LatentAttention:
    """The first of an order that can serve, unless another is faster."""
    problems = {name: VERSIONS[name].why_not(case) for name in entry.chunk}
    made: dict[str, Attend] = {}
    for name in entry.chunk:
        if not problems[name]:
            made[name] = VERSIONS[name].make(case)
            problems[name] = _trial(made[name], case)
    serving = [name for name in entry.chunk if not problems[name]]
    if not serving:
        reasons = "; ".join(f"{name} {problem}" for name, problem in problems.items())
        raise ValueError(f"no attention over latents can serve here: {reasons}")
    racing = [name for name in serving if name != "reference"]
    if len(racing) > 1:
        times = {name: _time_of(made[name], case, timer) for name in racing}
        best = winner(times)
        measured = ", ".join(f"{name} {time * 1e6:.0f} us" for name, time in times.items() if time < float("inf"))
        return LatentAttention(best, made[best], f"first in a trial at this start: {measured}")
    first = serving[0]
    passed = "; ".join(f"{name} {problems[name]}" for name in entry.chunk[: entry.chunk.index(first)])
    return LatentAttention(first, made[first], f"first of {entry.describe()}" + (f"; {passed}" if passed else ""))


def with_latents(kernels: Kernels, attention: LatentAttention) -> Kernels:
    """The same kernels, whose rows of latents ``attention`` reads."""

    def attend_rows(
        heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
    ) -> Tensor:
        if rope is not None or cache.key_scales is not None:
            return kernels.attend_rows(heads, norm, rope, cache, places, keep)
        q, latents = heads[:, :-1], heads[:, -1:]
        if keep is not None:
            keep(q)
        reference.write_slots(latents, latents, cache, places.rows, places.slots)
        rank = cache.values.shape[-1]
        return attention.attend(q, cache.keys[cache.layer], rank, places.rows, places.lengths)

    return replace(kernels, attend_rows=attend_rows)


def random_rows(case: Case, num_rows: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """``q [B, H, E]``, ``latents [B + 1, 1, C, E]`` and row numbers, the same every time."""
    generator = torch.Generator(case.device).manual_seed(0)
    size = case.rank + case.rope_dim

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    q, latents = numbers(num_rows, case.num_heads, size), numbers(num_rows + 1, 1, slots, size)
    return q, latents, torch.arange(num_rows, device=case.device).flip(0)


def _trial(attend: Attend, case: Case) -> str:
    q, latents, rows = random_rows(case, 3, 256)
    lengths = torch.tensor([1, 70, 256], device=case.device)
    try:
        got = attend(q, latents, case.rank, rows, lengths)
        error = float((got.float() - attend_plain(q, latents, case.rank, rows, lengths).float()).abs().max())
    except Exception as problem:  # a foreign package may raise anything; the next kernel may serve
        return f"failed its trial ({type(problem).__name__}: {' '.join(str(problem).split())[:120]})"
    return "" if error <= TOLERANCE else f"failed its trial (wrong by {error:.2g})"


def seconds(attend: Attend, case: Case) -> float:
    """Time of a call on the device over full rows; the best of a few."""
    q, latents, rows = random_rows(case, _RACE_ROWS, _RACE_SLOTS)
    lengths, best = torch.full_like(rows, _RACE_SLOTS), float("inf")
    for _ in range(1 + _REPEATS):
        torch.cuda.synchronize(case.device)
        began = perf_counter()
        attend(q, latents, case.rank, rows, lengths)
        torch.cuda.synchronize(case.device)
        best = min(best, perf_counter() - began)
    return best


def _time_of(attend: Attend, case: Case, timer: Timer) -> float:
    try:
        return timer(attend, case)
    except Exception:  # a foreign package may raise anything; the next kernel may serve
        return float("inf")
