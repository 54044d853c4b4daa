"""The interface between the engine and its runner: plain data in, plain data out.

The engine (``engine/``) makes a ``StepPlan``, a ``Runner`` (``exec/runner.py``) executes it and returns a
``StepResult``. The engine's part of a plan never depends on a token that the device has not yet reported: rows store
their own last token, so the next plan can be made, and broadcast to other ranks, before the previous result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from snapstream.config import KVBudget, Selector
from snapstream.types import Compression, Logprob, PrefixUse, Request, RowTicket, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMoves:
    """Cached blocks of the prefix store that a prompt begins with, and those that its prefill fills."""

    block_len: int  # tokens of a block
    restored: tuple[int, ...] = ()  # numbers of the cached blocks, whose tokens are not computed
    saved: tuple[int, ...] = ()  # numbers of blocks that it fills
    first_saved: int = 0  # index of the first of those in the prompt; never before the cached ones
    # Of models with recurrent layers: the snapshot of their states that the prompt begins with, and those that it takes
    state: int | None = None
    snapshot_ends: tuple[int, ...] = ()  # after so many tokens of the prompt, ascending
    snapshots: tuple[int, ...] = ()  # their numbers

    @property
    def num_restored(self) -> int:
        """Tokens that are not computed."""
        return len(self.restored) * self.block_len


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEntry:
    """One prompt of a prefill job."""

    request_id: str
    token_ids: tuple[int, ...]
    rows: tuple[int, ...]  # one row per sample: the prompt is prefilled once and written to each
    seeds: tuple[int, ...]  # one per row
    sampling: SamplingParams
    budget: KVBudget
    selector: Selector
    prefix: PrefixMoves | None = None
    is_sent: bool = False  # its one row is sent to another engine, which decodes
    adapter: int = 0  # LoRA adapter, counted from 1 in EngineConfig.loras; 0: none

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def num_restored(self) -> int:
        """Cached tokens, at the beginning."""
        return 0 if self.prefix is None else self.prefix.num_restored


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """A row with nothing evicted whose keys and values fill blocks of the prefix store."""

    row: int
    moves: PrefixMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A prefill job: prompts packed one after the other, run layer by layer, each layer in chunks.

    The packed tokens of all entries, but the cached ones, are cut into chunks. Unit ``u`` is chunk ``u % num_chunks``
    of layer ``u // num_chunks``; units run in order. After the last unit every entry has its rows written and its first
    tokens sampled.
    """

    job_id: int
    staging_start: int  # first token of the job's range of the staging buffers
    entries: tuple[PrefillEntry, ...]
    chunk_len: int  # tokens of a chunk; the last one may have fewer

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return self.num_staged - self.num_restored

    @property
    def num_staged(self) -> int:
        """Tokens of its range of the staging buffers."""
        return sum(entry.prompt_len for entry in self.entries)

    @property
    def num_restored(self) -> int:
        """Cached tokens."""
        return sum(entry.num_restored for entry in self.entries)

    @property
    def num_chunks(self) -> int:
        """Of a layer."""
        return -(-self.num_tokens // self.chunk_len)

    def num_units(self, num_layers: int) -> int:
        return self.num_chunks * num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """What the prefill engine sends with a row."""

    compression: Compression
    prompt_logprobs: list[Logprob | None] | None = None
    prefix: PrefixUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRow:
    """A prompt that another engine prefilled: its row is copied to ``entry.rows``, and first tokens are sampled."""

    entry: PrefillEntry
    row: KVReceived | None  # None on worker ranks


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units ``first .. first + count - 1`` of a job."""

    job_id: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: drop jobs, save rows of answers that have ended, open jobs, copy received rows, run units, decode a
    token for each of ``decode_rows``.
    """

    step_id: int
    dropped_jobs: tuple[int, ...] = ()  # aborted before their last unit
    saved_rows: tuple[SavedRow, ...] = ()  # before anything is written to them
    opened_jobs: tuple[JobSpec, ...] = ()
    prepared: tuple[PrefillEntry, ...] = ()  # with a remote prefill: their grammars may be compiled now
    received: tuple[ReceivedRow, ...] = ()
    units: tuple[UnitRange, ...] = ()
    decode_rows: tuple[int, ...] = ()
    # Of several ranks that verify drafts, by rank 0: tokens for each of decode_rows, or nothing if no row has any.
    drafts: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_empty(self) -> bool:
        opens = self.dropped_jobs or self.saved_rows or self.opened_jobs or self.prepared or self.received
        return not (opens or self.units or self.decode_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """First tokens of one prompt, one per row (none if the row was sent), and what compression did."""

    tokens: tuple[Logprob, ...]
    compression: Compression
    prompt_logprobs: list[Logprob | None] | None = None


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Of a row with drafted tokens in a step."""

    accepted: tuple[Logprob, ...]  # they follow the row's token of ``decoded``
    num_drafted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced. ``Logprob.logprob`` is NaN unless requested; a token id below 0 means that the row's logits
    were not finite.
    """

    step_id: int
    prefilled: dict[str, PrefillResult] = field(default_factory=dict)  # by request id; ended jobs and received rows
    decoded: tuple[Logprob, ...] = ()  # aligned with StepPlan.decode_rows
    drafted: dict[int, DraftResult] = field(default_factory=dict)  # by index in decode_rows
    # Rows whose grammar allows no token after their last of the step: "" if the text is complete, else the reason.
    grammar_ends: dict[int, str] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was submitted; ``result`` blocks until the device has reported it."""

    def result(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of the prefix store and its file."""

    number: int
    name: str
    tokens: bytes  # ids of its tokens
    is_snapshot: bool = False  # the recurrent states after its last token; ``number`` counts snapshots


class DiskCache(Protocol):
    """The prefix store's disk cache (``kv/prefix_store.py``); reads and writes are asynchronous."""

    def names(self, namespace: str, chain: Sequence[bytes], *, of_snapshots: bool = False) -> tuple[str, ...]:
        """File names of a chain's blocks, or of snapshots at their ends, whether they exist or not."""
        ...

    def has(self, name: str) -> bool: ...

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """Fill blocks; how many could be read before the first that could not."""
        ...

    def save(self, block: StoredBlock) -> Future[int]: ...

    def forget(self, namespace: str | None) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReceived:
    """The whole row of a request with a remote prefill."""

    request_id: str
    parts: tuple[bytearray, ...]  # by layer, see ``exec/row_transfer.py``
    hidden: bytearray  # hidden state of the last token, after the last layer
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class KVTransferFailed:
    """A transfer failed and its ticket is void; the rows stay reserved for another ticket or until an abort."""

    request_id: str
    key: str  # of the ticket
    reason: str


@dataclass(frozen=True, slots=True)
class KVSent:
    """A row was sent; if not, ``problem`` is the reason."""

    request_id: str
    problem: str = ""


class KVConnector(Protocol):
    """Asynchronous KV transfer to and from other engines (``disaggregation/connector.py``)."""

    @property
    def has_events(self) -> bool:
        """Whether ``poll`` would return anything."""
        ...

    @property
    def receives(self) -> bool:
        """Whether this engine can receive rows."""
        ...

    def poll(self) -> list[KVReceived | KVTransferFailed | KVSent]: ...

    def expect(self, request: Request, budget: KVBudget) -> RowTicket:
        """A new ticket for the row of a request; an earlier one is void."""
        ...

    def void(self, request_id: str) -> None:
        """Refuse all further KV for a request."""
        ...

    def open(self, request: Request, budget: KVBudget) -> None:
        """Connect to the engine that ``request.ticket`` names. ValueError for a ticket that cannot be served."""
        ...

    def put(self, request_id: str, read: Callable[[], memoryview]) -> None:
        """The next layer; ``read`` is called on another thread and waits for the device."""
        ...

    def put_last(self, request_id: str, read: Callable[[], memoryview]) -> None:
        """The hidden state of the last token."""
        ...

    def finish(self, request_id: str, report: PrefillReport) -> None: ...

    def cancel(self, request_id: str) -> None:
        """Send no more of a row."""
        ...

    def close(self) -> None: ...


class Runner(Protocol):
    """Executes plans in order. ``submit`` may return before the device is done."""

    @property
    def disk_cache(self) -> DiskCache | None:
        """None without a prefix store on disk."""
        ...

    def connect(self, connector: KVConnector) -> None:
        """Send rows of entries with ``is_sent`` to it, layer by layer."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def is_ready(self, job_id: int) -> bool:
        """Whether the cached blocks for the next layer of an open job are copied."""
        ...

    def close(self) -> None:
        """Stop other ranks; nothing may be submitted afterwards."""
        ...


# Seeds of samples (engine) and the numbers drawn for a row (runner) are mixed in the same way.
WORD = 2**64 - 1
# SplitMix64 (Steele, Lea, Flood 2014): the increment, 2^64 / golden ratio, and the factors of the finalizer.
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def splitmix64(word: int) -> int:
    """One step of SplitMix64: a bijection of 64-bit words in which an input bit flips half of the output bits."""
    word = (word + GOLDEN) & WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)
