"""The plain data that crosses from the scheduler to the device and back.

One ``StepPlan`` in, one ``StepResult`` out. A plan never depends on a token that the device has not yet reported: rows
carry their own last token, so the next plan can be made, and under tensor parallelism broadcast, before the previous
result is read. The engine (``engine/``) makes plans, a ``Runner`` (``exec/runner.py``) executes them.
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
    """Blocks of the prefix store that a prompt begins with, and those that its prefill fills."""

    block_len: int  # tokens of a block
    restored: tuple[int, ...] = ()  # numbers of the blocks of its first tokens, which are not computed
    saved: tuple[int, ...] = ()  # numbers of blocks that it fills
    first_saved: int = 0  # which of the prompt's blocks is the first of those; never before the restored ones

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
    positions: tuple[int, ...] | None = None  # of the tokens in their text; None: 0, 1, 2, ...
    prefix: PrefixMoves | None = None  # what the prefix store has to do with it
    is_sent: bool = False  # its row goes to another engine, which draws the tokens; there is one row then

    @property
    def num_restored(self) -> int:
        """Tokens at the beginning whose keys and values come out of the prefix store."""
        return 0 if self.prefix is None else self.prefix.num_restored

    @property
    def next_position(self) -> int:
        """Where the answer begins, which is also the length of the logical prompt."""
        return self.positions[-1] + 1 if self.positions is not None else len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A prefill job: prompts packed one after the other, run layer by layer, each layer in chunks.

    The packed tokens of all entries, but those that are restored, are cut into ``ceil(num_tokens / chunk_len)`` chunks,
    of the engine's ``chunk_len`` unless the job has its own. Unit ``u`` is chunk ``u % num_chunks`` of layer
    ``u // num_chunks``; units run in order. With the last unit the job is over: every entry has its rows written and
    its first tokens sampled.
    """

    job_id: int
    staging_start: int  # first token of the job's range of the staging buffers
    entries: tuple[PrefillEntry, ...]
    chunk_len: int = 0  # tokens of its units; 0 means the engine's

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return self.num_staged - self.num_restored

    @property
    def num_staged(self) -> int:
        """Tokens of its range of the staging buffers: all of its prompts."""
        return sum(len(entry.token_ids) for entry in self.entries)

    @property
    def num_restored(self) -> int:
        """Tokens whose keys and values come out of the prefix store."""
        return sum(entry.num_restored for entry in self.entries)

    def num_chunks(self, chunk_len: int) -> int:
        """Of a layer; ``chunk_len`` is the engine's."""
        return -(-self.num_tokens // (self.chunk_len or chunk_len))

    def num_units(self, chunk_len: int, num_layers: int) -> int:
        return self.num_chunks(chunk_len) * num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """What the engine that read a prompt tells the one that answers it, beside the row."""

    compression: Compression
    prompt_logprobs: list[Logprob | None] | None = None
    prefix: PrefixUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRow:
    """A prompt that another engine read: its row is copied to ``entry.rows``, and their first tokens are drawn."""

    entry: PrefillEntry
    row: KVReceived | None  # None: on a follower, whose leader has it


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units ``first .. first + count - 1`` of a job."""

    job_id: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: drop jobs, open jobs, take rows that came, run units, decode a token for each of ``decode_rows``."""

    step_id: int
    dropped_jobs: tuple[int, ...] = ()  # jobs given up before their last unit
    opened_jobs: tuple[JobSpec, ...] = ()
    prepared: tuple[PrefillEntry, ...] = ()  # their rows will come: grammars may be compiled until then
    received: tuple[ReceivedRow, ...] = ()
    units: tuple[UnitRange, ...] = ()
    decode_rows: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        opens = self.dropped_jobs or self.opened_jobs or self.prepared or self.received
        return not (opens or self.units or self.decode_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """First tokens of one prompt, one per row (none where the row is sent), and what compression did."""

    tokens: tuple[Logprob, ...]
    compression: Compression
    prompt_logprobs: list[Logprob | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced. Where no log-probabilities were asked for, ``Logprob.logprob`` is NaN.

    A token id below 0 says that the row's logits were not finite, so that nothing could be drawn.
    """

    step_id: int
    prefilled: dict[str, PrefillResult] = field(
        default_factory=dict
    )  # by request id; jobs that ended in this step, and rows that came
    decoded: tuple[Logprob, ...] = ()  # aligned with StepPlan.decode_rows
    # Rows whose grammar lets nothing follow this step's token: "" where the text is complete, else why it is not.
    grammar_ends: dict[int, str] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was submitted; ``result`` blocks until the device has reported it."""

    def result(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of the prefix store and the file that it is read from or written to."""

    number: int
    name: str
    tokens: bytes  # ids of its tokens


class PrefixTier(Protocol):
    """Blocks of the prefix store on a disk (``kv/prefix_store.py``); reads and writes go on beside the engine."""

    def names(self, namespace: str, chain: Sequence[bytes]) -> tuple[str, ...]:
        """Of the files of a chain's blocks, whether they exist or not."""
        ...

    def has(self, name: str) -> bool: ...

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """Fill blocks; how many of the first ones could be."""
        ...

    def save(self, block: StoredBlock) -> Future[int]: ...

    def forget(self, namespace: str | None) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReceived:
    """The row of a request that arrives is whole."""

    request_id: str
    parts: tuple[bytearray, ...]  # by layer, as ``exec/row_transfer.py`` lays them
    hidden: bytearray  # of the last token, after the last layer
    report: PrefillReport


@dataclass(frozen=True, slots=True)
class KVTransferFailed:
    """The ticket of a request is void, and its row did not come."""

    request_id: str
    key: str  # of the ticket
    reason: str


@dataclass(frozen=True, slots=True)
class KVSent:
    """A row has gone out, or could not: ``problem`` says why."""

    request_id: str
    problem: str = ""


class KVConnector(Protocol):
    """Sends rows to other engines and receives some (``disaggregation/connector.py``), beside the engine."""

    @property
    def has_news(self) -> bool:
        """Whether ``poll`` would return anything."""
        ...

    @property
    def receives(self) -> bool:
        """Whether rows arrive at this engine."""
        ...

    def poll(self) -> list[KVReceived | KVTransferFailed | KVSent]: ...

    def expect(self, request: Request, budget: KVBudget) -> RowTicket:
        """A ticket for the row of a request; one that it had is void."""
        ...

    def void(self, request_id: str) -> None:
        """Whatever still comes for a request is refused."""
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
    def prefix_tier(self) -> PrefixTier | None:
        """The disk of the prefix store, where there is one."""
        ...

    def connect(self, connector: KVConnector) -> None:
        """Rows of entries with ``is_sent`` go there, layer by layer."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def is_ready(self, job_id: int) -> bool:
        """Whether the next layer of an open job can run without waiting for blocks of the prefix store."""
        ...

    def close(self) -> None:
        """End what works beside it, like other ranks; nothing may be submitted afterwards."""
        ...
