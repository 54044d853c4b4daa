"""What the prefix store reads from a disk and writes to it, as the engine sees it: reservations that threads fill.

A prompt whose blocks lie on the disk waits for them as it would for a job that computes them, while others go on; what
cannot be read was never there. Blocks go to the disk when the step that filled them has been read, and stay in memory
until they are written. ``cache/prefix_files.py`` has the files.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from snapstream.engine.prefix_index import Chain, Node, PrefixIndex, Reservation
from snapstream.step import PrefixTier, StoredBlock

REST_S = 0.05  # longest wait for the disk of an engine that has nothing else to do: messages must still be read
MOST_PINNED = 0.5  # of all blocks may wait to be written; what is filled meanwhile stays in memory only


@dataclass(slots=True, eq=False)
class _Read:
    """Blocks that come from the disk."""

    wanted: tuple[StoredBlock, ...]
    reservation: Reservation
    done: Future[int] | None = None  # None: nobody knows whether the disk was asked


@dataclass(slots=True, eq=False)
class _Write:
    """A block that goes there."""

    block: StoredBlock
    node: Node
    done: Future[int] | None = None


class PrefixDisk:
    """Reads and writes under way.

    They are noted before the disk is asked, so that Ctrl-C cannot lose one that it then does. Where it came before the
    answer the disk is asked again: it does what it is asked in order, and the second time changes nothing.
    """

    def __init__(self, index: PrefixIndex, tier: PrefixTier) -> None:
        self._index, self._tier = index, tier
        self._reads: list[_Read] = []
        self._writes: list[_Write] = []

    def in_use(self) -> tuple[list[Reservation], list[Node]]:
        """What the disk fills even now, and what it reads."""
        return [read.reservation for read in self._reads], [write.node for write in self._writes]

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
        read = _Read(wanted, reservation)
        self._reads.append(read)
        read.done = self._tier.load(wanted)
        return reservation.nodes[-1]

    def write(self, namespace: str, chain: Chain, reservation: Reservation) -> None:
        """Begin to write blocks that a job has filled."""
        names = self._tier.names(namespace, chain[: reservation.first + len(reservation.nodes)])
        for name, node in zip(names[reservation.first :], reservation.nodes, strict=True):
            if node.is_lost or len(self._writes) >= MOST_PINNED * self._index.num_blocks:
                return
            write = _Write(StoredBlock(node.number, name, node.tokens), node)
            node.num_users += 1
            self._writes.append(write)
            write.done = self._tier.save(write.block)

    def poll(self) -> None:
        """Take note of what has ended."""
        for read in list(self._reads):
            if read.done is None:
                read.done = self._tier.load(read.wanted)
            if read.done.done():
                self._reads.remove(read)
                first, nodes, num_right = read.reservation.first, read.reservation.nodes, read.done.result()
                self._index.commit(Reservation(first, nodes[:num_right]))
                self._index.drop(Reservation(first + num_right, nodes[num_right:]))
        for write in list(self._writes):
            if write.done is None:
                write.done = self._tier.save(write.block)
            if write.done.done():
                self._writes.remove(write)
                self._index.release([write.node])

    def rest(self) -> None:
        """Wait a little for a read, if there is one."""
        asked = [read.done for read in self._reads if read.done is not None]
        if asked:
            wait(asked, REST_S, FIRST_COMPLETED)

    def forget(self, namespace: str | None) -> None:
        """Delete what the disk has of a namespace and those below it, by default all."""
        self._tier.forget(namespace)

    def close(self) -> None:
        """Finish what is being written."""
        self._tier.close()
