"""Which beginnings of prompts lie in the prefix store, and in which blocks. Integers and bytes; no torch, no clock.

A prompt is cut into blocks of ``block_len`` token ids. The index is a tree: a node is a block, an edge the ids of its
tokens, a root a namespace, so two prompts meet in a node only if all their tokens up to there are equal, and namespaces
never meet. Nothing else is part of the key: what is stored precedes every budget, selector and sampling parameter.

A node is *written* from its reservation until the job that fills it commits, then *ready*. Eviction is a segmented LRU:
new blocks are on probation, a hit protects them. Invariants: a block number has one owner; a parent outlives its
children; what is being restored or written is never evicted; at least half of the blocks stay with what was hit.
``prefix_lookup.py`` applies this to requests, ``cache/prefix_blocks.py`` holds the bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from snapstream.request import NAMESPACE_BORDER

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
    is_lost: bool = False  # nobody can reach it any more; its number comes back when nobody uses it
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
            node.is_ready = True  # nobody writes it any more
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

    def start_over(self, filled: Sequence[Reservation], read: Sequence[Node]) -> None:
        """Forget all, however much of it is noted, but who has which number: that of a block which is filled or read
        even now comes back with its ``commit``, ``drop`` or ``release``.
        """
        written = [node for reservation in filled for node in reservation.nodes]
        for node in (*written, *read):
            node.is_lost, node.num_users = True, 0
        for node in written:
            node.is_ready = False
        for node in read:
            node.num_users += 1
        in_use = {node.number for node in (*written, *read)}
        self._free = [number for number in range(self.num_blocks) if number not in in_use]
        self._roots, self._probation, self._protected = {}, OrderedDict(), OrderedDict()
        self.num_written = len(written)

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
