"""Which replicas there are, what each has to do, and to whom the next request goes. No ray, no clock.

A prompt that the prefix store may know goes to the replica that has its beginning: replicas are put in an order by the
hash of key and replica (highest random weight), which every ingress finds alike without asking anyone, and which
changes only for the keys of a replica that comes or goes. The first in that order takes it unless it has too much to do
already: consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350). Any other prompt goes where most
rows are free; to be read only, where the fewest prompt tokens wait.

Invariant: what this caller has asked for counts as soon as a replica was chosen, not when it reports it. The router
works on a thread of its own, so every method takes the lock. ``router.py`` asks, ``engine.py`` tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import ceil
from threading import Lock

from snapstream.config import EngineConfig
from snapstream.engine.prefix_index import chain_of
from snapstream.engine.stats import add_totals, without_gauges
from snapstream.integrations.ray.messages import Load, Report
from snapstream.request import Request
from snapstream.server.engine.api import EngineStats

MOST_OF_MEAN = 1.5  # of the mean number of open rows, or tokens, that a replica may have before prompts go elsewhere


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """Where one call may go. It rides along with the call as an argument; of it, the replica gets the caller only."""

    board: Board | None = None
    caller: str = ""  # an ingress, or a replica that answers; it renews its leases by asking for reports
    key: bytes = b""  # of the prompt's beginning; b"": no replica can have it
    size: int = 0  # in what the board counts: rows, or prompt tokens
    avoid: frozenset[str] = frozenset()  # replicas that have failed this request
    to: str = ""  # this replica and no other, while it lives
    on_taken: Callable[[str], None] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[Route], tuple[None, str]]:
        return Route, (None, self.caller)


def route_key(request: Request, config: EngineConfig | None) -> bytes:
    """Hash of what decides whether the prefix store can have the beginning of a prompt; b"" where it cannot."""
    store = None if config is None else config.prefix_store
    if store is None or request.positions is not None:
        return b""
    num_blocks = max(1, store.min_tokens // store.block_len)
    chain = chain_of(request.prompt_token_ids[: num_blocks * store.block_len], store.block_len)
    if len(chain) < num_blocks:
        return b""
    digest = blake2b(request.namespace.encode(), digest_size=16)
    for block in chain:
        digest.update(block)
    return digest.digest()


def ranked(loads: Mapping[str, Load], key: bytes, num_rows: int) -> list[str]:
    """Replicas in the order in which they should be asked to take a request of ``num_rows``."""
    freest = sorted(loads, key=lambda name: (-loads[name].free_rows, loads[name].open_rows, name))
    if not key:
        return freest
    total = sum(load.open_rows for load in loads.values())
    most = ceil(MOST_OF_MEAN * (total + num_rows) / max(1, len(loads)))
    by_hash = sorted(loads, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
    near = [name for name in by_hash if _fits(loads[name], num_rows, most)]
    return [*near, *(name for name in freest if name not in near)]


def _fits(load: Load, num_rows: int, most: int) -> bool:
    return load.free_rows >= num_rows and load.open_rows + num_rows <= max(most, num_rows)


def ranked_readers(loads: Mapping[str, Load], key: bytes, num_tokens: int) -> list[str]:
    """The same for replicas that are to read a prompt of ``num_tokens``."""
    idlest = sorted(loads, key=lambda name: (loads[name].queued_tokens, loads[name].open_rows, name))
    if not key:
        return idlest
    total = sum(load.queued_tokens for load in loads.values())
    most = max(num_tokens, ceil(MOST_OF_MEAN * (total + num_tokens) / max(1, len(loads))))
    by_hash = sorted(loads, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
    near = [name for name in by_hash if loads[name].queued_tokens + num_tokens <= most]
    return [*near, *(name for name in idlest if name not in near)]


class Claim:
    """What one request asks for, counted before its replica reports it: from its choice until it is given back.

    Ray chooses on its own thread, and may do so when the caller has already left: then nothing is counted.
    """

    def __init__(self, lock: Lock, own: Counter[str], size: int) -> None:
        self._lock, self._own, self._size = lock, own, size
        self._is_over = False
        self.names: list[str] = []  # replicas that had the request

    def take(self, name: str) -> None:
        with self._lock:
            if not self._is_over:
                self.names.append(name)
                self._own[name] += self._size

    def give_back(self) -> None:
        with self._lock:
            self._is_over = True
            for name in self.names:
                self._own[name] -= self._size
                if not self._own[name]:
                    del self._own[name]


class Board:
    """What one caller knows of the replicas of a deployment."""

    def __init__(self, *, reads_only: bool = False) -> None:
        """``reads_only``: the replicas read prompts for others, and count by tokens that wait; else by rows."""
        self._reads_only = reads_only
        self._lock = Lock()
        self._reports: dict[str, Report] = {}
        self._names: tuple[str, ...] = ()  # replicas that Ray offers; some may not have reported yet
        self._loads: dict[str, Load] = {}
        self._own: Counter[str] = Counter()  # rows, or tokens, of requests that this caller has open
        self._gone = EngineStats()  # totals of replicas that are no more

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def num_ready(self) -> int:
        with self._lock:
            return sum(not load.absence for load in self._loads.values())

    @property
    def absences(self) -> list[str]:
        """Why replicas take no requests."""
        with self._lock:
            return [load.absence for load in self._loads.values() if load.absence]

    def rank(self, present: Collection[str], route: Route) -> list[str]:
        """Replicas for a call, the best first, of all that Ray offers; those to avoid only where there is no other."""
        with self._lock:
            self._keep(present)
            if route.to in present:
                return [route.to]
            loads = {name: self._load(name) for name in present}
            usable = {name: load for name, load in loads.items() if not load.absence and name not in route.avoid}
            usable = usable or {name: load for name, load in loads.items() if name not in route.avoid} or loads
            return self._order(usable, route)

    def best(self, route: Route) -> str:
        """Of the replicas known to take requests the one to ask, if possible none to avoid; "" where there is none."""
        with self._lock:
            loads = {name: self._load(name) for name in self._names}
            ready = {name: load for name, load in loads.items() if not load.absence}
            usable = {name: load for name, load in ready.items() if name not in route.avoid} or ready
            return self._order(usable, route)[0] if usable else ""

    def hear(self, name: str, load: Load) -> None:
        with self._lock:
            if name in self._names:
                self._loads[name] = load

    def take(self, report: Report) -> None:
        with self._lock:
            if report.replica in self._names:
                self._loads[report.replica] = report.load
                self._reports[report.replica] = report

    def lose(self, name: str, why: str) -> None:
        """It does not answer; Ray will offer another one, or it will report again."""
        with self._lock:
            if name in self._names:
                self._loads[name] = replace(self._loads.get(name, Load()), absence=why)

    def claim(self, size: int) -> Claim:
        """For a request that is about to be sent to a replica."""
        return Claim(self._lock, self._own, size)

    def stats(self) -> EngineStats:
        """Gauges of the replicas that there are; totals also of those that there were."""
        with self._lock:
            total = self._gone
            for name in self._names:
                if name in self._reports:
                    total = _sum(total, self._reports[name].stats)
            return total

    def _order(self, loads: Mapping[str, Load], route: Route) -> list[str]:
        order = ranked_readers if self._reads_only else ranked
        return order(loads, route.key, route.size)

    def _load(self, name: str) -> Load:
        """As reported, or what this caller knows better; one that never reported is worth a try."""
        load = self._loads.get(name, Load())
        if self._reads_only:
            return replace(load, queued_tokens=max(load.queued_tokens, self._own[name]))
        return replace(load, open_rows=max(load.open_rows, self._own[name]))

    def _keep(self, present: Collection[str]) -> None:
        if set(present) == set(self._names):
            return
        for name in set(self._names) - set(present):
            report = self._reports.pop(name, None)
            self._loads.pop(name, None)
            if report is not None:
                self._gone = add_totals(without_gauges(report.stats), self._gone)
        self._names = tuple(sorted(present))


def _sum(one: EngineStats, other: EngineStats) -> EngineStats:
    return replace(
        add_totals(one, other),
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        rows_free=one.rows_free + other.rows_free,
        rows_total=one.rows_total + other.rows_total,
        prefix_blocks_used=one.prefix_blocks_used + other.prefix_blocks_used,
        prefix_blocks_total=one.prefix_blocks_total + other.prefix_blocks_total,
    )
