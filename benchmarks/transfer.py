"""A row on its way to another engine: bytes, time, and what it saves to send a layer while the next is read.

One process reads the prompt, this one answers it, over loopback with handshake and checks as in service. A link slower
than loopback is emulated: the sender sleeps for as long as a part would take (``--gbit``, 0: no sleep). Each round asks
for the same prompt three times: read here alone, its row sent layer by layer, its row sent whole at the end.

    python -m benchmarks.transfer --save              # the 100M shape, 8,192 tokens into 2,048 slots: some 5 minutes
    python -m benchmarks.transfer --quick             # two layers, 1,024 tokens: a try
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter, sleep
from typing import Any

from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt
from snapstream.disaggregation.connector import TcpConnector
from snapstream.disaggregation.protocol import TransferSettings, prefill_request
from snapstream.engine.core import TicketIssued
from snapstream.engine.worker import EngineWorker, Stop, Submit
from snapstream.llm import LLM
from snapstream.plan.memory import row_sizes
from snapstream.server.engine.process import PipePort
from snapstream.startup.build import engine_fingerprint
from snapstream.types import Request, SamplingParams

ONE = SamplingParams(max_tokens=1, temperature=0.0)
AT_END = "at the end"  # begins the ids of requests whose row is held back
Read = Callable[[], memoryview]


class LinkedConnector(TcpConnector):
    """Sends over an emulated link, and holds the rows of some requests back until they are whole."""

    gbit = 0.0

    def put(self, request_id: str, read: Read) -> None:
        if request_id.startswith(AT_END):
            self._held.setdefault(request_id, []).append(read)
        else:
            super().put(request_id, self._limited(read))

    def put_last(self, request_id: str, read: Read) -> None:
        for part in self._held.pop(request_id, []):
            super().put(request_id, self._limited(part))
        super().put_last(request_id, read)

    def _limited(self, read: Read) -> Read:
        def limited() -> memoryview:
            data = read()
            if self.gbit:
                sleep(data.nbytes * 8 / (self.gbit * 1e9))
            return data

        return limited

    @property
    def _held(self) -> dict[str, list[Read]]:
        found: dict[str, list[Read]] = self.__dict__.setdefault("held", {})
        return found


def make(llm: LLM, folder: Path, settings: TransferSettings, wake: Callable[[], None]) -> LinkedConnector:
    return LinkedConnector(
        settings, row_sizes(llm.model_config, llm.config), engine_fingerprint(folder, llm.config), wake
    )


def read_main(connection: Connection, folder: Path, settings: dict[str, Any], secret: bytes, gbit: float) -> None:
    """Life of the process that reads prompts."""
    with LLM(folder, **settings) as llm:
        port = PipePort(connection)
        connector = make(llm, folder, TransferSettings(secret=secret), port.wake)
        connector.gbit = gbit
        llm.engine.connect(connector)
        llm.generate([random_prompt(256, seed=1)], ONE)  # touches what is new
        connection.send("ready")
        EngineWorker(llm.engine, llm.config.max_rows, port).run()


@contextmanager
def reader(folder: Path, settings: dict[str, Any], secret: bytes, gbit: float) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_main, args=(theirs, folder, settings, secret, gbit), daemon=True)
    process.start()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        ours.send(Stop())
        process.join()


class Answering:
    """The engine of this process, which asks the other to read."""

    def __init__(self, llm: LLM, folder: Path, secret: bytes) -> None:
        self._llm, self._news = llm, Event()
        settings = TransferSettings(secret=secret, host="127.0.0.1")
        llm.engine.connect(make(llm, folder, settings, self._news.set))

    def first_token_s(self, request: Request, other: Connection) -> float:
        """Seconds from asking to the first token."""
        engine, config = self._llm.engine, self._llm.config
        began = perf_counter()
        output = engine.add_request(replace(request, is_prefilled_remotely=True))
        while not output.is_finished:
            self._news.clear()
            if engine.has_work:
                engine.step()
            for notice in engine.take_notices():
                assert isinstance(notice, TicketIssued), notice
                other.send(Submit(prefill_request(request, notice.ticket, config.budget, config.selector)))
            if not engine.has_work and not output.is_finished:
                self._news.wait()
        taken = perf_counter() - began
        while other.poll():  # what the other says of itself
            other.recv()
        return taken


def measure(context: int, slots: int, rounds: int, gbits: list[float], **shape: Any) -> dict[str, Any]:
    settings = {"budget": slots, "max_rows": 1, "max_model_len": context + 8, "prefix_store": None, "progress": False}
    secret, links = os.urandom(32), []
    with llama_folder(**shape) as folder, LLM(folder, **settings) as llm:  # type: ignore[arg-type]
        llm.generate([random_prompt(256, seed=1)], ONE)
        own, sizes = Answering(llm, folder, secret), row_sizes(llm.model_config, llm.config)
        part_bytes = sizes.layer_bytes(context, llm.config.budget)[0]  # of every layer
        for gbit in gbits:
            times: dict[str, list[float]] = {"here": [], "while reading": [], AT_END: []}
            with reader(folder, settings, secret, gbit) as other:
                for turn in range(rounds):
                    prompt = tuple(random_prompt(context, seed=10 + turn))
                    alone = llm.generate([list(prompt)], ONE)[0]
                    times["here"].append(alone.timings.first_token_ms / 1e3)
                    for how in ("while reading", AT_END):
                        request = Request(request_id=f"{how} {turn}", prompt_token_ids=prompt, sampling=ONE)
                        times[how].append(own.first_token_s(request, other))
                    print({"gbit": gbit, **{how: found[-1] for how, found in times.items()}}, flush=True)
            links.append(
                {
                    "gbit": gbit,
                    "row_s_on_link": part_bytes * sizes.num_layers * 8 / (gbit * 1e9) if gbit else 0.0,
                    "here_s": median(times["here"]),
                    "while_reading_s": median(times["while reading"]),
                    "at_end_s": median(times[AT_END]),
                    "saved_s": median(b - a for a, b in zip(times["while reading"], times[AT_END], strict=True)),
                }
            )
    return {
        "model": "random Llama 100M fp32", **shape, "context": context, "slots": slots, "rounds": rounds,
        "row_bytes": part_bytes * sizes.num_layers, "part_bytes": part_bytes, "layers": sizes.num_layers,
        "links": links,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbit", type=float, nargs="*", default=[0.0, 10.0, 1.0, 0.1], help="of links; 0: loopback")
    parser.add_argument("--quick", action="store_true", help="two layers, 1,024 tokens, one round")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    if args.quick:
        figures = measure(1024, 256, 1, [0.0, 0.1], num_hidden_layers=2)
    else:
        figures = measure(args.context, args.slots, args.rounds, args.gbit)
    report("transfer", ceiling, figures, save=args.save)


if __name__ == "__main__":
    main()
