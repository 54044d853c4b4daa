"""Chooses the prefill attention of an engine: the fastest correct kernel of this machine.

On a GPU every candidate is first compared with the reference on small cases; one that raises or is wrong is skipped,
and the reason is reported. The others are timed; without a clear winner ``ORDER`` holds. On a CPU PyTorch's kernel and
ours are timed. The choice is made once, at start. A kernel requested by name that cannot serve is
an error, never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.backends.prefill import VERSIONS, Attend, AttendPacked, Case, StageHeads, Version
from snapstream.kernels.rows import PackedLens

# Of kernels whose times are within a tenth of each other, the first is taken.
ORDER = ("flash_attn_3", "flash_attn", "triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "reference")
PACKED_ORDER = ("flash_attn_3", "flash_attn", "sdpa_flash")  # for several prompts in one call


_BEFORE, _AFTER = 16, 16  # tokens of other prompts in the pool


def random_chunk(
    case: Case, num_queries: int, num_keys: int, *, num_kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """``q [T, H, E]`` and a range of a staging pool, ``k, v [G, N, E]``; from a fixed seed."""
    generator = torch.Generator(case.device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    pool = numbers(2, num_kv_heads, _BEFORE + num_keys + _AFTER, case.head_dim)
    k, v = pool[:, :, _BEFORE : _BEFORE + num_keys]
    return numbers(num_queries, num_kv_heads * case.group_size, case.head_dim), k, v


# Timing takes tens of milliseconds on a GPU, a few on a CPU. On a GPU each kernel runs at a few lengths, twice each: it
# may plan every new pair of lengths on the host, and a pair comes once per layer.
Timer = Callable[[Version, Case], float]  # -> seconds of a chunk
Known = dict[tuple[Case, tuple[str, ...]], dict[str, float]]

_MARGIN = 0.9  # share of the first one's time that another must stay below
_QUERIES = 2048  # a unit of prefill
_KEYS = (8192, 8128, 8064)
_TURNS = 5  # on a CPU
_LAYERS = 32  # of an 8B model: how often a pair of lengths comes


@cache
def known() -> Known:
    """The measurements of this process, kept so that all its engines choose the same."""
    return {}


def race(serving: Sequence[Version], case: Case, timer: Timer, measured: Known) -> dict[str, float]:
    """Seconds of each of ``serving``; infinite for one that fails, as for lack of memory."""
    names = tuple(version.name for version in serving)
    if (case, names) not in measured:
        measured[case, names] = {version.name: _time_of(version, case, timer) for version in serving}
    return measured[case, names]


def winner(times: dict[str, float]) -> str:
    """The first, or the fastest if it is faster by a tenth."""
    first, fastest = next(iter(times)), min(times, key=lambda name: times[name])
    return fastest if times[fastest] < _MARGIN * times[first] else first


def seconds(version: Version, case: Case) -> float:
    """Time of a call, with its share of the cost of new lengths; the best of a few lengths."""
    q, k, v = random_chunk(case, _QUERIES, _KEYS[0], num_kv_heads=4)
    attend = _attend_of(version, case)

    def timed(num_keys: int) -> float:
        torch.cuda.synchronize(case.device)
        began = perf_counter()
        attend(q, k[:, :num_keys], v[:, :num_keys])
        torch.cuda.synchronize(case.device)
        return perf_counter() - began

    attend(q, k[:, :-1], v[:, :-1])  # loads, compiles
    costs = []
    for num_keys in _KEYS:
        first, again = timed(num_keys), timed(num_keys)
        costs.append(again + max(0.0, first - again) / _LAYERS)
    return min(costs)


def seconds_on_a_cpu(version: Version, case: Case) -> float:
    """Time of a short chunk behind other tokens: the best of a few, least disturbed by other programs."""
    q, k, v = random_chunk(case, 64, 512)
    attend = _attend_of(version, case)
    attend(q, k, v)  # loads, starts threads
    times = []
    for _ in range(_TURNS):
        began = perf_counter()
        attend(q, k, v)
        times.append(perf_counter() - began)
    return min(times)


def _attend_of(version: Version, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The kernel as such a model calls it."""
    return version.attend if case.cap is None else partial(version.attend, cap=case.cap)


def describe(times: dict[str, float]) -> str:
    """Of those that ran."""
    ran = (f"{name} {time * 1e3:.2f} ms" for name, time in times.items() if time < float("inf"))
    return f"timed at this start: {', '.join(ran)}"


def _time_of(version: Version, case: Case, timer: Timer) -> float:
    try:
        return timer(version, case)
    except Exception:  # a foreign package may raise anything; the next kernel may serve
        return float("inf")


TOLERANCE = 0.03  # of a comparison in half precision; fp32 may use tf32 products
_SHOWN = 3  # reasons in a start-up line


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """The kernels of an engine's prefill."""

    name: str
    attend: Attend
    packed_name: str  # "loop": one call per prompt of a chunk
    attend_packed: AttendPacked | None
    why: str
    stage_heads: StageHeads | None = None  # norms, rotates and stages heads; None: PyTorch does
    takes_narrow_values: bool = False  # values may be shorter than keys

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
        chosen = {"cpu_bf16": "asked for, or products are of bf16", "cpu_int16": "asked for, or faster than fp32 here"}
        why = chosen.get(name, "asked for")
        return _made(version, _first_packed((name,), case), why)
    if case.device.type == "cpu":
        return _on_a_cpu(case)
    if case.capability is None:
        return _made(VERSIONS["reference"], None, f"nothing faster is known for {case.device}")
    version, why = _fastest(case)
    return _made(version, _first_packed(PACKED_ORDER, case), why)


def _on_a_cpu(case: Case) -> PrefillAttention:
    """PyTorch's kernel, unless ours is faster here."""
    theirs, ours = VERSIONS["cpu"], VERSIONS["cpu_fp32"]
    if problem := ours.why_not(case):
        return _made(theirs, None, f"{ours.name} cannot serve: {problem}")
    times = race([theirs, ours], case, seconds_on_a_cpu, known())
    why = describe(times)
    return _made(ours, ours, why) if winner(times) == ours.name else _made(theirs, None, why)


def _fastest(case: Case) -> tuple[Version, str]:
    """The first of the order that can serve, unless another is faster here; and why."""
    problems = {name: problem_of(VERSIONS[name], case) for name in ORDER}
    serving = [VERSIONS[name] for name in ORDER if not problems[name]]
    if not serving:
        reasons = "; ".join(f"{name} {problem}" for name, problem in problems.items())
        raise ValueError(f"no prefill attention can serve here: {reasons}")
    timed = [version for version in serving if version.name != "reference"]  # which holds all scores
    first, why = serving[0], "the one that can serve"
    if len(timed) > 1:
        times = race(timed, case, seconds, known())
        first, why = VERSIONS[winner(times)], describe(times)
    skipped = [f"{name} {problems[name]}" for name in ORDER[: ORDER.index(first.name)] if problems[name]]
    return first, "; ".join([why, *skipped[:_SHOWN]])


@lru_cache(maxsize=16)
def automatic(case: Case) -> PrefillAttention:
    """``choose("auto", case)``, remembered: for callers without an engine."""
    return choose("auto", case)


def _made(version: Version, packed: Version | None, why: str) -> PrefillAttention:
    name, together = ("loop", None) if packed is None else (packed.name, packed.attend_packed)
    is_narrow = version.takes_narrow_values and (packed is None or packed.takes_narrow_values)
    return PrefillAttention(version.name, version.attend, name, together, why, version.stage_heads, is_narrow)


def problem_of(version: Version, case: Case) -> str:
    """Why a kernel cannot serve; empty if it can."""
    if problem := version.why_not(case):
        return problem
    return _trial(version.attend, case) if case.device.type == "cuda" else ""


def _first_packed(order: tuple[str, ...], case: Case) -> Version | None:
    for name in order:
        version = VERSIONS[name]
        if version.attend_packed is None or version.why_not(case) or version.why_not_packed():
            continue
        if not _packed_trial(version.attend_packed, case):
            return version
    return None


def _trial(attend: Attend, case: Case) -> str:
    q, k, v = random_chunk(case, 40, 200)
    problem = ""
    for window in {None, case.window and min(case.window, 50)}:
        extra: dict[str, Any] = {"window": window, **_softmax(case, q)}
        expected = reference.prefill_attention(q, k, v, **extra)
        problem = problem or _compare(partial(attend, q, k, v, **extra), expected)
    return problem


def _packed_trial(attend_packed: AttendPacked, case: Case) -> str:
    """Two prompts of 24 and 40 tokens; of the first, the last 8 are in the chunk."""
    q, k, v = random_chunk(case, 48, 64)
    ends = torch.tensor([[0, 8, 48], [0, 24, 64]], dtype=torch.int32, device=q.device)
    lens, problem = PackedLens(ends[0], ends[1], 40, 40), ""
    for window in {None, case.window and min(case.window, 20)}:
        extra: dict[str, Any] = {"window": window, **_softmax(case, q)}
        expected = torch.cat([
            reference.prefill_attention(q[:8], k[:, :24], v[:, :24], **extra),
            reference.prefill_attention(q[8:], k[:, 24:], v[:, 24:], **extra),
        ])  # fmt: skip
        problem = problem or _compare(partial(attend_packed, q, k, v, lens, **extra), expected)
    return problem


def _softmax(case: Case, q: Tensor) -> dict[str, Any]:
    """What differs in a model's softmax: ``sinks [H]`` for the heads of ``q [T, H, E]``, and a cap of scores."""
    own = {"sinks": torch.linspace(-2.0, 3.0, q.shape[1], device=q.device)} if case.has_sinks else {}
    return own if case.cap is None else {**own, "cap": min(case.cap, 2.0)}  # low enough that random scores reach it


def _compare(run: Callable[[], Tensor], expected: Tensor) -> str:
    try:
        got = run()
        error = float((got.float() - expected.float()).abs().max())
    except Exception as problem:  # a foreign package may raise anything; the next kernel may serve
        return f"failed its trial ({type(problem).__name__}: {' '.join(str(problem).split())[:120]})"
    return "" if error <= TOLERANCE else f"failed its trial (wrong by {error:.2g})"
