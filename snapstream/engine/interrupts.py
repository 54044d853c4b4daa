"""Ctrl-C amid the host's half of a step: whatever was half done is forgotten, with every open request.

A Ctrl-C may come between any two lines: behind the row that was taken and before the job that owns it, behind the read
that a disk was sent and before the note of it. No order of lines leaves nothing over in all of these places, so nothing
is taken back line by line. Invariant: after an interrupted method no row, no staging range and no block of the prefix
store belongs to anybody, but for the blocks that a disk still reads or writes. What is counted is forgotten where it is
counted: ``start_over`` of ``core.py``, ``scheduler.py``, ``admission.py``, ``prefix_lookup.py``, ``prefix_index.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class StartsOver(Protocol):
    """Whose methods may be interrupted."""

    is_half_done: bool  # an interrupted method has left it so

    def start_over(self) -> None:
        """Forget everything that a method may have left half done. It may be interrupted, and repeated."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=StartsOver)


def whole(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that is done as a whole, or leaves its object as if it had just started; errors pass as they are."""

    @wraps(method)
    def run(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if owner.is_half_done:
            _start_over(owner)
        try:
            return method(owner, *args, **kwargs)
        except Exception:
            raise
        except BaseException:  # Ctrl-C
            owner.is_half_done = True
            _start_over(owner)
            raise

    return run


def _start_over(owner: StartsOver) -> None:
    owner.start_over()
    owner.is_half_done = False
