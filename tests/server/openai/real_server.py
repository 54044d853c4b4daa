"""The app on uvicorn with the real engine (on a thread of this process) and the shipped tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from snapstream.assets import TINY_MODEL
from snapstream.llm import LLM
from snapstream.server.app import make_app
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.options import ServerSettings
from tests.server.local_engine import LocalEngine
from tests.waiting import HANG_S


@contextmanager
def real_server(**settings: Any) -> Iterator[str]:
    """The URL of the API."""
    started: dict[str, Any] = {}
    is_up = threading.Event()

    async def main() -> None:
        with LLM(TINY_MODEL, budget=256, max_rows=4, max_model_len=1024, progress=False) as llm:
            engine = LocalEngine(llm)
            facts = ModelMetadata(
                model="tiny", names=("tiny",), architecture=llm.model_config, engine=llm.config, pid=1
            )
            app = make_app(engine, llm.tokenizer, ServerSettings(**settings), lambda: facts)
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            started["server"], started["port"] = server, server.servers[0].sockets[0].getsockname()[1]
            is_up.set()
            await serving
            await engine.shutdown(0)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert is_up.wait(HANG_S)
    yield f"http://127.0.0.1:{started['port']}/v1"
    started["server"].should_exit = True
    thread.join(HANG_S)
    assert not thread.is_alive()
