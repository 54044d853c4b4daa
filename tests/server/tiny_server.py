"""The app with the shipped model, in a thread of this process, on a free loopback port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.server.app import make_app
from snapstream.server.options import ServerSettings
from tests.server.local_engine import LocalEngine, metadata_of
from tests.waiting import HANG_S, until

SMALL: dict[str, Any] = {"budget": 256, "max_rows": 4, "max_model_len": 1024}


@dataclass
class TinyServer:
    url: str = ""
    engine: LocalEngine | None = None
    server: uvicorn.Server | None = None
    error: BaseException | None = None

    def gauges(self) -> tuple[int, int, int]:
        """Running, waiting, rows in use."""
        assert self.engine is not None
        stats = self.engine.stats()
        return stats.num_running, stats.num_waiting, stats.rows_total - stats.rows_free


@contextmanager
def tiny_server(engine: dict[str, Any] = SMALL, **settings: Any) -> Iterator[TinyServer]:
    """``engine``: its options."""
    running = TinyServer()

    async def serve(llm: LLM) -> None:
        running.engine = LocalEngine(llm)
        metadata = metadata_of(llm, str(TINY_MODEL))
        app = make_app(running.engine, llm.tokenizer, ServerSettings(**settings), lambda: metadata)
        running.server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
        await running.server.serve()
        await running.engine.shutdown(0)

    def run() -> None:
        try:
            with LLM(TINY_MODEL, progress=False, **engine) as llm:
                asyncio.run(serve(llm))
        except BaseException as error:
            running.error = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: running.error is not None or (running.server is not None and running.server.started))
    assert running.server is not None and running.error is None, running.error
    running.url = f"http://127.0.0.1:{running.server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield running
    finally:
        running.server.should_exit = True
        thread.join(HANG_S)
    assert not thread.is_alive()
