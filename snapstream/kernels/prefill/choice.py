"""Which kernel attends a prefill chunk: the fastest that this machine has and that answers rightly.

On a GPU every candidate first answers a small case (a chunk behind other keys, and two packed prompts) that is compared
with the reference; one that raises, or is wrong, is passed over with its reason. The others then run against the clock
(``race.py``); between equals the table's order holds. On a CPU two race, PyTorch's and ours.
Invariant: a choice is made once, at start-up, and says why; a kernel that was asked for by name and cannot serve is an
error, never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.prefill import race
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.kernels.prefill.samples import random_chunk
from snapstream.kernels.prefill.table import Entry, lookup
from snapstream.kernels.prefill.versions import VERSIONS, Attend, AttendPacked, Case, StageHeads, Version

TOLERANCE = 0.03  # of a trial in half precision; fp32 may use tf32 products
_SHOWN = 3  # reasons that a start-up line has room for


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """The kernels of an engine's prefill."""

    name: str
    attend: Attend
    packed_name: str  # "loop": short prompts that share a chunk are attended one by one
    attend_packed: AttendPacked | None
    why: str
    stage_heads: StageHeads | None = None  # norms, rotates and stages heads; None: plain calls do
    takes_narrow_values: bool = False  # values may have fewer numbers than keys

    def describe(self) -> str:
        """One line for the start."""
        packed = "a call per prompt" if self.attend_packed is None else f"one call ({self.packed_name})"
        return f"prefill attention: {self.name} ({self.why}); short prompts that share a chunk: {packed}"


def choose(name: str, case: Case) -> PrefillAttention:
    """The kernel of that name, or the fastest (``"auto"``). ValueError for one that cannot serve here."""
    if name != "auto":
        version = VERSIONS.get(name)
        if version is None:
            raise ValueError(f"prefill_attention is {name!r}; it must be auto or one of {', '.join(VERSIONS)}")
        if problem := problem_of(version, case):
            raise ValueError(f"prefill_attention {name!r} cannot be used: {problem}")
        packed, _ = _first_packed((name,), case)
        return _made(version, packed, "asked for, or products are of bf16" if name == "cpu_bf16" else "asked for")
    if case.device.type == "cpu":
        return _on_a_cpu(case)
    if case.capability is None:
        return _made(VERSIONS["reference"], None, f"nothing faster is known for {case.device}")
    entry = lookup(case.capability, case.dtype, case.head_dim)
    version, why = _fastest(entry, case)
    packed, _ = _first_packed(entry.packed, case)
    return _made(version, packed, why)


def _on_a_cpu(case: Case) -> PrefillAttention:
    """PyTorch's kernel, unless ours is faster here."""
    theirs, ours = VERSIONS["cpu"], VERSIONS["cpu_fp32"]
    if problem := ours.why_not(case):
        return _made(theirs, None, f"{ours.name} cannot serve: {problem}")
    times = race.race([theirs, ours], case, race.seconds_on_a_cpu, race.known())
    told = f"of a trial at this start: {race.describe(times)}"
    if race.winner(times) == ours.name:
        return _made(ours, ours, f"faster one {told}")
    return _made(theirs, None, f"kept by the result {told}")


def _fastest(entry: Entry, case: Case) -> tuple[Version, str]:
    """The first of the table's order that can serve, unless another is faster here; and why it is the one."""
    problems = {name: problem_of(VERSIONS[name], case) for name in entry.chunk}
    serving = [VERSIONS[name] for name in entry.chunk if not problems[name]]
    if not serving:
        reasons = "; ".join(f"{name} {problem}" for name, problem in problems.items())
        raise ValueError(f"no prefill attention can serve here: {reasons}")
    racing = [version for version in serving if version.name != "reference"]  # it holds a matrix of scores
    if len(racing) > 1:
        times = race.race(racing, case, race.seconds, race.known())
        best = VERSIONS[race.winner(times)]
        if best is not racing[0]:
            return best, f"fastest in a trial at this start: {race.describe(times)}"
    first, why = serving[0], f"first of {entry.describe()}"
    before = entry.chunk[: entry.chunk.index(first.name)]
    if before:
        why += f" that can serve; {'; '.join(f'{name} {problems[name]}' for name in before[:_SHOWN])}"
    return first, why


@lru_cache(maxsize=16)
def automatic(device: torch.device, dtype: torch.dtype, head_dim: int, group_size: int) -> PrefillAttention:
    """``choose("auto", ...)``, remembered: for callers without an engine."""
    return choose("auto", Case.of(device, dtype, head_dim, group_size))


def _made(version: Version, packed: Version | None, why: str) -> PrefillAttention:
    name, together = ("loop", None) if packed is None else (packed.name, packed.attend_packed)
    is_narrow = version.takes_narrow_values and (packed is None or packed.takes_narrow_values)
    return PrefillAttention(version.name, version.attend, name, together, why, version.stage_heads, is_narrow)


def problem_of(version: Version, case: Case) -> str:
    """Why a kernel cannot serve; empty if it can."""
    if problem := version.why_not(case):
        return problem
    return _trial(version.attend, case) if case.device.type == "cuda" else ""


def _first_packed(order: tuple[str, ...], case: Case) -> tuple[Version | None, list[str]]:
    reasons: list[str] = []
    for name in order:
        version = VERSIONS[name]
        if version.attend_packed is None:
            reasons.append(f"{name} takes one prompt at a time")
            continue
        problem = version.why_not(case) or version.why_not_packed() or _packed_trial(version.attend_packed, case)
        if not problem:
            return version, reasons
        reasons.append(f"{name} {problem}")
    return None, reasons


def _trial(attend: Attend, case: Case) -> str:
    q, k, v = random_chunk(case, 40, 200)
    return _compare(lambda: attend(q, k, v), reference.prefill_attention(q, k, v))


def _packed_trial(attend_packed: AttendPacked, case: Case) -> str:
    """Two prompts of 24 and 40 tokens; of the first, the last 8 are in the chunk."""
    q, k, v = random_chunk(case, 48, 64)
    expected = torch.cat([
        reference.prefill_attention(q[:8], k[:, :24], v[:, :24]),
        reference.prefill_attention(q[8:], k[:, 24:], v[:, 24:]),
    ])  # fmt: skip
    ends = torch.tensor([[0, 8, 48], [0, 24, 64]], dtype=torch.int32, device=q.device)
    return _compare(lambda: attend_packed(q, k, v, PackedLens(ends[0], ends[1], 40, 40)), expected)


def _compare(run: Callable[[], Tensor], expected: Tensor) -> str:
    try:
        got = run()
        error = float((got.float() - expected.float()).abs().max())
    except Exception as problem:  # a foreign package may raise anything; the next kernel may serve
        return f"failed its trial ({type(problem).__name__}: {' '.join(str(problem).split())[:120]})"
    return "" if error <= TOLERANCE else f"failed its trial (wrong by {error:.2g})"
