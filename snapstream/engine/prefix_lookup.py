"""The prefix store as admission sees it: what a prompt restores, what it saves, and whether it should wait.

A prompt restores whole blocks, and leaves at least its voting queries to be computed: the row is chosen anew by them,
from the exact keys of all tokens, so a hit changes no answer. It saves what the store lacks. Blocks are held from the
job's opening to its end, and plans run in order, so a block is never read before it was written.

A prompt whose beginning is being written by an open job waits for that job, if that spares it at least half of its
work: five agents over one document cost one prefill. Jobs end, and nobody behind it waits with it.
``prefix_index.py`` is the store's index.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from snapstream.config import EngineConfig, PrefixStoreConfig
from snapstream.engine.live import LiveRequest
from snapstream.engine.prefix_disk import PrefixDisk
from snapstream.engine.prefix_index import Chain, Node, PrefixIndex, Reservation, chain_of
from snapstream.request import PrefixUse
from snapstream.step import PrefixMoves, PrefixTier


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

    def start_over(self) -> None:
        """Nobody waits, and no job is open; blocks in memory may hold anything (``interrupts.py``)."""
        self._asks, self._held, self._filled = {}, {}, {}
        filled, read = ((), ()) if self._disk is None else self._disk.in_use()
        self.index.start_over(filled, read)

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
