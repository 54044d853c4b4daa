"""The index of the prefix store: which cached blocks a prompt uses, which it writes, and whether it should wait.

A prompt uses whole cached blocks, and at least its observation queries are computed: they select the row from the exact
keys of all tokens, so a hit changes no answer. It writes the blocks that the store lacks. Blocks are held from the
opening of a job to its end, and plans run in order, so a block is never read before it was written.

A prompt whose beginning is being written by an open job, or read from disk, waits if that saves at least half of its
work: five agents over one document cost one prefill. Requests behind it do not wait. Integers and bytes only;
``kv/prefix_store.py`` holds the data.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import takewhile
from typing import Literal, NamedTuple

from snapstream.config import EngineConfig, PrefixStoreConfig
from snapstream.config.engine import NAMESPACE_SEPARATOR
from snapstream.engine.request_state import LiveRequest, LiveSample
from snapstream.step import DiskCache, PrefixMoves, SavedRow, StoredBlock
from snapstream.types import PrefixUse

PROTECTED = 0.8  # share of the blocks that hits may protect, at most
KEPT_PROTECTED = 0.5  # share that new prompts cannot evict
MOST_COMPARED = 64  # stored continuations that are compared to find the nearest

Chain = tuple[bytes, ...]  # the token ids of each full block of a prompt
# What filled a block: a prompt, a row (the last of its keys and values were made by decode), or idle prefill.
Origin = Literal["prompt", "answer", "idle"]
_TOKEN = "i"  # type code of array
_TOKEN_BYTES = array(_TOKEN).itemsize


def chain_of(token_ids: Sequence[int], block_len: int) -> Chain:
    """The full blocks of a prompt."""
    raw, size = array(_TOKEN, token_ids).tobytes(), block_len * _TOKEN_BYTES
    return tuple(raw[start : start + size] for start in range(0, len(raw) - size + 1, size))


@dataclass(slots=True, eq=False)
class Node:
    """A block of a prompt; a root has no number."""

    number: int
    tokens: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    is_ready: bool = False
    num_users: int = 0  # jobs that read it
    origin: Origin = "prompt"
    is_lost: bool = False  # removed from the tree; its number is reused when no job holds it
    namespace: str = ""  # of a root
    snapshot: int | None = None  # number of a snapshot of the recurrent states after its last token
    num_due: int = 0  # open jobs that take such a snapshot


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that a job writes: blocks ``first``, ``first + 1``, ... of its prompt."""

    first: int
    nodes: tuple[Node, ...]


class PrefixIndex:
    """A tree over ``num_blocks`` blocks: a node is a block of ``block_len`` token ids, a root a namespace.

    Two prompts meet in a node only if all their tokens up to there are equal, and namespaces never meet; budget,
    selector and sampling are not part of the key. A node is *written* from its reservation to the commit of the job
    that fills it, then *ready*. Eviction is a segmented LRU: new blocks are on probation, a hit protects them.
    Invariants: a block has one owner; a parent outlives its children; what is being read or written is never evicted.

    Of models with recurrent layers a prompt continues at the end of a node that has a snapshot of their states. There
    are ``num_snapshots``; the least recently used is evicted for a new one, and a node's with the node.
    """

    def __init__(self, num_blocks: int, num_snapshots: int = 0) -> None:
        self.num_blocks, self.num_snapshots = num_blocks, num_snapshots
        self._free_snapshots = list(range(num_snapshots))  # a heap
        self.snapshots: OrderedDict[int, Node] = OrderedDict()  # by number, the least recently used first
        self._roots: dict[str, Node] = {}
        self._free = list(range(num_blocks))  # a heap: low numbers first, so that memory is touched only when needed
        self._probation: OrderedDict[int, Node] = OrderedDict()  # ready nodes by number, the oldest first
        self._protected: OrderedDict[int, Node] = OrderedDict()
        self.num_written = 0  # nodes that are not ready yet
        self.num_evicted = 0

    @property
    def num_used(self) -> int:
        """Blocks that are ready or written."""
        return self.num_blocks - len(self._free)

    def path(self, namespace: str, chain: Chain) -> list[Node]:
        """Nodes of the longest known beginning of a chain, written ones included."""
        node, found = self._roots.get(namespace), []
        for tokens in chain:
            node = node.children.get(tokens) if node is not None else None
            if node is None:
                break
            found.append(node)
        return found

    def diverged_at(self, namespace: str, chain: Chain, rest: bytes) -> int | None:
        """Tokens that a prompt shares with the nearest stored prompt before the two differ; None if they do not.

        ``rest`` are its tokens behind the chain, as bytes. A prompt does not diverge if it ends within a stored one, or
        continues where all stored ones end.
        """
        path = self.path(namespace, chain)
        node = path[-1] if path else self._roots.get(namespace)
        own = chain[len(path)] if len(path) < len(chain) else rest
        if node is None or not node.children or not own:
            return None
        nearest = max(_common(own, tokens) for tokens in list(node.children)[-MOST_COMPARED:])
        if nearest == len(own) // _TOKEN_BYTES or (nearest == 0 and not path):  # its end, or nothing in common
            return None
        return sum(len(each.tokens) for each in path) // _TOKEN_BYTES + nearest

    def up_to_snapshot(self, path: list[Node], *, with_due: bool = False) -> list[Node]:
        """The beginning of a path that ends with a snapshot, ``with_due`` also one that an open job takes; the path
        itself for models without recurrent layers.
        """
        if self.num_snapshots == 0:
            return path
        for end in range(len(path), 0, -1):
            if path[end - 1].snapshot is not None or (with_due and path[end - 1].num_due):
                return path[:end]
        return []

    def reserve_snapshot(self, node: Node) -> int | None:
        """A number for a snapshot at the end of a node; None if it has one or is due to, or all are in use."""
        if node.snapshot is not None or node.num_due:
            return None
        if not self._free_snapshots:
            oldest = next((own for own in self.snapshots.values() if own.num_users == 0), None)
            if oldest is None:
                return None
            self._free_snapshot(oldest)
        node.num_due += 1
        return heappop(self._free_snapshots)

    def end_snapshot(self, node: Node, number: int, *, is_done: bool) -> None:
        """The job that reserved the snapshot has ended or was dropped; it is kept if the node is still in the tree."""
        node.num_due -= 1
        if not is_done or node.is_lost or not node.is_ready:
            heappush(self._free_snapshots, number)
            return
        node.snapshot = number
        self.snapshots[number] = node

    def _free_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            del self.snapshots[node.snapshot]
            heappush(self._free_snapshots, node.snapshot)
            node.snapshot = None

    def take(self, nodes: Sequence[Node]) -> None:
        """Protect and hold these ready nodes, the beginning of a path, for a job."""
        if nodes and nodes[-1].snapshot is not None:
            self.snapshots.move_to_end(nodes[-1].snapshot)
        for node in reversed(nodes):  # parents last: they are younger than their children, and leave after them
            node.num_users += 1
            self._probation.pop(node.number, None)
            self._protected.pop(node.number, None)
            self._protected[node.number] = node
        while len(self._protected) > PROTECTED * self.num_blocks:
            number, node = self._protected.popitem(last=False)
            self._probation[number] = node

    def release(self, nodes: Iterable[Node]) -> None:
        """A job has finished with them."""
        for node in nodes:
            node.num_users -= 1
            if node.is_lost and node.num_users == 0:
                heappush(self._free, node.number)
                self._free_snapshot(node)

    def reserve(self, namespace: str, chain: Chain, origin: Origin = "prompt") -> Reservation:
        """Blocks for the unknown part of the chain, as many as are available."""
        path = self.path(namespace, chain)
        first = len(path)
        parent = path[-1] if path else self._root(namespace)
        own: list[Node] = []
        parent.num_users += 1  # so that it is not evicted for its own children
        for tokens in chain[first:]:
            number = self._take_number()
            if number is None:
                break
            node = Node(number, tokens, own[-1] if own else parent, origin=origin)
            (own[-1] if own else parent).children[tokens] = node
            own.append(node)
        parent.num_users -= 1
        self._forget_empty_root(parent)
        self.num_written += len(own)
        return Reservation(first, tuple(own))

    def commit(self, reservation: Reservation) -> None:
        """The job has filled its blocks."""
        self.num_written -= len(reservation.nodes)
        for node in reversed(reservation.nodes):
            node.is_ready = True
            if node.is_lost:
                heappush(self._free, node.number)
            else:
                self._probation[node.number] = node

    def drop(self, reservation: Reservation) -> None:
        """The job was dropped: remove its blocks, and all below them."""
        self.num_written -= len(reservation.nodes)
        for node in reservation.nodes:
            node.is_ready = True  # no job writes it any more
        if reservation.nodes and not reservation.nodes[0].is_lost:
            self._remove(reservation.nodes[0])
        else:  # removed by a reset
            for node in reservation.nodes:
                heappush(self._free, node.number)

    def reset(self, namespace: str | None = None) -> int:
        """Clear a namespace and those below it, by default all; the number of blocks removed."""
        names = [name for name in self._roots if _is_within(name, namespace)]
        roots = [self._roots.pop(name) for name in names]
        return sum(self._remove(child) for root in roots for child in list(root.children.values()))

    def _remove(self, top: Node) -> int:
        """Remove a node and all below it; the numbers of those in use are freed later."""
        if top.parent is not None:
            del top.parent.children[top.tokens]
            self._forget_empty_root(top.parent)
        count, below = 0, [top]
        while below:
            node = below.pop()
            below += node.children.values()
            count += 1
            node.is_lost = True
            self._probation.pop(node.number, None)
            self._protected.pop(node.number, None)
            if node.is_ready and node.num_users == 0:
                heappush(self._free, node.number)
                self._free_snapshot(node)
        return count

    def _take_number(self) -> int | None:
        if self._free:
            return heappop(self._free)
        victim = self._oldest_leaf(self._probation)
        if victim is None and len(self._protected) > KEPT_PROTECTED * self.num_blocks:
            victim = self._oldest_leaf(self._protected)
        if victim is None:
            return None
        self._remove(victim)
        self.num_evicted += 1
        return heappop(self._free)

    @staticmethod
    def _oldest_leaf(segment: OrderedDict[int, Node]) -> Node | None:
        return next((node for node in segment.values() if not node.children and node.num_users == 0), None)

    def _root(self, namespace: str) -> Node:
        return self._roots.setdefault(namespace, Node(-1, b"", None, namespace=namespace))

    def _forget_empty_root(self, node: Node) -> None:
        is_known = node.parent is None and self._roots.get(node.namespace) is node
        if is_known and not node.children and node.num_users == 0:
            del self._roots[node.namespace]


def _is_within(name: str, namespace: str | None) -> bool:
    """Whether a namespace is this one or below it; all are below None."""
    return namespace in (None, name) or name.startswith(f"{namespace}{NAMESPACE_SEPARATOR}")


def _common(first: bytes, second: bytes) -> int:
    """Tokens that two blocks share from their beginning."""
    ends = range(_TOKEN_BYTES, min(len(first), len(second)) + 1, _TOKEN_BYTES)
    return bisect_left(ends, True, key=lambda end: first[:end] != second[:end])


DISK_WAIT_S = 0.05  # longest wait of an idle engine: it must still read messages
MOST_PINNED = 0.5  # share of the blocks that may wait to be written; others stay in memory only


@dataclass(slots=True, eq=False)
class _Read:
    reservation: Reservation
    snapshot: tuple[Node, int] | None  # that is read after the blocks: its node and number
    wanted: tuple[StoredBlock, ...]
    is_older: bool = False  # than the plan of the step in flight
    done: Future[int] | None = None  # the number of blocks that could be read, from the first on; None: not started


@dataclass(slots=True, eq=False)
class _Write:
    node: Node
    done: Future[int]


class DiskTransfers:
    """Reads and writes in progress.

    A prompt whose blocks are on disk waits for them as for a job that computes them. Blocks are written once the result
    of the step that filled them has been read, and stay in memory until then. A read takes blocks that steps up to the
    one then planned may still read or fill, so it starts when the result of that step has been read.
    """

    def __init__(self, index: PrefixIndex, disk_cache: DiskCache) -> None:
        self._index, self.disk_cache = index, disk_cache
        self._reads: list[_Read] = []
        self._writes: list[_Write] = []

    def fetch(self, namespace: str, chain: Chain, num_known: int, least: int) -> Node | None:
        """Reserve a read of the blocks that follow the ``num_known`` ones in memory that are of use, if that makes at
        least ``least`` blocks; the last node that is read, or None. With recurrent layers they end with a snapshot.
        """
        names, path = self.disk_cache.names(namespace, chain), self._index.path(namespace, chain)
        end, states = len(path), tuple[str, ...]()
        while end < len(chain) and self.disk_cache.has(names[end]):
            end += 1
        if self._index.num_snapshots:
            states = self.disk_cache.names(namespace, chain[:end], of_snapshots=True)
            end = next((own for own in range(end, num_known, -1) if self.disk_cache.has(states[own - 1])), num_known)
        if end == num_known or end < least:
            return None
        reservation = self._index.reserve(namespace, chain[:end])
        nodes = [*path[:end], *reservation.nodes]
        wanted = [
            StoredBlock(node.number, names[reservation.first + place], node.tokens)
            for place, node in enumerate(reservation.nodes)
        ]
        snapshot: tuple[Node, int] | None = None
        if states:
            number = self._index.reserve_snapshot(nodes[-1]) if len(nodes) == end else None
            if number is None:
                self._index.drop(reservation)
                return None
            snapshot = nodes[-1], number
            wanted.append(StoredBlock(number, states[end - 1], nodes[-1].tokens, is_snapshot=True))
        if not wanted:
            return None
        self._reads.append(_Read(reservation, snapshot, tuple(wanted)))
        return nodes[-1]

    def start(self, *, is_idle: bool) -> None:
        """The result of the step before the one in flight has been read; ``is_idle``: no step is in flight."""
        for read in self._reads:
            if read.done is None and (is_idle or read.is_older):
                read.done = self.disk_cache.load(read.wanted)
            read.is_older = True

    def write(
        self, namespace: str, chain: Chain, reservation: Reservation, snapshots: Mapping[int, tuple[Node, int]]
    ) -> None:
        """Start to write blocks that a job has filled, and the snapshots that it took, by the block they end."""
        names = self.disk_cache.names(namespace, chain[: reservation.first + len(reservation.nodes)])
        for name, node in zip(names[reservation.first :], reservation.nodes, strict=True):
            if not self._save(node, StoredBlock(node.number, name, node.tokens)):
                return
        names = self.disk_cache.names(namespace, chain[: max(snapshots, default=0)], of_snapshots=True)
        for end, (node, number) in snapshots.items():
            if node.snapshot == number:  # else it was evicted since
                self._save(node, StoredBlock(number, names[end - 1], node.tokens, is_snapshot=True))

    def _save(self, node: Node, block: StoredBlock) -> bool:
        """Start to write what a node holds; False where it is lost, or too many wait."""
        if node.is_lost or len(self._writes) >= MOST_PINNED * self._index.num_blocks:
            return False
        node.num_users += 1  # its snapshot is not evicted either
        self._writes.append(_Write(node, self.disk_cache.save(block)))
        return True

    def poll(self) -> None:
        """Handle what has ended."""
        for read in list(self._reads):
            if read.done is not None and read.done.done():
                self._reads.remove(read)
                first, nodes, num_right = read.reservation.first, read.reservation.nodes, read.done.result()
                self._index.commit(Reservation(first, nodes[:num_right]))
                self._index.drop(Reservation(first + num_right, nodes[num_right:]))
                if read.snapshot is not None:
                    self._index.end_snapshot(*read.snapshot, is_done=num_right > len(nodes))
        for write in list(self._writes):
            if write.done.done():
                self._writes.remove(write)
                self._index.release([write.node])

    def wait(self) -> None:
        """No step is in flight: wait up to ``DISK_WAIT_S`` for a read, if there is one."""
        self.start(is_idle=True)
        if self._reads:
            wait([read.done for read in self._reads if read.done is not None], DISK_WAIT_S, FIRST_COMPLETED)


@dataclass(slots=True)
class PrefixStats:
    """Counts of tokens since the start; blocks as they are now."""

    queries: int = 0  # prompt tokens that were looked up
    hits: int = 0  # of those, tokens that were cached
    answer_hits: int = 0  # of those, tokens of blocks that were copied from rows
    idle_hits: int = 0  # of those, tokens that were prefilled in idle time
    saved: int = 0
    saved_answers: int = 0  # of those, from rows
    lost_answers: int = 0  # generated tokens that were not copied: their row had evicted some, or is not exact
    evicted_blocks: int = 0
    used_blocks: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class _Lookup:
    chain: Chain
    rest: bytes  # ids behind the last full block
    awaited: Node | None = None  # the last node that an open job or the disk fills for it
    was_fetched: bool = False  # looked up on disk


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A prompt with its answer, whose row fills blocks in a plan."""

    saved: SavedRow
    namespace: str
    chain: Chain
    reservation: Reservation


MAX_UNSTORED = 4  # conversations that wait for idle time; older ones are forgotten


class IdleText(NamedTuple):
    """A conversation that is worth a prefill in idle time."""

    token_ids: tuple[int, ...]
    namespace: str
    lora: str


@dataclass(frozen=True, slots=True)
class _Held:
    """Blocks of an open job."""

    restored: tuple[Node, ...]
    saved: Reservation
    chain: Chain
    snapshots: dict[int, tuple[Node, int]]  # that it takes, by the block they end, ascending: node and number


class PrefixLookup:
    """The prefix store of one engine; its methods do nothing for prompts that are not looked up."""

    def __init__(self, store: PrefixStoreConfig, config: EngineConfig, disk_cache: DiskCache | None) -> None:
        self._block_len, self._longest = store.block_len, config.prefix_max_len or config.max_model_len
        self._min_tokens = store.min_tokens
        self._min_blocks = -(-store.min_tokens // store.block_len)  # that a hit has
        self._snapshot_blocks = max(store.snapshot_len // store.block_len, 1)
        self.index = PrefixIndex(config.prefix_blocks, config.prefix_snapshots)
        self._queued: dict[LiveRequest, _Lookup] = {}
        self._held: dict[LiveRequest, _Held] = {}
        self._filled: dict[LiveRequest, _Held] = {}  # jobs whose last unit is planned, until its result has been read
        self._disk = None if disk_cache is None else DiskTransfers(self.index, disk_cache)
        self._row_len, self._num_drafted = config.prefix_row_len, config.num_speculative_tokens
        self._stats = PrefixStats()
        self._hits: Counter[Origin] = Counter()
        self._idle_len = store.idle_len
        self._most_staged = min(config.max_model_len - 1, config.pool_tokens - config.short_reserve)
        self._unstored: deque[IdleText] = deque(maxlen=MAX_UNSTORED)  # the last conversation at the end

    def stats(self) -> PrefixStats:
        index = self.index
        return replace(
            self._stats,
            hits=self._hits.total(),
            answer_hits=self._hits["answer"],
            idle_hits=self._hits["idle"],
            evicted_blocks=index.num_evicted,
            used_blocks=index.num_used,
            num_blocks=index.num_blocks,
        )

    def arrive(self, live: LiveRequest) -> None:
        if self._min_tokens <= live.num_tokens <= self._longest:
            chain = chain_of(live.request.prompt_token_ids, self._block_len)
            rest = live.request.prompt_token_ids[len(chain) * self._block_len :]
            self._queued[live] = _Lookup(chain, array(_TOKEN, rest).tobytes(), was_fetched=live.is_idle)

    def leave(self, live: LiveRequest) -> None:
        """A request left the queue without a job."""
        self._queued.pop(live, None)

    def probe(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that are stored now."""
        path = self.index.path(namespace, chain_of(token_ids, self._block_len))
        return len(self.index.up_to_snapshot(path[: _num_ready(path)])) * self._block_len

    def must_wait(self, live: LiveRequest, pack: Sequence[LiveRequest] = ()) -> bool:
        """Whether an open job, or the one that would be opened for ``pack``, writes so much of this prompt that it
        should wait for its end.
        """
        if (lookup := self._queued.get(live)) is None:
            return False
        if (awaited := lookup.awaited) is not None and (not awaited.is_ready or awaited.num_due):
            return True
        in_pack = max((self._shared(live, other) for other in pack), default=0)  # blocks
        if self.index.num_written == 0 and in_pack == 0 and (self._disk is None or lookup.was_fetched):
            return False
        most = self._most_restored(live)
        path = self.index.path(live.namespace, lookup.chain)[:most]
        path = self.index.up_to_snapshot(path, with_due=True)
        ready = len(self.index.up_to_snapshot(path[: _num_ready(path)]))
        if self._disk is not None and not lookup.was_fetched and ready == len(path):
            lookup.was_fetched = True
            lookup.awaited = self._disk.fetch(live.namespace, lookup.chain[:most], ready, self._min_blocks)
            return lookup.awaited is not None
        known = max(len(path), min(in_pack, most))
        spared, left = (known - ready) * self._block_len, live.num_tokens - ready * self._block_len
        is_worth_it = 2 * spared >= left and known >= self._min_blocks
        lookup.awaited = path[-1] if path and len(path) == known and is_worth_it else None
        return is_worth_it

    def _shared(self, live: LiveRequest, other: LiveRequest) -> int:
        """Blocks at the beginning of a queued prompt that another one will write. 0 with recurrent layers: it
        is not known yet where the other takes snapshots.
        """
        if other not in self._queued or live.namespace != other.namespace or self.index.num_snapshots:
            return 0
        pairs = zip(self._queued[live].chain, self._queued[other].chain, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def open(self, live: LiveRequest) -> PrefixMoves | None:
        """The request's job opens: the blocks that it reads and writes; None if there are none."""
        lookup, namespace = self._queued.pop(live, None), live.namespace
        if lookup is None:
            return None
        path = self.index.path(namespace, lookup.chain)
        restored = tuple(self.index.up_to_snapshot(path[: min(_num_ready(path), self._most_restored(live))]))
        if len(restored) < self._min_blocks:
            restored = ()
        if not live.is_idle:
            self._stats.queries += live.num_tokens
            for node in restored:
                self._hits[node.origin] += self._block_len
        diverged_at = self.index.diverged_at(namespace, lookup.chain, lookup.rest)
        live.output.prefix = PrefixUse(cached_tokens=len(restored) * self._block_len, diverged_at=diverged_at)
        self.index.take(restored)
        saved = self.index.reserve(namespace, lookup.chain, "idle" if live.is_idle else "prompt")
        snapshots = self._reserve_snapshots(live, len(restored), [*path, *saved.nodes])
        self._held[live] = _Held(restored, saved, lookup.chain, snapshots)
        if not restored and not saved.nodes and not snapshots:
            return None
        return PrefixMoves(
            block_len=self._block_len,
            restored=tuple(node.number for node in restored),
            saved=tuple(node.number for node in saved.nodes),
            first_saved=saved.first,
            state=restored[-1].snapshot if restored else None,
            snapshot_ends=tuple(end * self._block_len for end in snapshots),
            snapshots=tuple(number for _, number in snapshots.values()),
        )

    def _reserve_snapshots(self, live: LiveRequest, first: int, nodes: list[Node]) -> dict[int, tuple[Node, int]]:
        """The snapshots of states that a prompt takes, by block after ``first``: every ``snapshot_len`` tokens, and
        where the same prompt or a longer one would begin to compute. The last are reserved first.
        """
        if self.index.num_snapshots == 0:
            return {}
        last = (live.num_tokens - self._least_computed(live)) // self._block_len
        ends = {*range(self._snapshot_blocks, len(nodes) + 1, self._snapshot_blocks), min(last, len(nodes))}
        found = {}
        least = max(first + 1, self._min_blocks)
        for end in sorted((end for end in ends if end >= least), reverse=True):
            number = self.index.reserve_snapshot(nodes[end - 1])
            if number is not None:
                found[end] = nodes[end - 1], number
        return dict(sorted(found.items()))

    def close(self, live: LiveRequest, *, is_done: bool) -> None:
        """Its job has ended, or was dropped."""
        if (held := self._held.pop(live, None)) is None:
            return
        self.index.release(held.restored)
        if is_done:
            self._stats.saved += len(held.saved.nodes) * self._block_len
            self.index.commit(held.saved)
            if self._disk is not None and (held.saved.nodes or held.snapshots):
                self._filled[live] = held
        else:
            self.index.drop(held.saved)
        for node, number in held.snapshots.values():
            self.index.end_snapshot(node, number, is_done=is_done)

    def store_answer(self, sample: LiveSample) -> StoredAnswer | None:
        """A decoded sample has ended, and its row is saved by the plan in the making: the blocks that it fills.

        None if there are none, or if the row lacks the exact keys and values of a token, or has them in another order.
        """
        live, token_ids = sample.request, sample.output.token_ids
        num_tokens = live.num_tokens + len(token_ids) - 1  # that were fed; the last one may not have been
        # Behind the end: drafts that were accepted, and the token and drafts of a step whose result was not read.
        num_written = num_tokens + 1 + 2 * self._num_drafted
        is_stored = live.stores_answer and not live.request.is_prefilled_remotely
        if not is_stored or not self._min_tokens <= num_tokens <= self._longest:
            return None
        ids = (*live.request.prompt_token_ids, *token_ids[:-1])
        chain = chain_of(ids, self._block_len)
        if num_written > min(self._row_len, live.budget.capacity) or live.budget.num_window:
            self._stats.lost_answers += len(token_ids)
            num_new = len(ids) - self.probe(ids, live.namespace)
            is_worth_it = self._block_len <= num_new <= self._idle_len and len(ids) <= self._most_staged
            if is_worth_it and len(live.samples) == 1:  # of several a caller goes on with one at most
                self._unstored.append(IdleText(ids, live.request.namespace, live.request.lora))
            return None
        reservation = self.index.reserve(live.namespace, chain, "answer")
        if not reservation.nodes:
            return None
        self.index.commit(reservation)  # plans run in order
        num_saved = len(reservation.nodes) * self._block_len
        self._stats.saved += num_saved
        self._stats.saved_answers += num_saved
        numbers = tuple(node.number for node in reservation.nodes)
        moves = PrefixMoves(block_len=self._block_len, saved=numbers, first_saved=reservation.first)
        return StoredAnswer(SavedRow(row=sample.row, moves=moves), live.namespace, chain, reservation)

    @property
    def has_unstored(self) -> bool:
        """Whether there is a conversation to prefill in idle time."""
        return bool(self._unstored)

    def next_unstored(self) -> IdleText:
        """The last conversation whose answer could not be copied. IndexError if there is none."""
        return self._unstored.pop()

    def answer_written(self, answer: StoredAnswer) -> None:
        """The result of the step that saved a row was read: write its blocks to disk."""
        if self._disk is not None:
            self._disk.write(answer.namespace, answer.chain, answer.reservation, {})

    def written(self, live: LiveRequest) -> None:
        """The result of the step that filled the last of its blocks was read: write them and its snapshots to disk."""
        held = self._filled.pop(live, None)
        if held is not None and self._disk is not None:
            self._disk.write(live.namespace, held.chain, held.saved, held.snapshots)

    def poll(self) -> None:
        if self._disk is not None:
            self._disk.poll()

    def start_reads(self, *, is_idle: bool) -> None:
        """See ``DiskTransfers.start``."""
        if self._disk is not None:
            self._disk.start(is_idle=is_idle)

    def wait_for_disk(self) -> None:
        """The engine has nothing else to do: wait for a read, if there is one."""
        if self._disk is not None:
            self._disk.wait()

    def reset(self, namespace: str | None, running: Iterable[LiveRequest] = ()) -> int:
        """Clear a namespace and those below it, by default all, on disk too; the number of blocks in memory. Answers of
        ``running`` requests in it will not be stored.
        """
        for live in running:
            if _is_within(live.namespace, namespace):
                live.stores_answer = False
        kept = [text for text in self._unstored if not _is_within(text.namespace, namespace)]
        self._unstored = deque(kept, maxlen=MAX_UNSTORED)
        self.poll()  # an idle engine does not
        if self._disk is not None:
            self._disk.disk_cache.forget(namespace)
        return self.index.reset(namespace)

    def close_disk(self) -> None:
        """Finish writing."""
        if self._disk is not None:
            self._disk.disk_cache.close()

    def _most_restored(self, live: LiveRequest) -> int:
        """Cached blocks that a prompt may use: the observation queries are computed, and at least one token."""
        if live.request.sampling.prompt_logprobs is not None:
            return 0  # they need the hidden states of all tokens
        return (live.num_tokens - self._least_computed(live)) // self._block_len

    def _least_computed(self, live: LiveRequest) -> int:
        """Tokens at the end of a prompt that are computed whatever is stored. The store has no queries, so a selector
        that needs all of them computes a prompt of which it selects as a whole.
        """
        selects = live.num_tokens > live.budget.capacity and live.budget.num_topk > 0
        if live.selector.needs_all_queries and not selects:
            return 1
        return max(live.selector.num_queries(live.num_tokens), 1)


def _num_ready(path: list[Node]) -> int:
    """Nodes of a path before the first that is being written."""
    return next((count for count, node in enumerate(path) if not node.is_ready), len(path))
