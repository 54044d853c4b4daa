"""The prefix store as admission sees it: what a prompt restores, what it saves, and whether it should wait.

A prompt restores whole blocks, and leaves at least its voting queries to be computed: the row is chosen anew by them,
from the exact keys of all tokens, so a hit changes no answer. It saves what the store lacks. Blocks are held from the
job's opening to its end, and plans run in order, so a block is never read before it was written.

A prompt whose beginning is being written by an open job waits for that job, if that spares it at least half of its
work: five agents over one document cost one prefill. Jobs end, and requests behind it do not wait.
``prefix_index.py`` is the store's index.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from heapq import heappop, heappush

from snapstream.config import EngineConfig, PrefixStoreConfig
from snapstream.engine.request_state import LiveRequest
from snapstream.step import PrefixMoves, PrefixTier, StoredBlock
from snapstream.types import NAMESPACE_BORDER, PrefixUse

# Which beginnings of prompts lie in the prefix store, and in which blocks. Integers and bytes; no torch, no clock.
#
# A prompt is cut into blocks of ``block_len`` token ids. The index is a tree: a node is a block, an edge the ids of
# its tokens, a root a namespace, so two prompts meet in a node only if all their tokens up to there are equal, and
# namespaces never meet. Nothing else is part of the key: what is stored precedes every budget, selector and sampling
# parameter.
#
# A node is *written* from its reservation until the job that fills it commits, then *ready*. Eviction is a segmented
# LRU: new blocks are on probation, a hit protects them. Invariants: a block number has one owner; a parent outlives
# its children; what is being restored or written is never evicted; at least half of the blocks stay with what was hit.
# ``prefix_lookup.py`` applies this to requests, ``kv/prefix_store.py`` holds the bytes.

PROTECTED = 0.8  # most of the blocks that hits may protect
KEPT_PROTECTED = 0.5  # so many of them new prompts cannot push out
MOST_COMPARED = 64  # stored continuations among which the nearest is looked for

Chain = tuple[bytes, ...]  # the token ids of each full block of a prompt
_TOKEN = "i"  # of array: 4 bytes


def chain_of(token_ids: Sequence[int], block_len: int) -> Chain:
    """The full blocks of a prompt; what is left over is in none."""
    raw, size = array(_TOKEN, token_ids).tobytes(), block_len * array(_TOKEN).itemsize
    return tuple(raw[start : start + size] for start in range(0, len(raw) - size + 1, size))


@dataclass(slots=True, eq=False)
class Node:
    """A block of a prompt; a root has no number."""

    number: int
    tokens: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    is_ready: bool = False
    num_users: int = 0  # jobs that restore it
    is_lost: bool = False  # unreachable; its number is reused when no job holds it
    namespace: str = ""  # of a root


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that a job fills: blocks ``first``, ``first + 1``, ... of its prompt."""

    first: int
    nodes: tuple[Node, ...]


class PrefixIndex:
    """The tree over ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._roots: dict[str, Node] = {}
        self._free = list(range(num_blocks))  # a heap: low numbers first, so that memory is touched as it is needed
        self._probation: OrderedDict[int, Node] = OrderedDict()  # ready nodes by number, the oldest first
        self._protected: OrderedDict[int, Node] = OrderedDict()
        self.num_written = 0  # nodes that are not ready yet
        self.num_evicted = 0

    @property
    def num_used(self) -> int:
        """Blocks that are ready or written."""
        return self.num_blocks - len(self._free)

    def path(self, namespace: str, chain: Chain) -> list[Node]:
        """Nodes of the longest beginning of a chain that is known, written ones included. Changes nothing."""
        node, found = self._roots.get(namespace), []
        for tokens in chain:
            node = node.children.get(tokens) if node is not None else None
            if node is None:
                break
            found.append(node)
        return found

    def diverged_at(self, namespace: str, chain: Chain, rest: bytes) -> int | None:
        """Tokens that a prompt shares with the nearest prompt stored, where it then reads otherwise; else None.

        ``rest`` are its tokens behind the chain, as the bytes of an array. Where the prompt ends within a stored one,
        or goes on where all stored ones end, nothing diverges.
        """
        path = self.path(namespace, chain)
        node = path[-1] if path else self._roots.get(namespace)
        own = chain[len(path)] if len(path) < len(chain) else rest
        if node is None or not node.children or not own:
            return None
        nearest = max(_common(own, tokens) for tokens in list(node.children)[-MOST_COMPARED:])
        size = array(_TOKEN).itemsize
        if nearest == len(own) // size or (nearest == 0 and not path):  # its end; or another prompt altogether
            return None
        return sum(len(each.tokens) for each in path) // size + nearest

    def take(self, nodes: Sequence[Node]) -> None:
        """A job is about to restore these ready nodes, the beginning of a path: protect and hold them."""
        for node in reversed(nodes):  # parents last: they are younger than their children, and leave after them
            node.num_users += 1
            self._probation.pop(node.number, None)
            self._protected.pop(node.number, None)
            self._protected[node.number] = node
        while len(self._protected) > PROTECTED * self.num_blocks:
            number, node = self._protected.popitem(last=False)
            self._probation[number] = node

    def release(self, nodes: Iterable[Node]) -> None:
        """The job does not need them any more."""
        for node in nodes:
            node.num_users -= 1
            if node.is_lost and node.num_users == 0:
                heappush(self._free, node.number)

    def reserve(self, namespace: str, chain: Chain) -> Reservation:
        """Blocks for what of the chain is not known yet, as many as can be had; perhaps none."""
        path = self.path(namespace, chain)
        first = len(path)
        parent = path[-1] if path else self._root(namespace)
        own: list[Node] = []
        parent.num_users += 1  # so that it is not evicted for its own children
        for tokens in chain[first:]:
            number = self._take_number()
            if number is None:
                break
            node = Node(number, tokens, own[-1] if own else parent)
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
        """The job was given up: its blocks hold nothing, and what others hung below them is lost."""
        self.num_written -= len(reservation.nodes)
        for node in reservation.nodes:
            node.is_ready = True  # no job writes it any more
        if reservation.nodes and not reservation.nodes[0].is_lost:
            self._lose(reservation.nodes[0])
        else:  # a reset has lost them already
            for node in reservation.nodes:
                heappush(self._free, node.number)

    def reset(self, namespace: str | None = None) -> int:
        """Forget all of a namespace and of those below it, by default of every one; the number of blocks."""
        below = f"{namespace}{NAMESPACE_BORDER}"
        names = [name for name in self._roots if namespace in (None, name) or name.startswith(below)]
        roots = [self._roots.pop(name) for name in names]
        return sum(self._lose(child) for root in roots for child in list(root.children.values()))

    def _lose(self, top: Node) -> int:
        """Take a node and all below it out of the tree; those in use give their numbers back later."""
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
        return count

    def _take_number(self) -> int | None:
        if self._free:
            return heappop(self._free)
        victim = self._oldest_leaf(self._probation)
        if victim is None and len(self._protected) > KEPT_PROTECTED * self.num_blocks:
            victim = self._oldest_leaf(self._protected)
        if victim is None:
            return None
        self._lose(victim)
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


def _common(first: bytes, second: bytes) -> int:
    """Tokens that two blocks share from their beginning."""
    size = array(_TOKEN).itemsize
    low, high = 0, min(len(first), len(second)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if first[: middle * size] == second[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


# What the prefix store reads from a disk and writes to it, as the engine sees it: reservations that threads fill.
#
# A prompt whose blocks lie on the disk waits for them as it would for a job that computes them, while others go on;
# what cannot be read was never there. Blocks go to the disk when the step that filled them has been read, and stay in
# memory until they are written. ``kv/prefix_store.py`` has the files.

REST_S = 0.05  # longest wait for the disk of an engine that has nothing else to do: messages must still be read
MOST_PINNED = 0.5  # of all blocks may wait to be written; what is filled meanwhile stays in memory only


@dataclass(slots=True, eq=False)
class _Read:
    """Blocks that come from the disk."""

    reservation: Reservation
    done: Future[int]  # the number of blocks that could be read, from the first on


@dataclass(slots=True, eq=False)
class _Write:
    """A block that goes there."""

    node: Node
    done: Future[int]


class PrefixDisk:
    """Reads and writes under way."""

    def __init__(self, index: PrefixIndex, tier: PrefixTier) -> None:
        self._index, self._tier = index, tier
        self._reads: list[_Read] = []
        self._writes: list[_Write] = []

    def fetch(self, namespace: str, chain: Chain, num_known: int, least: int) -> Node | None:
        """Begin to read the blocks that follow the ``num_known`` ones in memory, if that makes at least ``least``
        blocks; the last node that is read, None for nothing.
        """
        names, end = self._tier.names(namespace, chain), num_known
        while end < len(chain) and self._tier.has(names[end]):
            end += 1
        if end == num_known or end < least:
            return None
        reservation = self._index.reserve(namespace, chain[:end])
        if not reservation.nodes:
            return None
        wanted = tuple(
            StoredBlock(node.number, names[reservation.first + place], node.tokens)
            for place, node in enumerate(reservation.nodes)
        )
        self._reads.append(_Read(reservation, self._tier.load(wanted)))
        return reservation.nodes[-1]

    def write(self, namespace: str, chain: Chain, reservation: Reservation) -> None:
        """Begin to write blocks that a job has filled."""
        names = self._tier.names(namespace, chain[: reservation.first + len(reservation.nodes)])
        for name, node in zip(names[reservation.first :], reservation.nodes, strict=True):
            if node.is_lost or len(self._writes) >= MOST_PINNED * self._index.num_blocks:
                return
            node.num_users += 1
            self._writes.append(_Write(node, self._tier.save(StoredBlock(node.number, name, node.tokens))))

    def poll(self) -> None:
        """Take note of what has ended."""
        for read in list(self._reads):
            if read.done.done():
                self._reads.remove(read)
                first, nodes, num_right = read.reservation.first, read.reservation.nodes, read.done.result()
                self._index.commit(Reservation(first, nodes[:num_right]))
                self._index.drop(Reservation(first + num_right, nodes[num_right:]))
        for write in list(self._writes):
            if write.done.done():
                self._writes.remove(write)
                self._index.release([write.node])

    def rest(self) -> None:
        """Wait a little for a read, if there is one."""
        if self._reads:
            wait([read.done for read in self._reads], REST_S, FIRST_COMPLETED)

    def forget(self, namespace: str | None) -> None:
        """Delete what the disk has of a namespace and those below it, by default all."""
        self._tier.forget(namespace)

    def close(self) -> None:
        """Finish what is being written."""
        self._tier.close()


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts of tokens since the start; blocks as they are now."""

    queries: int = 0  # prompt tokens that were looked up
    hits: int = 0  # of those, tokens that were restored
    saved: int = 0
    evicted_blocks: int = 0
    used_blocks: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class _Ask:
    """What is known of one waiting request."""

    chain: Chain
    rest: bytes  # ids behind the last full block
    awaited: Node | None = None  # the last node that an open job, or the disk, fills for it
    was_fetched: bool = False  # the disk has been asked


@dataclass(frozen=True, slots=True)
class _Held:
    """What an open job uses."""

    restored: tuple[Node, ...]
    saved: Reservation
    chain: Chain


class PrefixLookup:
    """The store of one engine; all of its methods do nothing for prompts that are none of its business."""

    def __init__(self, store: PrefixStoreConfig, config: EngineConfig, tier: PrefixTier | None = None) -> None:
        self._block_len, self._longest = store.block_len, config.prefix_max_len or config.max_model_len
        # Short prompts are packed, and are read in a unit or two: they are not looked up.
        self._least = max(store.min_tokens, config.chunking.short_len + 1)
        self._min_restored = store.min_tokens
        self.index = PrefixIndex(config.prefix_blocks)
        self._asks: dict[LiveRequest, _Ask] = {}
        self._held: dict[LiveRequest, _Held] = {}
        self._filled: dict[LiveRequest, _Held] = {}  # jobs whose last unit is planned, until it has been read
        self._disk = None if tier is None else PrefixDisk(self.index, tier)
        self._queries = self._hits = self._saved = 0

    def stats(self) -> PrefixStats:
        """What has happened so far."""
        index = self.index
        return PrefixStats(self._queries, self._hits, self._saved, index.num_evicted, index.num_used, index.num_blocks)

    def arrive(self, live: LiveRequest) -> None:
        """A request joins the queue."""
        # Kept ids are another text, and a rotation that depends on the length of a prompt gives its keys to it alone.
        if live.request.positions is None and self._least <= live.num_tokens <= self._longest:
            chain = chain_of(live.request.prompt_token_ids, self._block_len)
            rest = live.request.prompt_token_ids[len(chain) * self._block_len :]
            self._asks[live] = _Ask(chain, array("i", rest).tobytes())

    def leave(self, live: LiveRequest) -> None:
        """A request left the queue without a job."""
        self._asks.pop(live, None)

    def probe(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that are stored now; changes nothing."""
        path = self.index.path(namespace, chain_of(token_ids, self._block_len))
        return _num_ready(path) * self._block_len

    def must_wait(self, live: LiveRequest) -> bool:
        """Whether an open job writes so much of this prompt that it should wait for its end."""
        if (ask := self._asks.get(live)) is None:
            return False
        if ask.awaited is not None and not ask.awaited.is_ready:
            return True
        if self.index.num_written == 0 and (self._disk is None or ask.was_fetched):
            return False
        most = self._most_restored(live)
        path = self.index.path(live.request.namespace, ask.chain)[:most]
        ready = _num_ready(path)
        if self._disk is not None and not ask.was_fetched and ready == len(path):
            ask.was_fetched = True
            least = -(-self._min_restored // self._block_len)
            ask.awaited = self._disk.fetch(live.request.namespace, ask.chain[:most], ready, least)
            return ask.awaited is not None
        spared, left = (len(path) - ready) * self._block_len, live.num_tokens - ready * self._block_len
        is_worth_it = 2 * spared >= left and len(path) * self._block_len >= self._min_restored
        ask.awaited = path[-1] if path and is_worth_it else None
        return ask.awaited is not None

    def open(self, live: LiveRequest) -> PrefixMoves | None:
        """The request's job opens: what is moved for it. None where that is nothing."""
        ask, namespace = self._asks.pop(live, None), live.request.namespace
        if ask is None:
            return None
        path = self.index.path(namespace, ask.chain)
        restored = tuple(path[: min(_num_ready(path), self._most_restored(live))])
        if len(restored) * self._block_len < self._min_restored:
            restored = ()
        self._queries += live.num_tokens
        self._hits += len(restored) * self._block_len
        diverged_at = self.index.diverged_at(namespace, ask.chain, ask.rest)
        live.output.prefix = PrefixUse(cached_tokens=len(restored) * self._block_len, diverged_at=diverged_at)
        self.index.take(restored)
        saved = self.index.reserve(namespace, ask.chain)
        self._held[live] = _Held(restored, saved, ask.chain)
        if not restored and not saved.nodes:
            return None
        return PrefixMoves(
            block_len=self._block_len,
            restored=tuple(node.number for node in restored),
            saved=tuple(node.number for node in saved.nodes),
            first_saved=saved.first,
        )

    def close(self, live: LiveRequest, *, is_done: bool) -> None:
        """Its job has ended, or was given up."""
        held = self._held.pop(live, None)
        if held is None:
            return
        self.index.release(held.restored)
        if is_done:
            self._saved += len(held.saved.nodes) * self._block_len
            self.index.commit(held.saved)
            if self._disk is not None and held.saved.nodes:
                self._filled[live] = held
        else:
            self.index.drop(held.saved)

    def written(self, live: LiveRequest) -> None:
        """The step that filled the last of its blocks has been read: they may go to the disk."""
        held = self._filled.pop(live, None)
        if held is not None and self._disk is not None:
            self._disk.write(live.request.namespace, held.chain, held.saved)

    def poll(self) -> None:
        """Take note of what the disk has done."""
        if self._disk is not None:
            self._disk.poll()

    def rest(self) -> None:
        """There is nothing to do but, perhaps, to wait for the disk."""
        if self._disk is not None:
            self._disk.rest()

    def reset(self, namespace: str | None) -> int:
        """Forget a namespace and those below it, by default all, on the disk too; the number of blocks in memory."""
        if self._disk is not None:
            self._disk.forget(namespace)
        return self.index.reset(namespace)

    def shut(self) -> None:
        """Finish what is being written to the disk."""
        if self._disk is not None:
            self._disk.close()

    def _most_restored(self, live: LiveRequest) -> int:
        """Blocks that a prompt may restore: the tokens whose queries vote are computed, and at least one."""
        if live.request.sampling.prompt_logprobs is not None:
            return 0  # they need the hidden states of all tokens
        return (live.num_tokens - max(live.selector.num_queries(live.num_tokens), 1)) // self._block_len


def _num_ready(path: list[Node]) -> int:
    """Nodes of a path before the first that is being written."""
    return next((count for count, node in enumerate(path) if not node.is_ready), len(path))
