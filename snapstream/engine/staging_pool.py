"""Ranges of the staging buffers, counted in tokens: where each prompt may put its K and V during prefill.

    0                                   pool_tokens - short_reserve        pool_tokens
    |  long prompts; short ones when they find the reserve full  |  short only  |

Invariant: ranges in use never overlap and never leave the pool; a long range never enters the reserve. So a
short prompt finds room however many long ones are in prefill. The reverse - a stream of short prompts that
keeps a long one out - is prevented by the caller: while a long prompt waits, it asks with ``reserve_only``
(``admission.py``).
"""

from __future__ import annotations

from bisect import insort


class StagingPool:
    """First-fit allocator of contiguous token ranges in two zones."""

    def __init__(self, num_tokens: int, *, short_reserve: int) -> None:
        if not 0 <= short_reserve <= num_tokens:
            raise ValueError(f"short_reserve is {short_reserve}; it must be from 0 to {num_tokens}")
        self.num_tokens = num_tokens
        self._long_end = num_tokens - short_reserve
        self._taken: list[tuple[int, int]] = []  # (start, end), ascending

    @property
    def num_free(self) -> int:
        """Tokens in no range, both zones together."""
        return self.num_tokens - sum(end - start for start, end in self._taken)

    def take(self, num_tokens: int, *, is_short: bool, reserve_only: bool = False) -> int | None:
        """Start of a new range, or None when there is no room now."""
        if num_tokens < 1:
            raise ValueError(f"a staging range of {num_tokens} tokens was asked for; the least is 1")
        start = self._find(num_tokens, is_short=is_short, reserve_only=reserve_only)
        if start is not None:
            insort(self._taken, (start, start + num_tokens))
        return start

    def has_room(self, num_tokens: int, *, is_short: bool) -> bool:
        """Whether ``take`` would succeed now."""
        return self._find(num_tokens, is_short=is_short, reserve_only=False) is not None

    def give(self, start: int) -> None:
        """Return the range that begins at ``start``."""
        for place, (taken_start, _) in enumerate(self._taken):
            if taken_start == start:
                del self._taken[place]
                return
        raise ValueError(f"no staging range begins at {start}; ranges in use: {self._taken}")

    def _find(self, num_tokens: int, *, is_short: bool, reserve_only: bool) -> int | None:
        if not is_short:
            return self._first_fit(num_tokens, 0, self._long_end)
        start = self._first_fit(num_tokens, self._long_end, self.num_tokens)
        if start is None and not reserve_only:
            start = self._first_fit(num_tokens, 0, self.num_tokens)  # across the border is still one range
        return start

    def _first_fit(self, num_tokens: int, low: int, high: int) -> int | None:
        start = low
        for taken_start, taken_end in self._taken:
            if taken_end <= start:
                continue
            if taken_start - start >= num_tokens:
                break
            start = taken_end
        return start if start + num_tokens <= high else None
