"""The disk tier of a prefix store over several ranks: each rank has its share of every block in files of its own.

    leader: ReadBlocks --> every follower, beside its steps: its files --> BlocksDone --> leader: all have n blocks

The engine asks the leader's files what is stored, and every rank reads its share of that. Invariant: a block counts as
read only if every rank has read its share, before a plan that restores it is sent. A share that is missing or damaged
on one rank is a miss for all, and its block is written again where it is lacking. A rank that goes ends what waits for
it. ``cache/prefix_files.py`` has the files, ``distributed/messages.py`` the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from snapstream.cache.prefix_files import PrefixFiles
from snapstream.distributed.launch import RankLost
from snapstream.distributed.link import LinkClosed
from snapstream.distributed.messages import BlocksDone, ForgetBlocks, ReadBlocks, WriteBlock
from snapstream.step import StoredBlock


@dataclass(eq=False)
class _Asked:
    """What all ranks have been asked for."""

    counts: dict[int, int] = field(default_factory=dict)  # by rank that has answered
    agreed: Future[int] = field(default_factory=Future)  # the smallest of them


class RankFiles:
    """The leader's ``PrefixTier``: the files of all ranks."""

    def __init__(self, own: PrefixFiles, num_followers: int, send: Callable[[object], None]) -> None:
        """``send`` brings a message to every follower; their answers come to ``note``."""
        self._own, self._num_ranks, self._send = own, 1 + num_followers, send
        self._lock = Lock()
        self._asked: dict[int, _Asked] = {}  # by number, until all have answered
        self._next = 0

    def names(self, namespace: str, chain: Sequence[bytes]) -> tuple[str, ...]:
        """See ``PrefixTier.names``: the leader's, which the files of all ranks have."""
        return self._own.names(namespace, chain)

    def has(self, name: str) -> bool:
        """Whether the leader has its share; the others show it when they read."""
        return self._own.has(name)

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """Fill the blocks of every rank; how many of the first ones all of them have."""
        return self._ask(lambda number: ReadBlocks(number, tuple(wanted)), lambda: self._own.load(wanted))

    def save(self, block: StoredBlock) -> Future[int]:
        """Write every rank's share of a block."""
        return self._ask(lambda number: WriteBlock(number, block), lambda: self._own.save(block))

    def forget(self, namespace: str | None) -> None:
        """Delete the files of a namespace and those below it, by default all, on every rank."""
        place = "" if namespace is None else self._own.place(namespace)
        self._ask(lambda number: ForgetBlocks(number, place), lambda: self._own.forget_place(place))

    def note(self, rank: int, done: BlocksDone) -> None:
        """A rank's answer; any thread may call it."""
        with self._lock:
            asked = self._asked.get(done.number)
            if asked is None:
                return
            asked.counts[rank] = done.count
            if len(asked.counts) < self._num_ranks:
                return
            del self._asked[done.number]
        asked.agreed.set_result(min(asked.counts.values()))

    def give_up(self) -> None:
        """A rank has gone: nobody waits for its answers. Any thread may call it."""
        with self._lock:
            left, self._asked = list(self._asked.values()), {}
        for asked in left:
            asked.agreed.set_exception(RankLost("a rank has gone amid the files of the prefix store"))

    def close(self) -> None:
        """Finish what is being written, on every rank."""
        self._own.close()
        with self._lock:
            left = [asked.agreed for asked in self._asked.values()]
        wait(left)

    def _ask(self, message: Callable[[int], object], own: Callable[[], Future[int]]) -> Future[int]:
        asked = _Asked()
        with self._lock:
            number, self._next = self._next, self._next + 1
        try:
            self._asked[number] = asked
            own().add_done_callback(lambda done: self.note(0, BlocksDone(number, _count(done))))
            self._send(message(number))
        except BaseException:  # a rank went, or Ctrl-C came: whoever asked does not wait, and ``close`` must not
            with self._lock:
                self._asked.pop(number, None)
            raise
        return asked.agreed


def answer(files: PrefixFiles, message: object, reply: Callable[[object], None]) -> None:
    """A follower's part: begin what the leader asks for, and reply from another thread when it is done."""
    if isinstance(message, ReadBlocks):
        done = files.load(message.blocks)
    elif isinstance(message, WriteBlock):
        done = files.save(message.block)
    else:
        assert isinstance(message, ForgetBlocks), "a leader sends plans, and what its followers' files are asked for"
        done = files.forget_place(message.place)
    number = message.number

    def tell(done: Future[int]) -> None:
        with suppress(LinkClosed):  # then this process ends
            reply(BlocksDone(number, _count(done)))

    done.add_done_callback(tell)


def _count(done: Future[int]) -> int:
    """What a thread has found; nothing where it failed."""
    return 0 if done.exception() is not None else done.result()
