"""Whether the callers of a replica still live: Ray tells nobody that a caller was killed, and goes on with its calls.

Every ingress asks for a report about once a second (``engine.py``); one that is silent while others ask is gone. While
nobody asks nobody is blamed: Ray lets no call through to a replica that drains, whose requests end by themselves or
with the drain. Counted in ticks and not in seconds: a replica that was itself stopped makes one tick of the gap. No
ray, no clock.
"""

from __future__ import annotations

TICK_S = 3.0
NUM_TICKS = 10  # without a sign: then a caller is gone


class Leases:
    """Callers by name; one without a name has no lease and is trusted to end what it begins."""

    def __init__(self) -> None:
        self._num_silent: dict[str, int] = {}
        self._is_asked = False  # by any caller, since the last tick

    def open(self, caller: str) -> None:
        """It has a request here."""
        if caller:
            self._num_silent.setdefault(caller, 0)

    def renew(self, caller: str) -> None:
        """It asks for a report."""
        self._is_asked = self._is_asked or bool(caller)
        if caller in self._num_silent:
            self._num_silent[caller] = 0

    def tick(self) -> list[str]:
        """Time passes; callers that are gone, each told once."""
        if not self._is_asked:
            return []
        self._is_asked = False
        for caller in self._num_silent:
            self._num_silent[caller] += 1
        gone = [caller for caller, num_silent in self._num_silent.items() if num_silent > NUM_TICKS]
        for caller in gone:
            del self._num_silent[caller]
        return gone
