"""Two engines in this process, one that reads prompts and one that answers them, joined by sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from snapstream.disaggregation.protocol import (
    TransferSettings,
    prefill_request,
    request_from_bytes,
    request_to_bytes,
)
from snapstream.engine.core import Engine, TicketIssued
from snapstream.llm import LLM
from snapstream.startup.build import make_connector
from snapstream.step import KVTransferFailed
from snapstream.types import Request, RequestOutput
from tests.disaggregation.rows import SECRET
from tests.waiting import HANG_S, until

Settings = dict[str, Any] | None


@dataclass
class Pair:
    """``turn`` steps both engines once, or waits until a socket has news."""

    reader: LLM
    answerer: LLM
    news: Event
    missed: list[KVTransferFailed] = field(default_factory=list)  # rows that were lost, and asked for again

    def turn(self) -> list[RequestOutput]:
        self.news.clear()
        engines = [llm.engine for llm in (self.reader, self.answerer)]
        if not any(engine.has_work for engine in engines):
            assert self.news.wait(HANG_S)
        outputs = [output for engine in engines if engine.has_work for output in engine.step()]
        while notices := self.answerer.engine.take_notices():
            for notice in notices:
                if isinstance(notice, TicketIssued):
                    self.ask(notice)
                else:
                    self.missed.append(notice)
                    self.answerer.engine.reissue(notice.request_id, notice.key)
        return outputs

    def ask(self, notice: TicketIssued) -> None:
        config, request = self.answerer.config, self.requests[notice.request_id]
        data = request_to_bytes(prefill_request(request, notice.ticket, config.budget, config.selector))
        self.reader.engine.add_request(request_from_bytes(data))

    def run(self, requests: Sequence[Request], num_lost: int = 0) -> list[RequestOutput]:
        """The answers, in their order; every row is free again afterwards."""
        self.requests = {request.request_id: request for request in requests}
        outputs = [
            self.answerer.engine.add_request(replace(request, is_prefilled_remotely=True)) for request in requests
        ]
        self.until(lambda: all(output.is_finished for output in outputs))
        assert len(self.missed) == num_lost, self.missed
        self.until(lambda: all(llm.engine.rows_free == llm.config.max_rows for llm in (self.reader, self.answerer)))
        return outputs

    def until_news(self, engine: Engine) -> None:
        """Until a step of ``engine`` has heard something."""
        self.news.wait(HANG_S)
        until(lambda: engine.has_work)
        engine.step()

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.turn()


@contextmanager
def joined(
    folder: Path, other: Path | None = None, reading: Settings = None, answering: Settings = None, **fields: Any
) -> Iterator[Pair]:
    """``reading``, ``answering``: settings of one engine, where they differ; ``other``: checkpoint of the reader."""
    news = Event()
    with ExitStack() as stack:
        made = []
        for own, host, more in ((other or folder, None, reading or {}), (folder, "127.0.0.1", answering or {})):
            llm = stack.enter_context(LLM(own, **{"progress": False, **fields, **more}))
            settings = TransferSettings(secret=SECRET, host=host)
            llm.engine.connect(make_connector(own, llm.model_config, llm.config, settings, news.set))
            made.append(llm)
        yield Pair(made[0], made[1], news)
