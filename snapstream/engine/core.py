"""The engine loop: requests in, outputs out, one device step per call of ``step``.

            step t:   plan t --> submit t --> read result t-1 --> outputs
                       |                       |
                       device runs t  . . . .  host handles t-1

Invariant: a result is handled one step late, so the device never waits for the host. The price: a row whose end is only
visible in its tokens decodes once more; that surplus token is discarded.

``Transfers`` is its side of KV transfer: tickets for requests with a remote prefill, and rows that are sent.

    decode side    rows reserved -> ticket -> notice to the caller, who requests a prefill -> KV received -> decode
                                     ^---- reissue ----- notice that the transfer failed <-'
    prefill side   queued -> connected to the ticket -> layer by layer -> report -> sent

Invariant: a request that has ended leaves neither a ticket nor a connection behind.

Calls must not overlap. After an exception that a method does not document, or Ctrl-C inside a call, the engine is
unusable; ``client.py`` runs it on a thread that Ctrl-C does not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import perf_counter

from snapstream.config import EngineConfig, KVBudget
from snapstream.engine.prefix_cache import PrefixStats
from snapstream.engine.request_state import CachingTokenizer, LiveRequest, LiveSample, Tokenizer, live_request
from snapstream.engine.scheduler import PlannedStep, Scheduler
from snapstream.engine.validate import check_request
from snapstream.step import (
    DraftResult,
    KVConnector,
    KVReceived,
    KVTransferFailed,
    PendingStep,
    PrefillReport,
    PrefillResult,
    Runner,
    StepResult,
)
from snapstream.types import FinishReason, Logprob, QueueFull, Request, RequestOutput, RowTicket, SamplingParams


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """A request with a remote prefill has rows: another engine may prefill its prompt, with this ticket."""

    request_id: str
    ticket: RowTicket


@dataclass(slots=True)
class TransferStats:
    """Counts of rows since the start of an engine."""

    num_sent: int = 0
    num_received: int = 0
    num_failed: int = 0  # in either direction
    num_bytes: int = 0  # received


class Transfers:
    """Requests of one engine that send or receive KV."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._connector: KVConnector | None = None  # then there are no such requests
        self._lives: dict[str, LiveRequest] = {}
        self._keys: dict[str, str] = {}  # of the last ticket, by request
        self._notices: list[TicketIssued | KVTransferFailed] = []
        self.stats = TransferStats()

    def connect(self, connector: KVConnector) -> None:
        self._connector = connector

    @property
    def _connected(self) -> KVConnector:
        assert self._connector is not None
        return self._connector

    @property
    def has_events(self) -> bool:
        return self._connector is not None and self._connector.has_events

    def validate(self, request: Request) -> None:
        """ValueError for KV transfer without a connector."""
        if self._connector is None and uses_kv_transfer(request):
            raise ValueError("KV transfer requested, but no connector is configured")

    def add(self, live: LiveRequest) -> None:
        """A request joins the queue. ValueError for a transfer that this engine does not support."""
        if not uses_kv_transfer(live.request):
            return
        if live.request.is_prefilled_remotely and not self._connected.receives:
            raise ValueError("a remote prefill was requested, and this engine has no transfer address to receive KV")
        if live.request.ticket is not None:
            self._connected.open(live.request, live.budget)
        self._lives[live.request_id] = live

    def issue(self, live: LiveRequest) -> None:
        """Its rows are reserved."""
        ticket = self._connected.expect(live.request, live.budget)
        self._keys[live.request_id] = ticket.key
        self._notices.append(TicketIssued(live.request_id, ticket))

    def reissue(self, request_id: str, key: str) -> None:
        """Replace a ticket, unless it has been used or the request is over."""
        live = self._lives.get(request_id)
        if live is not None and self._keys.get(request_id) == key and self._scheduler.awaits_kv(live):
            self.issue(live)

    def take_notices(self) -> list[TicketIssued | KVTransferFailed]:
        notices, self._notices = self._notices, []
        return notices

    def poll(self) -> list[tuple[LiveRequest, str]]:
        """Pass received rows to the scheduler; requests whose row was sent, or with the reason why it was not."""
        ended: list[tuple[LiveRequest, str]] = []
        for news in [] if self._connector is None else self._connector.poll():
            live = self._lives.get(news.request_id)
            if live is None:
                continue
            match news:
                case KVReceived():
                    self.stats.num_received += 1
                    self.stats.num_bytes += sum(map(len, news.parts))
                    live.output.prefix = news.report.prefix
                    self._scheduler.receive_kv(live, news)
                case KVTransferFailed():
                    self.stats.num_failed += 1
                    self._notices.append(news)
                case _:
                    self.stats.num_failed += bool(news.problem)
                    self.stats.num_sent += not news.problem
                    ended.append((live, news.problem))
        return ended

    def finish(self, live: LiveRequest, result: PrefillResult) -> None:
        """Its prompt is prefilled, and all layers have been passed to the connector."""
        report = PrefillReport(
            compression=result.compression, prompt_logprobs=result.prompt_logprobs, prefix=live.output.prefix
        )
        self._connected.finish(live.request_id, report)

    def end(self, live: LiveRequest) -> None:
        if self._lives.pop(live.request_id, None) is None:
            return
        if live.request.ticket is not None:
            self._connected.cancel(live.request_id)
        else:
            self._keys.pop(live.request_id, None)
            self._connected.void(live.request_id)

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()


def uses_kv_transfer(request: Request) -> bool:
    return request.is_prefilled_remotely or request.ticket is not None


IDLE_ID = "idle prefill"  # of the engine's own request


class Engine:
    """Continuous batching over one runner."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_size: int,
        num_layers: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        random: Random | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """``random`` draws the seeds of requests without one; by default from the system's entropy."""
        self.runner = runner
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = None if tokenizer is None else CachingTokenizer(tokenizer)
        self._random = random or Random()
        self._clock = clock
        self._scheduler = Scheduler(config, num_layers=num_layers, disk_cache=runner.disk_cache)
        self._prefixes = self._scheduler.admission.prefixes
        self._transfers = Transfers(self._scheduler)
        self._live: dict[str, LiveRequest] = {}  # until ``step`` has returned the finished output
        self._changed: dict[str, LiveRequest] = {}  # for ``step`` to return, in order of change
        self._pending: tuple[PlannedStep, PendingStep] | None = None
        self._idle: LiveRequest | None = None  # fills the prefix store while no request is open

    def connect(self, connector: KVConnector) -> None:
        """Enable KV transfer to and from other engines."""
        self.runner.connect(connector)
        self._transfers.connect(connector)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to plan, to read or to return."""
        is_busy = self._pending or self._changed or self._transfers.has_events or self._scheduler.has_work
        return bool(is_busy or self._has_idle_work)

    @property
    def _has_idle_work(self) -> bool:
        """Whether no request is open, and there is a conversation to prefill ahead of its next turn."""
        return not self._live and self._prefixes is not None and self._prefixes.has_unstored

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return self._scheduler.admission.num_waiting

    @property
    def num_running(self) -> int:
        """Requests in prefill or decode whose end the host has not seen."""
        return sum(not live.is_over for live in self._live.values()) - self.num_waiting

    @property
    def rows_free(self) -> int:
        return self._scheduler.admission.rows_free

    @property
    def staging_free(self) -> int:
        """Tokens of the staging pool that no prefill uses."""
        return self._scheduler.admission.staging_free

    @property
    def prefix_stats(self) -> PrefixStats | None:
        """None without a prefix store."""
        return None if self._prefixes is None else self._prefixes.stats()

    @property
    def transfer_stats(self) -> TransferStats:
        return self._transfers.stats

    def take_notices(self) -> list[TicketIssued | KVTransferFailed]:
        """News for the callers of requests with a remote prefill, since the last call."""
        return self._transfers.take_notices()

    def reissue(self, request_id: str, key: str) -> None:
        """Replace the ticket of a failed transfer; does nothing if the KV was received."""
        self._transfers.reissue(request_id, key)

    def num_stored(self, token_ids: tuple[int, ...], namespace: str = "") -> int:
        """Tokens at the beginning of a prompt that are in the prefix store now; ``namespace``: see ``prefix_namespace``
        of the config.
        """
        return 0 if self._prefixes is None else self._prefixes.probe(token_ids, namespace)

    def reset_prefix_store(self, namespace: str | None = None) -> int:
        """Clear a namespace of the prefix store, by default all; the number of blocks removed."""
        running = {*self._live.values(), *self._scheduler.ended_requests}
        return 0 if self._prefixes is None else self._prefixes.reset(namespace, running)

    def close(self) -> None:
        """Finish writing the prefix store's files, and close the runner. The engine cannot be used afterwards."""
        self._transfers.close()
        if self._prefixes is not None:
            self._prefixes.close_disk()
        self.runner.close()

    def validate(self, request: Request) -> None:
        """Raise ValueError if the request could never be served; queues nothing."""
        has_tokenizer = self._tokenizer is not None
        check_request(request, self._config, vocab_size=self._vocab_size, has_tokenizer=has_tokenizer)
        self._transfers.validate(request)

    def add_request(self, request: Request) -> RequestOutput:
        """Queue a request; the output returned is the one that later steps update.

        ValueError if it can never be served (other requests are untouched), QueueFull if too many wait.
        """
        self.validate(request)
        if request.request_id in self._live or self._scheduler.holds_id(request.request_id):
            raise ValueError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        # Requests that get a row in the next step do not count as queued.
        limit, num_queued = self._config.max_waiting, self.num_waiting - self.rows_free
        # Rows reserved on the decode engine bound the number of requests with a ticket.
        if limit and num_queued >= limit and request.ticket is None:
            raise QueueFull(f"{num_queued} requests wait for a row; the limit is {limit}")
        live = live_request(request, self._config, self._tokenizer, self._random, self._clock())
        self._transfers.add(live)
        self._live[request.request_id] = live
        self._scheduler.add(live)
        if self._idle is not None and self._prefixes is not None and not self._prefixes.must_wait(live):
            self._end_idle(FinishReason.ABORT)
        return live.output

    def _start_idle(self) -> None:
        """Begin to prefill the last conversation whose answer could not be copied from its row."""
        if self._idle is not None or self._scheduler.has_work or not self._has_idle_work:
            return
        assert self._prefixes is not None
        config = self._config
        text = self._prefixes.next_unstored()
        request = Request(
            request_id=IDLE_ID,
            prompt_token_ids=text.token_ids,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
            namespace=text.namespace,
            lora=text.lora,
            # Its row is not read: nothing needs to be selected.
            budget=KVBudget.streaming(config.budget.capacity, num_sink=0),
        )
        self._idle = live_request(request, config, None, self._random, self._clock())
        self._idle.is_idle = True
        self._scheduler.add(self._idle)

    def _end_idle(self, reason: FinishReason) -> None:
        """Its prompt is prefilled, or it makes way: then what its job has computed is lost."""
        live, self._idle = self._idle, None
        if live is not None:
            live.samples[0].end(reason)
            self._scheduler.abort(live)

    def abort(self, request_id: str) -> bool:
        """End a request, at any moment; the next step returns its output. False if it is not running."""
        live = self._live.get(request_id)
        if live is None or live.is_over:
            return False
        self._changed[request_id] = live
        for sample in live.samples:
            if not sample.is_over:
                sample.end(FinishReason.ABORT)
        self._remove(live)
        return True

    def step(self) -> list[RequestOutput]:
        """Plan and submit a step, then handle the result of the one before; the outputs that changed."""
        self._poll_transfers()
        self._start_idle()
        planned = self._scheduler.plan(self.runner.is_ready)
        previous, self._pending = self._pending, None
        if not planned.plan.is_empty:
            now = self._clock() if planned.started else 0.0
            for live in planned.started:
                live.start(now)
            self._pending = planned, self.runner.submit(planned.plan)
        elif previous is None and self._prefixes is not None:
            self._prefixes.wait_for_disk()
        now = self._clock() if planned.reserved else 0.0
        for live in planned.reserved:
            live.start(now)
            self._transfers.issue(live)
        if previous is not None:
            self._handle_result(previous[0], previous[1].result())
        if self._prefixes is not None:
            self._prefixes.start_reads(is_idle=self._pending is None)
        return self._take_outputs()

    def _poll_transfers(self) -> None:
        """Take received rows, and end requests whose row was sent or could not be."""
        for live, problem in self._transfers.poll():
            self._changed[live.request_id] = live
            for sample in live.samples:
                sample.end(FinishReason.ERROR if problem else FinishReason.STOP, problem or None)
            self._remove(live)

    def _remove(self, live: LiveRequest) -> None:
        """All samples of a request have ended at once, whatever its state."""
        live.mark(self._clock())
        self._transfers.end(live)
        self._scheduler.abort(live)

    def _handle_result(self, planned: PlannedStep, result: StepResult) -> None:
        if result.step_id != planned.plan.step_id:
            raise RuntimeError(f"the runner answered step {planned.plan.step_id} with step {result.step_id}")
        now = self._clock()
        if self._prefixes is not None:
            for answer in planned.answers:
                self._prefixes.answer_written(answer)
        for live in planned.prefilled:
            if self._prefixes is not None:
                self._prefixes.written(live)
            if live is self._idle:
                self._end_idle(FinishReason.STOP)
            if live.is_over:  # aborted, or the idle prefill
                continue
            prefill = result.prefilled[live.request_id]
            live.take_prefill(prefill, now)
            if live.request.ticket is not None:
                self._transfers.finish(live, prefill)
                continue
            for sample, token in zip(live.samples, prefill.tokens, strict=True):
                self._append(sample, token, now, result.grammar_ends.get(sample.row))
        for index, (sample, token) in enumerate(zip(planned.decoding, result.decoded, strict=True)):
            if not sample.is_over:  # else surplus: decoded once more before its end was seen, or aborted
                has_more = index in result.drafted and result.drafted[index].accepted
                self._append(sample, token, now, None if has_more else result.grammar_ends.get(sample.row))
        for index, drafted in result.drafted.items():
            if not planned.decoding[index].is_over:
                self._take_drafted(planned.decoding[index], drafted, now, result)

    def _take_drafted(self, sample: LiveSample, drafted: DraftResult, now: float, result: StepResult) -> None:
        timings = sample.request.output.timings
        timings.drafted_tokens += drafted.num_drafted
        for place, token in enumerate(drafted.accepted, start=1):
            if sample.is_over:
                return
            timings.accepted_tokens += 1
            is_last = place == len(drafted.accepted)
            self._append(sample, token, now, result.grammar_ends.get(sample.row) if is_last else None)

    def _append(self, sample: LiveSample, token: Logprob, now: float, grammar_end: str | None) -> None:
        """``grammar_end``: see ``LiveSample.take``."""
        self._changed[sample.request.request_id] = sample.request
        sample.take(token, self._eos_token_ids, grammar_end)
        if sample.is_over:
            self._scheduler.release(sample)
        sample.request.mark(now)

    def _take_outputs(self) -> list[RequestOutput]:
        outputs = [live.output for live in self._changed.values()]
        for request_id, live in self._changed.items():
            if live.is_over:
                self._live.pop(request_id, None)
                self._transfers.end(live)
        self._changed = {}
        return outputs
